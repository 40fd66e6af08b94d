"""Attention's output for a rank's tokens, which context parallelism keeps as that of its heads, and redoes in backward.

No bit may tell. How much is kept then is held by test_memory_trace.py, what is sent by
lab/unit/test_plan_traffic.py.
"""

import contextlib
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import gradient_by_descent, make_actor, objective, random_samples
from job import run_group
from tiny_models import make_model

from hacpo_mega.megatron.model.context_parallel import FromHeads
from hacpo_mega.models.sharding.lora import Lora

pytestmark = pytest.mark.nightly

QUERIES, KEYS, LAYERS = 8, 2, 2
SAMPLES = random_samples(4, seed=5)
# Heads that a layer sends in a micro-batch: queries, keys, values and outputs, in each pass; redone outputs once more.
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
            stack.enter_context(patch.object(FromHeads, "free_output", lambda *_: None))
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
