#!/usr/bin/env bash
# Pretrains on a Slurm cluster, on one node or several, and goes on after preemption.
#
#   sbatch slurm/pretrain.sh CONFIG [key=value ...]
#   sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 slurm/pretrain.sh configs/mae_base.yaml
#
# One task for each GPU. Site settings (partition, account, time) go on the sbatch line or into
# SBATCH_* variables; MAE_VIT_ENV names a file to source instead of .venv/bin/activate.
#SBATCH --job-name=mae-vit
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@120
set -uo pipefail

cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" || exit 1
# Activated, not only called: DeepSpeed looks for its tools on PATH.
# shellcheck source=/dev/null
[[ -n ${MAE_VIT_ENV:-} || -e .venv/bin/activate ]] && source "${MAE_VIT_ENV:-.venv/bin/activate}"

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# --export=ALL: under `sbatch --export=NONE` tasks would not see what is exported here.
# --kill-on-bad-exit: without it the other ranks of a dead one wait for their time-out.
srun --export=ALL --kill-on-bad-exit=1 python pretrain/run.py --config "$@" &
step=$!

# The time limit's signal reaches this shell alone (B:); srun hands it to every rank, which
# finishes its step, saves and exits 75.
trap 'kill -USR1 "$step" 2>/dev/null' USR1
# TERM is scancel, or a preemption that requeues by itself: the ranks save, we do not requeue.
cancelled=
trap 'cancelled=1; kill -TERM "$step" 2>/dev/null' TERM

# A trap ends `wait` early, with srun still running.
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done

if [[ $code -eq 75 && -z $cancelled ]]; then
  echo "saved; back into the queue (restart ${SLURM_RESTART_COUNT:-0})"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
