#!/usr/bin/env bash
# Pretrains both objectives on scikit-learn's digits, on two CPU ranks, and compares what comes of
# them. `make demo` runs it.
set -euo pipefail
runs=${1:-runs}

echo "Two pretrainings and a comparison of six entries: four to nine minutes on two cores."
for objective in mae masked_patch; do
  echo "== $objective on the digits"
  # Its own port: two launches on one machine collide on DeepSpeed's default.
  port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  deepspeed --log_level error --num_accelerators 2 --master_port "$port" \
    pretrain/run.py --config "configs/${objective}_digits.yaml" "run.dir=$runs/${objective}_digits"
done

echo "== comparison with twenty labels of each digit: from scratch, pretrained with labels and without, convolutional"
python finetune/compare.py --config configs/compare_demo.yaml "run.dir=$runs/compare_demo" \
  "pretrain.MAE.dir=$runs/mae_digits" "pretrain.mean color.dir=$runs/masked_patch_digits"

echo
echo "Reconstructions of held-out digits (masked / predicted / pasted / original):"
for objective in mae masked_patch; do
  find "$runs/${objective}_digits/pictures" -name 'step-*.png' | sort | tail -n 1
done
echo
echo "Test accuracy with twenty labels of each digit, after minutes of training on 8 px images: this shows the tools, not"
echo "what the methods are worth (docs/results.md)."
sed -n '/^| entry/,/^$/p' "$runs/compare_demo/report.md" | cut -d '|' -f 2,4
echo "Watch the runs:  $(dirname "$(command -v python)")/tensorboard --logdir $runs"
echo "The report:      $runs/compare_demo/report.html"
echo "All this took $((SECONDS / 60)) min $((SECONDS % 60)) s."
