"""Tries the CUDA environment as far as it goes without a GPU: its imports, the kernels' compilation, vLLM's binaries.

    build/cuda-env/bin/python launch/lock/try_cuda.py          (`make cuda-env` installs and runs it)

Prints a line for every thing tried and exits with 1 if any failed. Not here: anything that a device computes.
"""

import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# vLLM modules that the CUDA engine alone imports: executor, worker, both runners, the sampler of the second.
ENGINE = (
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.sample.sampler",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.llama",
)
ARCHITECTURES = (90, 100)
LOADER = """
import ctypes, os, sys, torch
for file in sys.argv[1:]:
    if os.fork() == 0:
        try:
            ctypes.CDLL(file, os.RTLD_LAZY)
            said = "ok"
        except OSError as error:
            said = str(error).splitlines()[0]
        print(file, said, sep="\\t", flush=True)
        os._exit(0)
    os.wait()
"""


def own_modules() -> Iterator[str]:
    """Every module of hacpo_mega, hacpo_grading, hacpo_kernels and hacpo_lab."""
    for package in ("hacpo_mega", "hacpo_grading", "hacpo_kernels", "hacpo_lab"):
        yield package
        yield from (
            found.name for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        )


def tried(name: str, action: Callable[[], object]) -> bool:
    """Says whether the action went through, and how not."""
    try:
        action()
    except Exception as error:  # whatever it is, it is a finding, and the next thing is tried
        print(f"FAILED  {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
        return False
    print(f"ok      {name}", flush=True)
    return True


def compile_kernels(architecture: int) -> None:
    """Every Triton kernel, by the pinned Triton, for one architecture."""
    report = ROOT / "kernels" / "bench" / "compile_report.py"
    done = subprocess.run([sys.executable, report, str(architecture)], capture_output=True, text=True)
    print(done.stdout, end="")
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or "a kernel needs more shared memory than there is")


def make_stub_driver(folder: Path) -> None:
    """A libcuda.so.1 without a function in it: enough to be found, since nothing here calls one."""
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", folder / "libcuda.so.1"], check=True)


def loaded(binaries: list[Path], driver: Path) -> dict[str, str]:
    """The loader's answer for each compiled module, "ok" or why not, with `driver` among the libraries.

    Driver functions are looked up only when they are called. Each is loaded in a process of its own, forked from one
    that has torch, since two may register the same operations. One that is missing in the answer ended its process.
    """
    path = os.pathsep.join(filter(None, [str(driver), os.environ.get("LD_LIBRARY_PATH")]))
    # of a new process: the loader reads the path at its start
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *binaries],
        env=os.environ | {"LD_LIBRARY_PATH": path},
        capture_output=True,
        text=True,
    )
    return dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)


def complain(said: str) -> None:
    """RuntimeError with what was said, unless it is ok."""
    if said != "ok":
        raise RuntimeError(said)


def main() -> int:
    """0 when all went through."""
    warnings.simplefilter("ignore")  # what is not installed is a choice (TransformerEngine, Apex)
    results = [tried(f"import {name}", lambda name=name: importlib.import_module(name)) for name in own_modules()]
    results += [tried(f"import {name}", lambda name=name: importlib.import_module(name)) for name in ENGINE]
    results += [tried(f"kernels for sm_{sm}", lambda sm=sm: compile_kernels(sm)) for sm in ARCHITECTURES]
    package = Path(importlib.util.find_spec("vllm").origin).parent
    with tempfile.TemporaryDirectory() as folder:
        make_stub_driver(Path(folder))
        binaries = sorted(package.rglob("*.so"))
        said = loaded(binaries, Path(folder))
    for file in binaries:
        answer = said.get(str(file), "its process ended")
        results.append(tried(f"load {file.relative_to(package)}", lambda answer=answer: complain(answer)))
    print(f"{results.count(True)} went through, {results.count(False)} did not")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
