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
