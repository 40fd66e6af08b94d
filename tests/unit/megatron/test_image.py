"""The image's recipe: nothing in it can change under a reader's hands, and its pins are those of the lock files.

A build of the image is not tested here: it needs a container engine and its base image.
"""

import re
import runpy
import subprocess

import pytest
from dockerfile import HASHED, instructions, problems, requirements
from repository import ROOT

from hacpo_mega.megatron.model.installed import version_problem

IMAGE = ROOT / "launch" / "image"
TEXT = (IMAGE / "Dockerfile").read_text(encoding="utf-8")
FOUND = instructions(TEXT)
LOCK = runpy.run_path(str(ROOT / "launch" / "lock" / "check.py"))["read_lock"](ROOT / "launch" / "lock" / "cuda.txt")
PINS = {
    name.lower().replace("_", "-"): version
    for file in IMAGE.glob("*.txt")
    for name, version in [re.match(r"([\w.-]+)==(\S+)", line).groups() for line in requirements(file)]
}


def test_nothing_in_it_is_unpinned():
    assert problems(TEXT, ROOT) == []
    assert len(FOUND) > 40


@pytest.mark.parametrize(
    "line, said",
    [
        ("FROM ubuntu:24.04", "neither an earlier stage nor named by its digest"),
        ("RUN pip install ninja", "neither hashes nor a lock"),
        ("RUN true && pip install --no-index /wheels/*.whl", "dependencies that nothing pins"),
        ("RUN apt-get install --yes git && rm -rf /var/lib/apt/lists/*", "without --no-install-recommends"),
        ("RUN apt-get install --no-install-recommends git", "leaves apt's lists"),
        ("RUN curl https://example.org/install.sh | bash", "takes what is pinned by nothing"),
        ("RUN git fetch https://example.org/code main", "does not look at what it fetched"),
        ("COPY no/such/file /build/", "not in the repository"),
        ("COPY . /build/", "all that lies about"),
        ("ENV HF_TOKEN=x", "a secret would stay"),
        ("USER root", "runs as root"),
    ],
)
def test_what_is_not_let_through(line, said):
    assert [problem for problem in problems(f"{TEXT}\n{line}\n", ROOT) if said in problem], line


def test_every_package_beside_the_lock_is_known_by_its_hash():
    lines = [line for file in IMAGE.glob("*.txt") for line in requirements(file)]
    assert len(lines) == len(PINS) == 8
    assert [line for line in lines if not HASHED.fullmatch(line)] == []
    assert PINS.keys().isdisjoint(LOCK)


def test_the_pins_fit_the_lock():
    """The base's CUDA is that of the lock's compiler and headers; TransformerEngine's parts are one release."""
    (base,) = [rest for word, rest in FOUND if word == "ARG" and rest.startswith("CUDA_IMAGE=")]
    assert re.search(r"cuda:(\d+\.\d+)\.", base)[1] == ".".join(str(LOCK["nvidia-cuda-nvcc"]).split(".")[:2])
    parts = {version for name, version in PINS.items() if name.startswith("transformer-engine")}
    assert len(parts) == 1 and version_problem(parts.pop()) is None
    assert PINS["flash-attn"] == "2.8.3"  # what TransformerEngine 2.17 takes at most
    assert {"nvidia-modelopt", "megatron-core", "vllm", "torch", "ninja", "packaging", "setuptools"} <= LOCK.keys()


def test_what_is_compiled_is_compiled_here():
    """Each would rather download a binary; and nothing is compiled against a torch that pip chose for it."""
    builds = [rest for word, rest in FOUND if word == "RUN" and "pip wheel" in rest]
    assert len(builds) == 4
    assert all("--no-build-isolation" in build for build in builds)
    (flash,) = [build for build in builds if "flash_attn.txt" in build]
    assert "FLASH_ATTENTION_FORCE_BUILD=TRUE" in flash and "--no-binary flash-attn" in flash
    (engine,) = [build for build in builds if "transformer_engine.txt" in build]
    assert "NVTE_PYTORCH_FORCE_BUILD=TRUE" in engine and "--no-binary transformer-engine-torch" in engine
    (commit,) = [rest.partition("=")[2] for word, rest in FOUND if word == "ARG" and rest.startswith("APEX_COMMIT=")]
    assert re.fullmatch("[0-9a-f]{40}", commit)


def test_every_line_that_runs_is_shell():
    lines = [re.sub(r"--mount=\S+ ", "", rest) for word, rest in FOUND if word == "RUN"]
    assert len(lines) > 12
    for line in lines:
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)


def test_the_builder_is_sent_only_what_is_copied():
    ignored = (IMAGE / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in ignored if not line.startswith("#")]
    assert rules[0] == "*"
    sent = {line[1:] for line in rules if line.startswith("!")}
    copied = {name for word, rest in FOUND if word == "COPY" for name in rest.split()[:-1]}
    assert {name.partition("/")[0] for name in copied} == sent
