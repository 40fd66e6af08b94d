"""Bytes of experts that a device holds, by hand: of Qwen3-30B-A3B, and of a small job.

unit/memory/test_memory_trace.py holds the activations to the real layer, unit/models/test_publish_plan.py what is
published, lab/unit/test_plan_traffic.py what is sent.
"""

from dataclasses import replace

import pytest

from hacpo_mega.memory.actor_bytes import CUDA, ActorPlan, actor_memory
from hacpo_mega.memory.budget import EnginePlan, engine_weights
from hacpo_mega.memory.expert_bytes import expert_bytes
from hacpo_mega.memory.weight_numbers import expert_weights, num_weights
from hacpo_mega.models.flops import feed_forward_parameters, matrix_parameters, touched_experts
from hacpo_mega.models.public import public_architecture
from hacpo_mega.models.sharding.layout import Layout

MODEL = public_architecture("Qwen/Qwen3-30B-A3B")
LAYERS, HIDDEN, WIDTH, EXPERTS, TO = 48, 2048, 768, 128, 8
EXPERT = 3 * HIDDEN * WIDTH
ATTENTION = HIDDEN * (32 + 4 + 4 + 32) * 128
VOCABULARY = 151_936 * HIDDEN


def test_weights_are_shared_by_other_ranks_than_experts():
    """tp 2, cp 2, ep 4: half of the dense matrices, whole norms and routers, 32 of 128 experts."""
    layout = Layout(tp=2, cp=2, ep=4)
    dense = LAYERS * (ATTENTION // 2 + EXPERTS * HIDDEN + 2 * HIDDEN + 2 * 128) + VOCABULARY + HIDDEN
    assert expert_weights(MODEL, layout) == LAYERS * 32 * EXPERT
    assert num_weights(MODEL, layout) == dense + LAYERS * 32 * EXPERT
    memory = actor_memory(ActorPlan(MODEL, layout, dp=3, num_tokens=4096, device=CUDA))
    # The same experts are on the ranks of the other cells alone; other weights on those that share tokens, too.
    share = -(-dense // 6) + LAYERS * 32 * EXPERT // 3
    assert (memory.main_weights, memory.moments) == (4 * share, 8 * share)
    assert memory.step == 4 * LAYERS * 32 * EXPERT // 3  # one optimizer after the other


def test_an_engine_has_a_part_of_every_expert():
    actor = ActorPlan(MODEL, Layout(tp=2, ep=2), dp=1, num_tokens=4096)
    whole, half = (engine_weights(actor, EnginePlan(tp=tp, max_tokens=1, memory_share=None)) for tp in (1, 2))
    copied = LAYERS * (EXPERTS * HIDDEN + 2 * HIDDEN + 2 * 128) + HIDDEN
    assert whole == 2 * 30_532_122_624 and half - 2 * copied == (whole - 2 * copied) // 2


def test_a_token_meets_as_many_parameters_as_the_models_card_says():
    """3.3 of 30.5 billion, 22 of 235, 12.9 of 46.7, the embedding among them."""
    active = matrix_parameters(MODEL) + VOCABULARY
    assert active == LAYERS * (ATTENTION + EXPERTS * HIDDEN + TO * EXPERT) + 2 * VOCABULARY
    for name, billions in (("Qwen3-30B-A3B", 3.3), ("Qwen3-235B-A22B", 22.0), ("Mixtral-8x7B-v0.1", 12.9)):
        model = public_architecture(name)
        assert matrix_parameters(model) + model.vocab_size * model.hidden_size == pytest.approx(
            billions * 1e9, rel=0.02
        )


def test_few_tokens_touch_few_experts():
    """By lot: of one token 8 of 128, of two 8 + 8 x 120 / 128, of a thousand all."""
    assert touched_experts(MODEL, 1) == pytest.approx(8 / 128)
    assert touched_experts(MODEL, 2) == pytest.approx((8 + 8 * 120 / 128) / 128)
    assert touched_experts(MODEL, 1000) == pytest.approx(1.0)


def test_the_worst_that_can_be_asked_of_a_rank():
    """With all experts on a rank its own tokens' 8 rows each; of 128 on 4 ranks 4 times as many, of 8 on 8 only 8."""
    assert expert_bytes(MODEL, Layout(tp=4), 4096, 2).worst == 0
    of_row = 2 * (HIDDEN + 3 * WIDTH) + 2 * 8
    assert expert_bytes(MODEL, Layout(tp=4, ep=4), 4096, 2).worst == 1024 * (4 - 1) * TO * of_row
    few = replace(MODEL, num_experts=8)
    assert expert_bytes(few, Layout(tp=8, ep=8), 4096, 2).worst == 0  # each token asks every expert once


def test_the_router_counts_as_a_matrix():
    assert feed_forward_parameters(MODEL) == LAYERS * (TO * EXPERT + EXPERTS * HIDDEN)
