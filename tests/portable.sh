#!/usr/bin/env bash
# The numeric tests as other processors would run them: tests/portable.sh, or `make test-portable`.
# Every library here chooses its kernels by the processor it finds; these variables make it choose others. All run under
# the most different choice of all libraries together, the fast ones under each single variable. Left out: what `make
# test` leaves out (marked nightly).
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
python=${PYTHON:-.venv/bin/python}

fast=(
  tests/unit/megatron/test_{layers,learn_operators,moe,megatron_model}.py
  tests/unit/algorithm/test_{objective,algorithm,methods,method_relations}.py
  tests/unit/kernels/test_sequence_objective.py tests/unit/logbook/test_update_metrics.py
)
kernels=(tests/unit/kernels/test_{linear_logprob,kernel_complaints,kernel_repeats}.py)
jobs=(tests/jobs/test_{actor,gradient_invariance}.py)

failed=0
check() { # check NAME=VALUE... -- FILE...: one line per environment, and what failed
  local variables=() started=$SECONDS outcome=passed
  while [[ $1 != -- ]]; do variables+=("$1"); shift; done
  shift
  local log
  log=$(mktemp)
  env "${variables[@]}" "$python" -m pytest -n 2 -m "not nightly" "$@" --durations=0 --durations-min=10 >"$log" 2>&1 || { outcome=FAILED; failed=1; }
  printf '%-6s %4d s  %s: %s\n' "$outcome" $((SECONDS - started)) "${variables[*]}" "$(tail -n 1 "$log")"
  if [[ $outcome == FAILED ]]; then cat "$log"; fi
  rm -f "$log"
}

check OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2 -- \
  "${fast[@]}" "${kernels[@]}" "${jobs[@]}"
for core in SkylakeX Prescott; do
  # OpenBLAS would run instructions that this processor lacks.
  [[ $core == SkylakeX ]] && ! grep -qw avx512f /proc/cpuinfo && continue
  check OPENBLAS_CORETYPE=$core -- "${fast[@]}" "${kernels[@]}"
done
check ATEN_CPU_CAPABILITY=avx2 -- "${fast[@]}"
grep -qw avx512f /proc/cpuinfo && check ATEN_CPU_CAPABILITY=avx512 -- "${fast[@]}"
check MKL_CBWR=COMPATIBLE -- "${fast[@]}"
check ONEDNN_MAX_CPU_ISA=AVX2 -- "${fast[@]}"
exit $failed
