"""The server that forks ranks for an experiment: what it asks of a device, and what keeps it from its imports."""

import getpass
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from hacpo_lab.forked import SERVER_ONLY


def test_the_server_asks_for_gpus_without_initialising_cuda(monkeypatch):
    """torch, asked with the settings of hacpo_lab/forked.py, counts the driver's devices; else a fork is too late."""

    def initialise():
        raise AssertionError("CUDA's runtime was asked, which initialises it")

    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", initialise, raising=False)
    with mock.patch.dict(os.environ, SERVER_ONLY):
        assert torch.cuda.is_available()
    with (
        mock.patch.dict(os.environ, {"PYTORCH_NVML_BASED_CUDA_CHECK": "0"}),
        pytest.raises(AssertionError, match="runtime"),
    ):
        torch.cuda.is_available()


def test_no_name_under_tmpdir_keeps_the_server_from_its_imports(tmp_path):
    """tests/jobs/test_library_settings.py asks the same of the product."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / f"torchinductor_{getpass.getuser()}").touch()
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_DIR")}
    environment |= {"TMPDIR": str(shared), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = "import hacpo_lab.preloaded, torch._dynamo, torch._inductor.codecache"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(shared.iterdir())) == 1
