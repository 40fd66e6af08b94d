"""Adapters that an agent may have, how they lie on ranks, and what they cost: by hand."""

import math
from dataclasses import replace

import pytest
from memory_cases import DELTA, EXPERTS, GEMMA4, LATENTS, SHARED

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


def family_of(architecture: Architecture) -> str:
    return architecture.family


def test_targets_are_taken_in_the_models_order_and_must_be_there():
    assert chosen_targets(model("qwen3"), ("up_proj", "q_proj")) == ("q_proj", "up_proj")
    assert len(chosen_targets(model("qwen3"), ALL_LINEAR)) == 7
    assert chosen_targets(model("phi3"), ALL_LINEAR) == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    with pytest.raises(ValueError, match=r"'qkv_proj' matches nothing in this qwen3 model.*Nearest: '[qkv]_proj'"):
        chosen_targets(model("qwen3"), ("qkv_proj",))
    with pytest.raises(ValueError, match=r"'lm_head' matches nothing .*Nearest: 'all-linear'"):
        chosen_targets(model("llama"), ("lm_head", "q_proj"))


OF_DELTA_NETS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OF_LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
NEXT = replace(DELTA, family="qwen3_next", tied=False)
EVERY_CUT = [model("qwen3"), model("phi3"), DELTA, NEXT, LATENTS,
             replace(GEMMA4, full_heads=replace(GEMMA4.full_heads, kv_heads=2))]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        (DELTA, (*OF_DELTA_NETS, *FEED_FORWARD, *OF_ATTENTION)),
        (NEXT, ("in_proj_qkvz", "in_proj_ba", "out_proj", *FEED_FORWARD, *OF_ATTENTION)),
        (LATENTS, (*OF_LATENTS, *FEED_FORWARD)),
        (replace(LATENTS, latent=replace(LATENTS.latent, query_rank=0)), ("q_proj", *OF_LATENTS[2:], *FEED_FORWARD)),
        (GEMMA4, (*OF_ATTENTION, *FEED_FORWARD)),
        (SHARED, (*OF_ATTENTION, *FEED_FORWARD)),
    ],
    ids=("delta nets", "delta nets by heads", "latents", "latents but of queries", "two kinds of heads", "shared"),
)
def test_all_linear_maps_of_every_kind_of_layer(architecture, targets):
    """And nothing else: no convolution, no number per head, no router, no gate of shared experts."""
    assert chosen_targets(architecture, ALL_LINEAR) == targets
    for name in ("conv1d", "A_log", "dt_bias", "gate", "shared_expert_gate", "q_a_layernorm"):
        with pytest.raises(ValueError, match=rf"^lora.targets: '{name}' matches nothing in this {architecture.family}"):
            chosen_targets(architecture, (name,))
    assert not list(lora_problems(architecture, Lora(4, 8.0, targets), tp=2))


def test_the_narrowest_matrix_bounds_the_rank():
    """A number per head is projected by the narrowest."""
    (problem,) = lora_problems(DELTA, Lora(9, 8.0, chosen_targets(DELTA, ALL_LINEAR)), tp=1)
    assert problem == "lora.rank (9) is more than the smaller side of in_proj_b (8). Nearest: 8"
    assert not list(lora_problems(DELTA, Lora(9, 8.0, ("in_proj_qkv", "in_proj_z", "out_proj")), tp=1))
    assert len(list(lora_problems(GEMMA4, Lora(4, 8.0, ("q_proj",)), tp=4))) == 2  # of either kind of layer


def test_experts_that_peft_has_no_layer_for_have_no_adapters():
    """Matrices beside them do, by the same names."""
    sizes = replace(SHARED, family="hy_v3", num_groups=1, groups_per_token=1, rotary_share=1.0, qk_norm=True)
    lora = Lora(4, 8.0, chosen_targets(sizes, FEED_FORWARD))
    names = [source.name for source in adapter_sources(sizes, lora)]
    assert len(names) == sizes.num_layers * 3 * 2 and not any(".experts." in name for name in names)
    assert any(".experts." in source.name for source in adapter_sources(SHARED, lora))


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
@pytest.mark.parametrize("architecture", EVERY_CUT, ids=family_of)
@pytest.mark.parametrize("targets", [ALL_LINEAR, "some"])
def test_every_number_of_every_factor_is_on_the_ranks_that_use_it(architecture, tp, targets):
    """The shards of all tensor ranks are the whole tensors of peft, a factor that is not cut on each of them."""
    names = chosen_targets(architecture, ALL_LINEAR)
    lora = Lora(4, 8.0, names if targets == ALL_LINEAR else names[1:])
    found = dict.fromkeys(adapter_sources(architecture, lora), 0)
    for slot in adapter_slots(architecture, (architecture.num_layers,), 1, 0, lora):
        size = math.prod(shard_shape(slot, architecture, tp=tp))
        for rank in range(tp):
            held = list(rectangles(slot, architecture, tp=tp, tp_rank=rank, start=0, stop=size))
            assert sum(math.prod(part.sizes) for part in held) == size
            for part in held:
                found[part.source] += math.prod(part.sizes)
    for source, count in found.items():
        splits_input = any(f".{name}." in source.name for name in ("o_proj", "out_proj", "down_proj"))
        is_whole = any(f".{name}." in source.name for name in ("q_a_proj", "kv_a_proj_with_mqa", "experts"))
        copies = 1 if ("lora_A" in source.name) == splits_input and not is_whole else tp
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


def test_the_adapters_of_delta_nets_and_of_latents():
    """Every rank has a whole matrix of latents; the states of delta nets are learnt, as attention is, by no matrix."""
    lora = Lora(4, 8.0, ("q_a_proj", "kv_a_proj_with_mqa"))
    hidden, (queries, keys) = LATENTS.hidden_size, (LATENTS.latent.query_rank, LATENTS.latent.cached)
    plan = ActorPlan(LATENTS, Layout(tp=2), 2, 1024, device=CUDA, lora=lora)
    assert trained_parts(plan) == (LATENTS.num_layers * 4 * (2 * hidden + queries + keys), 0)
    assert num_merged(LATENTS, Layout(tp=2), 0, lora) == LATENTS.num_layers * hidden * (queries + keys)
    lora, net, nets = Lora(4, 8.0, ("in_proj_b", "out_proj")), DELTA.delta_net, sum(DELTA.delta_layers)
    adapters = nets * 4 * (DELTA.hidden_size + 8 + 8 * 64 + DELTA.hidden_size)
    states = nets * 3 * net.value_heads * net.key_dim * net.value_dim
    plan = ActorPlan(DELTA, Layout(tp=2), 2, 1024, device=CUDA, lora=lora)
    assert trained_parts(plan) == (nets * 4 * (DELTA.hidden_size + 4 + 4 * 64 + DELTA.hidden_size), 0)
    whole = learning_flops(DELTA, 2, 10)
    assert learning_flops(DELTA, 2, 10, lora) == whole - 40 * (matrix_parameters(DELTA) - states) + 120 * adapters


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
