"""Stages of several chunks (a virtual pipeline) compute what stages of one do, for any number of micro-batches.

Fewer than stages, a remainder, and none of both: what Megatron's schedule lacks is filled with empty ones.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import full_weights, make_actor, norm, objective, random_samples, relative_error
from job import run_group
from tiny_models import make_model

from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.platform import megatron_platform
from hacpo_mega.megatron.publish import ActorShards
from hacpo_mega.megatron.schedule import accumulate_gradients
from hacpo_mega.models.layout import VIRTUAL
from hacpo_mega.samples.packing import microbatch

pytestmark = pytest.mark.nightly

# ranks -> (tp, pp) and the model
LAYOUTS = {
    4: ((1, 4), {"family": "llama", "tied": False, "num_layers": 8}),
    6: ((2, 3), {"family": "qwen3", "tied": True, "num_layers": 6}),
}
ADAM = OptimizerConfig(lr=1e-3)


def counts(pp: int) -> list[int]:
    """Of micro-batches."""
    return sorted({1, 3, pp, pp + 1, 2 * pp})


@pytest.fixture(scope="module", params=LAYOUTS)
def seen(request, tmp_path_factory):
    """Of every rank, and of stages of one and of two chunks: what `visit` found."""
    (tp, pp), sizes = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp(f"{request.param}")
    make_model(folder / "model", **sizes)
    return pp, run_group(request.param, visit_both, folder, tp, pp)


def visit_both(folder, tp, pp):
    found = {vpp: visit(folder, tp, pp, vpp) for vpp in (1, 2)}
    for vpp in found:
        found[vpp]["taken up"] = taken_up(folder, tp, pp, 3 - vpp, vpp)
    return found


def chunked(folder, tp, pp, vpp, **options):
    return make_actor(folder / "model", tp=tp, pp=pp, overrides={VIRTUAL: vpp} if vpp > 1 else {}, **options)


def visit(folder, tp, pp, vpp):
    samples = [sample for sample in random_samples(6, seed=5) if sample.num_trained]
    actor = chunked(folder, tp, pp, vpp)
    found = {"scores": actor.token_logprobs(samples)}
    for count in counts(pp):
        batches = [microbatch([[sample] for sample in samples[number::count]], multiple=tp) for number in range(count)]
        found[count] = gradient(actor, batches)
    actor = chunked(folder, tp, pp, vpp, optimizer=ADAM)
    for _ in range(2):
        actor.learn(samples, objective)
    found["trained"] = full_weights(actor)
    shards = ActorShards(actor.model)
    found["published"] = sum(shard.size for shard in shards.shards), set(shards.published)
    state = folder / f"state-{vpp}"
    if dist.get_rank() == 0:
        state.mkdir()
    dist.barrier()
    found["counts"], write = actor.save(state)
    write()
    return found


def gradient(actor, batches):
    """What the gradient buffers hold after these micro-batches, as a model; and the losses, on the last stage."""
    parameters = list(actor.model.module.parameters())
    with megatron_platform(), torch.no_grad():
        with torch.enable_grad():
            seen = accumulate_gradients(actor.model, batches, actor._loss_of(objective))
        weights = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        of_model = full_weights(actor)
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
    return of_model, [float(loss) for loss, _ in seen]


def taken_up(folder, tp, pp, writer, reader):
    """The weights of an actor of `reader` chunks a stage after an update from what one of `writer` has stored."""
    actor = chunked(folder, tp, pp, reader, optimizer=ADAM)
    actor.load(folder / f"state-{writer}", num_updates=2, num_applied=2)
    weights = full_weights(actor)
    again = folder / f"again-{reader}"
    if dist.get_rank() == 0:
        again.mkdir()
    dist.barrier()
    actor.save(again)[1]()
    dist.barrier()
    other = chunked(folder, tp, pp, writer, optimizer=ADAM)
    other.load(again, num_updates=2, num_applied=2)
    return weights, full_weights(other)


def test_gradients_losses_and_scores_are_those_of_one_chunk(seen):
    pp, by_rank = seen
    for found in by_rank:
        for one, two in zip(found[1]["scores"], found[2]["scores"], strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-5)
        for count in counts(pp):
            (expected, losses), (computed, its_losses) = found[1][count], found[2][count]
            assert its_losses == pytest.approx(losses, rel=1e-5)
            assert norm(expected) > 0.01
            assert relative_error(computed, expected) < 1e-5
    assert [len(by_rank[-1][2][count][1]) for count in counts(pp)] == counts(pp)


def test_what_is_stored_and_published_is_the_same(seen):
    """From two chunks to one and back, to the last bit; every number of the model once, on whatever rank."""
    _, by_rank = seen
    for found in by_rank:
        for reader in (1, 2):
            taken, back = found[reader]["taken up"]
            for name, weight in found[3 - reader]["trained"].items():
                assert torch.equal(taken[name], weight) and torch.equal(back[name], weight), name
    for chunks in (1, 2):
        sizes, names = zip(*(found[chunks]["published"] for found in by_rank))
        assert sum(sizes) == sum(found[1]["published"][0] for found in by_rank)
        assert all(name == set(by_rank[0][1]["trained"]) for name in names)
