"""Actors with experts: scores, gradients, clipping and files on every layout, against Hugging Face in float64.

Gradients are read off the weights after a step of plain gradient descent, and named as Hugging Face saves them.
unit/megatron/test_moe.py looks at a layer alone, test_expert_options.py at what is stored and at options.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import DESCENT, LOGPROB_ERROR, Oracle, gradient_by_descent, make_actor, norm, objective, random_samples
from job import run_group
from safetensors.torch import load_file
from tiny_models import GPT_OSS_ROPE, LATENT_ROPE, make_model

from hacpo_mega.agent.policy_loss import REPORTS, PolicyLoss
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.megatron.model.router import Router
from hacpo_mega.models.files.stacked_experts import stack_shapes, stacked_experts
from hacpo_mega.models.files.weight_files import CORRECTION, EXPERT_BIAS, LAYER_SCALE, stacks_experts, stacks_plainly
from hacpo_mega.records import Sample
from hacpo_mega.samples.packing import input_length

pytestmark = pytest.mark.nightly

NUM_RANKS = 4
MODELS = {
    "qwen3_moe": {"tied": True, "num_experts": 8, "experts_per_token": 3, "num_kv_heads": 4},
    "mixtral": {"tied": False, "num_experts": 4, "num_kv_heads": 4},
    # The first layer dense; of four groups of experts two are chosen from.
    "glm4_moe": {"tied": False, "num_experts": 8, "experts_per_token": 4, "num_kv_heads": 4, "attention_bias": True,
                 "said": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True}},
    # Sinks, windows, biases on everything, limits at which some numbers stop.
    "gpt_oss": {"tied": False, "num_experts": 8, "experts_per_token": 3, "num_kv_heads": 4, "attention_bias": True,
                "window": 9, "rope_scaling": GPT_OSS_ROPE},
    # A norm over the heads of all ranks, half of a head turns, a bias for the choice of experts.
    "minimax_m2": {"tied": False, "num_experts": 8, "experts_per_token": 3, "num_kv_heads": 4,
                   "rope_scaling": {"partial_rotary_factor": 0.5}},
    # The first layer dense, a shared expert.
    "hy_v3": {"tied": False, "num_experts": 8, "experts_per_token": 3, "num_kv_heads": 4},
    # Gated delta nets, which refuse cp, and a shared expert with a gate; every layer has experts.
    "qwen3_5_moe_text": {"tied": True, "num_experts": 8, "experts_per_token": 3, "said": {"rms_norm_eps": 1e-2}},
    "qwen3_next": {"tied": False, "num_experts": 8, "experts_per_token": 3, "num_layers": 4,
                   "said": {"rms_norm_eps": 1e-2}},
    # Latents, of queries, too, whose scores YaRN scales; values longer than what does not turn of a key.
    "deepseek_v3": {"tied": False, "num_experts": 8, "experts_per_token": 3, "rope_scaling": LATENT_ROPE,
                    "said": {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "v_head_dim": 16}},
    # None of queries; two shared experts.
    "glm4_moe_lite": {"tied": False, "num_experts": 8, "experts_per_token": 3,
                      "said": {"q_lora_rank": None, "n_shared_experts": 2, "norm_topk_prob": False}},
    # Beside the feed-forward, each between norms of its own; a factor for every expert.
    "gemma4_text": {"tied": True, "num_experts": 8, "experts_per_token": 3, "num_kv_heads": 4, "window": 9,
                    "said": {"enable_moe_block": True}},
}  # fmt: skip
# tp, cp, pp, ep: the rest of four ranks are further cells
LAYOUTS = [
    *((2, 1, 1, 1), (1, 1, 1, 1), (2, 2, 1, 4), (2, 2, 1, 2), (1, 2, 2, 1)),
]
RUNS = [*(("qwen3_moe", layout) for layout in LAYOUTS), ("mixtral", (2, 2, 1, 2)), ("mixtral", (1, 1, 2, 2))]
RUNS += [("glm4_moe", layout) for layout in ((2, 1, 1, 2), (1, 4, 1, 4), (2, 2, 1, 2), (2, 1, 2, 2))]
RUNS += [("gpt_oss", layout) for layout in ((2, 1, 1, 2), (2, 2, 1, 4), (2, 1, 2, 1))]
RUNS += [(name, layout) for name in ("minimax_m2", "hy_v3") for layout in ((2, 1, 1, 2), (2, 2, 1, 2))]
DELTA_NETS = "qwen3_5_moe_text", "qwen3_next"
RUNS += [(name, layout) for name in DELTA_NETS for layout in ((2, 1, 1, 2), (2, 1, 2, 2), (1, 1, 2, 2))]
LATENTS = "deepseek_v3", "glm4_moe_lite"
RUNS += [(name, layout) for name in LATENTS for layout in ((2, 2, 1, 4), (2, 1, 2, 2))]
RUNS += [("gemma4_text", layout) for layout in ((2, 2, 1, 4), (2, 1, 2, 2))]
# What is not trained: a bias for the choice of experts in a layer that has experts, the scale of a layer.
FIXED = CORRECTION, EXPERT_BIAS, LAYER_SCALE
NUM_FIXED = {"glm4_moe": 1, "minimax_m2": 2, "hy_v3": 1, "deepseek_v3": 1, "glm4_moe_lite": 1, "gemma4_text": 2}
MAX_TOKENS = 128
SAMPLES = random_samples(6, seed=11)
AGREED = 1e-5
# Hugging Face computes a delta net's states in float32 whatever the weights are.
DELTA_ERROR = 2e-5
# Small gradients would be lost where a weight is rounded.
STEEP = 100
STEEPER = DESCENT.model_copy(update={"lr": DESCENT.lr * STEEP})
# So large that neither loss is lost beside the other, nor beside the policy's.
AUX, Z = 0.05, 0.002
WITH_LOSSES = "qwen3_moe", "mixtral"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, name, **sizes) for name, sizes in MODELS.items()}


@pytest.fixture(scope="module")
def seen(folders, tmp_path_factory) -> dict[tuple, list[dict]]:
    """(model, layout) -> what every rank saw."""
    answers = run_group(NUM_RANKS, visit_layouts, folders, tmp_path_factory.mktemp("exports"))
    return {key: [answer[key] for answer in answers] for key in answers[0]}


def visit_layouts(folders: dict[str, Path], exports: Path) -> dict[tuple, dict]:
    return {(name, layout): visit(folders[name], layout, exports / f"{name}{layout}") for name, layout in RUNS}


def visit(folder: Path, layout: tuple[int, int, int, int], export: Path) -> dict:
    tp, cp, pp, ep = layout
    cells = NUM_RANKS // (tp * cp * pp)
    options = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "max_tokens_per_microbatch": MAX_TOKENS}
    actor = make_actor(folder, **options, reports=REPORTS)
    scores = actor.score(SAMPLES)
    # A product of other rows may be rounded otherwise: what an update packs together is scored together.
    own = [sample for sample in SAMPLES if sample.is_self and sample.num_trained]
    scored = [dataclasses.replace(s, source_logprob=score.mean_logprob) for s, score in zip(own, actor.score(own))]
    first = PolicyLoss(0, 1.0, AlgorithmConfig(), reference={})
    ratios = [r for report in actor.learn(scored, first).reports for r in report.terms.ratio_B.tolist()]
    actor = make_actor(folder, optimizer=STEEPER, **options)
    actor.save_hf(export)
    mine = [sample for sample in SAMPLES if sample.prompt_index % cells == dist.get_rank() // (NUM_RANKS // cells)]
    gradient, stats = gradient_by_descent(actor, lambda: actor.learn(mine, objective))
    gradient = {name: tensor / STEEP for name, tensor in gradient.items()}
    if (plain := stacks_plainly(gradient)) or stacks_experts(gradient):  # as folders do, and so the oracle
        shapes = stack_shapes(((name, tensor.shape) for name, tensor in gradient.items()), plain=plain)
        gradient = dict(stacked_experts(gradient.items(), shapes, plain=plain))
    routers = [module for module in actor.model.modules() if isinstance(module, Router)]
    tokens = stats.num_tokens, sum(input_length(sample) for sample in mine if sample.num_trained)
    return {"logprobs": [score.token_logprobs for score in scores], "ratios": ratios, "gradient": gradient,
            "norm": stats.grad_norm, "experts": stats.experts, "export": export, "tokens": tokens,
            "pairs": [int(router.load_E.sum()) for router in routers],
            "auxiliary": auxiliary(folder, options, mine) if folder.name in WITH_LOSSES else None}  # fmt: skip


def auxiliary(folder: Path, options: dict, mine: list[Sample]) -> dict:
    """An update with auxiliary losses, and the same where layers are computed again; which samples, by their places,
    are in a micro-batch, and those whose prompt it reads with another."""
    overrides = {"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}
    found = {}
    for recompute in ("none", "mlp", "full") if options["tp"] == options["cp"] == options["ep"] == 2 else ("none",):
        actor = make_actor(folder, optimizer=STEEPER, **options, overrides=overrides, recompute=recompute)
        gradient, stats = gradient_by_descent(actor, lambda actor=actor: actor.learn(mine, objective))
        found[recompute] = {name: tensor / STEEP for name, tensor in gradient.items()}, stats.experts
    place_of = {id(sample): place for place, sample in enumerate(SAMPLES)}
    batches = [[place_of[id(sample)] for sample in batch.sequences] for batch in actor._pack_update(mine)]
    whole: list = [None] * dist.get_world_size()
    dist.all_gather_object(whole, batches)
    leaders = range(0, NUM_RANKS, options["tp"] * options["cp"] * options["pp"])
    return {"updates": found, "batches": [batch for leader in leaders for batch in whole[leader]],
            "shares": actor._pack_update.keywords["shares_prompts"]}  # fmt: skip


@pytest.fixture(scope="module")
def expected(folders, tmp_path_factory) -> dict[str, tuple[list[np.ndarray], dict[str, torch.Tensor]]]:
    """Hugging Face's log-probs of every sample, and its gradient by the names that it saves weights by."""
    answers = {}
    for name, folder in folders.items():
        oracle = Oracle(folder)
        logprobs = [oracle.token_logprobs(sample).detach().numpy() for sample in SAMPLES]
        gradients = oracle.stored_gradient(oracle.policy_loss(SAMPLES), tmp_path_factory.mktemp(name))
        answers[name] = (
            logprobs,
            {name: its for name, its in gradients.items() if not name.endswith(FIXED)},
        )
    return answers


