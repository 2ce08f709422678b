#!/usr/bin/env bash
# Checks a config, its data and the machines of a job before a run. All ranks check; the result is in the job's output.
#
#   sbatch --gpus-per-node=1 --cpus-per-task=12 slurm/doctor.sh CONFIG [key=value ...]
#   sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=12 \
#       slurm/doctor.sh configs/pretrain/mae_base.yaml data.path=data/imagenet
#
# Use the same sizes as for the run. Settings of the cluster: slurm/site.sh.
#SBATCH --job-name=mae-vit-doctor
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=30
#SBATCH --no-requeue
#SBATCH --output=%x-%j.out

# Source it from the job's folder: Slurm runs a copy of this script from another folder.
if [[ ! -r slurm/common.sh ]]; then
  echo "error: no slurm/common.sh in $PWD; run sbatch in the repository's root, or with --chdir" >&2
  exit 2
fi
# shellcheck source=common.sh
source slurm/common.sh
require_config "slurm/doctor.sh configs/pretrain/mae_base.yaml" "$@"
run -m mae_vit.cli doctor --config "$@"
