"""A script of this folder as a job of real processes, in the environment that the launcher gives a run.

For jobs with vLLM: it changes the process that imports it, so the process that judges must not.
"""

import os
import subprocess
import sys
from pathlib import Path

from hacpo_mega.cluster.environment import EVERYWHERE, ON_CPU


def run_script(name: str, num_processes: int, *arguments: Path, timeout_s: float = 540.0) -> None:
    """`torchrun --nproc-per-node=num_processes tests/name arguments`; raises CalledProcessError if it fails."""
    environment = {**os.environ, **EVERYWHERE, **ON_CPU, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_processes}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    script = Path(__file__).with_name(name)
    subprocess.run([*command, script, *arguments], env=environment, check=True, timeout=timeout_s)
