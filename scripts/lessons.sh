#!/usr/bin/env bash
# On a machine with a CUDA device: run every `evoattn search` of docs/lessons.md, then write their numbers into the
# page.
#   scripts/lessons.sh OUTPUT_FOLDER
# EVOATTN is the command to run (default `.venv/bin/evoattn`), PYTHON the interpreter. Everything it prints is also in
# OUTPUT_FOLDER, with the
# database and a JSON report of each study.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
evoattn=${EVOATTN:-.venv/bin/evoattn}
mkdir -p "$out"
export EVOATTN_DB=$out/lessons.sqlite
grep '^evoattn search' docs/lessons.md | while read -r _ words; do
  study=${words##*--study }
  {
    echo "== $study"
    # shellcheck disable=SC2086  (the words of a command line of our own)
    $evoattn $words < /dev/null
    $evoattn report --study "$study" --format json -o "$out/$study.json"
  } 2>&1 | tee -a "$out/lessons.log"
done
${PYTHON:-.venv/bin/python} scripts/fill_lessons.py docs/lessons.md "$out"
