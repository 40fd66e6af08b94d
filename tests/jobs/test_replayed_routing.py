"""Actors that replay a routing, on every layout and recomputation, against Hugging Face's routers forced in float64.

Routings are drawn: any experts, in any order, so that a token that went elsewhere shows. Every sixth token of own
answers has no routing, and neither has any token of others' answers. Where prompts are shared, they are read once.
unit/megatron/test_router_replay.py looks at the parts by hand, test_expert_engine.py at what an engine returns,
test_expert_run.py and test_answers_ahead.py at whole runs.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import (
    GRADIENT_ERROR,
    GRADIENT_RATE,
    LOGPROB_ERROR,
    Oracle,
    gradient_by_descent,
    make_actor,
    objective,
    random_samples,
)
from forced_routing import NOBODY, Forced
from job import run_group
from safetensors.torch import load_file
from test_experts import MAX_TOKENS, MODELS, NUM_RANKS
from tiny_models import make_model

from hacpo_mega.records import Sample

pytestmark = pytest.mark.nightly

# model -> tp, cp, pp, ep, what is computed again; the rest of four ranks are further cells
RUNS = [
    ("qwen3_moe", (2, 2, 1, 4, "none")),
    ("qwen3_moe", (1, 2, 2, 1, "full")),
    ("qwen3_moe", (2, 1, 2, 2, "mlp")),
    ("mixtral", (1, 1, 1, 1, "mlp")),
]
# A gradient is read off a weight of float32 that was rounded once: some expert has few tokens, and a small one.
READING = 2.0**-24 / GRADIENT_RATE


def routed(samples: list[Sample], name: str) -> list[Sample]:
    """Own samples with a routing of both layers; that of a prompt is the same with all of its answers."""
    experts, chosen = MODELS[name]["num_experts"], MODELS[name].get("experts_per_token", 2)

    def drawn(size: int, *seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        routing = rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (size, 2, 1)), axis=-1)[..., :chosen]
        routing[rng.integers(size, size=size // 6)] = NOBODY
        return routing

    def with_routing(sample: Sample) -> Sample:
        place = sample.prompt_index, sample.rollout_index + 1
        of_prompt = drawn(len(sample.prompt_ids), place[0])
        routing = np.concatenate([of_prompt, drawn(len(sample.answer_ids) - 1, *place)])
        return dataclasses.replace(sample, routing=routing)

    return [with_routing(sample) if sample.is_self else sample for sample in samples]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, name, **MODELS[name]) for name in dict(RUNS)}


@pytest.fixture(scope="module")
def seen(folders) -> dict[tuple, list[dict]]:
    answers = run_group(NUM_RANKS, visit_layouts, folders)
    return {key: [answer[key] for answer in answers] for key in answers[0]}


def visit_layouts(folders: dict[str, Path]) -> dict[tuple, dict]:
    return {(name, layout): visit(folders[name], name, *layout) for name, layout in RUNS}


def visit(folder: Path, name: str, tp: int, cp: int, pp: int, ep: int, recompute: str) -> dict:
    cells = NUM_RANKS // (tp * cp * pp)
    samples = routed(random_samples(4, seed=11), name)
    options = {"max_tokens_per_microbatch": MAX_TOKENS, "recompute": recompute}
    actor = make_actor(folder, tp=tp, cp=cp, pp=pp, ep=ep, **options)
    parts = ([sample for sample in samples if sample.is_self is own] for own in (True, False))
    scores = [score.token_logprobs for part in parts for score in actor.score(part)]
    mine = [sample for sample in samples if sample.prompt_index % cells == dist.get_rank() // (NUM_RANKS // cells)]
    gradient, stats = gradient_by_descent(actor, lambda: actor.learn(mine, objective))
    return {"logprobs": scores, "gradient": gradient, "experts": stats.experts}


@pytest.fixture(scope="module")
def expected(folders, tmp_path_factory) -> dict[str, tuple[list[np.ndarray], dict[str, torch.Tensor]]]:
    """Log-probs of every sample, and the gradient by the names that Hugging Face saves weights by."""
    answers = {}
    for name, folder in folders.items():
        oracle, samples = Oracle(folder), routed(random_samples(4, seed=11), name)
        forced, plain = Forced(oracle.model), oracle.token_logprobs

        def token_logprobs(sample: Sample, forced=forced, plain=plain) -> torch.Tensor:
            forced.routing = sample.routing
            return plain(sample)

        oracle.token_logprobs = token_logprobs
        parts = sorted(samples, key=lambda sample: not sample.is_self)
        logprobs = [oracle.token_logprobs(sample).detach().numpy() for sample in parts]
        answers[name] = logprobs, oracle.stored_gradient(oracle.policy_loss(samples), tmp_path_factory.mktemp(name))
    return answers


EACH = pytest.mark.parametrize("name, layout", RUNS, ids=str)


@EACH
def test_scores_and_every_gradient_are_hugging_faces(folders, seen, expected, name, layout):
    (logprobs, gradient), weights = expected[name], load_file(folders[name] / "model.safetensors")
    for found in seen[name, layout]:
        for mine, theirs in zip(found["logprobs"], logprobs, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=LOGPROB_ERROR)
        assert found["gradient"].keys() == gradient.keys()
        for tensor, its in gradient.items():
            error = (found["gradient"][tensor] - its).norm()
            assert error < GRADIENT_ERROR * its.norm() + READING * weights[tensor].norm(), tensor


@EACH
def test_what_the_replay_changes_is_counted_once(seen, name, layout):
    """Drawn experts are mostly others: of 8 and 3 chosen 5 in 8, of 4 and 2 a half."""
    experts, chosen = MODELS[name]["num_experts"], MODELS[name].get("experts_per_token", 2)
    for found in seen[name, layout]:
        assert found["experts"] == seen[name, layout][0]["experts"]
        assert found["experts"].changed == pytest.approx(1 - chosen / experts, abs=0.08)
