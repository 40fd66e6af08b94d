"""Settings of vLLM, Triton and torch on CUDA arrive in a rank, and the installed packages still read them.

A machine with a driver is one with the command nvidia-smi, as for the launcher; vLLM is asked what it has read.
"""

import ast
import getpass
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from job import run_ranks

from hacpo_mega.cluster.machine.environment import (
    CACHES,
    EXPECTED,
    FLASHINFER,
    ON_CUDA,
    library_settings,
    own_caches,
    prepare_environment,
)
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap

RANKS = RankMap(1, (AgentShape("small"), AgentShape("large", tp=2)))
OF_VLLM = sorted(name for name in library_settings(on_cuda=True) | CACHES if name.startswith("VLLM_"))


def source_of(module: str) -> str:
    return Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")


def test_vllm_still_has_these_variables():
    """By the table that vLLM looks every variable up in; it is not imported here."""
    (table,) = (
        node.value
        for node in ast.parse((Path(importlib.util.find_spec("vllm").origin).parent / "envs.py").read_text()).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables"
    )
    keys = {key.value for key in table.keys if isinstance(key, ast.Constant)}
    assert len(OF_VLLM) == 7
    assert set(OF_VLLM) <= keys


def test_triton_still_has_its_variable():
    assert '"TRITON_CACHE_DIR"' in source_of("triton.knobs")


@pytest.mark.parametrize("module", EXPECTED)
def test_vllm_still_has_the_warnings_that_are_left_out(module):
    assert f'"{EXPECTED[module]}' in source_of(module)


def is_shown(name: str, text: str) -> bool:
    return bool(logging.getLogger(name).filter(logging.makeLogRecord({"name": name, "msg": f"{text} to %d"})))


def read_by_the_libraries(folder: Path, chosen: dict[str, str]) -> dict[str, Any]:
    """A rank of a machine with a driver, on which the user has chosen some variables."""
    import triton
    import vllm.envs

    for name in library_settings(on_cuda=False):
        os.environ.pop(name, None)
    tempfile.tempdir = str(folder)
    os.environ |= {"PATH": f"{os.environ['PATH']}:{folder}"} | chosen
    prepare_environment()
    with Place.join(RANKS) as place:
        read = {name: getattr(vllm.envs, name) for name in OF_VLLM}
        read |= {
            "agent": place.coordinate.agent_name,
            "rank": place.coordinate.global_rank,
            "TRITON_CACHE_DIR": triton.knobs.cache.dir,
        }
        asked = {"queues": "CUDA_DEVICE_MAX_CONNECTIONS", "order": "CUDA_DEVICE_ORDER"}
        asked |= {"flashinfer": "FLASHINFER_LOGGING_LEVEL"}
        read["expected"] = [is_shown(name, text) for name, text in EXPECTED.items()]
        read["unexpected"] = [is_shown(name, "no memory") for name in EXPECTED]
        return read | {name: os.environ.get(variable) for name, variable in asked.items()}


def ranks_on_cuda(folder: Path, chosen: dict[str, str]) -> list[dict[str, Any]]:
    (folder / "nvidia-smi").touch(mode=0o755)
    return run_ranks(3, read_by_the_libraries, folder, chosen)


def test_a_rank_reads_what_cuda_asks_for(tmp_path):
    own = tmp_path / f"hacpo_mega-{os.getuid()}"
    for read in ranks_on_cuda(tmp_path, {}):
        agent = read["agent"]
        assert read == {
            "agent": agent,
            "rank": read["rank"],
            "queues": {"small": None, "large": "1"}[agent],
            "order": "PCI_BUS_ID",
            "flashinfer": "warning",
            "expected": [False] * 3,
            "unexpected": [True] * 3,
            "VLLM_ENABLE_V1_MULTIPROCESSING": False,
            "VLLM_ALLOW_INSECURE_SERIALIZATION": False,
            "VLLM_NO_USAGE_STATS": True,
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ALLREDUCE_USE_FLASHINFER": False,
            "VLLM_USE_FLASHINFER_SAMPLER": False,
            "VLLM_CACHE_ROOT": str(own / agent / "vllm" / str(read["rank"])),
            "TRITON_CACHE_DIR": str(own / agent / "triton"),
        }


