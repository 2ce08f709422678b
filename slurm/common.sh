# shellcheck shell=bash
# Common parts of the job scripts. They source this file in the job's folder (the repository's root) and call `run`.

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "error: not inside a Slurm job; start it with sbatch --gpus-per-node=1 --cpus-per-task=12 $0 ${*:-CONFIG}" >&2
  exit 2
fi

# Near the time limit Slurm sends USR1 only to this shell (--signal=B:). TERM comes from scancel, preemption, a
# requeue or the limit itself. This function passes both on to srun as USR1, because srun forwards USR1 to all ranks
# but kills them on TERM. The ranks then finish their step, save and exit with 75.
step='' signaled='' started=0
pass_on() {
  local early=$((started + 10 - SECONDS))
  signaled=1
  [[ -n $step ]] || return
  # Wait until 10 s after the start: before that, the signal would kill a process that does not handle it yet.
  (sleep $((early > 0 ? early : 0)) && kill -USR1 "$step" 2>/dev/null) &
}
trap pass_on USR1 TERM

srun_options=() container=() port='' max_restarts=3 notes=.restarts
site=${MAE_VIT_SITE:-slurm/site.sh}
if [[ ! -r $site ]]; then
  echo "error: no site settings $site in $PWD; set MAE_VIT_SITE=FILE" >&2
  exit 2
fi
# Source it in a function, which hides the job's arguments: conda's `activate` would read the first one.
enter_site() {
  # shellcheck source=site.sh
  source "$site"
}
enter_site
# Set this only now, because some environments cannot be activated with it.
set -uo pipefail

restart=${SLURM_RESTART_COUNT:-0}
# In the last task of an array, SLURM_JOB_ID means the whole array, so use the array's id and the task's number.
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
# The file with the number of the restart that last saved something. mae_vit/runtime/slurm.py writes it.
export MAE_VIT_SAVED=$notes/$SLURM_JOB_ID
[[ $notes == /* ]] || MAE_VIT_SAVED=$PWD/$MAE_VIT_SAVED

# An option, key=value or nothing is no config.
is_config() {
  [[ -n ${1:-} && $1 != -* && ! $1 =~ ^[a-z_.]+= ]]
}

# Ends the job if the script's first word is no config.
# usage: require_config EXAMPLE "$@", where the example is what stands after sbatch and its options
require_config() {
  ! is_config "${2:-}" || return 0
  echo "error: the first word after the script must be a config, for example: sbatch --gpus-per-node=1" \
    "--cpus-per-task=12 $1${2:+; it is \"$2\"}" >&2
  exit 2
}

# Makes each task of an array a run of its own, in place of one more process in the same run folder.
take_array_task() {
  [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || export MAE_VIT_ARRAY_TASK=$SLURM_ARRAY_TASK_ID
}

# Runs a Python program in every task, and ends the job according to the program's exit code.
run() {
  begin_notes
  if ((${SLURM_NTASKS:-1} > 1)); then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_PORT=${port:-$((20000 + SLURM_JOB_ID % 10000))}
    export MASTER_ADDR MASTER_PORT
  fi
  # --export: with `sbatch --export=NONE`, tasks would not see the variables exported here.
  # --wait: if one rank dies, the others wait for it; srun kills them after a minute, enough for ranks that are leaving.
  # --kill-on-bad-exit=0: with 1, srun would kill all ranks after the first one exits, and their exit codes would be lost.
  # --cpus-per-task: srun does not take it over from sbatch, and each task would get one core.
  srun --export=ALL --wait=60 --kill-on-bad-exit=0 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "${srun_options[@]}" \
    "${container[@]}" python -u "$@" &
  step=$! started=$SECONDS
  # A signal that came before srun started.
  [[ -z $signaled ]] || pass_on
  # A trap interrupts `wait` while srun is still running, so wait again.
  while kill -0 "$step" 2>/dev/null; do wait "$step"; done
  wait "$step"
  end $?
}

# A restart that saves nothing is counted as in vain. Slurm also restarts jobs itself, after a node failure.
begin_notes() {
  if [[ $restart == 0 || ! -e $MAE_VIT_SAVED ]] && ! { mkdir -p "$notes" && echo "$restart" >"$MAE_VIT_SAVED"; }; then
    echo "error: $notes cannot be written; set another folder in $site" >&2
    exit 2
  fi
  (($(count_vain) <= max_restarts)) || give_up
}

count_vain() {
  local saved
  saved=$(cat "$MAE_VIT_SAVED" 2>/dev/null)
  [[ $saved =~ ^[0-9]+$ ]] || saved=0
  echo $((restart - saved))
}

give_up() {
  echo "error: gave up, as nothing was saved any more (max_restarts=$max_restarts); once that is fixed," \
    "the same sbatch resumes it" >&2
  rm -f "$MAE_VIT_SAVED"
  exit 1
}

# Ends or requeues the job, depending on the exit code of its ranks.
end() {
  local code=$1 state pause
  # From here no signal may interrupt this shell or its commands.
  trap '' USR1 TERM
  # A job that is cancelled, or that Slurm itself requeues (preemption, a node failure), is COMPLETING. Its ranks may
  # be gone before this shell gets the signal. At the time limit Slurm ends the job for good, unless it is requeued here.
  # A busy controller may not answer in time.
  for pause in 5 10 0; do
    state=$(squeue --noheader --jobs="$id" --format="%T %r") && [[ -n $state ]] && break
    sleep $pause
  done
  if [[ -z $state ]] && ((code == 75 || code > 128)); then
    echo "error: squeue does not answer, so job $id is not requeued; the same sbatch resumes it" >&2
  fi
  if [[ $state != RUNNING* && $state != *TimeLimit ]]; then
    ((code != 75)) || rm -f "$MAE_VIT_SAVED"
    exit "$code"
  fi
  # 75: the run was saved. Above 128: a rank was killed, by lack of memory, by a fault, or by our signal at its start.
  # 1 and 2 are not requeued, because they would occur again. If only one rank fails with them, the ranks that wait
  # for it are aborted (134) or killed (137). srun reports the highest code, so such a job is requeued until too many
  # restarts were in vain.
  if ((code == 75 || code > 128)); then
    (($(count_vain) < max_restarts)) || give_up
    echo "exit code $code at restart $restart: requeueing"
    scontrol requeue "$id" || echo "error: job $id cannot be requeued; the same sbatch resumes it" >&2
  else
    rm -f "$MAE_VIT_SAVED"
  fi
  exit "$code"
}
