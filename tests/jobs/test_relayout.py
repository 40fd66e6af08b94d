"""A checkpoint is of no layout: any tp, cp and pp, any number of cells, and one process without any take it up.

An actor's state is read here by Megatron's own gather of the optimizer's state, put into the model's parameters and
named by the exporter: nothing of the code that stores takes part.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from actor_cases import full_weights, make_actor, random_samples
from job import run_group
from megatron.core import parallel_state
from tiny_models import make_model

from hacpo_mega.cluster.patches import TORCH, apply_patches
from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.checkpoint.stored_state import KINDS, WEIGHT, Part, StateReader, stored_name, stored_weights
from hacpo_mega.megatron.model.platform import megatron_platform
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.segments import Source, all_sources

pytestmark = pytest.mark.nightly

NUM_RANKS = 4
CUDA = torch.device("cuda")  # made here: where Megatron is at work the word means the CPU
ADAM = OptimizerConfig(lr=1e-3, weight_decay=0.1, schedule="linear", warmup_updates=2)
# A vocabulary of 131 rows is padded to 256 at tp 1 and 2, to 512 at tp 4, where ranks share the two key/value heads.
MODELS = {
    "tied": {"family": "qwen3", "tied": True, "num_layers": 3},
    "untied": {"family": "llama", "tied": False, "num_layers": 3, "attention_bias": True},
}
WRITTEN = {"tp": 2}
UNEVEN = {"overrides": {"num_layers_in_first_pipeline_stage": 2}}
LAYOUTS = {
    "as written": WRITTEN,
    "pp 2, uneven, two cells": {"pp": 2, **UNEVEN},
    "tp 2 x pp 2": {"tp": 2, "pp": 2, **UNEVEN},
    "tp 4": {"tp": 4},
    "four cells, from tp 2 x pp 2": {},
    "cp 2, two cells": {"cp": 2},
    "pp 2 x cp 2": {"pp": 2, "cp": 2, **UNEVEN},
    "tp 2, two cells, from cp 2": {"tp": 2},
}
# Layouts that write a checkpoint of the state they have taken up, and layouts that take up this checkpoint.
WRITERS = {"tp 2 x pp 2": "again", "cp 2, two cells": "shared"}
READERS = {"four cells, from tp 2 x pp 2": "again", "tp 2, two cells, from cp 2": "shared"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for name, shape in MODELS.items():
        make_model(folder / name, **shape)
        for state in ("state", "again", "shared"):
            (folder / f"{name}.{state}").mkdir()
    for state in ("half.state", "half.again"):
        (folder / state).mkdir()
    return folder


@pytest.fixture(scope="module")
def seen(folder) -> dict[str, dict]:
    """A checkpoint, and the update after it, in every layout, by model; `written` is who wrote it."""
    (seen, *_) = run_group(NUM_RANKS, visit_layouts, folder)
    return seen


def visit_layouts(folder: Path) -> dict[str, dict]:
    apply_patches(TORCH)  # as in a run: a save that says its plan as a pickle fails
    return {name: visit_layouts_of(folder, name) for name in MODELS}


def visit_layouts_of(folder: Path, name: str) -> dict:
    """Two updates and a checkpoint at tp 2 and two cells, then one more update, by it and by every layout."""
    writer = make_actor(folder / name, optimizer=ADAM, **WRITTEN)
    for number in range(2):
        update(writer, number)
    counts = save(writer, folder / f"{name}.state")
    found = {"written": (state_of(writer), update(writer, 2))}
    for layout, options in LAYOUTS.items():
        actor = make_actor(folder / name, optimizer=ADAM, **options)
        actor.load(folder / f"{name}.{READERS.get(layout, 'state')}", **counts)
        if layout in WRITERS:
            save(actor, folder / f"{name}.{WRITERS[layout]}")
        found[layout] = (state_of(actor), update(actor, 2))
    return found


def save(actor: Actor, folder: Path) -> dict[str, int]:
    """Writes the actor; the counts for its `load`."""
    counts, write = actor.save(folder)
    write()
    return counts


def update(actor: Actor, number: int) -> tuple[float, float, float]:
    """One update by all cells together: loss, gradient norm and learning rate."""
    samples = [sample for sample in random_samples(4, seed=60 + number) if sample.num_trained]
    cell, cells = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    stats = actor.learn_supervised(samples[cell::cells], sum(sample.num_trained for sample in samples))
    return stats.loss, stats.grad_norm, stats.lr


def state_of(actor: Actor) -> dict[str, dict[str, torch.Tensor]]:
    """The model's weights and, by kind, the optimizer's state, all by Hugging Face name."""
    parts = actor.optimizer.parts
    with megatron_platform():
        states = [part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True) for part in parts]
    found = {"weights": full_weights(actor)}
    for kind in KINDS:
        with parameters_kept(actor), torch.no_grad():
            for part, gathered in zip(parts, states, strict=True):
                for index, buffer in enumerate(part.buffers):
                    (tensors,) = gathered[index].values()
                    for parameter, (start, stop, _) in buffer.param_index_map.items():
                        parameter.copy_(tensors[kind][start:stop].view(parameter.shape))
            found[kind] = full_weights(actor)
    return found


@contextmanager
def parameters_kept(actor: Actor) -> Iterator[None]:
    before = [parameter.detach().clone() for parameter in actor.model.parameters()]
    yield
    with torch.no_grad():
        for parameter, value in zip(actor.model.parameters(), before, strict=True):
            parameter.copy_(value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_layout_takes_up_every_bit(model, layout, seen):
    expected, found = seen[model]["written"][0], seen[model][layout][0]
    assert set(found) == {"weights", *KINDS}
    for kind, tensors in expected.items():
        assert found[kind].keys() == tensors.keys()
        assert all(torch.equal(found[kind][name], tensor) for name, tensor in tensors.items()), kind
        assert all(float(tensor.abs().max()) > 0.0 for tensor in tensors.values()), kind


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_next_update_is_that_of_the_undisturbed_actor(model, layout, seen):
    (loss, grad_norm, lr), (other_loss, other_grad_norm, other_lr) = seen[model]["written"][1], seen[model][layout][1]
    assert other_lr == lr > 0.0
    assert (other_loss, other_grad_norm) == pytest.approx((loss, grad_norm), rel=1e-5)
    if layout == "as written":
        assert (other_loss, other_grad_norm) == (loss, grad_norm)


def half_actor(folder: Path, **layout) -> Actor:
    """As CUDA has it: weights in bf16, main weights in float32."""
    return make_actor(folder / "tied", optimizer=ADAM, dtype=torch.bfloat16, **layout)


def visit_in_half_precision(folder: Path) -> list[dict]:
    """The weights of an actor after two updates, and of one on another layout that took up its state and wrote it."""
    writer = half_actor(folder, **WRITTEN)
    for number in range(2):
        update(writer, number)
    counts, written = save(writer, folder / "half.state"), full_weights(writer)
    reader = half_actor(folder, tp=2, pp=2, **UNEVEN)
    reader.load(folder / "half.state", **counts)
    save(reader, folder / "half.again")
    return [written, full_weights(reader)]


def test_weights_in_half_precision_are_the_main_weights_rounded(folder):
    ((written, found), *_) = run_group(NUM_RANKS, visit_in_half_precision, folder)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert all(torch.equal(found[name], tensor) for name, tensor in written.items())
    sources = tuple(all_sources(Architecture.from_folder(folder / "tied")))
    rounded = dict(stored_weights(folder / "half.state", sources, torch.bfloat16))
    assert all(torch.equal(rounded[name], tensor) for name, tensor in written.items())
    first, again = (stored_state(folder / name, sources) for name in ("half.state", "half.again"))
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert any(not torch.equal(first[stored_name(WEIGHT, name)], tensor.float()) for name, tensor in rounded.items())


def stored_state(folder: Path, sources: Sequence[Source]) -> dict[str, torch.Tensor]:
    whole = {stored_name(kind, source.name): torch.empty(source.shape) for kind in KINDS for source in sources}
    reader = StateReader(folder)
    reader.read({name: [Part(tensor.shape, (0,) * tensor.dim(), tensor)] for name, tensor in whole.items()})
    return whole


@pytest.mark.parametrize("model", MODELS)
def test_one_process_without_a_group_reads_the_weights(model, seen, folder):
    assert not dist.is_initialized()
    sources = tuple(all_sources(Architecture.from_folder(folder / model)))
    expected = seen[model]["written"][0]["weights"]
    for state in ("state", "again", "shared"):
        found = dict(stored_weights(folder / f"{model}.{state}", sources, torch.float32))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
