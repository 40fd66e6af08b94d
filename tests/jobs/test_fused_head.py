"""The training step with the fused head equals the step with Megatron's own unfused one, at every layout.

The unfused twin materialises the logits of its vocabulary shard and hands them to Megatron's vocab-parallel
cross-entropy, written by somebody else: log-prob = -loss.
"""

import pytest
import torch
import torch.distributed as dist
from actor_cases import (
    DESCENT,
    GRADIENT_ERROR,
    LOGPROB_ERROR,
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
from job import run_group
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, vocab_parallel_cross_entropy
from tiny_models import make_model

from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.model import lm_head_weight, vocab_start
from hacpo_mega.megatron.platform import megatron_platform

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
ADAM = OptimizerConfig(lr=1e-2, eps=1e-4, clip_grad=1e30)

pytestmark = pytest.mark.slow


def unfused_token_logprobs(actor: Actor, hidden_TH: torch.Tensor, batch) -> torch.Tensor:
    weight_VH, start = lm_head_weight(actor.model), vocab_start(actor.model)
    # the head's input is on every tensor-parallel rank; its gradient is the sum of what the shards send back
    hidden_RH = copy_to_tensor_model_parallel_region(hidden_TH[batch.rows_R])
    logits_RV = (hidden_RH @ weight_VH.t()) / TEMPERATURE
    padded_V = torch.arange(start, start + len(weight_VH)) >= actor.architecture.vocab_size
    logits_R1V = logits_RV.masked_fill(padded_V, -torch.inf)[:, None]
    with megatron_platform():
        return -vocab_parallel_cross_entropy(logits_R1V, batch.targets_R[:, None])[:, 0]


def steps_of_layouts(folders, samples):
    """Per layout and model: (gradient, weights after two Adam updates, scores) of the fused and the unfused step."""
    found = {}
    for tp, pp in LAYOUTS:
        cell, num_cells = dist.get_rank() // (tp * pp), dist.get_world_size() // (tp * pp)
        mine = [sample for sample in samples if sample.prompt_index % num_cells == cell]
        for name, folder in folders.items():
            found[tp, pp, name] = [one_way(folder, tp, pp, mine, fused) for fused in (True, False)]
    return found


def one_way(folder, tp, pp, mine, fused):
    def actor_with(optimizer):
        actor = make_actor(folder, tp=tp, pp=pp, optimizer=optimizer)
        if not fused:
            actor._token_logprobs = lambda hidden_TH, batch: unfused_token_logprobs(actor, hidden_TH, batch)
        return actor

    descending = actor_with(DESCENT)
    gradient, _ = gradient_by_descent(descending, lambda: descending.learn(mine, objective))
    adam = actor_with(ADAM)
    scores = adam.score(mine)
    for _ in range(2):
        adam.learn(mine, objective)
    return gradient, full_weights(adam), scores


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = {tied: make_model(root / str(tied), "qwen3", tied=tied) for tied in (True, False)}
    drawn = random_samples(3, seed=21)
    samples = with_sources_near(drawn, [-4.9] * len(drawn), seed=22)
    return run_group(4, steps_of_layouts, folders, samples)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tp, pp", LAYOUTS)
def test_the_step_is_that_of_the_unfused_head(steps, tp, pp, tied):
    for answer in steps:
        (fused_gradient, fused_weights, fused_scores), (gradient, weights, scores) = answer[tp, pp, tied]
        assert abs(fused_scores - scores).max(initial=0.0) < LOGPROB_ERROR
        assert relative_error(fused_gradient, gradient) < GRADIENT_ERROR
        # two updates, and Adam's lr * g / (|g| + eps) has a slope of at most lr / eps
        moved_apart = norm({name: fused_weights[name] - weights[name] for name in weights})
        assert moved_apart < 2 * ADAM.lr * GRADIENT_ERROR * norm(gradient) / ADAM.eps