EACH = pytest.mark.parametrize("name, layout", RUNS, ids=str)


@EACH
def test_scores_are_hugging_faces(seen, expected, name, layout):
    for found in seen[name, layout]:
        for mine, theirs in zip(found["logprobs"], expected[name][0], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=LOGPROB_ERROR)


@EACH
def test_the_gradient_of_every_expert_and_router_is_hugging_faces(seen, expected, name, layout):
    """A router's bias and a layer's scale have none, and stay as they were loaded."""
    for found in seen[name, layout]:
        fixed = {name for name in found["gradient"] if name.endswith(FIXED)}
        assert len(fixed) == NUM_FIXED.get(name, 0) and not any(found["gradient"].pop(one).any() for one in fixed)
        assert worst(found["gradient"], expected[name][1])[0] < (DELTA_ERROR if name in DELTA_NETS else AGREED)


@pytest.mark.parametrize("name, layout", [run for run in RUNS if run[0] in WITH_LOSSES], ids=str)
def test_auxiliary_losses_enter_the_gradient(seen, folders, expected, tmp_path, name, layout):
    """Beside the policy's loss, in float64, from what Hugging Face's routers say of the tokens of each micro-batch."""
    oracle, found = Oracle(folders[name]), seen[name, layout][0]["auxiliary"]
    balance, z = losses_of_routers(oracle, found["batches"], shares=found["shares"])
    both = oracle.stored_gradient(oracle.policy_loss(SAMPLES) + AUX * balance + Z * z, tmp_path)
    policy = expected[name][1]
    assert norm({name: both[name] - gradient for name, gradient in policy.items()}) > 1e-3 * norm(both)
    num_layers = 2
    for rank in seen[name, layout]:
        for gradient, experts in rank["auxiliary"]["updates"].values():
            assert worst(gradient, both)[0] < AGREED
            assert experts.aux_loss == pytest.approx(float(balance) / num_layers, rel=AGREED)
            assert experts.z_loss == pytest.approx(float(z) / num_layers, rel=AGREED)
            assert 1.0 < experts.aux_loss < 2.0


