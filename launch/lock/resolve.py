"""Resolves the lock files on every Python that they serve, by what the indexes say of each package.

    make locks

Asks uv for wheels alone. A lock resolves where its packages can be had together and are what they ask for, no more and
no fewer. Set aside are builds of torch that PyTorch's index alone has, what check.py leaves out and accepts, and on
Python 3.11 megatron-core (megatron_core.txt). For CUDA 12.9 the requirements of torch's build stand here, and vLLM's
are those of its build for CUDA 13 with the extras of CUDA 12. Prints a line for each and exits with 1 if one does not
resolve. UV_INDEX and UV_FIND_LINKS name other indexes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from check import ACCEPTED, LEFT_OUT, PYTHONS, read_lock
from packaging.version import Version

LOCKS = [Path(__file__).with_name(name) for name in ("cpu.txt", "cuda.txt", "cuda12.txt")]
# The oldest glibc that all wheels are for: llguidance has none for 2.28.
PLATFORM = "x86_64-manylinux_2_31"
# torch 2.13.0+cu129 asks for these.
OF_TORCH_12 = (
    "cuda-toolkit[nvrtc,cudart,cupti,cublas,cufft,curand,cusolver,cusparse,nvjitlink,cufile,nvtx]==12.9.1",
    *("cuda-bindings>=12.9.4,<13", "nvidia-cudnn-cu12==9.20.0.48", "nvidia-nccl-cu12==2.29.7", "triton==3.7.1"),
    *("nvidia-cusparselt-cu12==0.8.1", "nvidia-nvshmem-cu12==3.4.5", "networkx", "sympy", "jinja2", "fsspec"),
)


def set_aside(lock: Path, python: str) -> list[str]:
    """Overrides for uv that keep packages from its judgement: no package, or this version whatever others ask for."""
    names = {"cpu": ("torch", *LEFT_OUT), "cuda": (), "cuda12": ("torch", *LEFT_OUT)}[lock.stem]
    names = (*names, *(("megatron-core",) if python == "3.11" else ()))
    versions = [f"{asked}=={version}" for _, asked, version in ACCEPTED] if lock.stem == "cpu" else []
    if lock.stem == "cuda12":
        pinned = read_lock(lock)
        versions = [f"{name}=={pinned[name].public}" for name in ("vllm", "nvidia-cutlass-dsl")]
        versions += [f"humming-kernels[cu12]=={pinned['humming-kernels']}"]
    return [*(f"{name}; python_version < '3'" for name in names), *versions]


def problem(lock: Path, python: str) -> str | None:
    """Why a lock does not resolve on a Python; None where it does."""
    with tempfile.TemporaryDirectory() as folder:
        overrides, found = Path(folder, "overrides.txt"), Path(folder, "found.txt")
        overrides.write_text("\n".join(set_aside(lock, python)), encoding="utf-8")
        asked = Path(folder, "asked.txt")
        asked.write_text("\n".join(OF_TORCH_12) if lock.stem == "cuda12" else "", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", lock, asked, "--override", overrides, "-o", found]
        options = ["--python-version", python, "--python-platform", PLATFORM, "--only-binary", ":all:", "--no-annotate"]
        done = subprocess.run([*command, *options, "--quiet"], capture_output=True, text=True)
        if done.returncode:
            return " ".join(done.stderr.split())
        pinned = {name: Version(version.public) for name, version in read_lock(lock).items()}
        differing = read_lock(found).items() ^ pinned.items()
    aside = {line.partition(";")[0] for line in set_aside(lock, python) if ";" in line}
    names = sorted({name for name, _ in differing} - aside)
    return f"not the same packages: {', '.join(names)}" if names else None


def main() -> int:
    """0 when every lock resolves on every Python."""
    found = {(lock.name, python): problem(lock, python) for lock in LOCKS for python in PYTHONS}
    for (name, python), why in found.items():
        print(f"{'FAILED' if why else 'ok    '}  {name} on Python {python}{f': {why}' if why else ''}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
