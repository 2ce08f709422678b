#!/usr/bin/env bash
# Pretrains on a Slurm cluster, on one node or several; saves and requeues itself before the time limit.
#
#   sbatch --gpus-per-node=1 --cpus-per-task=12 slurm/pretrain.sh CONFIG [key=value ...]
#   sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=12 --time=12:00:00 \
#       slurm/pretrain.sh configs/pretrain/mae_base.yaml
#
# Use one task for each GPU, with cores for its data workers. With --array=0-2, each task is a run of its own: its number
# is added to run.seed and to the run's name.
# Settings of the cluster: slurm/site.sh. What happens when: docs/cluster.md.
#SBATCH --job-name=mae-vit
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@120

# From the job's folder: what runs is Slurm's copy of this file.
if [[ ! -r slurm/common.sh ]]; then
  echo "error: no slurm/common.sh in $PWD; run sbatch in the repository's root, or with --chdir" >&2
  exit 2
fi
# shellcheck source=common.sh
source slurm/common.sh
require_config "slurm/pretrain.sh configs/pretrain/mae_base.yaml" "$@"
take_array_task
run pretrain/run.py --config "$@"
