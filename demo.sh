#!/usr/bin/env bash
# Pretrains on scikit-learn's digits without labels, and compares MAE with other pretraining and with convolutional
# networks. `make demo` runs it.
set -euo pipefail
runs=${1:-runs}

echo "MAE pretrains without labels, beside other networks; then all are trained on 40 labels of each digit."
echo "It takes four to seven minutes on two cores; longest is MAE, 360 epochs."
python finetune/compare.py --config configs/compare/compare_demo.yaml "run.dir=$runs/compare_demo"

cat <<EOF

How the rows differ. Every row trains on the same 400 labeled images for 30 epochs.
  settings            MAE's were chosen on held-out digits, but test results of earlier demos were known. Labels, epochs and batches are
                      the same for all rows; pretrained rows have layer decay 0.8, the others none
  scratch, the CNNs   begin from random weights
  MAE, mean color     have seen the training images before, without labels
  supervised          has seen 1,097 other training images before, with their labels
  compute             pretraining costs far more than fine-tuning: results.csv has the FLOPs of each row

Reconstructions of held-out digits (masked / predicted / pasted / original):
  $(find "$runs"/compare_demo/pretrain-mae/*/pictures -name 'step-*.png' | sort | tail -n 1)
Watch the runs:  $(dirname "$(command -v python)")/tensorboard --logdir $runs
The report:      $runs/compare_demo/report.html
All this took $((SECONDS / 60)) min $((SECONDS % 60)) s.
EOF