def losses_of_routers(oracle: Oracle, batches: list[list[int]], *, shares: bool) -> list[torch.Tensor]:
    """Both auxiliary losses of an update: a mean over its tokens, the sum over layers."""
    totals, num_read = [torch.zeros((), dtype=torch.float64)] * 2, 0
    for batch in batches:
        logits, prompts = [], set()
        for sample in (SAMPLES[place] for place in batch):
            tokens = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.answer_ids])).long()
            found = oracle.model(tokens[None, : input_length(sample)], output_router_logits=True).router_logits
            is_read = shares and sample.prompt_ids.tobytes() in prompts
            logits.append([layer[len(sample.prompt_ids) * is_read :] for layer in found])
            prompts.add(sample.prompt_ids.tobytes())
        for layer in map(torch.cat, zip(*logits)):
            k, probs = oracle.model.config.num_experts_per_tok, layer.softmax(dim=-1)
            load = torch.nn.functional.one_hot(probs.topk(k).indices, probs.shape[1]).sum(dim=(0, 1))
            balance = probs.shape[1] / (k * len(layer)) * (load * probs.sum(dim=0)).sum()
            totals = [totals[0] + balance, totals[1] + layer.logsumexp(dim=-1).square().sum()]
        num_read += len(layer)
    return [total / num_read for total in totals]


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The tensor that is furthest off, relative to its own size."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max((float((found[name] - its).norm() / its.norm()), name) for name, its in expected.items())


