"""An actor that learns by adapters: what it computes, its gradients, what it publishes and exports, on every layout.

Oracles: the same model without adapters, to the last bit; LoRA's definition on Hugging Face's model in float64; a merge
of whole matrices by one process.
"""

import math

import pytest
import torch
import torch.distributed as dist
from actor_cases import DESCENT, GRADIENT_RATE, LOGPROB_ERROR, VOCAB, full_weights, make_actor, norm, random_samples
from hacpo_kernels import merge_adapter
from job import run_group
from lora_cases import AdaptedOracle, factors_of
from safetensors.torch import load_file
from tiny_models import LATENT_ROPE, make_model, reference_model

from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.train.optimizer import ActorOffload
from hacpo_mega.megatron.weights.hf_writer import ADAPTER
from hacpo_mega.megatron.weights.publish import ActorShards
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import VIRTUAL
from hacpo_mega.models.sharding.lora import ALL_LINEAR, Lora, chosen_targets, factor_names

pytestmark = pytest.mark.nightly

MODELS = {
    "qwen3": {"family": "qwen3", "tied": True},
    # two layers of linear_qkv's three matrices, one of gate-up's two; four layers for two stages
    "llama": {"family": "llama", "tied": False, "num_layers": 4},
    # with tp 2 its one key/value head is cut across ranks
    "one head": {"family": "llama", "tied": False, "num_kv_heads": 1, "attention_bias": True},
    # query, key and value in one stored matrix, gate and up in another
    "phi3": {"family": "phi3", "tied": False},
    "gemma3": {"family": "gemma3_text", "tied": True, "window": 7},
    "experts": {"family": "qwen3_moe", "tied": True, "experts_per_token": 3},
    # delta nets, whose four matrices are one of Megatron's, beside attention with a gate
    "delta": {"family": "qwen3_5_text", "tied": True, "num_layers": 4, "said": {"rms_norm_eps": 1e-2}},
    # the same in two matrices, by heads; shared experts
    "delta experts": {
        "family": "qwen3_next",
        "tied": False,
        "num_layers": 4,
        "num_experts": 8,
        "experts_per_token": 3,
        "said": {"rms_norm_eps": 1e-2},
    },
    # experts that peft has no layer for, beside a shared one that has adapters
    "shared": {"family": "qwen3_5_moe_text", "tied": True, "said": {"rms_norm_eps": 1e-2}},
    # latents, of queries, too; the first layer dense
    "latents": {
        "family": "deepseek_v3",
        "tied": False,
        "num_experts": 8,
        "experts_per_token": 3,
        "num_layers": 4,
        "rope_scaling": LATENT_ROPE,
        "said": {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    },
    "latent": {"family": "glm4_moe_lite", "tied": False, "said": {"q_lora_rank": None, "n_shared_experts": 2}},
    # two kinds of heads, of which one has no matrix of values
    "gemma4": {"family": "gemma4_text", "tied": True, "window": 7, "num_layers": 4},
    # eight layers for four stages of two chunks
    "rounds": {"family": "mixtral", "tied": False, "num_layers": 8, "num_kv_heads": 4},
}
TARGETS = {"llama": ("v_proj", "q_proj", "up_proj", "down_proj"), "gemma3": ("k_proj", "gate_proj", "o_proj"),
           "rounds": ("q_proj", "w2")}  # fmt: skip
EP = dict.fromkeys(("experts", "delta experts", "shared", "latents", "latent"), 2)
OVERRIDES = {"rounds": {VIRTUAL: 2}}
RANK, ALPHA = 4, 6.0
# (model, tp, pp, cp, recompute): the rest of the ranks are further cells
TWO_RANKS = [("qwen3", 2, 1, 1, "none"), ("llama", 1, 2, 1, "full"), ("delta", 2, 1, 1, "none")]
FOUR_RANKS = [
    ("qwen3", 2, 2, 1, "full"),
    ("qwen3", 2, 1, 2, "mlp"),
    ("llama", 2, 2, 1, "none"),
    ("one head", 4, 1, 1, "full"),
    ("phi3", 2, 1, 1, "none"),
    ("gemma3", 2, 2, 1, "none"),
    ("delta", 2, 2, 1, "full"),
    ("delta experts", 2, 2, 1, "none"),
    ("shared", 1, 1, 1, "mlp"),
    ("latents", 2, 2, 1, "none"),
    ("latent", 2, 1, 2, "full"),
    ("gemma4", 1, 2, 1, "full"),
    ("gemma4", 4, 1, 1, "none"),
    ("experts", 2, 1, 2, "mlp"),
    ("rounds", 1, 4, 1, "full"),
]
CASE = ("name", "tp", "pp", "cp", "recompute")
EACH = [*TWO_RANKS, *FOUR_RANKS]
SAMPLES = random_samples(4, seed=3)
# Divisors of the loss: the first update leaves B of the size of a real one; gradients are read from the second.
DIVISORS = [100 * sum(sample.num_trained for sample in SAMPLES), sum(sample.num_trained for sample in SAMPLES)]
LEFT = 1  # the factors that are published and exported: after the first update
# The step of every update is GRADIENT_RATE times the gradient, none of those before.
PLAIN_DESCENT = DESCENT.model_copy(update={"betas": (0.0, 0.0)})
AGREED = 1e-5
FEW = {"max_tokens_per_microbatch": 144}  # two or three micro-batches of a cell


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, **sizes) for name, sizes in MODELS.items()}


