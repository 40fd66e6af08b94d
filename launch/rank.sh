#!/usr/bin/env bash
# One process of a job, as srun starts it: rank.sh LOGS COMMAND [ARGUMENT ...]
# What it writes goes to LOGS/rank_<r>.log, that of rank 0 to the job's log, too. How it ended, and when, goes to
# LOGS/rank_<r>.ended, so that the job script can name the process that died first.
set -u
logs=$1
shift
if [[ ! -d $logs ]]; then
  echo "node $SLURMD_NODENAME does not see $logs: run_dir must lie on a file system that all nodes share" >&2
  exit 2
fi
name=$logs/rank_$SLURM_PROCID
if [[ $SLURM_PROCID == 0 ]]; then
  exec > >(trap '' USR1 TERM INT && exec tee -a "$name.log") 2>&1 # Slurm may signal it, too
  tee=$!
else
  exec >>"$name.log" 2>&1
fi
echo "rank $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME, process $$, $(date '+%F %T')"
launch=$(dirname "${BASH_SOURCE[0]}")
source "$launch/env.sh" # here, for what this node has: --job starts the job script on a login node without GPUs
source "$launch/node.sh"
raise_limits /sys
[[ -n ${NCCL_IB_HCA+set} ]] || { found=$(active_infiniband /sys) && [[ -n $found ]] && export NCCL_IB_HCA=$found; }
killed_before=$(memory_kills "")

"$@" &
child=$!
# Whom Slurm tells to end: this shell must pass it on, and stay to write how it ended.
trap 'kill -USR1 $child 2>/dev/null' USR1
trap 'kill -TERM $child 2>/dev/null' TERM
while :; do # a trap ends `wait` early; a process that has ended already is waited for, too
  wait $child
  status=$?
  kill -0 $child 2>/dev/null || break
done
if [[ $status == 137 ]] && (($(memory_kills "") > killed_before)); then
  echo "rank $SLURM_PROCID was killed by the kernel: out of memory (its counter oom_kill says so). Give it more (slurm.mem)"
fi
echo "$SLURM_PROCID $status $(date +%s%N) $SLURMD_NODENAME" >"$name.ended"
[[ $status != 2 ]] || : >"$logs/refused" # the job script ends the others, who may be waiting for this one
if [[ $SLURM_PROCID == 0 ]]; then # the last lines are still on their way
  exec >&- 2>&-
  for _ in {1..20}; do kill -0 $tee 2>/dev/null && sleep 0.1; done
fi
exit $status
