"""Ranks that share a micro-batch's tokens: the scores, gradients and own ratios of a model whose ranks do not.

Oracles: the same actor at cp 1, Hugging Face in float64, attention by its definition. test_gradient_invariance.py holds
the law of gradients, test_relayout.py checkpoints, test_context_run.py a whole run.
"""

import dataclasses
import resource
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import (
    LOGPROB_ERROR,
    Oracle,
    end_model_parallel,
    gradient_by_descent,
    make_actor,
    objective,
    random_samples,
    relative_error,
)
from job import run_group
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from te_stand_in import DotProductAttention
from tiny_models import make_model

from hacpo_mega.agent.policy_loss import REPORTS, PolicyLoss
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model.attention import PackedAttention
from hacpo_mega.megatron.model.context_parallel import own_tokens
from hacpo_mega.megatron.model.shared_prompts import packed_segments
from hacpo_mega.megatron.model.te_layers import PackedTEAttention
from hacpo_mega.records import Sample

pytestmark = pytest.mark.nightly

NUM_RANKS = 8
# Eight heads, and fewer for keys and values: divided among the ranks of tp x cp, one each, and one for several.
MODELS = {
    "four": {"family": "qwen3", "tied": True, "num_heads": 8, "num_kv_heads": 4},
    "two": {"family": "llama", "tied": False, "num_heads": 8, "num_kv_heads": 2, "attention_bias": True},
    # with a window in every second layer, and norms over the heads of all tensor ranks
    "windows": {"family": "olmo3", "tied": False, "num_heads": 8, "num_kv_heads": 4, "window": 9},
}
# (tp, cp, pp): the rest of eight ranks are further cells
LAYOUTS = [(1, 2, 1), (1, 8, 1), (4, 2, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2)]
MAX_TOKENS = 128
AGREED = 1e-5


def sample_of(prompt: int, prompt_tokens: int, answer_tokens: int) -> Sample:
    """An own answer without a score, which its first update gives it."""
    rng = np.random.default_rng(prompt)
    ids = rng.integers(131, size=prompt_tokens + answer_tokens, dtype=np.int32)
    return Sample(
        source=0,
        is_self=True,
        prompt_index=prompt,
        rollout_index=0,
        prompt_ids=ids[:prompt_tokens],
        answer_ids=ids[prompt_tokens:],
        num_trained=answer_tokens,
        advantage=1.0,
        source_logprob=None,
        length=float(answer_tokens),
    )


# In a micro-batch of this sample alone the last of two ranks has all trained rows; so has the last of eight.
LATE, LATE_SOURCE = sample_of(0, 120, 3), -7.0
OWN = [sample_of(prompt, 5 + prompt, 7 + 3 * prompt) for prompt in range(8)]
CROSS = random_samples(8, seed=21)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, **sizes) for name, sizes in MODELS.items()}


@pytest.fixture(scope="module")
def seen(folders):
    """(model, layout) -> what every rank saw."""
    answers = run_group(NUM_RANKS, visit_layouts, folders)
    return {key: [answer[key] for answer in answers] for key in answers[0]}


def visit_layouts(folders):
    return {(name, layout): visit(folders[name], layout) for name in folders for layout in [(1, 1, 1), *LAYOUTS]}


