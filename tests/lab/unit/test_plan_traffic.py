"""Bytes that a plan counts between the ranks of a cell: of experts' tokens and of context parallelism, by hand."""

from dataclasses import replace

import pytest

from hacpo_lab.planning.configuration import Work
from hacpo_lab.planning.traffic import Spread, messages_of
from hacpo_mega.memory.actor_bytes import ActorPlan
from hacpo_mega.memory.budget import Budget, EnginePlan
from hacpo_mega.memory.weight_numbers import num_weights
from hacpo_mega.models.public import public_architecture
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.lora import Lora

MODEL = public_architecture("Qwen/Qwen3-30B-A3B")
HIDDEN, WIDTH, TO = 2048, 768, 8  # TO: experts of a token
EXPERT = 3 * HIDDEN * WIDTH
WORK = Work(prompts=4, answers=8, pool=16, trained=16, updates=1, sources=2, scored_updates=1, prompt_tokens=33,
            answer_tokens=32, longest=32)  # fmt: skip


def test_messages_of_a_layer_with_experts():
    """tp 2, ep 2, two cells: tokens of a tensor rank to 8 experts each, half of them elsewhere, and back."""
    thin = replace(MODEL, num_layers=2)
    actor = ActorPlan(thin, Layout(tp=2, ep=2), dp=2, num_tokens=4096, recompute="mlp")
    budget = Budget(actor, EnginePlan(tp=2, max_tokens=64, memory_share=0.3), capacity=None)
    found = {(m.phase, m.what): m for m in messages_of(budget, WORK, 2, Spread(*[True] * 6), rounds=32.0)}
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
    found = {m.what: m for m in messages_of(everywhere, WORK, 2, Spread(*[True] * 6), rounds=32.0)}
    assert "tokens of ep" not in found
    assert found["gradients and weights of experts"].num_bytes == pytest.approx(0.75 * 2 * experts * (4 + 2))


def test_the_plan_counts_what_is_sent_once_more():
    """cp 2, two layers of 32 query and 4 key/value heads of 128 numbers of two bytes; half of each leaves a rank."""
    model = replace(public_architecture("Qwen/Qwen3-30B-A3B"), num_layers=2)
    own, head = 16 * 64 // 2, 128 * 2
    for recompute, lora, heads in (
        ("mlp", None, 2 * 2 * 36 + 32), ("full", None, 3 * 2 * 36 + 32),
        ("mlp", Lora(8, 16.0, ("o_proj",)), 2 * 2 * 36 + 32), ("mlp", Lora(8, 16.0, ("q_proj",)), 2 * 2 * 36),
    ):  # fmt: skip
        actor = ActorPlan(model, Layout(cp=2), dp=1, num_tokens=4096, recompute=recompute, lora=lora)
        budget = Budget(actor, EnginePlan(tp=2, max_tokens=64, memory_share=0.3), capacity=None)
        found = {(m.phase, m.what): m for m in messages_of(budget, WORK, 1, Spread(*[True] * 6), rounds=32.0)}
        assert found["learn", "heads of cp"].num_bytes == 2 * 0.5 * own * heads * head
        assert found["score", "heads of cp"].num_bytes == 2 * 0.5 * (8 * 64 // 2) * 2 * 36 * head
