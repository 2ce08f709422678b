# shellcheck shell=bash disable=SC2034
# Settings that differ between clusters. Change them here, or copy this file and set MAE_VIT_SITE to the copy.
# Every job sources it in the repository's root before it starts its ranks.
#
# The resources of a job belong on the command line of sbatch (--partition, --account, --time, --gpus-per-node).
# For all jobs, set SBATCH_PARTITION, SBATCH_ACCOUNT or SBATCH_TIMELIMIT in your shell.

# The environment. It must be activated, because DeepSpeed looks for its tools on PATH.
# module load cuda/12.8
if [[ -e .venv/bin/activate ]]; then
  # shellcheck source=/dev/null
  source .venv/bin/activate
fi

# More options for srun. Rank n of a node takes GPU n, but Slurm distributes ranks over the sockets in turn.
# block:block fills the first socket first. GPUs 0 to 3 of 8 usually belong to it (see `nvidia-smi topo -m`).
# srun_options=(--mpi=none --cpu-bind=cores --distribution=block:block)

# The network interface between nodes, if the default is not the right one.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# The port at which ranks meet, if not every port is open. The default is 20000 to 29999, by the job's number.
# port=29500

# A container with the dependencies. Each rank then opens one file at its start, instead of thousands in .venv on the
# shared disk. These words stand before `python`. The command must pass signals on and must not die of them ...
# container=(apptainer exec --nv --bind "$PWD" mae-vit.sif)
# ... or options of srun (pyxis).
# srun_options=(--container-image=mae-vit.sqsh --container-mounts="$PWD:$PWD" --container-workdir="$PWD")

# A job is given up after this number of restarts in a row that save nothing.
# max_restarts=3

# The folder in which jobs count these restarts. All nodes and the container must see it.
# notes=.restarts
