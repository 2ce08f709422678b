#!/usr/bin/env bash
# What only a GPU can show (never run by us yet; meant for about 25 minutes): its tests, then steps, objectives, engines and
# profiles in bf16, each as JSON in a folder. Data come from an index of noise, but for the last part.
#   benchmarks/gpu.sh [FOLDER] [PART ...]     parts: tests steps small objectives engine profile end_to_end (all)
# PYTHON names the interpreter (python); PEAK the dense bf16 rate in TFLOP/s that shares are of (790, measured on
# an H200); DATA prepared CIFAR-10 (data/cifar10) for end_to_end. A part that fails does not stop the others.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-docs/results/gpu}
[[ $# -gt 0 ]] && shift
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(tests steps small objectives engine profile end_to_end)
python=${PYTHON:-python}
peak=${PEAK:-790}
data=${DATA:-data/cifar10}
bf16=(--device cuda --precision bf16)
# One contender's memory at a time would not do for ratios: these fit beside each other in 141 GB.
step=("$python" benchmarks/step.py "${bf16[@]}" --peak-tflops "$peak" --threads 4)
failed=()

part() { # NAME COMMAND ...
  local name=$1
  shift
  echo "== $name: $*" >&2
  "$@" >"$out/$name.log" 2>&1 || failed+=("$name")
  tail -n 3 "$out/$name.log" >&2
}

tests() { part tests "$python" -m pytest -q -m gpu; }

steps() {
  part step_b16 "${step[@]}" --config configs/mae_base.yaml --batch 256 --steps 10 --rounds 5 --out "$out/step_b16.json"
  part step_l16 "${step[@]}" --config configs/mae_large.yaml --batch 128 --steps 6 --rounds 5 --out "$out/step_l16.json"
}

small() {
  # One peer, in its better attention setting on a GPU: all five would not fit beside each other.
  local rivals=(--contenders ours "ours compiled" "transformers sdpa")
  part step_tiny4 "${step[@]}" --config configs/mae_cifar_tiny.yaml --batch 4096 --steps 20 --rounds 5 \
    "${rivals[@]}" --out "$out/step_tiny4.json"
  part step_ti4 "${step[@]}" --config configs/mae_cifar_vit_t2.yaml --batch 4096 --steps 10 --rounds 5 \
    "${rivals[@]}" --out "$out/step_ti4.json" model.patch_size=4
  part step_t2 "${step[@]}" --config configs/mae_cifar_vit_t2.yaml --batch 4096 --steps 5 --rounds 5 \
    "${rivals[@]}" --out "$out/step_t2.json"
}

objectives() {
  part objectives_b16 "$python" benchmarks/objectives.py "${bf16[@]}" --config configs/mae_base.yaml --batch 128 \
    --steps 10 --threads 4 --out "$out/objectives_b16.json"
}

engine() {
  part engine "$python" benchmarks/engine.py "${bf16[@]}" --batch 128 --threads 4 --out "$out/engine.json"
}

profile() {
  part profile_b16 "$python" benchmarks/profile_step.py "${bf16[@]}" --config configs/mae_base.yaml --batch 256 \
    --steps 5 --threads 4 --out "$out/profile_b16.json"
  part profile_b16_compiled "$python" benchmarks/profile_step.py "${bf16[@]}" --config configs/mae_base.yaml \
    --batch 256 --steps 5 --threads 4 --compile --out "$out/profile_b16_compiled.json"
  part profile_tiny4 "$python" benchmarks/profile_step.py "${bf16[@]}" --config configs/mae_cifar_tiny.yaml \
    --batch 4096 --steps 5 --threads 4 --compile --out "$out/profile_tiny4.json"
}

end_to_end() {
  part end_to_end "$python" benchmarks/end_to_end.py "${bf16[@]}" --ranks 1 --batch 4096 --data "$data" --threads 4 \
    --out "$out/end_to_end.json"
}

mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv >"$out/gpu.csv"
for chosen in "${parts[@]}"; do
  case $chosen in
    tests | steps | small | objectives | engine | profile | end_to_end) "$chosen" ;;
    *)
      echo "error: no part \"$chosen\": tests, steps, small, objectives, engine, profile, end_to_end" >&2
      exit 2
      ;;
  esac
done
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "error: failed: ${failed[*]} (see $out/NAME.log)" >&2
  exit 1
fi
