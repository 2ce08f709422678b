#!/usr/bin/env bash
# Fine-tunes on a Slurm cluster; saves and requeues itself before the time limit.
#
#   sbatch --gpus-per-node=1 --cpus-per-task=12 slurm/finetune.sh --ckpt runs/mae_base \
#       --config configs/finetune/finetune_base.yaml [key=value ...]
#   sbatch --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=12 slurm/finetune.sh --ckpt runs/mae_base
#
# It takes the arguments of finetune/run.py. Use one task for each GPU, with cores for its data workers. With --array=0-2,
# each task is a run of its own: its number is added to run.seed and to the run's name.
# Settings of the cluster: slurm/site.sh. What happens when: docs/cluster.md.
#SBATCH --job-name=mae-vit-finetune
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@120

# Source it from the job's folder: Slurm runs a copy of this script from another folder.
if [[ ! -r slurm/common.sh ]]; then
  echo "error: no slurm/common.sh in $PWD; run sbatch in the repository's root, or with --chdir" >&2
  exit 2
fi
# shellcheck source=common.sh
source slurm/common.sh
if [[ " $*" != *" --ckpt"* && " $*" != *" --config"* ]] && ! is_config "${1:-}"; then
  echo "error: neither a config nor --ckpt is given, for example: sbatch --gpus-per-node=1 --cpus-per-task=12" \
    "slurm/finetune.sh --ckpt runs/mae_base" >&2
  exit 2
fi
take_array_task
run finetune/run.py "$@"
