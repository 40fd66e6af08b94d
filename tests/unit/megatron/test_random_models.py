"""Twenty random members of every family, as Megatron's layers and as Hugging Face in float64: their logits."""

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tiny_models import LLAMA3_ROPE, YARN_ROPE, make_model, reference_model

from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model.model import build_model, forward_packed, lm_head_weight
from hacpo_mega.megatron.weights.names import load_hf_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.families.family import Family

pytestmark = pytest.mark.nightly
NUM_MODELS = 20
LENGTHS = (23, 1, 40, 40)
ROPES = {"default": None, "linear": {"rope_type": "linear", "factor": 3.0}, "llama3": LLAMA3_ROPE, "yarn": YARN_ROPE}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[None]:
    """This process as an agent's only rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    initialize_parallel(1, 1, seed=1)
    with torch.compiler.set_stance("force_eager"):  # as in every job; Megatron compiles the gate of attention
        yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def random_sizes(name: str, rng: random.Random) -> dict:
    """Arguments of make_model that a member of the family can have."""
    family = FAMILIES[name]
    num_kv_heads = rng.choice([1, 2, 3])
    num_heads, head_dim = num_kv_heads * rng.choice([1, 2, 5]), rng.choice([8, 16, 32])
    rope = dict(ROPES.get(rng.choice(family.rope_kinds)) or {})
    if family.scales_queries:
        rope["llama_4_scaling_beta"] = rng.choice([0.05, 0.1, 0.4])
    if family.may_rotate_a_part or family.full_heads:
        rope["partial_rotary_factor"] = rng.choice([0.25, 0.5, 0.75, 1.0])
    num_layers = rng.choice([1, 2, 4])
    if family.latent and rope.get("rope_type") == "yarn" and rng.random() < 0.7:
        rope |= {"mscale": rng.choice([0.7, 1.0]), "mscale_all_dim": rng.choice([0.7, 1.0])}
    turns = {"no_rope_layers": [rng.randint(0, 1) for _ in range(num_layers)]} if family.skips_rope else None
    return {
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        # One family has no head size of its own.
        "hidden_size": num_heads * (head_dim if "head_dim" not in family.defaults else rng.choice([8, 12, 20])),
        "ffn_size": rng.choice([40, 96, 160]),
        "vocab_size": rng.choice([97, 128, 131, 259]),
        "tied": rng.random() < 0.5 and "tie_word_embeddings" not in family.only,
        "attention_bias": family.may_have_bias and (rng.random() < 0.5 or "attention_bias" in family.only),
        "rope_scaling": rope,
        "said": turns,
        "images": family.experts is not None and family.image_class is not None and rng.random() < 0.5,
        **random_heads(family, rng),
        **random_experts(family, num_layers, rng),
        **random_delta_net(family, rng),
        "window": rng.choice([None, 1, 7, 30]) if family.windows != "none" else None,
        "seed": rng.randrange(1000),
    }


def random_heads(family: Family, rng: random.Random) -> dict:
    if not family.full_heads:
        return {}
    cap, images = rng.choice([None, 1.0, 30.0]), rng.random() < 0.5
    said = {"attention_k_eq_v": rng.random() < 0.5, "final_logit_softcapping": cap}
    said["enable_moe_block"] = family.experts is not None and rng.random() < 0.5
    num_experts = rng.choice([3, 4, 7])
    return {"said": said, "images": images, "num_experts": num_experts, "experts_per_token": rng.choice([1, 2, 3])}


def random_delta_net(family: Family, rng: random.Random) -> dict:
    if family.delta_net is None:
        return {}
    key_heads = rng.choice([1, 2, 3])
    # Norms of nearly nothing would only show rounding errors.
    said = {"linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * rng.choice([1, 2, 3]),
            "linear_key_head_dim": rng.choice([4, 8, 16]), "linear_value_head_dim": rng.choice([4, 10, 16]),
            "linear_conv_kernel_dim": rng.choice([2, 4, 5]), "rms_norm_eps": 1e-2}  # fmt: skip
    if family.experts is None:
        return {"said": said}
    said |= {"norm_topk_prob": rng.random() < 0.5} if family.experts.may_normalise else {}
    said |= {"shared_expert_intermediate_size": rng.choice([24, 96])}
    # vLLM gives one of the families a head of its own.
    tied = {"tied": False} if "tie_word_embeddings" in family.only else {}
    return {"experts_per_token": rng.choice([1, 2, 3]), "said": said, **tied}


def random_experts(family: Family, num_layers: int, rng: random.Random) -> dict:
    if family.full_heads:  # among `random_heads`
        return {}
    if family.experts is None or family.experts.shared is None or family.delta_net is not None:
        return {"experts_per_token": rng.choice([1, 2, 3])}
    if "num_shared_experts" in family.experts.fields:
        said = {"num_shared_experts": rng.choice([1, 2]), "router_scaling_factor": rng.choice([1.0, 2.5])}
        return {"experts_per_token": rng.choice([1, 2, 3]), "said": said}
    groups = rng.choice([1, 2, 4])
    of_a_token = rng.randint(1, groups)
    num_experts = groups * rng.choice([2, 3])
    return {
        "num_experts": num_experts,
        "experts_per_token": rng.randint(1, of_a_token * num_experts // groups),
        "said": {
            "n_group": groups, "topk_group": of_a_token, "n_shared_experts": rng.choice([1, 2]),
            "norm_topk_prob": rng.random() < 0.5, "routed_scaling_factor": rng.choice([1.0, 2.5]),
            **({} if family.experts.dense_kinds else {"first_k_dense_replace": rng.randrange(num_layers)}),
            **({"use_qk_norm": rng.random() < 0.5} if family.qk_norm is None else {}),
            **random_latents(family, rng),
        },
    }  # fmt: skip


def random_latents(family: Family, rng: random.Random) -> dict:
    if not family.latent:
        return {}
    nope_dim, rope_dim = rng.choice([4, 12, 16]), rng.choice([4, 8, 16])
    return {
        "q_lora_rank": rng.choice([None, 8, 24]), "kv_lora_rank": rng.choice([8, 24, 40]),
        "qk_nope_head_dim": nope_dim, "qk_rope_head_dim": rope_dim,
        "v_head_dim": rng.choice([2, nope_dim, nope_dim + rope_dim]),
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_twenty_random_members_are_hugging_faces_in_float64(world, tmp_path, family):
    rng = random.Random(family)
    for index in range(NUM_MODELS):
        sizes = random_sizes(family, rng)
        folder = make_model(tmp_path / str(index), family, **sizes)
        architecture = Architecture.from_folder(folder)
        model = build_model(architecture, tp=1, pp=1, dtype=torch.float32, max_positions=64)
        load_hf_weights(model, folder)
        theirs = reference_model(folder)
        tokens_T = torch.randint(sizes["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(index))
        positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
        with torch.no_grad():
            hidden_TH = forward_packed(model, tokens_T, positions_T, torch.tensor([0, *LENGTHS]).cumsum(0).int())
            logits_TV = (hidden_TH @ lm_head_weight(model).T)[:, : sizes["vocab_size"]]
            if (cap := architecture.softcap) is not None:
                logits_TV = cap * (logits_TV / cap).tanh()
            expected_TV = torch.cat(
                [theirs(sequence[None], use_cache=False).logits[0] for sequence in tokens_T.split(list(LENGTHS))]
            )
        torch.testing.assert_close(
            logits_TV.double(), expected_TV, atol=1e-4, rtol=0, msg=lambda text, sizes=sizes: f"{sizes}: {text}"
        )
