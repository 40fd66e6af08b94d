"""Adapters that an agent may have, how they lie on ranks, and what they cost: by hand."""

import math
from dataclasses import replace

import pytest
from memory_cases import EXPERTS

from hacpo_mega.config.changes import changes, refusals
from hacpo_mega.config.tables.agents import AgentConfig, LoraConfig
from hacpo_mega.memory.actor_bytes import CUDA, ActorPlan, actor_memory, trained_parts
from hacpo_mega.memory.adapter_numbers import num_merged
from hacpo_mega.memory.weight_numbers import num_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.flops import forward_flops, learning_flops, matrix_parameters
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.lora import (
    ALL_LINEAR,
    Lora,
    adapter_slots,
    adapter_sources,
    chosen_targets,
    lora_problems,
)
from hacpo_mega.models.sharding.segments import rectangles, shard_shape

H, Q, K, D, F, LAYERS = 64, 8, 2, 16, 96, 3


def model(family: str) -> Architecture:
    return Architecture.of_family(
        FAMILIES[family],
        num_layers=LAYERS,
        hidden_size=H,
        num_heads=Q,
        num_kv_heads=K,
        head_dim=D,
        ffn_size=F,
        vocab_size=131,
        max_positions=64,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope=None,
        tied=False,
    )


def test_targets_are_taken_in_the_models_order_and_must_be_there():
    assert chosen_targets(model("qwen3"), ("up_proj", "q_proj")) == ("q_proj", "up_proj")
    assert len(chosen_targets(model("qwen3"), ALL_LINEAR)) == 7
    assert chosen_targets(model("phi3"), ALL_LINEAR) == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    with pytest.raises(ValueError, match=r"'qkv_proj' matches nothing in this qwen3 model.*Nearest: '[qkv]_proj'"):
        chosen_targets(model("qwen3"), ("qkv_proj",))
    with pytest.raises(ValueError, match=r"'lm_head' matches nothing .*Nearest: 'all-linear'"):
        chosen_targets(model("llama"), ("lm_head", "q_proj"))


def test_what_a_layout_cannot_have_is_refused():
    few = Lora(4, 8.0, ("q_proj", "v_proj"))
    assert not list(lora_problems(model("llama"), few, tp=2))
    (problem,) = lora_problems(model("llama"), few, tp=4)
    assert problem.startswith("lora.targets: tp (4) cuts through the 2 key/value heads")
    assert problem.endswith("shares of q_proj and v_proj alone. Nearest: all of q_proj, k_proj, v_proj")
    assert not list(lora_problems(model("llama"), replace(few, targets=("q_proj", "k_proj", "v_proj")), tp=4))
    gate = Lora(4, 8.0, ("gate_proj", "down_proj"))
    (problem,) = lora_problems(EXPERTS, gate, tp=1)
    assert problem.startswith(
        "lora.targets: gate_proj and up_proj of an expert are one matrix to transformers, so peft"
    )
    assert problem.endswith("Nearest: both of gate_proj, up_proj")
    assert not list(lora_problems(EXPERTS, replace(gate, targets=("down_proj",)), tp=1))
    (problem,) = lora_problems(model("llama"), replace(few, rank=33), tp=1)
    assert problem.startswith("lora.rank (33) is more than the smaller side")
    assert not list(lora_problems(model("llama"), replace(few, rank=32), tp=1))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
@pytest.mark.parametrize("targets", [ALL_LINEAR, "some"])
def test_every_number_of_every_factor_is_on_the_ranks_that_use_it(family, tp, targets):
    """The shards of all tensor ranks are the whole tensors of peft, a factor that is not cut on each of them."""
    architecture = model(family)
    names = chosen_targets(architecture, ALL_LINEAR)
    lora = Lora(4, 8.0, names if targets == ALL_LINEAR else names[1:])
    found = dict.fromkeys(adapter_sources(architecture, lora), 0)
    for slot in adapter_slots(architecture, (LAYERS,), 1, 0, lora):
        size = math.prod(shard_shape(slot, architecture, tp=tp))
        for rank in range(tp):
            held = list(rectangles(slot, architecture, tp=tp, tp_rank=rank, start=0, stop=size))
            assert sum(math.prod(part.sizes) for part in held) == size
            for part in held:
                found[part.source] += math.prod(part.sizes)
    for source, count in found.items():
        splits_input = ".o_proj." in source.name or ".down_proj." in source.name
        copies = 1 if ("lora_A" in source.name) == splits_input else tp
        assert count == copies * math.prod(source.shape), source


