#!/usr/bin/env bash
# Pretrains on a Slurm cluster, on one node or several; saves and requeues itself before the time limit.
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

if [[ -z ${SLURM_SUBMIT_DIR:-} ]]; then
  echo "error: not inside a Slurm job: start it by sbatch slurm/pretrain.sh CONFIG [key=value ...]" >&2
  exit 2
fi
cd "$SLURM_SUBMIT_DIR" || exit 2
# Activated, not only called: DeepSpeed looks for its tools on PATH. Before `set -u`, which not
# every such file survives.
environment=${MAE_VIT_ENV:-.venv/bin/activate}
if [[ -n ${MAE_VIT_ENV:-} || -e $environment ]]; then
  # shellcheck source=/dev/null
  source "$environment" || exit 2
fi
set -uo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# The time limit's USR1 reaches this shell alone (B:). srun passes USR1 on to every rank, which
# finishes its step, saves and exits 75.
step='' told='' cancelled=''
trap 'told=1; [[ -z $step ]] || kill -USR1 "$step" 2>/dev/null' USR1
# TERM is scancel, or a preemption that requeues by itself: the ranks save, we do not requeue.
# Sent on as USR1, for TERM makes srun kill its ranks.
trap 'cancelled=1; [[ -z $step ]] || kill -USR1 "$step" 2>/dev/null' TERM

# --export=ALL: under `sbatch --export=NONE` tasks would not see what is exported here.
# --kill-on-bad-exit: without it the other ranks of a dead one wait for their time-out.
# --cpus-per-task: srun does not take it over from sbatch; each task would get one core.
srun --export=ALL --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  python -u pretrain/run.py --config "$@" &
step=$!

# A trap ends `wait` early, with srun still running.
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done

# 75: saved. Above 128 after our signal: a rank that had not yet set its handlers up, or was slow to
# leave; the last checkpoint stands.
if [[ -z $cancelled && ($code -eq 75 || (-n $told && $code -gt 128)) ]]; then
  echo "stopped by a signal (exit code $code, restart ${SLURM_RESTART_COUNT:-0}): requeueing"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
