"""CUDA environments of launch/lock, and the NVIDIA driver that each needs.

Imports the standard library alone: launch/lock/flavour.py runs this file before there is an environment.
A driver runs code of its own major version of CUDA, later minor versions included, and of every earlier one (NVIDIA,
"CUDA Compatibility": R580 is the first branch of CUDA 13, R525 that of CUDA 12). nvidia-smi also reports the CUDA of
the libcuda.so that is found: a later major one where the package cuda-compat is in use.
"""

from __future__ import annotations  # `make env` tells an older Python by its version

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ANSWER_S = 20.0
DRIVER, CUDA = re.compile(r"Driver Version: *(\d+)([\d.]*)"), re.compile(r"CUDA (?:UMD )?Version: *(\d+)")
BUILD = re.compile(r"^cuda\b.*= *['\"]([\d.]+)['\"]", re.MULTILINE)


class Lock(NamedTuple):
    """A lock of launch/lock: its name, also make's FLAVOUR; its CUDA; and the driver branch it needs at least."""

    name: str
    cuda: str
    driver: int

    @property
    def major(self) -> int:
        return int(self.cuda.partition(".")[0])


# the best first
LOCKS = (Lock("cuda", "13.0", 580), Lock("cuda12", "12.9", 525))


class Driver(NamedTuple):
    """An NVIDIA driver: its version, and the latest major version of CUDA that runs on it."""

    version: str
    major: int

    def __str__(self) -> str:
        return f"driver {self.version} runs CUDA up to {self.major}"


def parse(header: str) -> Driver | None:
    """Driver named in the first lines that nvidia-smi prints; None if they name none."""
    if (found := DRIVER.search(header)) is None:
        return None
    of_branch = next((lock.major for lock in LOCKS if int(found[1]) >= lock.driver), 11)
    reported = CUDA.search(header)
    return Driver(found[1] + found[2], max(of_branch, int(reported[1]) if reported else 0))


def installed_driver() -> Driver | None:
    """This machine's driver; None if nvidia-smi is not there, fails or names none."""
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse(done.stdout) if done.returncode == 0 else None


def lock_for(driver: Driver) -> Lock:
    """Lock whose CUDA a driver runs, the latest. ValueError, in one line, for a driver older than all of them."""
    for lock in LOCKS:
        if driver.major >= lock.major:
            return lock
    raise ValueError(
        f"{driver}, and the oldest lock needs R{LOCKS[-1].driver} (CUDA {LOCKS[-1].cuda}): update the driver, use "
        "cuda-compat (docs/guide/gpus.md), or say FLAVOUR=cpu"
    )


def torch_cuda() -> str | None:
    """CUDA that the installed torch was built for, without importing it; None for the CPU build, or without torch."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    found = BUILD.search(file.read_text(encoding="utf-8")) if file and file.is_file() else None
    return found[1] if found else None


def driver_needed(cuda: str) -> str:
    """Driver that an environment of a CUDA needs, and the lock for older ones, in words."""
    major = int(cuda.partition(".")[0])
    need = next((f"R{lock.driver} or later" for lock in LOCKS if lock.major == major), f"of CUDA {major}")
    older = [f"R{lock.driver} or later: make env FLAVOUR={lock.name}" for lock in LOCKS if lock.major < major]
    return f"driver {need}" + (f" (an older one, {'; '.join(older)})" if older else "")


def driver_problem(cuda: str | None, driver: Driver | None) -> str | None:
    """Reason in one line why the environment of a CUDA does not run on a driver; None if it does."""
    if cuda is None or driver is None or driver.major >= int(cuda.partition(".")[0]):
        return None
    return f"{driver}, and this environment is of CUDA {cuda}: it needs a {driver_needed(cuda)}"
