# Functions of rank.sh about the node it runs on. SYS is /sys, ROOT is /, or what stands for it in a test.

# active_infiniband SYS: NCCL_IB_HCA for the InfiniBand ports that are up, "=mlx5_0:1,mlx5_3:1"; nothing without any.
# An adapter in Ethernet mode beside them may be the storage's; where there are only such, NCCL chooses by itself.
active_infiniband() {
  local state port ports=()
  for state in "$1"/class/infiniband/*/ports/*/state; do
    port=${state%/state}
    [[ -r $state && $(<"$state") == *ACTIVE* && $(<"$port/link_layer") == InfiniBand ]] || continue
    ports+=("$(basename "${port%/ports/*}"):${port##*/}")
  done
  [[ ${#ports[@]} == 0 ]] || (IFS=, && echo "=${ports[*]}")
}

# memory_kills ROOT: how often the kernel has killed a process of this cgroup for want of memory, as machine_limits.py
# counts it; of the machine where it shows no cgroup.
memory_kills() {
  local line path folder file v1='' v2=/
  while IFS=: read -r _ line path; do
    [[ $line ]] || v2=$path
    [[ ,$line, != *,memory,* ]] || v1=$path
  done <"$1/proc/self/cgroup"
  if [[ $v1 ]]; then folder=$1/sys/fs/cgroup/memory path=$v1; else folder=$1/sys/fs/cgroup path=$v2; fi
  [[ -d $folder$path ]] || path='' # in a container its own cgroup is the top
  for file in "$folder$path"/memory.{events,oom_control} "$1/proc/vmstat"; do
    [[ ! -r $file ]] || ! grep -q '^oom_kill ' "$file" || { sed -n 's/^oom_kill //p' "$file"; return; }
  done
  echo 0
}

# raise_limits SYS: as many open files and as much locked memory as this node allows; the soft limits are slurmd's, or
# those of the shell that submitted. Says where no locked memory is left to the network; that rank 0 of a large job has
# too few files it says itself.
raise_limits() {
  local locked
  locked=$(ulimit -Hl)
  ulimit -Sn "$(ulimit -Hn)" && ulimit -Sl "$locked"
  [[ ${SLURM_LOCALID:-0} != 0 || $locked == unlimited || -z $(active_infiniband "$1") ]] ||
    echo "warning: ${SLURMD_NODENAME:-this node} allows $locked KiB of locked memory (ulimit -Hl); InfiniBand wants it unlimited"
}

# clean RUN ATTEMPT JOB GOING EARLIER: end_stale, and remove_containers of this job and of the EARLIER ones of this run.
clean() {
  local number old=("$3")
  for number in $5; do [[ $4 == "?" || " $4 " == *" $number "* ]] || old+=("$number"); done
  end_stale "$1" "$2" "$3" "$4"
  remove_containers "${old[@]}"
}

# remove_containers JOB ...: removes the unpacked images that pyxis has left here under the names that slurm.sbatch gave
# them in these jobs; pyxis may put a job's number before them.
remove_containers() {
  local name
  command -v enroot >/dev/null || return 0
  for name in $(enroot list); do
    [[ $name =~ ^pyxis_([0-9]+_)?hacpo-mega-([0-9]+)$ && " $* " == *" ${BASH_REMATCH[2]} "* ]] || continue
    enroot remove -f "$name" && echo "${SLURMD_NODENAME:-this node}: removed the container $name"
  done
}

# end_stale RUN ATTEMPT JOB GOING: ends the processes that earlier attempts of RUN have left on this node, and removes
# what they alone have in /dev/shm. GOING are the numbers of the user's jobs that run, "?" if nobody knows: what belongs
# to one stays, but for JOB, this one. Everything else on the node stays, too: other users', other runs', and what names no run.
end_stale() {
  local environ process job attempt file ended=() files=() names=() gone=()
  while read -r environ; do
    process=${environ%/environ}
    [[ -O $process ]] || continue
    attempt=$(sed -zn 's/^HACPO_MEGA_ATTEMPT=//p' "$environ" | tr -d '\0')
    job=$(sed -zn 's/^SLURM_JOB_ID=//p' "$environ" | tr -d '\0')
    [[ $job == "$3" && $attempt != "$2" || $job != "$3" && $4 != "?" && " $4 " != *" $job "* ]] || continue
    ended+=("${process#/proc/}")
    names+=("$(<"$process/comm") ${process#/proc/} of attempt $attempt, job $job")
    while read -r file; do files+=("$file"); done < <(sed -n 's|^.* \(/dev/shm/.*\)$|\1|p' "$process/maps" | sort -u)
  done < <(grep -lzsFx "HACPO_MEGA_RUN=$1" /proc/[0-9]*/environ)
  [[ ${#ended[@]} != 0 ]] || return 0
  kill -KILL "${ended[@]}"
  for _ in {1..50}; do kill -0 "${ended[@]}" 2>/dev/null && sleep 0.1; done
  for file in "${files[@]}"; do
    [[ -O $file ]] && ! grep -qsF " $file" /proc/[0-9]*/maps && rm -f "$file" && gone+=("$file")
  done
  printf -v names '; %s' "${names[@]}"
  echo "${SLURMD_NODENAME:-this node}: ended what earlier attempts of this run have left: ${names:2}${gone[*]:+; removed ${gone[*]}}"
}
