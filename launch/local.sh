#!/usr/bin/env bash
# Trains on this machine, with one process per rank: launch/local.sh CONFIG [key=value ...]
# Works from any folder; relative paths count from the current one. PYTHON chooses another interpreter than .venv's.
# hacpo-mega itself sets what libraries read (env.sh has it for others), counts the ranks and shares out the cores.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"
  exit 2
fi
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python || -n ${PYTHON:-} ]] || python=python3
# A job inside a job would take its ranks from the outer one.
unset RANK WORLD_SIZE LOCAL_RANK SLURM_PROCID
exec "$python" -P -m hacpo_mega.cli train "$@"
