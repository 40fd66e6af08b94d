"""The training step with the fused head equals the step with Megatron's own unfused one, at every layout.

On CUDA the head adds a bf16 weight's gradient to DDP's float32 buffer itself; here float32 weights do it too.

The unfused twin materialises the logits of its vocabulary shard and hands them to Megatron's vocab-parallel
cross-entropy, written by somebody else: log-prob = -loss.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import (
    DESCENT,
    TEMPERATURE,
    full_weights,
    gradient_by_descent,
    make_actor,
    norm,
    objective,
    random_samples,
    relative_error,
    with_sources_near,
)
from hacpo_kernels import linear_logprob
from job import run_group
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, vocab_parallel_cross_entropy
from tiny_models import make_model

import hacpo_mega.megatron.actor as actor_module
from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.model.model import lm_head_weight, vocab_start
from hacpo_mega.megatron.model.platform import megatron_platform

# Roundings that a gradient may differ by: sums over the hidden size and over the vocabulary, and a few in between.
U32 = 2.0**-24
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
ADAM = OptimizerConfig(lr=1e-2, eps=1e-4, clip_grad=1e30)

pytestmark = pytest.mark.nightly


def unfused_token_logprobs(actor: Actor, hidden_TH: torch.Tensor, batch) -> torch.Tensor:
    weight_VH, start = lm_head_weight(actor.model), vocab_start(actor.model)
    # the head's input is on every tensor-parallel rank; its gradient is the sum of what the shards send back
    hidden_RH = copy_to_tensor_model_parallel_region(hidden_TH[batch.rows_R])
    logits_RV = (hidden_RH @ weight_VH.t()) / TEMPERATURE
    padded_V = torch.arange(start, start + len(weight_VH)) >= actor.architecture.vocab_size
    logits_R1V = logits_RV.masked_fill(padded_V, -torch.inf)[:, None]
    with megatron_platform():
        return -vocab_parallel_cross_entropy(logits_R1V, batch.targets_R[:, None])[:, 0]


def steps_of_layouts(layouts, folders, samples):
    """Per layout and model: (gradient, weights after two Adam updates, scores) of a step in each of the WAYS."""
    found = {}
    for tp, pp in layouts:
        cell, num_cells = dist.get_rank() // (tp * pp), dist.get_world_size() // (tp * pp)
        mine = [sample for sample in samples if sample.prompt_index % num_cells == cell]
        for name, folder in folders.items():
            found[tp, pp, name] = {way: one_way(folder, tp, pp, mine, way) for way in WAYS}
    return found


WAYS = ("fused", "into main_grad", "unfused")


def one_way(folder, tp, pp, mine, way):
    def actor_with(optimizer):
        actor = make_actor(folder, tp=tp, pp=pp, optimizer=optimizer)
        if way == "unfused":
            actor._token_logprobs = lambda hidden_TH, batch: unfused_token_logprobs(actor, hidden_TH, batch)
        return actor

    fuse = {"fuse_main_grad": way == "into main_grad"}
    actor_module.linear_logprob = lambda *given, **named: linear_logprob(*given, **{**named, **fuse})
    descending = actor_with(DESCENT)
    gradient, _ = gradient_by_descent(descending, lambda: descending.learn(mine, objective))
    adam = actor_with(ADAM)
    scores = np.array([score.mean_logprob for score in adam.score(mine)])
    for _ in range(2):
        adam.learn(mine, objective)
    return gradient, full_weights(adam), scores


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = {tied: make_model(root / str(tied), "qwen3", tied=tied) for tied in (True, False)}
    drawn = random_samples(3, seed=21)
    samples = with_sources_near(drawn, [-4.9] * len(drawn), seed=22)
    on_two = run_group(2, steps_of_layouts, LAYOUTS[:-1], folders, samples)
    on_four = run_group(4, steps_of_layouts, LAYOUTS[-1:], folders, samples)
    return {layout: on_four if layout == LAYOUTS[-1] else on_two for layout in LAYOUTS}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tp, pp", LAYOUTS)
@pytest.mark.parametrize("way", ["fused", "into main_grad"])
def test_the_step_is_that_of_the_unfused_head(steps, way, tp, pp, tied):
    for ways in steps[tp, pp]:
        found_gradient, found_weights, found_scores = ways[tp, pp, tied][way]
        gradient, weights, scores = ways[tp, pp, tied]["unfused"]
        vocab_size, hidden_size = weights["model.embed_tokens.weight"].shape
        allowed = 2 * (vocab_size + hidden_size) * U32
        assert abs(found_scores - scores).max() < allowed * abs(scores).max()
        assert relative_error(found_gradient, gradient) < allowed
        # Adam's step is lr g / (|g| + eps): nowhere steeper in g than lr / eps, twice.
        steepest = 2 * ADAM.lr / ADAM.eps * norm(gradient) / norm(weights)
        assert relative_error(found_weights, weights) < allowed * (1 + steepest)