def test_the_bytes_of_an_adapted_actor():
    """Two of every weight; of the adapters' numbers eighteen, Adam's share over the cells."""
    lora, layout = Lora(4, 8.0, chosen_targets(model("llama"), ("q_proj", "down_proj"))), Layout(tp=2)
    adapted = LAYERS * (4 * H + Q * D // 2 * 4 + 4 * F // 2 + H * 4)
    plan = ActorPlan(model("llama"), layout, 2, 1024, device=CUDA, lora=lora)
    assert trained_parts(plan) == (adapted, 0)
    assert num_merged(model("llama"), layout, 0, lora) == LAYERS * (Q * D * H + H * F) // 2
    memory, held = actor_memory(plan), num_weights(model("llama"), layout)
    assert memory.weights == 2 * (held + adapted)
    assert (memory.gradients, memory.main_weights, memory.moments) == (4 * adapted, 2 * adapted, 4 * adapted)


def test_the_numbers_of_the_adapters_of_experts():
    """A rank has 4 of 16 experts: a token meets those of 4, whose gradients are of the experts' optimizer."""
    lora, layout = Lora(4, 8.0, chosen_targets(EXPERTS, ("o_proj", "down_proj"))), Layout(tp=2, cp=2, ep=4)
    hidden, width, layers = EXPERTS.hidden_size, EXPERTS.expert_ffn, EXPERTS.num_layers
    attention, of_expert = 4 * (EXPERTS.num_heads * EXPERTS.head_dim + hidden), 4 * (width + hidden)
    plan = ActorPlan(EXPERTS, layout, 2, 1024, device=CUDA, lora=lora)
    assert trained_parts(plan) == (layers * (attention + 4 * hidden) // 2, layers * 4 * of_expert)
    assert num_merged(EXPERTS, layout, 0, lora) == layers * (hidden * hidden // 2 + 4 * width * hidden)
    frozen = 40 * matrix_parameters(EXPERTS)
    whole = learning_flops(EXPERTS, 2, 10)
    assert learning_flops(EXPERTS, 2, 10, lora) == whole - frozen + 120 * layers * (attention + 4 * of_expert)


def test_the_flops_of_learning():
    """Three times a forward; with adapters no gradient of a matrix, and their own three."""
    architecture = model("llama")
    lora = Lora(4, 8.0, chosen_targets(architecture, ("o_proj",)))
    whole, forward = learning_flops(architecture, 2, 10), forward_flops(architecture, 2, 10)
    assert whole == 3 * forward
    adapters = LAYERS * 4 * (H + Q * D)
    assert learning_flops(architecture, 2, 10, lora) == whole - 40 * matrix_parameters(architecture) + 120 * adapters


def test_a_run_goes_on_with_the_adapters_that_it_has():
    def table(**lora):
        return {"agents": [{"name": "a", "lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]} | lora}]}

    for key, value in (("rank", 8), ("targets", ["q_proj", "v_proj"])):
        (line,) = refusals(changes(table(), table(**{key: value})), ["agents"])
        assert line.startswith(f"agents.a.lora.{key} was ")
        assert "a run cannot go on with another" in line
    assert not list(refusals(changes(table(), table(alpha=9.0)), ["agents.a.lora.alpha"]))
    (line, *_) = refusals(changes(table(), {"agents": [{"name": "a"}]}), ["agents"])
    assert line.startswith("agents.a.lora.")


def test_the_key_says_what_peft_says():
    agent = AgentConfig(name="a", model="a", lora=LoraConfig(rank=8, alpha=16.0, targets=("v_proj", "q_proj")))
    assert agent.adapters(model("llama")) == Lora(8, 16.0, ("q_proj", "v_proj"))
    assert agent.adapters(model("llama")).scale == 2.0
    assert AgentConfig(name="a", model="a").adapters(model("llama")) is None


def test_experts_that_a_folder_stacks_have_no_adapters():
    """As in peft, for which they are no layers."""
    sizes = replace(EXPERTS, family="gpt_oss", qk_norm=False)
    assert chosen_targets(sizes, ALL_LINEAR) == ("q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(
        ValueError, match=r"'gate_proj' matches nothing in this gpt_oss model, whose matrices are q_proj"
    ):
        chosen_targets(sizes, ["gate_proj"])
