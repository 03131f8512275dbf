#!/bin/bash
# Kernel Tuner and Helion beside evoattn on the CUDA device that is here.
#   benchmarks/versus/run.sh FOLDER [SECONDS...]          (default: 15 60)
# Needs `pip install kernel-tuner==1.5.0 helion==1.5.0`. Writes what each tool tried into FOLDER and prints the tables.
set -u
cd "$(dirname "$0")/../.."
folder=$1; shift
seconds=(${@:-15 60}); longest=${seconds[-1]}
ours=${VERSUS_OURS:-$longest}; given=${VERSUS_GIVEN:-80}; most=${VERSUS_MOST:-40}; problems=${VERSUS_PROBLEMS-seed_h100 fa_d128_4k_causal}; python=${PYTHON:-python3}
mkdir -p "$folder"
# A tool that goes on 15 s beyond its time is ended; what Helion tried until then counts.
run() {
  timeout -k 5 $((longest + 15)) "$python" -m "benchmarks.versus.$1" "${@:2}" >> "$folder/log" 2>&1 || { echo "$1 failed:"; tail -5 "$folder/log"; }
}
if [ "$given" != 0 ]; then
  run by_evoattn seed_h100 -o "$folder/same-evoattn.json" -- --family flash_mma --sampler random \
    --no-starting-configs --budget "${given}trials"
  run by_kernel_tuner seed_h100 --given "$folder/same-evoattn.json" --most "$most" --answers host -o "$folder/same-kt.json"
  "$python" -m benchmarks.versus.rates "$folder"/same-*.json
fi
for problem in $problems; do
  run by_evoattn "$problem" -o "$folder/$problem-evoattn.json" -- --budget "${ours}s"
  run by_kernel_tuner "$problem" --seconds "$longest" -o "$folder/$problem-kt.json"
  run by_helion "$problem" --seconds "$longest" -o "$folder/$problem-helion.json"
  "$python" -m benchmarks.versus.rates "$folder/$problem"-*.json
  "$python" -m benchmarks.versus.final "$problem" "$folder/$problem"-*.json --after "${seconds[@]}" 2>> "$folder/log"
done