def visit(folder, layout):
    """Token log-probs and scores, ratios in a first update, the gradient of one by all cells together."""
    tp, cp, pp = layout
    size = tp * cp * pp
    cell, cells = dist.get_rank() // size, NUM_RANKS // size
    options = {"tp": tp, "cp": cp, "pp": pp, "max_tokens_per_microbatch": MAX_TOKENS}
    actor = make_actor(folder, **options, reports=REPORTS)
    scores = actor.score([LATE, *OWN])
    scored = [dataclasses.replace(s, source_logprob=score.mean_logprob) for s, score in zip([LATE, *OWN], scores)]
    first = PolicyLoss(0, 1.0, AlgorithmConfig(), reference={})
    ratios = [r for report in actor.learn(scored, first).reports for r in report.terms.ratio_B.tolist()]
    found = {"logprobs": [score.token_logprobs for score in scores], "ratios": ratios}
    trained = [dataclasses.replace(LATE, source_logprob=LATE_SOURCE), *CROSS]
    mine = [sample for sample in trained if sample.prompt_index % cells == cell]
    actor = make_actor(folder, **options)
    found["gradient"], _ = gradient_by_descent(actor, lambda: actor.learn(mine, objective))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_gradients_are_those_without(seen, name, layout):
    expected = seen[name, (1, 1, 1)][0]
    for found in seen[name, layout]:
        for mine, its in zip(found["logprobs"], expected["logprobs"], strict=True):
            np.testing.assert_allclose(mine, its, rtol=0, atol=AGREED)
        assert relative_error(found["gradient"], expected["gradient"]) < AGREED


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_own_ratio_of_a_first_update_is_1_and_all_ranks_say_the_same(seen, name, layout):
    size = layout[0] * layout[1] * layout[2]
    for rank, found in enumerate(seen[name, layout]):
        assert found["ratios"] == [1.0] * (1 + len(OWN))
        leader = seen[name, layout][rank // size * size]
        assert all(map(np.array_equal, found["logprobs"], leader["logprobs"])), rank


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_whose_rows_one_rank_has_is_scored_as_by_hugging_face(seen, folders, name):
    expected = Oracle(folders[name]).token_logprobs(LATE).detach().numpy()
    assert abs(expected.mean() - LATE_SOURCE) < 3, "what the gradient above has of it would be nothing"
    for layout in LAYOUTS:
        for found in seen[name, layout]:
            np.testing.assert_allclose(found["logprobs"][0], expected, rtol=0, atol=LOGPROB_ERROR)


# ---- TransformerEngine's attention

LENGTHS, HEAD_DIM = (5, 17, 1, 30, 11), 16
ATTENTIONS = [(1, 2), (2, 2), (1, 4), (1, 1)]  # tp, cp on four ranks


class Attend(torch.nn.Module):
    """As Megatron wraps TransformerEngine's attention: it is told of all tensor ranks' heads, and sees its own."""

    def __init__(self, config, pg_collection):
        super().__init__()
        shards = pg_collection.tp.size()
        self.heads = config.num_attention_heads // shards, config.num_query_groups // shards
        self.inner = DotProductAttention(config.num_attention_heads, config.kv_channels, config.num_query_groups)

    def forward(self, query, key, value, mask, *, packed_seq_params):
        assert (query.shape[1], key.shape[1], value.shape[1]) == (*self.heads, self.heads[1])
        packed = packed_seq_params
        assert packed.cu_seqlens_q_padded is None
        starts = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_kv": packed.cu_seqlens_kv}
        longest = {"max_seqlen_q": packed.max_seqlen_q, "max_seqlen_kv": packed.max_seqlen_kv}
        return self.inner(query, key, value, mask, "thd", attn_mask_type="padding_causal", **starts, **longest)


def attend_on_every_layout():
    return {layout: attend(*layout) for layout in ATTENTIONS}


def attend(tp, cp):
    """This rank's place, the output of its tokens and heads, and the gradient of its query, by both attentions."""
    end_model_parallel()
    initialize_parallel(tp, 1, seed=1, cp=cp)
    groups = SimpleNamespace(
        tp=parallel_state.get_tensor_model_parallel_group(), cp=parallel_state.get_context_parallel_group()
    )
    config = TransformerConfig(
        num_layers=1, hidden_size=8 * HEAD_DIM, num_attention_heads=8, num_query_groups=2, attention_dropout=0.0
    )
    tokens, found = own_tokens(sum(LENGTHS)), []
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = packed_segments(starts, None)
    for attention in (PackedTEAttention(Attend, config, groups), PackedAttention(config, groups)):
        query, key, value = (whole.chunk(tp, dim=1)[groups.tp.rank()][tokens] for whole in wholes())
        query.requires_grad_()
        output = attention(query, key, value, None, packed_seq_params=packed)
        output.square().sum().backward()
        found.append((output.detach().reshape(len(query), -1, HEAD_DIM), query.grad))
    return tokens, groups.tp.rank(), found


def wholes():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(sum(LENGTHS), heads, HEAD_DIM, generator=generator) for heads in (8, 2, 2)]


def by_definition():
    """Causal softmax of every sequence in float64, and the gradient of the sum of its squares."""
    query, *rest = (whole.double() for whole in wholes())
    query.requires_grad_()
    parts = []
    for q, k, v in zip(*(whole.split(LENGTHS) for whole in (query, *rest)), strict=True):
        k, v = (tensor.repeat_interleave(4, dim=1) for tensor in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q, k) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), -torch.inf)
        parts.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1), v))
    output = torch.cat(parts)
    output.square().sum().backward()
    return output.detach(), query.grad


def test_both_attentions_are_the_definition_for_the_own_tokens():
    expected = by_definition()
    for answers in run_group(4, attend_on_every_layout):
        for (tp, _), (tokens, tp_rank, found) in answers.items():
            for whole, *parts in zip(expected, *found, strict=True):
                for part in parts:
                    wanted = whole.chunk(tp, dim=1)[tp_rank][tokens]
                    torch.testing.assert_close(part.double(), wanted, rtol=0, atol=AGREED)


# ---- a long sequence

LONG = 32_768


def supervised(logprob_R, _batch):
    return -logprob_R.mean(), None


def learn_a_long_one(folder):
    """(loss before, loss after two updates, tokens of this rank, highest memory)."""
    sample = sample_of(1, LONG - 64, 65)
    options = {"cp": 2, "max_tokens_per_microbatch": LONG, "recompute": "full"}
    actor = make_actor(folder, **options)
    tokens = own_tokens(LONG)
    losses = [actor.learn([sample], supervised).loss for _ in range(2)]
    return losses, tokens.stop - tokens.start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_a_sequence_of_32768_tokens_is_learned(tmp_path):
    """By a step of gradient descent the loss falls; nobody has more than half of the tokens."""
    sizes = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "max_positions": LONG, "tied": False}
    folder = make_model(tmp_path / "long", "llama", **sizes)
    for losses, num_tokens, memory in run_group(2, learn_a_long_one, folder):
        assert num_tokens == LONG // 2
        assert np.isfinite(losses).all() and losses[0] != losses[1]
        assert memory < 4 << 30, "attention has kept its square"
