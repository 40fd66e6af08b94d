"""The lock files name one build of everything and fit together on every Python; another build is no environment."""

import importlib.metadata
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from repository import ROOT

FOLDER = ROOT / "launch" / "lock"
CHECK = runpy.run_path(str(FOLDER / "check.py"))
CPU, CUDA, CUDA12 = FOLDER / "cpu.txt", FOLDER / "cuda.txt", FOLDER / "cuda12.txt"


def pinned(lock: Path) -> dict[str, str]:
    return {name: str(version) for name, version in CHECK["read_lock"](lock).items()}


@pytest.mark.parametrize("python", CHECK["PYTHONS"])
def test_the_lock_of_this_environment_meets_its_packages_on_every_python(python):
    lock = CPU if importlib.metadata.version("torch").endswith("+cpu") else CUDA
    versions = CHECK["read_lock"](lock)
    requires = CHECK["installed_requirements"](versions)
    assert len(requires) > 150
    assert list(CHECK["requirement_problems"](versions, requires, python)) == []


def test_what_does_not_fit_is_named():
    versions = CHECK["read_lock"](CUDA)
    requires = {
        "vllm": ['six>=1.16.0; python_version > "3.11"', 'setuptools<70; python_version > "3.11"', "torchvision"],
        "other": ["nobody-has-this", 'tests-only; extra == "test"'],
    }
    found = {python: list(CHECK["requirement_problems"](versions, requires, python)) for python in ("3.11", "3.12")}
    assert found["3.11"] == ["Python 3.11: other asks for nobody-has-this, which the lock lacks"]
    assert found["3.12"] == [
        "Python 3.12: other asks for nobody-has-this, which the lock lacks",
        "Python 3.12: vllm asks for setuptools<70, the lock has 80.10.2",
    ]


def test_vllms_wishes_on_newer_pythons():
    """vllm 0.32.0 states them for Python 3.12 and later, where no test of ours installs it."""
    requires = {"vllm": ['six>=1.16.0; python_version > "3.11"', 'setuptools<81,>=78.1.1; python_version > "3.11"']}
    for lock in (CPU, CUDA, CUDA12):
        assert list(CHECK["requirement_problems"](CHECK["read_lock"](lock), requires, "3.13")) == []


def test_the_locks_name_torchs_build():
    assert pinned(CPU)["torch"] == "2.13.0+cpu"
    (line,) = [line for line in CUDA.read_text().splitlines() if line.startswith("torch==")]
    assert line == "torch==2.13.0,!=2.13.0+cpu"


def test_the_cuda_lock_is_resolved_whole_and_the_cpu_lock_with_exceptions(monkeypatch):
    """`make locks` asks the indexes; here only what it does not ask them."""
    monkeypatch.syspath_prepend(FOLDER)
    resolve = runpy.run_path(str(FOLDER / "resolve.py"))
    assert resolve["LOCKS"] == [CPU, CUDA, CUDA12]
    assert resolve["set_aside"](CUDA, "3.12") == []
    assert resolve["set_aside"](CUDA, "3.11") == ["megatron-core; python_version < '3'"]
    nowhere = [f"{name}; python_version < '3'" for name in ("torch", "torchvision", "torchaudio", "torchcodec")]
    assert resolve["set_aside"](CPU, "3.12") == [*nowhere, f"setuptools=={pinned(CPU)['setuptools']}"]
    assert resolve["set_aside"](CUDA12, "3.13")[:4] == nowhere


def test_the_locks_for_both_cudas_differ_by_cuda_alone():
    """A package of another version in one of them would be a difference that no driver asks for."""
    new, old = pinned(CUDA), pinned(CUDA12)
    differ = {
        name: (new.get(name), old.get(name)) for name in new.keys() | old.keys() if new.get(name) != old.get(name)
    }
    built = {name: versions for name, versions in differ.items() if name.partition("-")[0] not in ("nvidia", "cuda")}
    assert built == {
        "torch": ("2.13.0", "2.13.0+cu129"), "vllm": ("0.32.0", "0.32.0+cu129"), "torchcodec": ("0.17.0", None),
        "torchvision": ("0.28.0", "0.28.0+cu129"), "torchaudio": ("2.11.0", "2.11.0+cu129"),
    }  # fmt: skip
    assert not [name for name in old if name.endswith("cu13")]
    assert {old[f"nvidia-{part}-cu12"].rpartition(".")[0] for part in ("cuda-nvcc", "cuda-nvrtc", "cuda-cccl")} == {
        "12.9"
    }


def test_megatron_is_installed_by_its_hash_whatever_the_python():
    """Only this wheel is installed without asking for its Python: pip asks for every other."""
    lines = (FOLDER / "megatron_core.txt").read_text(encoding="utf-8").splitlines()
    (version,) = [line.partition("==")[2].split()[0] for line in lines if line.startswith("megatron-core==")]
    assert {version} == {pinned(lock)["megatron-core"] for lock in (CPU, CUDA, CUDA12)}
    assert sum("--hash=sha256:" in line for line in lines) == len(CHECK["PYTHONS"])
    recipe = [
        line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "requires-python" in line
    ]
    assert len(recipe) == 1 and "--require-hashes --requirement launch/lock/megatron_core.txt" in recipe[0]


def test_the_compiler_is_of_the_headers_cuda():
    versions = pinned(CUDA)
    compiler = [f"nvidia-{part}" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-nvrtc")]
    assert {versions[name].rpartition(".")[0] for name in (*compiler, "nvidia-cuda-runtime")} == {"13.0"}
    assert versions["triton"] == "3.7.1", "the one that torch 2.13.0 asks for"


@pytest.mark.parametrize(
    "lock, version, cuda, says",
    [
        (CUDA, "2.13.0+cpu", None, "needs torch's build for CUDA 13.0, installed is 2.13.0+cpu (CPU)"),
        (CUDA, "2.13.0+cu126", "12.6", "needs torch's build for CUDA 13.0, installed is 2.13.0+cu126 (CUDA 12.6)"),
        (CUDA12, "2.13.0", "13.0", "needs torch's build for CUDA 12.9, installed is 2.13.0 (CUDA 13.0)"),
        (CUDA12, "2.13.0+cu129", "12.9", ""),
        (CPU, "2.13.0", "13.0", "needs torch's CPU build, installed is 2.13.0 (CUDA 13.0)"),
        (CUDA, "2.13.0", "13.0", ""),
        (CPU, "2.13.0+cpu", None, ""),
    ],
)
def test_an_environment_with_another_build_is_not_finished(monkeypatch, capsys, lock, version, cuda, says):
    build = SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch", build)
    monkeypatch.setitem(CHECK["main"].__globals__, "installed_requirements", lambda names: {})
    assert CHECK["main"](lock) == (1 if says else 0)
    assert says in capsys.readouterr().out
