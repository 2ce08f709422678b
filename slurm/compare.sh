#!/usr/bin/env bash
# Runs a comparison on a Slurm cluster. The tasks of an array share its runs; each task is a job on one node.
#
#   sbatch --gpus-per-node=1 --cpus-per-task=8 slurm/compare.sh CONFIG [key=value ...]
#   sbatch --array=0-7 --gpus-per-node=4 --cpus-per-task=32 slurm/compare.sh configs/compare/compare_cifar10_5k.yaml
#
# In each array task one process starts a run on each of its GPUs (or cores), and takes only runs that no other task
# has taken. It saves and requeues itself before the time limit.
# Settings of the cluster: slurm/site.sh. What happens when: docs/cluster.md.
#SBATCH --job-name=mae-vit-compare
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out
#SBATCH --signal=B:USR1@120

# Source it from the job's folder: Slurm runs a copy of this script from another folder.
if [[ ! -r slurm/common.sh ]]; then
  echo "error: no slurm/common.sh in $PWD; run sbatch in the repository's root, or with --chdir" >&2
  exit 2
fi
# shellcheck source=common.sh
source slurm/common.sh
require_config "slurm/compare.sh configs/compare/compare_cifar10_5k.yaml" "$@"
run finetune/compare.py --config "$@"
