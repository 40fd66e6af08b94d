"""The lock that an NVIDIA driver runs, and what is said where it and the environment do not fit."""

import os
import runpy
import subprocess
import sys
from importlib.util import spec_from_file_location
from types import SimpleNamespace

import pytest
from repository import ROOT

from hacpo_mega.cli import slurm
from hacpo_mega.cluster.machine import driver
from hacpo_mega.cluster.machine.driver import LOCKS, driver_needed, driver_problem, installed_driver, lock_for, parse
from hacpo_mega.cluster.machine.visible_gpus import Gpu
from hacpo_mega.config.tables.slurm import SlurmConfig
from hacpo_mega.preflight import node_report

SCRIPT = ROOT / "launch" / "lock" / "flavour.py"
HEADER = "| NVIDIA-SMI {0}          Driver Version: {0}      CUDA Version: {1}     |"


def nvidia_smi(folder, *lines):
    (folder / "nvidia-smi").write_text("\n".join(["#!/bin/sh", *lines]), encoding="utf-8")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    "version, reported, lock",
    [
        ("580.95.05", "13.0", "cuda"),
        ("595.71.05", "13.2", "cuda"),
        ("575.57.08", "12.9", "cuda12"),  # between the two
        ("550.54.15", "12.4", "cuda12"),
        ("525.60.13", "12.0", "cuda12"),
        ("550.54.15", "13.0", "cuda"),  # cuda-compat
        ("615.10", "14.0", "cuda"),
    ],
)
def test_the_lock_that_a_driver_runs(version, reported, lock):
    found = parse(HEADER.format(version, reported))
    assert found.version == version and lock_for(found).name == lock
    assert driver_problem(lock_for(found).cuda, found) is None


def test_another_header_is_read_by_its_driver_alone():
    assert lock_for(parse("Driver Version: 580.95.05 KMD")).name == "cuda"
    assert parse("CUDA UMD Version: 13.0  Driver Version: 570.1").major == 13
    assert parse("no devices were found") is None


def test_a_driver_that_does_not_fit_is_one_line():
    old, between = (parse(HEADER.format(*both)) for both in (("470.82.01", "11.4"), ("575.57.08", "12.9")))
    with pytest.raises(ValueError, match=r"^driver 470\.82\.01 runs CUDA up to 11, and the oldest lock needs R525 .*$"):
        lock_for(old)
    assert driver_problem("13.0", between) == (
        "driver 575.57.08 runs CUDA up to 12, and this environment is of CUDA 13.0: it needs a driver R580 or later "
        "(an older one, R525 or later: make env FLAVOUR=cuda12)"
    )
    assert driver_problem("12.9", old).endswith("it needs a driver R525 or later")
    assert driver_problem(None, old) is driver_problem("13.0", None) is None
    assert (
        driver_needed("14.1")
        == "driver of CUDA 14 (an older one, "
        + "; ".join(f"R{lock.driver} or later: make env FLAVOUR={lock.name}" for lock in LOCKS)
        + ")"
    )


@pytest.mark.parametrize(
    "lines, printed, said",
    [
        ([f"echo '{HEADER.format('550.54.15', '12.4')}'"], "cuda12", "launch/lock/cuda12.txt, of CUDA 12.9"),
        ([f"echo '{HEADER.format('470.82.01', '11.4')}'"], "", "the oldest lock needs R525"),
        (["exit 9"], "cpu", ""),
        (None, "cpu", ""),
    ],
    ids=["12.4", "11.4", "fails", "none"],
)
def test_make_env_is_told_the_lock(lines, printed, said, tmp_path, monkeypatch):
    if lines is not None:
        nvidia_smi(tmp_path, *lines)
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert (done.stdout.strip(), done.returncode) == (printed, 0 if printed else 1)
    assert said in done.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (installed_driver() is None) == (printed == "cpu")


@pytest.mark.parametrize("cuda, is_good", [("12.9", True), ("13.0", False), (None, True)])
def test_preflight_says_which_and_why(cuda, is_good, tmp_path, monkeypatch):
    nvidia_smi(tmp_path, f"echo '{HEADER.format('575.57.08', '12.9')}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(node_report, "torch_cuda", lambda: cuda)
    facts, problems = node_report._environment_facts([Gpu("H100", "575.57.08", "")])
    assert facts == {"environment": f"CUDA {cuda or 'none'}; driver 575.57.08 runs CUDA up to 12"}
    assert (problems == []) == is_good and all("make env FLAVOUR=cuda12" in problem for problem in problems)
    assert node_report._environment_facts([]) == ({}, [])


def test_a_dry_run_says_what_the_nodes_need(monkeypatch):
    """Not for another interpreter on the nodes, whose torch nobody here knows."""
    monkeypatch.setattr(slurm, "torch_cuda", lambda: "13.0")
    config = SimpleNamespace(slurm=SlurmConfig(gpus_per_node=8))
    (line,) = slurm._environment(config)
    assert line.startswith("environment: CUDA 13.0, for a driver R580 or later (an older one, R525 or later: make env")
    other = SimpleNamespace(slurm=SlurmConfig(gpus_per_node=8, container_image="/images/a.sqsh"))
    assert slurm._environment(other) == []
    monkeypatch.setattr(slurm, "torch_cuda", lambda: None)
    assert slurm._environment(config) == []


@pytest.mark.parametrize("text, cuda", [("cuda: Optional[str] = '12.9'", "12.9"), ("cuda: Optional[str] = None", None)])
def test_torchs_build_is_read_without_importing_it(text, cuda, tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('it is imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__all__ = ['cuda']\n__version__ = '2.13.0'\n{text}\nhip = None\n")
    monkeypatch.setattr(
        driver, "find_spec", lambda name: spec_from_file_location(name, tmp_path / name / "__init__.py")
    )
    assert driver.torch_cuda() == cuda


def test_make_takes_it(tmp_path):
    """Also a flavour that the user names, and none for a driver that is too old."""
    nvidia_smi(tmp_path, f"echo '{HEADER.format('550.54.15', '12.4')}'")
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    make = ["make", "--dry-run", "--always-make", "env", f"PYTHON={sys.executable}"]

    def run(*words):
        return subprocess.run([*make, *words], capture_output=True, text=True, env=environment, cwd=ROOT)

    assert "check.py launch/lock/cuda12.txt" in run().stdout and "whl/cu129" in run().stdout
    assert "check.py launch/lock/cuda.txt" in run("FLAVOUR=cuda").stdout
    nvidia_smi(tmp_path, f"echo '{HEADER.format('470.82.01', '11.4')}'")
    refused = run()
    assert refused.returncode == 2 and "no environment fits this driver" in refused.stderr


def test_the_locks_are_those_of_the_folder():
    check = runpy.run_path(str(ROOT / "launch" / "lock" / "check.py"))
    assert {lock.name: lock.cuda for lock in LOCKS} | {"cpu": None} == check["BUILDS"]
    for lock in LOCKS:
        pins = check["read_lock"](ROOT / "launch" / "lock" / f"{lock.name}.txt")
        assert str(pins["cuda-toolkit"]).startswith(f"{lock.cuda}.")
