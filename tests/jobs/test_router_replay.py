"""Actors that replay a routing, on every layout and recomputation, against Hugging Face's routers forced in float64.

Routings are drawn: any experts, in any order, so that a token that went elsewhere shows. Half of the own answers are
read in part as nobody says; answers of others have no routing. unit/test_router_replay.py looks at the parts by hand,
test_expert_engine.py at what an engine returns, test_expert_run.py and test_answers_ahead.py at whole runs.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import LOGPROB_ERROR, Oracle, gradient_by_descent, make_actor, objective, random_samples
from job import run_group
from safetensors.torch import load_file
from test_experts import AGREED, MAX_TOKENS, MODELS, NUM_RANKS, worst
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
NOBODY = 255


def routed(samples: list[Sample], name: str) -> list[Sample]:
    """Own samples with a routing of both layers."""
    rng = np.random.default_rng(17)
    experts, chosen = MODELS[name]["num_experts"], MODELS[name].get("experts_per_token", 2)

    def drawn(sample: Sample) -> Sample:
        size = len(sample.prompt_ids) + len(sample.answer_ids) - 1
        routing = rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (size, 2, 1)), axis=-1)[..., :chosen]
        if sample.rollout_index == 1:
            routing[rng.integers(size, size=size // 3)] = NOBODY
        return dataclasses.replace(sample, routing=routing)

    return [drawn(sample) if sample.is_self else sample for sample in samples]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, name, **sizes) for name, sizes in MODELS.items()}


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
    scores = [score.token_logprobs for score in actor.score(samples)]
    mine = [sample for sample in samples if sample.prompt_index % cells == dist.get_rank() // (NUM_RANKS // cells)]
    gradient, stats = gradient_by_descent(actor, lambda: actor.learn(mine, objective))
    return {"logprobs": scores, "gradient": gradient, "experts": stats.experts}


class Forced:
    """Hugging Face's routers, made to send the tokens of a sample where its routing says."""

    def __init__(self, oracle: Oracle) -> None:
        self.routing: np.ndarray | None = None
        for place, layer in enumerate(oracle.model.model.layers):
            layer.mlp.gate.register_forward_hook(lambda gate, given, said, place=place: self(place, said))

    def __call__(self, place: int, said: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits_TE, shares_Tk, experts_Tk = said
        if self.routing is None:
            return said
        told_Tk = torch.from_numpy(self.routing[:, place].astype(np.int64))
        is_told_T1 = (told_Tk != NOBODY)[:, :1]
        chosen_Tk = torch.where(is_told_T1, told_Tk % NOBODY, experts_Tk[: len(told_Tk)])
        experts_Tk = torch.cat([chosen_Tk, experts_Tk[len(told_Tk) :]])
        shares_Tk = logits_TE.softmax(dim=-1).gather(-1, experts_Tk)
        return logits_TE, shares_Tk / shares_Tk.sum(dim=-1, keepdim=True), experts_Tk


@pytest.fixture(scope="module")
def expected(folders, tmp_path_factory) -> dict[str, tuple[list[np.ndarray], dict[str, torch.Tensor]]]:
    """Log-probs of every sample, and the gradient by the names that Hugging Face saves weights by."""
    answers = {}
    for name, folder in folders.items():
        oracle, samples = Oracle(folder), routed(random_samples(4, seed=11), name)
        forced, plain = Forced(oracle), oracle.token_logprobs

        def token_logprobs(sample: Sample, forced=forced, plain=plain) -> torch.Tensor:
            forced.routing = sample.routing
            return plain(sample)

        oracle.token_logprobs = token_logprobs
        logprobs = [oracle.token_logprobs(sample).detach().numpy() for sample in samples]
        oracle.gradient(oracle.policy_loss(samples))
        with torch.no_grad():
            for parameter in oracle.model.parameters():
                parameter.copy_(parameter.grad)
        saved = tmp_path_factory.mktemp(name)
        oracle.model.save_pretrained(saved)
        answers[name] = logprobs, load_file(saved / "model.safetensors")
    return answers


EACH = pytest.mark.parametrize("name, layout", RUNS, ids=str)


@EACH
def test_scores_and_every_gradient_are_hugging_faces(seen, expected, name, layout):
    logprobs, gradient = expected[name]
    for found in seen[name, layout]:
        for mine, theirs in zip(found["logprobs"], logprobs, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=LOGPROB_ERROR)
        assert worst(found["gradient"], gradient)[0] < AGREED


@EACH
def test_what_the_replay_changes_is_counted_once(seen, name, layout):
    """Drawn experts are mostly others: of 8 and 3 chosen 5 in 8, of 4 and 2 a half."""
    experts, chosen = MODELS[name]["num_experts"], MODELS[name].get("experts_per_token", 2)
    for found in seen[name, layout]:
        assert found["experts"] == seen[name, layout][0]["experts"]
        assert found["experts"].changed == pytest.approx(1 - chosen / experts, abs=0.08)