@pytest.fixture(scope="module")
def seen(folders, tmp_path_factory):
    """A case -> what rank 0 saw. A job per tier."""
    answers, root = {}, tmp_path_factory.mktemp("exports")

    def visit(case):
        if case not in answers:
            cases, ranks = (TWO_RANKS, 2) if case in TWO_RANKS else (FOUR_RANKS, 4)
            answers.update(run_group(ranks, visit_cases, cases, folders, root)[0])
        return answers[case]

    return visit


def visit_cases(cases, folders, root):
    return {case: visit_case(case, folders[case[0]], root / "-".join(map(str, case))) for case in cases}


def visit_case(case, folder, out):
    """Scores with B = 0, beside those of the model itself; an update, what leaves then, and another update."""
    name, tp, pp, cp, recompute = case
    layout = {"tp": tp, "pp": pp, "cp": cp, "ep": EP.get(name, 1), "overrides": OVERRIDES.get(name), **FEW}
    cells = dist.get_world_size() // (tp * pp * cp)
    mine = [sample for sample in SAMPLES if sample.prompt_index % cells == dist.get_rank() // (tp * pp * cp)]
    plain = [score.token_logprobs.tolist() for score in make_actor(folder, **layout).score(SAMPLES)]
    lora = lora_of(name, folder)
    actor = make_actor(folder, **layout, lora=lora, recompute=recompute, optimizer=PLAIN_DESCENT)
    actor.keep_reference()
    found = {"plain": plain, "zero": [score.token_logprobs.tolist() for score in actor.score(SAMPLES)]}
    found["factors"] = [factors_of(actor)]
    actor.learn_supervised(mine, DIVISORS[0])
    found["factors"].append(factors_of(actor))
    counts = saved(actor, out.with_name(f"{out.name}-state"))
    # Before the large update, after which float32's rounding alone moves a log-prob by more than LOGPROB_ERROR.
    found["learnt"] = [score.token_logprobs.tolist() for score in actor.score(SAMPLES)]
    found["reference"] = [logprobs.tolist() for logprobs in actor.reference_token_logprobs(SAMPLES)]
    found["weights"], found["shards differ"] = full_weights(actor), shards_that_differ(actor)
    actor.save_hf(out)
    found["export"] = out
    found["norm"] = actor.learn_supervised(mine, DIVISORS[1]).grad_norm
    found["factors"].append(factors_of(actor))
    found["again"], found["elsewhere"] = [], []
    for what, place in (("again", layout), ("elsewhere", FEW)):
        actor = make_actor(folder, **place, lora=lora, recompute=recompute, optimizer=PLAIN_DESCENT, seed=2)
        actor.load(out.with_name(f"{out.name}-state"), **counts)
        found[what].append(factors_of(actor))
        if what == "again":
            actor.learn_supervised(mine, DIVISORS[1])
            found[what].append(factors_of(actor))
    return found


def saved(actor, folder):
    """Writes an actor's state into a new folder; the counts for `load`."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    counts, write = actor.save(folder, copies=False)
    write()
    return counts


def shards_that_differ(actor):
    """Names of shards that this rank would publish and that differ from the whole tensors there, on all ranks."""
    whole, shards = full_weights(actor), ActorShards(actor.model)
    wrong = []
    for number, shard in enumerate(shards.shards):
        parts = []
        for member in map(shard.member, range(shard.num_members)):
            part = whole[member.name]
            for dim, (start, size) in enumerate(zip(member.offsets, member.sizes)):
                part = part.narrow(dim, start, size)
            parts.append(part)
        if not torch.equal(torch.stack(parts).view(shard.sizes), shards.view(number, shard)):
            wrong.append(shard.name)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, wrong)
    return [name for names in every for name in names]


def lora_of(name, folder):
    architecture = Architecture.from_folder(folder)
    return Lora(RANK, ALPHA, chosen_targets(architecture, TARGETS.get(name, ALL_LINEAR)))


@pytest.mark.parametrize(CASE, EACH)
def test_an_adapter_of_zeros_is_the_model_itself(seen, name, tp, pp, cp, recompute):
    """To the last bit; and so is the reference policy, after the adapters have learnt."""
    found = seen((name, tp, pp, cp, recompute))
    assert found["zero"] == found["reference"] == found["plain"]
    assert found["learnt"] != found["plain"]


@pytest.mark.parametrize(CASE, EACH)
def test_gradients_are_those_of_the_definition(folders, seen, name, tp, pp, cp, recompute):
    """Every A and B, at B = 0 and at another, is within 1e-5 of float64; so is the norm that clips them."""
    found = seen((name, tp, pp, cp, recompute))
    for before, after, divisor in zip(found["factors"], found["factors"][1:], DIVISORS, strict=False):
        oracle = AdaptedOracle(folders[name], before, ALPHA / RANK)
        expected = oracle.gradient(oracle.cross_entropy(SAMPLES) * DIVISORS[1] / divisor)
        steps = {key: (before[key].double() - after[key].double()) / GRADIENT_RATE for key in before}
        assert steps.keys() == expected.keys()
        for key, step in steps.items():
            # A has no gradient where B is zero.
            assert float((step - expected[key]).norm()) <= AGREED * float(expected[key].norm()), key
    assert math.isclose(found["norm"], norm(expected), rel_tol=AGREED)


@pytest.mark.parametrize(CASE, EACH)
def test_what_leaves_is_the_base_with_its_adapters_merged(folders, seen, name, tp, pp, cp, recompute):
    """In every byte, shard by shard, whole and as a folder, that of one process that merges whole matrices; and W + B A
    in float64 within float32's rounding. A weight that is no target is the base's."""
    found = seen((name, tp, pp, cp, recompute))
    base, factors, lora = (
        load_file(folders[name] / "model.safetensors"),
        found["factors"][LEFT],
        lora_of(name, folders[name]),
    )
    assert not found["shards differ"]
    exported = load_file(found["export"] / "model.safetensors")
    assert exported.keys() == found["weights"].keys()
    num_adapted = 0
    for key, weight in found["weights"].items():
        down, up = (factors.get(factor) for factor in factor_names(key))
        num_adapted += down is not None
        whole = base[key] if down is None else merge_adapter(base[key], up, down, lora.scale)
        assert torch.equal(weight, whole), key
        assert torch.equal(exported[key], whole), key
        if down is not None:
            exact = base[key].double() + lora.scale * up.double() @ down.double()
            assert float((whole - exact).abs().max()) < (RANK + 2) * 2.0**-23 * float(exact.abs().max())
    assert 2 * num_adapted == len(factors)


@pytest.mark.parametrize(CASE, EACH)
def test_a_checkpoint_has_the_adapters_for_any_layout(seen, name, tp, pp, cp, recompute):
    """The same layout goes on bit for bit, from adapters that were drawn from another seed; one rank begins so."""
    found = seen((name, tp, pp, cp, recompute))
    for taken_up, expected in (("again", found["factors"][1:]), ("elsewhere", found["factors"][1:2])):
        for now, before in zip(found[taken_up], expected, strict=True):
            assert all(torch.equal(now[key], factor) for key, factor in before.items())
    assert len(found["factors"]) == 3


@pytest.mark.parametrize(CASE, EACH)
def test_the_exported_adapter_on_the_base_is_the_actor(folders, seen, name, tp, pp, cp, recompute):
    """As peft reads it, by its definition: log-probs equal to the actor's up to rounding."""
    found = seen((name, tp, pp, cp, recompute))
    stored = load_file(found["export"] / ADAPTER / "adapter_model.safetensors")
    assert stored.keys() == found["factors"][LEFT].keys()
    assert all(torch.equal(stored[key], factor) for key, factor in found["factors"][LEFT].items())
    oracle = AdaptedOracle(folders[name], stored, ALPHA / RANK)
    for sample, logprobs in zip(SAMPLES, found["learnt"], strict=True):
        expected = oracle.token_logprobs(sample).detach()
        torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), expected, rtol=0, atol=LOGPROB_ERROR)


