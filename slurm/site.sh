# shellcheck shell=bash disable=SC2034
# What differs between clusters: change it here, or keep a copy elsewhere and name that in MAE_VIT_SITE.
# Every job sources it in the repository's root, before it starts its ranks.
#
# What a job asks for belongs on sbatch's line (--partition, --account, --time, --gpus-per-node) or, for
# all jobs, in your shell: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT.

# The environment, activated and not only called: DeepSpeed looks for its tools on PATH.
# module load cuda/12.8
if [[ -e .venv/bin/activate ]]; then
  # shellcheck source=/dev/null
  source .venv/bin/activate
fi

# More words for srun. Rank n of a node takes GPU n, while Slurm deals ranks out over its sockets in turn:
# block:block fills the first socket first, where GPUs 0 to 3 of 8 mostly belong (`nvidia-smi topo -m` tells).
# srun_options=(--mpi=none --cpu-bind=cores --distribution=block:block)

# The interface between nodes, where the first one is the wrong one.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# The port that ranks meet at, where not every one is open; by default one of 20000 to 29999, by the job's number.
# port=29500

# A container that has the dependencies: one file to open in place of the thousands of .venv, which each rank else
# reads from the shared disk at its start. Words before `python`, which must pass signals on, not die of them ...
# container=(apptainer exec --nv --bind "$PWD" mae-vit.sif)
# ... or srun's own (pyxis).
# srun_options=(--container-image=mae-vit.sqsh --container-mounts="$PWD:$PWD" --container-workdir="$PWD")

# How many restarts in a row may save nothing before a job is given up.
# max_restarts=3

# Where jobs keep count of them; seen by all nodes, and in the container.
# notes=.restarts
