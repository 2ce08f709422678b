# shellcheck shell=bash
# What the scripts share: they source it in the job's folder, the repository's root, and call `run`.

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "error: not inside a Slurm job: start it by sbatch $0 $*" >&2
  exit 2
fi

# The time limit's USR1 reaches this shell alone (--signal=B:); TERM is scancel, preemption, a requeue or the
# limit itself. Both are passed on as USR1, which srun hands to all ranks (of TERM it kills them): they finish
# their step, save and exit 75.
step='' told='' started=0
pass_on() {
  local early=$((started + 10 - SECONDS))
  told=1
  [[ -n $step ]] || return
  # A process that has hardly begun would die of it.
  (sleep $((early > 0 ? early : 0)) && kill -USR1 "$step" 2>/dev/null) &
}
trap pass_on USR1 TERM

srun_options=() container=() port='' max_restarts=3 notes=.restarts
site=${MAE_VIT_SITE:-slurm/site.sh}
if [[ ! -r $site ]]; then
  echo "error: no site settings $site in $PWD" >&2
  exit 2
fi
# In a function, and so without the job's arguments: conda's `activate` would take the first for its own.
enter_site() {
  # shellcheck source=site.sh
  source "$site"
}
enter_site
# Not before: not every environment can be activated under it.
set -uo pipefail

restart=${SLURM_RESTART_COUNT:-0}
# In the last task of an array SLURM_JOB_ID alone means the whole array.
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
# At which restart something was last saved: mae_vit/runtime/slurm.py writes it.
export MAE_VIT_SAVED=$notes/$SLURM_JOB_ID
[[ $notes == /* ]] || MAE_VIT_SAVED=$PWD/$MAE_VIT_SAVED

# Runs a program of ours in every task, and ends the job as it ends.
run() {
  begin_notes
  if ((${SLURM_NTASKS:-1} > 1)); then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_PORT=${port:-$((20000 + SLURM_JOB_ID % 10000))}
    export MASTER_ADDR MASTER_PORT
  fi
  # --export: under `sbatch --export=NONE` tasks would not see what is exported here.
  # --wait: when one rank is dead the others wait for it; a minute is enough for those that leave, too.
  # --kill-on-bad-exit=1 instead would kill all but the first to leave, and blur their exit codes.
  # --cpus-per-task: srun does not take it over from sbatch; each task would get one core.
  srun --export=ALL --wait=60 --kill-on-bad-exit=0 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "${srun_options[@]}" \
    "${container[@]}" python -u "$@" &
  step=$! started=$SECONDS
  # Told in the meantime.
  [[ -z $told ]] || pass_on
  # A trap ends `wait` early, with srun still running.
  while kill -0 "$step" 2>/dev/null; do wait "$step"; done
  wait "$step"
  end $?
}

# A restart in which nothing was saved is one in vain. Slurm itself restarts jobs too, after a node's failure.
begin_notes() {
  if [[ $restart == 0 || ! -e $MAE_VIT_SAVED ]] && ! { mkdir -p "$notes" && echo "$restart" >"$MAE_VIT_SAVED"; }; then
    echo "error: $notes cannot be written: name another folder in $site" >&2
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
  echo "error: gave up, as nothing was saved any more (max_restarts=$max_restarts); once that is mended," \
    "the same sbatch resumes it" >&2
  rm -f "$MAE_VIT_SAVED"
  exit 1
}

# Ends the job, or requeues it, after ranks that left with an exit code.
end() {
  local code=$1 state
  # Now nothing is to interrupt this shell, or what it calls.
  trap '' USR1 TERM
  # What is cancelled, or requeued by Slurm itself (preemption, a node's failure), is COMPLETING: its ranks may
  # be gone before this shell is told. At the limit Slurm ends a job for good, unless it is requeued here.
  state=$(squeue --noheader --jobs="$id" --format="%T %r")
  if [[ $state != RUNNING* && $state != *TimeLimit ]]; then
    ((code != 75)) || rm -f "$MAE_VIT_SAVED"
    exit "$code"
  fi
  # 75: saved. Above 128: killed, for want of memory, by a fault, or by our signal while it started.
  # 1 and 2 would come again. Where one rank alone fails by them, others that wait for it are aborted (134) or
  # killed (137), and srun tells the highest code: that is requeued too, until restarts in vain are too many.
  if ((code == 75 || code > 128)); then
    (($(count_vain) < max_restarts)) || give_up
    echo "exit code $code at restart $restart: requeueing"
    scontrol requeue "$id" || echo "error: job $id cannot be requeued; the same sbatch resumes it" >&2
  else
    rm -f "$MAE_VIT_SAVED"
  fi
  exit "$code"
}
