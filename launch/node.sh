# Functions of rank.sh about the node it runs on. SYS is /sys, or what stands for it in a test.

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
