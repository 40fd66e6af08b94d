"""Stages of several chunks (a virtual pipeline) compute what stages of one do, for any number of micro-batches.

Fewer than stages, a remainder, and none of both: what Megatron's schedule lacks is filled with empty ones.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import (
    DESCENT,
    full_weights,
    gradient_by_descent,
    make_actor,
    norm,
    objective,
    random_samples,
    relative_error,
)
from job import run_group
from tiny_models import make_model

from hacpo_mega.config import DataParallelConfig, OptimizerConfig
from hacpo_mega.megatron.weights.publish import ActorShards
from hacpo_mega.models.sharding.layout import VIRTUAL
from hacpo_mega.samples.packing import microbatch

pytestmark = pytest.mark.nightly

# Three stages on six ranks make two cells, whose gradients are added up meanwhile, or have ranks that share experts.
MEANWHILE = DataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=4000)
CASES = {
    "two cells": ({"family": "llama", "tied": False}, {"communication": MEANWHILE}),
    "experts": ({"family": "qwen3_moe", "tied": True, "experts_per_token": 3, "num_kv_heads": 4}, {"tp": 2, "ep": 2}),
}
PP, NUM_RANKS = 3, 6
# Numbers of micro-batches.
COUNTS = (1, PP, PP + 1)
ADAM = OptimizerConfig(lr=1e-3)
# The step of every update is GRADIENT_RATE times the gradient, none of those before.
PLAIN_DESCENT = DESCENT.model_copy(update={"betas": (0.0, 0.0)})


@pytest.fixture(scope="module", params=CASES)
def seen(request, tmp_path_factory):
    """By rank, and for stages of one and of two chunks: what `visit` found."""
    sizes, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("rounds")
    make_model(folder / "model", num_layers=6, **sizes)
    return run_group(NUM_RANKS, visit_both, folder, options)


def visit_both(folder, options):
    found = {vpp: visit(folder, options, vpp) for vpp in (1, 2)}
    for vpp in found:
        found[vpp]["taken up"] = taken_up(folder, options, 3 - vpp, vpp)
    return found


def chunked(folder, vpp, **options):
    """Experts with auxiliary losses, to which empty micro-batches add nothing."""
    losses = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01} if "ep" in options else {}
    return make_actor(folder / "model", pp=PP, overrides=losses | ({VIRTUAL: vpp} if vpp > 1 else {}), **options)


def visit(folder, options, vpp):
    samples = [sample for sample in random_samples(6, seed=5) if sample.num_trained]
    actor = chunked(folder, vpp, **options, optimizer=PLAIN_DESCENT)
    found = {"scores": actor.token_logprobs(samples)}
    weights = actor._copy_of_parameters()
    for count in COUNTS:
        batches = [
            microbatch([[sample] for sample in samples[number::count]], multiple=options.get("tp", 1))
            for number in range(count)
        ]
        found[count] = gradient_by_descent(actor, lambda b=batches: actor.learn(samples, objective, lambda _: b))
        actor._set_parameters(weights)
    actor = chunked(folder, vpp, **options, optimizer=ADAM)
    for _ in range(2):
        actor.learn(samples, objective)
    found["trained"] = full_weights(actor)
    shards = ActorShards(actor.model)
    found["published"] = sum(shard.size for shard in shards.shards), set(shards.published)
    state = folder / f"state-{vpp}"
    if dist.get_rank() == 0:
        state.mkdir()
    dist.barrier()
    actor.save(state)[1]()
    return found


def taken_up(folder, options, writer, reader):
    """The weights of an actor of `reader` chunks a stage after an update from what one of `writer` has stored."""
    actor = chunked(folder, reader, **options, optimizer=ADAM)
    actor.load(folder / f"state-{writer}", num_updates=2, num_applied=2)
    weights = full_weights(actor)
    again = folder / f"again-{reader}"
    if dist.get_rank() == 0:
        again.mkdir()
    dist.barrier()
    actor.save(again)[1]()
    dist.barrier()
    other = chunked(folder, writer, **options, optimizer=ADAM)
    other.load(again, num_updates=2, num_applied=2)
    return weights, full_weights(other)


def test_gradients_losses_and_scores_are_those_of_one_chunk(seen):
    for found in seen:
        for one, two in zip(found[1]["scores"], found[2]["scores"], strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-5)
        for count in COUNTS:
            (expected, stats), (computed, its_stats) = found[1][count], found[2][count]
            assert its_stats.num_microbatches == len(its_stats.reports) == count
            assert (its_stats.loss, its_stats.grad_norm) == pytest.approx((stats.loss, stats.grad_norm), rel=1e-5)
            assert norm(expected) > 0.01
            assert relative_error(computed, expected) < 1e-5


def test_what_is_stored_and_published_is_the_same(seen):
    """From two chunks to one and back, to the last bit; every number of the model once, on whatever rank."""
    for found in seen:
        for reader in (1, 2):
            taken, back = found[reader]["taken up"]
            for name, weight in found[3 - reader]["trained"].items():
                assert torch.equal(taken[name], weight) and torch.equal(back[name], weight), name
    for chunks in (1, 2):
        sizes, names = zip(*(found[chunks]["published"] for found in seen))
        assert sum(sizes) == sum(found[1]["published"][0] for found in seen)
        assert all(name == set(seen[0][1]["trained"]) for name in names)