def test_what_the_user_has_set_stays(tmp_path):
    chosen = {
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "FLASHINFER_LOGGING_LEVEL": "debug",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "1",
        "VLLM_CACHE_ROOT": "/of/the/user",
    }
    assert chosen.keys() - CACHES.keys() == ON_CUDA.keys()
    for read in ranks_on_cuda(tmp_path, chosen):
        assert (read["VLLM_LOGGING_LEVEL"], read["VLLM_ALLREDUCE_USE_FLASHINFER"]) == ("DEBUG", True)
        assert (read["VLLM_CACHE_ROOT"], read["order"]) == ("/of/the/user", "FASTEST_FIRST")
        assert read["flashinfer"] == "debug"
        assert read["TRITON_CACHE_DIR"].startswith(str(tmp_path))


def test_vllms_code_is_that_of_the_device(tmp_path, monkeypatch):
    """It names its device by number. vLLM tells ranks of an agent apart, and the layout decides where a rank is."""
    assert "device_guard(self.device_idx)" in source_of("torch._inductor.codegen.wrapper")
    assert 'f"rank_{rank}_{dp_rank}"' in source_of("vllm.compilation.decorators")
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    split, in_turns = (RankMap(1, RANKS.agents, shares_devices=shares) for shares in (False, True))
    found = []
    for device in (split.device_number(1, 1), in_turns.device_number(1, 1)):  # the first rank of the second agent
        for name in CACHES:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        own_caches("large", device)
        found.append({name: os.environ[name] for name in CACHES})
    assert {name for name in CACHES if found[0][name] != found[1][name]} == {"VLLM_CACHE_ROOT"}


@pytest.mark.parametrize("found", ["link", "file"])
def test_what_is_not_ours_is_not_used(found, tmp_path, monkeypatch):
    """A link that somebody laid there would lead our compiled code, and what we run, to a place of his."""
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    for name in CACHES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    own = tmp_path / f"hacpo_mega-{os.getuid()}"
    own.symlink_to(tmp_path / "elsewhere") if found == "link" else own.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own_caches("small", 3)
    assert {os.environ.pop(name) for name in CACHES} == {
        str(tmp_path / "cache/hacpo_mega" / socket.gethostname() / "small" / part.format(device=3))
        for part in CACHES.values()
    }
    (tmp_path / "cache/hacpo_mega").chmod(0o777)
    (tmp_path / "cache/hacpo_mega" / socket.gethostname()).chmod(0o777)
    with pytest.raises(ValueError, match=r"is a folder of yours, or can be made one: set TMPDIR"):
        own_caches("small", 3)


@pytest.mark.parametrize("home", ["there", "a file", "chosen"])
def test_flashinfer_has_a_folder_where_the_home_takes_none(home, tmp_path, monkeypatch):
    """It makes one when vLLM imports it, at the start of an engine on Hopper, which ended there."""
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in (*CACHES, FLASHINFER):
        monkeypatch.setenv(name, "/of/the/user")
    if home != "chosen":
        monkeypatch.delenv(FLASHINFER)
    monkeypatch.setenv("HOME", str(tmp_path if home == "there" else tmp_path / "nvidia-smi"))
    own_caches("small", 3)
    own = str(tmp_path / f"hacpo_mega-{os.getuid()}" / "small" / "flashinfer")
    assert os.environ.get(FLASHINFER) == {"there": None, "chosen": "/of/the/user"}.get(home, own)


NAMES_OF_OTHERS = (
    "torchinductor_{}",
    "hacpo_mega-{uid}",
    "vllm",
    "{}",
    "torch_compile_debug",
    "cache",
    "pymp-",
    "triton",
)
IMPORTS = (
    "from hacpo_mega.cluster.machine.environment import prepare_environment; prepare_environment()",
    "from hacpo_mega import Trainer",
)


@pytest.mark.nightly
def test_no_name_under_tmpdir_keeps_a_process_from_its_imports(tmp_path):
    """Names that other users have taken there do no harm, and an import of torch's compiler leaves nothing there."""
    shared, environment = tmp_path / "shared", {k: v for k, v in os.environ.items() if k not in CACHES}
    shared.mkdir()
    environment |= {"TMPDIR": str(shared), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    taken = {name.format(getpass.getuser(), uid=os.getuid()) for name in NAMES_OF_OTHERS}
    for name in taken:
        (shared / name).touch()
    for first in IMPORTS:
        command = [sys.executable, "-c", f"{first}\nimport torch._dynamo, torch._inductor.codecache"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {path.name for path in shared.iterdir()} == taken
