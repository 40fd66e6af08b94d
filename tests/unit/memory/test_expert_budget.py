"""What a device holds and sends of experts, by hand: of Qwen3-30B-A3B, and of a small job.

unit/memory/test_memory_trace.py holds the activations to the real layer, unit/models/test_publish_plan.py what is
published.
"""

from dataclasses import replace

import pytest

from hacpo_lab.planning.configuration import Work
from hacpo_lab.planning.traffic import Spread, messages_of
from hacpo_mega.memory.actor_bytes import CUDA, ActorPlan, actor_memory
from hacpo_mega.memory.budget import Budget, EnginePlan, engine_weights
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


def test_messages_of_a_layer_with_experts():
    """tp 2, ep 2, two cells: tokens of a tensor rank to 8 experts each, half of them elsewhere, and back."""
    thin = replace(MODEL, num_layers=2)
    actor = ActorPlan(thin, Layout(tp=2, ep=2), dp=2, num_tokens=4096, recompute="mlp")
    budget = Budget(actor, EnginePlan(tp=2, max_tokens=64, memory_share=0.3), capacity=None)
    work = Work(prompts=4, answers=8, pool=16, trained=16, updates=1, sources=2, scored_updates=1, prompt_tokens=33,
                answer_tokens=32, longest=32)  # fmt: skip
    found = {(m.phase, m.what): m for m in messages_of(budget, work, 2, Spread(*[True] * 6), rounds=32.0)}
    row = HIDDEN * 2
    scored, trained = 4 * 64, 8 * 64  # tokens of a cell
    # There and back; forward, backward, forward again. Nothing is gathered over tp for experts.
    assert found["score", "tokens of ep"].num_bytes == 2 * 2 * 0.5 * scored / 2 * TO * row
    assert found["learn", "tokens of ep"].num_bytes == 3 * 2 * 2 * 0.5 * trained / 2 * TO * row
    assert found["score", "gathers and scatters of tp"].num_bytes == 2 * 2 * 0.5 * scored * row
    assert found["learn", "gathers and scatters of tp"].num_bytes == 5 * 2 * 0.5 * trained * row
    experts = 2 * 64 * EXPERT
    dense = num_weights(thin, actor.layout) - experts
    assert found["learn", "gradients and weights of dp"].num_bytes == 0.5 * dense * (4 + 2)
    assert found["learn", "gradients and weights of experts"].num_bytes == pytest.approx(0.5 * experts * (4 + 2))
    # A rank's experts are on a rank of the other cell alone with ep 2, on a rank of its own cell, too, with ep 1.
    everywhere = replace(budget, actor=replace(actor, layout=Layout(tp=2)))
    found = {m.what: m for m in messages_of(everywhere, work, 2, Spread(*[True] * 6), rounds=32.0)}
    assert "tokens of ep" not in found
    assert found["gradients and weights of experts"].num_bytes == pytest.approx(0.75 * 2 * experts * (4 + 2))


def test_the_router_counts_as_a_matrix():
    assert feed_forward_parameters(MODEL) == LAYERS * (TO * EXPERT + EXPERTS * HIDDEN)