@pytest.mark.parametrize(CASE, [FOUR_RANKS[0], FOUR_RANKS[2], FOUR_RANKS[4], *FOUR_RANKS[6:]])
def test_peft_loads_what_was_exported(folders, seen, name, tp, pp, cp, recompute):
    """Its logits, in float64, are those of LoRA's definition on the same numbers."""
    peft = pytest.importorskip("peft")
    export = seen((name, tp, pp, cp, recompute))["export"]
    factors = load_file(export / ADAPTER / "adapter_model.safetensors")
    expected = AdaptedOracle(folders[name], factors, ALPHA / RANK)
    base = reference_model(folders[name])
    tokens = torch.arange(40)[None] % VOCAB
    with torch.no_grad():
        plain = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, export / ADAPTER, autocast_adapter_dtype=False).double()
        assert torch.allclose(adapted(tokens).logits, expected.model(tokens).logits, rtol=0, atol=1e-9)
        assert not torch.allclose(adapted(tokens).logits, plain, rtol=0, atol=1e-3)


def test_in_bf16_an_adapted_actor_leaves_the_device_and_comes_back(tmp_path):
    """The base too, which is in no buffer; it learns, scores and is published with the bits of one that stays."""
    folder = make_model(tmp_path / "half", "qwen3", dtype=torch.bfloat16)
    ((stays, leaves),) = run_group(1, learn_in_half, folder)
    assert leaves == stays


def learn_in_half(folder):
    """Scores, losses and weights of an actor that stays and of one that leaves in between."""
    return [learn_and_leave(folder, leaves) for leaves in ("nothing", "everything")]


def learn_and_leave(folder, leaves):
    adam = OptimizerConfig(lr=1e-2)
    half, lora = {"dtype": torch.bfloat16, "optimizer": adam}, lora_of("qwen3", folder)
    plain = [score.mean_logprob for score in make_actor(folder, **half).score(SAMPLES)]
    actor = make_actor(folder, **half, lora=lora, offload_mode=leaves)
    assert plain == [score.mean_logprob for score in actor.score(SAMPLES)]
    norms = []
    for _ in range(2):
        norms.append(actor.learn_supervised(SAMPLES, DIVISORS[1]).grad_norm)
        if leaves == "everything":
            away = ActorOffload(actor.model, actor.optimizer)
            away.offload()
            assert not any(parameter.numel() for parameter in actor.model.parameters())
            away.onload(to_learn=True)
    weights = {name: tensor.float().tolist() for name, tensor in full_weights(actor).items()}
    return norms, weights, [score.mean_logprob for score in actor.score(SAMPLES)]
