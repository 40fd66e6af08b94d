"""The configuration chooses the optimizer's kernels, and Adam is Adam with each of them.

TransformerEngine's and apex's are stand-ins here (tests/support/stand_ins/fused_stand_in.py).
"""

import os
import runpy
import subprocess
import sys

import pytest
import torch
from repository import ROOT, SOURCES
from tiny_models import make_model

from hacpo_mega.megatron.train.fused_optimizer import chosen_kernels

EVERY = ("te", "apex", "torch")


@pytest.mark.parametrize(
    "there, on_cuda, chosen",
    [
        (EVERY, True, {"auto": "te", "te": "te", "apex": "apex", "torch": "torch"}),
        (("apex", "torch"), True, {"auto": "apex", "apex": "apex", "torch": "torch"}),
        (("torch",), True, {"auto": "torch", "torch": "torch"}),
        (EVERY, False, {"auto": "torch", "torch": "torch"}),
    ],
)
def test_auto_takes_what_is_there(there, on_cuda, chosen):
    assert {asked: chosen_kernels(asked, on_cuda=on_cuda, installed=there) for asked in chosen} == chosen


@pytest.mark.parametrize(
    "asked, there, on_cuda, said",
    [
        ("apex", ("te", "torch"), True, 'optimizer.kernels = "apex", but apex is not installed here: build it'),
        ("te", ("torch",), True, 'optimizer.kernels = "te", but TransformerEngine is not installed here: build it'),
        ("apex", EVERY, False, 'optimizer.kernels = "apex" is for CUDA, and this actor is on the CPU: set "auto"'),
    ],
)
def test_what_cannot_be_is_one_line(asked, there, on_cuda, said):
    with pytest.raises(ValueError, match=said) as refusal:
        chosen_kernels(asked, on_cuda=on_cuda, installed=there)
    assert "\n" not in str(refusal.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """In a process of its own: Megatron sees what is installed when it is imported."""
    folder = tmp_path_factory.mktemp("fused")
    make_model(folder / "model", "qwen3", tied=True)
    support = ROOT / "tests" / "support"
    paths = os.pathsep.join(map(str, (*SOURCES, support, support / "cases")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(support / "stand_ins" / "fused_stand_in.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "found.pt")


@pytest.mark.nightly
def test_each_trains_as_torch_does_with_its_own_kernels(found):
    """Three clipped updates with weight decay: weights to a hundredth of an update's size, and nobody else's kernel."""
    reference = found["torch"]
    assert all(norm > 0.1 for norm in reference["norms"]), "nothing would be clipped"
    assert reference["called"] == {}
    for library in ("apex", "te"):
        assert found[library]["norms"] == pytest.approx(reference["norms"], rel=1e-5)
        assert found[library]["called"] == {f"{library} {part}": 3 for part in ("adam", "l2norm", "scale")}
        for name, weight in reference["weights"].items():
            torch.testing.assert_close(found[library]["weights"][name], weight, rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_state_of_each_is_gone_on_with_by_torch(found):
    """Its count of steps as well: Adam's third step from moments whose bias is corrected as of the first is far off."""
    for library in ("torch", "apex", "te"):
        for name, weight in found["torch"]["weights"].items():
            torch.testing.assert_close(found[library]["gone on"][name], weight, rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_what_is_there_is_said_by_name_and_version(found):
    assert found["there"] == list(EVERY) and found["auto"] == "te"
    assert [found[name]["said"] for name in EVERY] == [
        "Adam of TransformerEngine 2.17.1", "Adam of apex 0.1", f"Adam of torch {torch.__version__}"
    ]  # fmt: skip


def test_an_apex_of_another_torch_is_one_line(monkeypatch):
    """Its extension does not load; Megatron would go on without it in silence."""

    def find_spec(self, name, path=None, target=None):
        if name == "amp_C":
            raise ImportError("amp_C.so: undefined symbol: _ZN3c104cuda9SetDeviceEi")

    monkeypatch.setattr(sys, "meta_path", [type("Broken", (), {"find_spec": find_spec})(), *sys.meta_path])
    with pytest.raises(ValueError, match=r"apex is installed in part: ImportError: amp_C.so: undefined symbol") as said:
        runpy.run_path(str(ROOT / "hacpo_mega" / "megatron" / "model" / "installed.py"))
    assert "\n" not in str(said.value)
