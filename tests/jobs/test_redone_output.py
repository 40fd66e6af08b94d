"""Attention's output for a rank's tokens, which context parallelism keeps as that of its heads, and redoes in backward.

No bit may tell. How much is kept then is held by test_memory_trace.py.
"""

import contextlib
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import gradient_by_descent, make_actor, objective, random_samples
from job import run_group
from tiny_models import make_model

from hacpo_lab.planning.configuration import Work
from hacpo_lab.planning.traffic import Spread, messages_of
from hacpo_mega.megatron.model.context_parallel import FromHeads
from hacpo_mega.memory.actor_bytes import ActorPlan
from hacpo_mega.memory.budget import Budget, EnginePlan
from hacpo_mega.models.public import public_architecture
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.lora import Lora

pytestmark = pytest.mark.nightly

QUERIES, KEYS, LAYERS = 8, 2, 2
SAMPLES = random_samples(4, seed=5)
# What a layer sends in a micro-batch, in heads: queries, keys, values and outputs, in each pass; outputs once more.
PASS = 2 * (QUERIES + KEYS)
SENT = {"none": 2 * PASS, "mlp": 2 * PASS, "full": 3 * PASS}
CASES = [("none", None), ("mlp", None), ("full", None), ("mlp", ("o_proj", "up_proj")), ("mlp", ("q_proj",))]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_model(folder, "qwen3", num_heads=QUERIES, num_kv_heads=KEYS, num_layers=LAYERS)
    return run_group(2, learn_in_all_ways, folder)


def learn_in_all_ways(folder):
    """(case, whether outputs are redone) -> gradients, scores, numbers that all-to-alls were given."""
    return {(case, redoes): learned(folder, *case, redoes=redoes) for case in CASES for redoes in (True, False)}


def learned(folder, recompute, targets, *, redoes):
    given, exchange = [], dist.all_to_all_single

    def counted(received, by_rank, **options):
        given.append(by_rank.numel())
        return exchange(received, by_rank, **options)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(dist, "all_to_all_single", counted))
        if not redoes:
            stack.enter_context(patch.object(FromHeads, "let_go", lambda *_: None))
        lora = None if targets is None else Lora(4, 8.0, targets)
        actor = make_actor(folder, cp=2, max_tokens_per_microbatch=64, recompute=recompute, lora=lora)
        actor.learn(SAMPLES, objective)  # adapters' B is no longer zero
        given.clear()
        gradient, _ = gradient_by_descent(actor, lambda: actor.learn(SAMPLES, objective))
        learns = sum(given)
        given.clear()
        scores = [score.mean_logprob for score in actor.score(SAMPLES)]
    return {"gradient": gradient, "learns": learns, "scores": scores, "scored": sum(given)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_bit_tells_who_kept_the_output(seen, case):
    recompute, targets = case
    redone = 0 if targets and "o_proj" not in targets else QUERIES  # nobody keeps what an untrained projection reads
    for rank in seen:
        mine, kept = rank[case, True], rank[case, False]
        assert mine["gradient"].keys() == kept["gradient"].keys()
        assert all(torch.equal(mine["gradient"][name], kept["gradient"][name]) for name in kept["gradient"])
        assert any(tensor.count_nonzero() for tensor in mine["gradient"].values())
        assert np.array_equal(mine["scores"], kept["scores"]) and mine["scored"] == kept["scored"] > 0
        assert mine["learns"] * SENT[recompute] == kept["learns"] * (SENT[recompute] + redone)


def test_the_plan_counts_what_is_sent_once_more():
    """cp 2, two layers of 32 query and 4 key/value heads of 128 numbers of two bytes; half of each leaves a rank."""
    model = replace(public_architecture("Qwen/Qwen3-30B-A3B"), num_layers=2)
    work = Work(prompts=4, answers=8, pool=16, trained=16, updates=1, sources=2, scored_updates=1, prompt_tokens=33,
                answer_tokens=32, longest=32)  # fmt: skip
    own, head = 16 * 64 // 2, 128 * 2
    for recompute, lora, heads in (
        ("mlp", None, 2 * 2 * 36 + 32), ("full", None, 3 * 2 * 36 + 32),
        ("mlp", Lora(8, 16.0, ("o_proj",)), 2 * 2 * 36 + 32), ("mlp", Lora(8, 16.0, ("q_proj",)), 2 * 2 * 36),
    ):  # fmt: skip
        actor = ActorPlan(model, Layout(cp=2), dp=1, num_tokens=4096, recompute=recompute, lora=lora)
        budget = Budget(actor, EnginePlan(tp=2, max_tokens=64, memory_share=0.3), capacity=None)
        found = {(m.phase, m.what): m for m in messages_of(budget, work, 1, Spread(*[True] * 6), rounds=32.0)}
        assert found["learn", "heads of cp"].num_bytes == 2 * 0.5 * own * heads * head
        assert found["score", "heads of cp"].num_bytes == 2 * 0.5 * (8 * 64 // 2) * 2 * 36 * head