@EACH
def test_the_norm_that_clips_is_of_both_parts(seen, expected, name, layout):
    for found in seen[name, layout]:
        assert found["norm"] == pytest.approx(norm(expected[name][1]), rel=AGREED)


@EACH
def test_the_load_of_experts_is_the_same_on_every_rank(seen, name, layout):
    """Other layouts that read a prompt as often agree, but for the few tokens that fill a micro-batch up."""
    alike = next(other for model, other in RUNS if model == name and (other[1] == 1) == (layout[1] == 1))
    num_experts, expected = MODELS[name]["num_experts"], seen[name, alike][0]["experts"]
    for found in seen[name, layout]:
        experts = found["experts"]
        assert experts == seen[name, layout][0]["experts"]
        assert 1 / num_experts < experts.fullest_share == pytest.approx(expected.fullest_share, abs=0.02)
        assert 1.0 > experts.entropy == pytest.approx(expected.entropy, abs=0.02)


def test_a_shared_prompt_is_routed_once(seen):
    """Every token that is read goes to three experts of a layer once, and prompts are read fewer times than answers."""
    for found in seen["qwen3_moe", (1, 1, 1, 1)]:
        read, if_apart = found["tokens"]
        assert found["pairs"] == [3 * read] * 2 and read <= if_apart
    assert sum(found["tokens"][0] for found in seen["qwen3_moe", (1, 1, 1, 1)]) < sum(
        found["tokens"][1] for found in seen["qwen3_moe", (1, 1, 1, 1)]
    )


@EACH
def test_the_own_ratio_of_a_first_update_is_1(seen, name, layout):
    for found in seen[name, layout]:
        assert found["ratios"] and set(found["ratios"]) == {1.0}


@EACH
def test_an_export_is_the_loaded_folder(seen, folders, name, layout):
    export, loaded = seen[name, layout][0]["export"], load_file(folders[name] / "model.safetensors")
    written = load_file(export / "model.safetensors")
    assert written.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in written.items())
