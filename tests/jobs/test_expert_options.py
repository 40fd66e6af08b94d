"""Actors with experts, whose buffers and optimizer have two parts: what is stored, and what must change no bit.

A state that was written over two cells that share experts is taken up by other layouts; activations that are computed
again, communication that goes on meanwhile and an actor that leaves its device leave every number as it is.
"""

from pathlib import Path

import pytest
import torch
from actor_cases import make_actor, objective, random_samples
from job import run_group
from test_relayout import ADAM, save, state_of, update
from tiny_models import make_model

from hacpo_mega.cluster.patches import TORCH, apply_patches
from hacpo_mega.config import DataParallelConfig
from hacpo_mega.megatron.checkpoint.stored_state import KINDS
from hacpo_mega.megatron.train.optimizer import ActorOffload
from hacpo_mega.megatron.train.overlap import buffers_of

pytestmark = pytest.mark.nightly

NUM_RANKS = 4
WRITTEN = {"tp": 2, "ep": 4}  # of two cells
LAYOUTS = {
    "as written": WRITTEN,
    "ep 1, four cells": {},
    "ep 4 of a cell": {"tp": 2, "cp": 2, "ep": 4},
    "ep 2, four cells": {"ep": 2},
    "ep 2 x pp 2": {"cp": 2, "pp": 2, "ep": 2},
    "ep 1 x pp 2": {"tp": 2, "pp": 2},
}
RECOMPUTE = ("none", "mlp", "full")
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}
COMMUNICATION = {"after": DataParallelConfig(), "meanwhile": DataParallelConfig(**OVERLAP)}
PLACES = ("nothing", "everything")


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("experts")
    # The first layer has no experts; routers of the others have a bias, which nobody trains.
    sizes = {"num_experts": 8, "num_kv_heads": 4, "said": {"n_group": 4, "topk_group": 2, "use_qk_norm": True}}
    make_model(folder / "model", "glm4_moe", **sizes)
    (folder / "state").mkdir()
    return run_group(NUM_RANKS, visit, folder)


def visit(folder: Path) -> dict:
    apply_patches(TORCH)
    return {
        "stored": stored(folder),
        "recomputed": {choice: learned(folder, recompute=choice) for choice in RECOMPUTE},
        "communication": {
            name: learned(folder, optimizer=ADAM, communication=options) for name, options in COMMUNICATION.items()
        },
        "places": {
            leaves: learned(folder, optimizer=ADAM, dtype=torch.bfloat16, offload_mode=leaves) for leaves in PLACES
        },
    }


def stored(folder: Path) -> dict:
    """The state after two updates and what the third one says, of who wrote it and of every layout that took it up."""
    writer = make_actor(folder / "model", optimizer=ADAM, **WRITTEN)
    for number in range(2):
        update(writer, number)
    counts = save(writer, folder / "state")
    found = {"written": (state_of(writer), update(writer, 2))}
    for name, layout in LAYOUTS.items():
        actor = make_actor(folder / "model", optimizer=ADAM, **layout)
        actor.load(folder / "state", **counts)
        found[name] = state_of(actor), update(actor, 2)
    return found


def learned(folder: Path, **options) -> tuple:
    """Scores, losses of two updates, all gradients of the last one and all weights after it.

    An actor that can leave its device does so before each update.
    """
    actor, samples = make_actor(folder / "model", **WRITTEN, **options), random_samples(4, seed=5)
    whole = ActorOffload(actor.model, actor.optimizer) if options.get("offload_mode") == "everything" else None
    scores, losses = [score.mean_logprob for score in actor.score(samples)], []
    for _ in range(2):
        if whole is not None:
            whole.offload()
            assert not any(buffer.param_data.numel() for buffer in buffers_of(actor.model))
            whole.onload(to_learn=True)
        losses.append(actor.learn(samples, objective).loss)
    buffers = buffers_of(actor.model)
    weights = dict(actor.weights())
    return (scores, losses), [buffer.grad_data.clone() for buffer in buffers], list(weights.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_takes_up_every_bit(by_rank, layout):
    for found in by_rank:
        expected, taken_up = found["stored"]["written"][0], found["stored"][layout][0]
        assert set(taken_up) == {"weights", *KINDS}
        for kind, tensors in expected.items():
            assert taken_up[kind].keys() == tensors.keys()
            assert all(torch.equal(taken_up[kind][name], tensor) for name, tensor in tensors.items()), kind
            assert all(float(tensor.abs().max()) > 0.0 for tensor in tensors.values()), kind


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_update_is_that_of_the_undisturbed_actor(by_rank, layout):
    for found in by_rank:
        (loss, grad_norm, lr), (its_loss, its_grad_norm, its_lr) = (
            found["stored"][who][1] for who in ("written", layout)
        )
        assert its_lr == lr > 0.0
        assert (its_loss, its_grad_norm) == pytest.approx((loss, grad_norm), rel=1e-5)
        if layout == "as written":
            assert (its_loss, its_grad_norm) == (loss, grad_norm)


@pytest.mark.parametrize("choice", RECOMPUTE[1:])
def test_recompute_changes_no_bit(by_rank, choice):
    for found in by_rank:
        (numbers, *tensors), (plain, *its) = (found["recomputed"][which] for which in (choice, "none"))
        assert numbers == plain
        for some, other in zip(tensors, its, strict=True):
            assert len(some) == len(other) > 0
            assert all(torch.equal(one, two) for one, two in zip(some, other, strict=True))


def test_communication_meanwhile_changes_no_bit(by_rank):
    """The gradients of two cells are added up in one order, whatever the buckets."""
    for found in by_rank:
        (numbers, _, weights), (plain, _, its) = (found["communication"][which] for which in ("meanwhile", "after"))
        assert numbers == plain
        assert all(torch.equal(one, two) for one, two in zip(weights, its, strict=True))


def test_leaving_the_device_changes_no_bit(by_rank):
    """Weights, main weights and moments of both parts, all away between steps."""
    for found in by_rank:
        (numbers, *tensors), (plain, *its) = (found["places"][leaves] for leaves in ("everything", "nothing"))
        assert numbers == plain
        assert all(torch.equal(*pair) for pairs in zip(tensors, its, strict=True) for pair in zip(*pairs, strict=True))
