#!/usr/bin/env bash
# A real Slurm cluster on this machine: a login node and two compute nodes, n1 and n2. For tests.
#
#   cluster.sh install      installs Slurm where it is missing; says in one line why no cluster can run here
#   cluster.sh start        starts the cluster
#   cluster.sh run CMD...   runs a command on the login node (sbatch, squeue, bash), in the current folder
#   cluster.sh crash NODE   a power cut: the node falls silent and all its processes die
#   cluster.sh boot NODE    brings it back, once Slurm has noticed
#   cluster.sh stop         ends all that runs on the cluster, and nothing else
#
# Each machine is a set of namespaces (network, hostname, processes, mounts) that one `unshare` process
# holds; files are shared, but for /dev/shm. The switch is a bridge in the login node's network: the host's
# network, mounts, /etc and /run stay as they are. Needs root. State is kept in CLUSTER_DIR.
set -uo pipefail
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
DIR=${CLUSTER_DIR:-${TMPDIR:-/tmp}/mae-vit-cluster}
SELF=$(readlink -f "$0")
declare -A ADDRESS=([login]=10.78.0.1 [n1]=10.78.0.11 [n2]=10.78.0.12)
export SLURM_CONF=$DIR/slurm.conf

fail() {
  echo "cluster.sh: $*" >&2
  exit 1
}

# Prints the process that holds a machine. Its words name the machine: a reused number does not deceive.
holder() {
  local pid
  pid=$(cat "$DIR/run/$1.pid" 2>/dev/null) &&
    [[ $(tr '\0' ' ' <"/proc/$pid/cmdline") == "unshare "*" $SELF machine $1 $DIR " ]] 2>/dev/null && echo "$pid"
}

on() { # NAME COMMAND...
  local pid
  pid=$(holder "$1") || fail "$1 is not up"
  shift
  # unshare itself is not in the processes' namespace that it made: its child is.
  exec nsenter --target "$pid" --net --uts --mount --pid="/proc/$pid/ns/pid_for_children" --wd="$PWD" -- "$@"
}

installed() { # One name a call: given several, command -v is content with any of them.
  local name
  for name in slurmctld slurmd sbatch munged ip; do command -v $name >/dev/null || return 1; done
}

install() {
  [[ $(id -u) == 0 ]] || fail "needs root"
  unshare --net --uts --pid --mount --fork true 2>/dev/null || fail "may not make namespaces here"
  installed && return
  command -v apt-get >/dev/null || fail "Slurm is not installed, and there is no apt-get to install it"
  # What is installed must not start daemons of its own, for as long as this subshell lasts.
  local said policy=/usr/sbin/policy-rc.d
  said=$(
    if [[ ! -e $policy ]]; then
      trap 'rm $policy' EXIT
      printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy
    fi
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
      slurmctld slurmd slurm-client munge iproute2; } 2>&1 </dev/null
  )
  installed || fail "Slurm is not installed, and cannot be: $(tail -n 1 <<<"$said")"
}

configure() {
  rm -rf "$DIR"/{run,state,log}
  mkdir -p "$DIR"/{run,state,log} || fail "cannot write $DIR"
  (umask 077 && head -c 128 /dev/urandom >"$DIR/munge.key")
  echo "127.0.0.1 localhost" >"$DIR/hosts"
  for name in "${!ADDRESS[@]}"; do echo "${ADDRESS[$name]} $name" >>"$DIR/hosts"; done
  # A lost node is missed after 10 s (Slurm: 300), a requeued job waits 10 s (cred_expire; Slurm: 120).
  # Tasks are bound to cores, as on most clusters. Without accounting, cgroups and limits: what a node says it
  # has is taken as told; both have this machine's cores, and tasks that are given others are bound to none.
  cat >"$SLURM_CONF" <<CONF
ClusterName=tests
SlurmctldHost=login(${ADDRESS[login]})
SlurmUser=root
AuthInfo=socket=$DIR/run/munge.socket,cred_expire=10
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/state/%n
SlurmctldPidFile=$DIR/run/slurmctld
SlurmdPidFile=$DIR/run/slurmd-%n
SlurmctldLogFile=$DIR/log/slurmctld
SlurmdLogFile=$DIR/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=200000,bf_interval=5
SlurmdParameters=config_overrides
PropagateResourceLimitsExcept=MEMLOCK
ReturnToService=2
KillWait=10
SlurmdTimeout=10
NodeName=n[1-2] CPUs=16 RealMemory=512000
PartitionName=main Nodes=ALL Default=YES
CONF
}

