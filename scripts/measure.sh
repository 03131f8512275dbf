#!/usr/bin/env bash
# On a machine with a CUDA device and nvcc: search each problem, then report, export (built and run by nvcc) and
# reproduce its best.
#   scripts/measure.sh OUTPUT_FOLDER BUDGET PROBLEM...
# SEARCH_OPTIONS are further options of `evoattn search`, e.g. "--family flash_mma"; EVOATTN is the command to run
# (default `.venv/bin/evoattn`).
# Everything it prints is also in OUTPUT_FOLDER, with the database and the kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1 budget=$2
shift 2
evoattn=${EVOATTN:-.venv/bin/evoattn}
mkdir -p "$out"
export EVOATTN_DB=$out/evoattn.sqlite
for problem in "$@"; do
  {
    echo "== $problem, $budget"
    $evoattn search --gpu auto --budget "$budget" --problem "$problem" --study "$problem" ${SEARCH_OPTIONS:-}
    $evoattn report --study "$problem" --format json -o "$out/$problem.json"
    $evoattn report --study "$problem" --format html -o "$out/$problem.html"
    $evoattn export best --study "$problem" -o "$out/$problem.cu"
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    if [ "$capability" = 90 ]; then capability=90a; fi     # Hopper's own instructions need that target
    nvcc -arch="sm_$capability" "$out/$problem.cu" -o "$out/$problem.bin" && "$out/$problem.bin"
    rm "$out/$problem.bin"
    $evoattn reproduce best --study "$problem"
  } 2>&1 | tee "$out/$problem.log"
done
