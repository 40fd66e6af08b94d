"""Numbers of an engine beside its parameters, as on CUDA: sinks in another type, tensors that sleep drops."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import inplace, record_metadata_for_reloading

from hacpo_mega.rollout.engine import KeptTensors
from hacpo_mega.rollout.weights.engine_weights import EngineWeights, Receiver, take_sinks, without_reload_warnings
from hacpo_mega.rollout.weights.held_weights import held_parts
from hacpo_mega.rollout.weights.parts import record

NAME, BF16 = "layers.0.attn.sinks", torch.bfloat16


class Attention(nn.Module):
    """As vLLM's over FlashInfer: it multiplies with a copy in float32, which it makes when it is told to."""

    def __init__(self, sinks: nn.Parameter) -> None:
        super().__init__()
        self.impl = SimpleNamespace(source=sinks, sinks=sinks.float())

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.impl.sinks.copy_(self.impl.source)


def model_on_rank_1(device: str) -> nn.Module:
    """A model of two heads a rank, whose sinks are -9."""
    layer = nn.Module()
    layer.sinks = nn.Parameter(torch.full((2,), -9.0, dtype=BF16, device=device), requires_grad=False)
    layer.qkv_proj = nn.Module()
    layer.qkv_proj.tp_rank, layer.attn = 1, Attention(layer.sinks)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].attn = layer
    return model


def held(model: nn.Module) -> torch.Tensor:
    (part,) = [part for part in held_parts(model, {}, False) if part.name == NAME]
    return part.read()


def by_load(model: nn.Module, sinks: torch.Tensor) -> None:
    take_sinks(model, {NAME: sinks})


def by_parts(model: nn.Module, sinks: torch.Tensor) -> None:
    recorded = model_on_rank_1("meta")

    def load_weights(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            recorded.get_parameter(name).data.copy_(tensor[2:])

    recording = record(recorded, {NAME: (4,)}, BF16, load_weights)
    weights = EngineWeights(model, recording, SimpleNamespace(dtype=BF16))
    receiver = Receiver(weights, lambda tensors: None)
    (part,) = weights.parts
    receiver.view(0, part.shard, BF16).copy_(sinks[2:])
    receiver.wrote(0, 2)
    assert not receiver.missing


@pytest.mark.parametrize("take", [by_load, by_parts])
def test_attention_multiplies_with_the_sinks_that_were_given_last(take):
    model = model_on_rank_1("cpu")
    copy = model.layers[0].attn.attn.impl.sinks
    for numbers in ([1.0, 2, 3, 4], [5.0, 6, 7, 8]):
        take(model, torch.tensor(numbers, dtype=BF16))
        assert copy.tolist() == held(model).tolist() == numbers[2:]
        assert held(model).dtype == BF16, "the published type, to be compared with what was published"
    copy.zero_()
    assert held(model).tolist() == [0, 0], "a copy that was left behind is seen"


class TwoLayers(nn.Sequential):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        names = []
        for name, tensor in weights:
            self.get_parameter(name).weight_loader(self.get_parameter(name), tensor)
            names.append(name)
        return set(names)


def test_tensors_that_are_synced_whole_bring_no_warning_of_the_others():
    """By vLLM's own reload, whose warnings are shown on CUDA: one names every other parameter, in every weight sync."""
    model, said = TwoLayers(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)), []
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=None), load_config=None, lora_config=None)
    handler, before = logging.Handler(), inplace.logger.level
    handler.emit = lambda record: said.append(record.getMessage())
    inplace.logger.addHandler(handler)
    inplace.logger.setLevel(logging.WARNING)
    record_metadata_for_reloading(model)

    def reload() -> None:
        inplace.reload_weights(config, model, iter([("0.weight", torch.eye(2))]), None, True)

    try:
        with without_reload_warnings():
            reload()
        assert not said and torch.equal(model[0].weight, torch.eye(2))
        reload()
        assert len(said) == 1 and "{'1.weight'}" in said[0], "it would be said"
    finally:
        inplace.logger.removeHandler(handler)
        inplace.logger.setLevel(before)


def test_sleep_gives_back_what_is_neither_parameter_nor_buffer():
    pool, without_storage = torch.zeros(100), torch.eye(3).to_sparse()  # the first as the allocator took it
    model = nn.Module()
    model.weight = nn.Parameter(pool[0:10])
    model.register_buffer("cosines", pool[10:20], persistent=False)
    model.latents = nn.Module()
    model.latents.W_UK_T, model.latents.W_UV = pool[20:30], pool[30:40]
    workspace, in_no_module, outside = pool[40:50], {"flags": pool[60:63]}, torch.zeros(5)
    model.workspace = workspace
    first, size = pool.data_ptr(), pool.element_size()
    kept = KeptTensors(model, [(first + 60 * size, 40 * size), (first, 60 * size)])
    workspace.fill_(3)
    in_no_module["flags"].copy_(torch.tensor([1.0, 2, 3]))
    outside.fill_(4)
    for _ in range(2):
        kept.save()
        for tensor in (pool, outside):
            tensor.fill_(-7)  # as woken memory is
        kept.restore()
        assert workspace.tolist() == [3.0] * 10 and in_no_module["flags"].tolist() == [1.0, 2, 3]
        assert set(pool[:40].tolist()) == {-7.0}, "buffers are vLLM's, and the rest is published"
        assert outside.tolist() == [-7.0] * 5
    assert without_storage.sum() == 3