# Inside a machine, as its first process: the daemons, then nothing but burying what was orphaned.
machine() {
  hostname "$1"
  mount --bind "$DIR/hosts" /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit 1
  ip link set lo up
  until [[ -e $DIR/run/$1.wired ]]; do sleep 0.05; done
  if [[ $1 == login ]]; then
    munged --foreground --force --key-file="$DIR/munge.key" --socket="$DIR/run/munge.socket" \
      --pid-file="$DIR/run/munge.pid" --seed-file="$DIR/run/munge.seed" --log-file="$DIR/log/munged" &
    until [[ -S $DIR/run/munge.socket ]]; do sleep 0.05; done
    slurmctld -D 2>/dev/null &
  else
    slurmd -D 2>/dev/null &
  fi
  while :; do sleep 1; done
}

switch_on() { # NAME
  local name=$1 pid login
  rm -f "$DIR/run/$name".*
  mkdir -p "$DIR/state/$name"
  # Its environment is not that of whoever starts it, its session neither: it outlives this script.
  env --chdir=/ -i PATH="$PATH" HOME="$HOME" LANG=C.UTF-8 CLUSTER_DIR="$DIR" setsid \
    unshare --net --uts --pid --mount --fork --kill-child --mount-proc "$SELF" machine "$name" "$DIR" \
    </dev/null >>"$DIR/log/$name" 2>&1 &
  pid=$!
  echo "$pid" >"$DIR/run/$name.pid"
  until [[ -n $(holder "$name") && $(readlink "/proc/$pid/ns/net") != $(readlink /proc/self/ns/net) ]]; do
    kill -0 "$pid" || fail "$name does not start: $(tail -n 1 "$DIR/log/$name")"
    sleep 0.05
  done
  if [[ $name == login ]]; then
    nsenter --target "$pid" --net sh -ec "ip link add switch type bridge
      ip addr add ${ADDRESS[login]}/24 dev switch; ip link set switch up"
  else
    login=$(holder login) || fail "login is not up"
    # The cable of an earlier life may outlive its machine for a while.
    nsenter --target "$login" --net ip link del "to-$name" 2>/dev/null
    ip link add name eth0 netns "$pid" type veth peer name "to-$name" netns "$login" &&
      nsenter --target "$login" --net ip link set "to-$name" master switch up &&
      nsenter --target "$pid" --net sh -ec "ip addr add ${ADDRESS[$name]}/24 dev eth0; ip link set eth0 up"
  fi || fail "no network for $name"
  : >"$DIR/run/$name.wired"
}

switch_off() { # NAME
  local pid
  pid=$(holder "$1") || return 0
  # Takes the machine's first process with it (--kill-child), and that all others.
  kill -KILL "$pid"
  while [[ -n $(holder "$1") ]]; do sleep 0.05; done
}

# Waits up to a minute until as many nodes as in $1 are in one of the states $2 (of node $3).
wait_for_nodes() {
  local try
  for ((try = 0; try < 300; try++)); do
    [[ $("$SELF" run sinfo --noheader --Node --states="$2" ${3:+--nodes="$3"} 2>/dev/null | wc -l) == "$1" ]] && return
    sleep 0.2
  done
  fail "waited in vain for $1 nodes to be $2: see $DIR/log"
}

stop() {
  for name in n2 n1 login; do switch_off "$name"; done
}

case ${1:-} in
  install) install ;;
  start)
    (install) || exit
    stop
    configure
    for name in login n1 n2; do switch_on "$name"; done
    wait_for_nodes 2 idle
    ;;
  run) on login "${@:2}" ;;
  crash)
    # The cable first: what the other node sees is silence, not connections that close.
    (on login ip link del "to-$2") && switch_off "$2"
    ;;
  boot)
    # A node that is back before Slurm missed it leaves its job running with a dead rank.
    wait_for_nodes 1 down "$2"
    switch_on "$2"
    wait_for_nodes 1 idle,alloc,mixed,completing "$2"
    ;;
  stop) stop ;;
  machine) machine "$2" ;;
  *) sed -n '2,/^set/s/^# \{0,1\}//p' "$SELF" ;;
esac
