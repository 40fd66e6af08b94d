"""Methods whose ratio is one per token, and the examples of configs/methods: plain Python per answer, float64 autograd.

A case is a few answers of unequal length, own and others', whose token ratios lie on both sides of every bound.
"""

import math
import statistics
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import answers_of, config_of, cube, judged, sequence_objective
from repository import ROOT
from run_cases import CHARACTERS, PAIRS, agent_table, write_config

from hacpo_mega.agent.policy_loss import PolicyLoss
from hacpo_mega.algorithm import advantages_of, objective_loss, objective_of, token_objective
from hacpo_mega.config import load_config
from hacpo_mega.records import MicroBatch, Sample

U64, U32 = 2.0**-53, 2.0**-24
METHODS = ROOT / "configs" / "methods"
Case = tuple[torch.Tensor, torch.Tensor, float, bool]  # tokens now, tokens of the source, advantage, own


def cases(seed: int, *, gap: float = 0.0) -> list[Case]:
    """Nine answers of 1 to 9 tokens; a source finds each token likelier by `gap` nats on the average."""
    generator = np.random.default_rng(seed)
    found = []
    for b in range(9):
        now = -generator.uniform(0.01, 2.0, generator.integers(1, 10))
        old = now - generator.choice([1e-4, -2e-3, 0.1, -0.15, 0.4, -0.5, 0.9], len(now)) + (gap if b % 3 else 0.0)
        found.append((torch.tensor(now), torch.tensor(old), generator.choice([-1.5, -0.5, 0.7, 1.0]), b % 3 == 0))
    return found


def loss_by_token(method: str, limit: float, now: torch.Tensor, old: torch.Tensor, A: float, own: bool) -> torch.Tensor:
    """The equations of docs/guide/methods.md for one answer: a loop over its tokens."""
    if method == "sgt" and not own:
        return -A * now.mean()
    divergence = sum((o - n).item() for n, o in zip(now, old))
    total = 0.0
    for n, o in zip(now, old):
        r = (n - o).exp()
        if own:
            total = total + torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
        elif not (A < 0 and divergence > limit):
            total = total + min(r.item(), 2.0) * A * n
    return -total / len(now) + 0.0 * now.sum()


def packed(found: list[Case]) -> tuple[torch.Tensor, ...]:
    """Tokens [R] with a gradient, and what `answers_of` takes after them; others' means are those of their tokens."""
    length_B = torch.tensor([float(len(now)) for now, *_ in found])
    starts_B1 = torch.tensor([0, *length_B.long().tolist()]).cumsum(0)
    source_B = torch.stack([old.mean() for _, old, *_ in found])
    advantage_B = torch.tensor([A for *_, A, _ in found], dtype=torch.float64)
    is_self_B = torch.tensor([own for *_, own in found])
    tokens_R = torch.cat([now for now, *_ in found]).requires_grad_()
    return tokens_R, starts_B1, source_B, advantage_B, is_self_B, length_B


def reference(loss_of, found: list[Case]) -> tuple[list[float], torch.Tensor, list[float]]:
    """Losses, the gradient of every token [R], and the weight of each answer: - (sum of its gradient) / A."""
    losses, gradients, weights = [], [], []
    for now, old, A, own in found:
        tokens = now.clone().requires_grad_()
        loss = loss_of(tokens, old, A, own)
        gradients.append(torch.autograd.grad(loss, tokens)[0])
        losses.append(loss.item())
        weights.append(-gradients[-1].sum().item() / A)
    return losses, torch.cat(gradients), weights


def check_objective(loss_of, config, found: list[Case], m: int = 1) -> None:
    """Loss, token gradient and reported weight of packed answers in float64 are those of the reference."""
    tokens_R, *columns = packed(found)
    old_R = torch.cat([old for _, old, *_ in found])
    answers = answers_of(tokens_R, *columns, m, old_logprob_R=old_R)
    loss_B, terms = objective_loss(answers, objective_of(config), config)
    loss_B.sum().backward()
    losses, gradient_R, weights = reference(loss_of, found)
    # an exp and a handful of products and sums of at most nine numbers of size one
    bound = {"rtol": 64 * U64, "atol": 64 * U64}
    torch.testing.assert_close(loss_B.detach(), torch.tensor(losses, dtype=torch.float64), **bound)
    torch.testing.assert_close(tokens_R.grad, gradient_R, **bound)
    torch.testing.assert_close(terms.weight_B, torch.tensor(weights, dtype=torch.float64), **bound)
    by_answer = [(now.mean() - old.mean()).exp() for now, old, *_ in found]
    by_token = [(now - old).exp().mean() for now, old, *_ in found]
    ratio_B = torch.stack(by_token if config.is_token_level else by_answer)
    # a mean log-prob travels as float32 here, a token's as it is
    torch.testing.assert_close(terms.ratio_B, ratio_B, rtol=4 * U32, atol=0)


@pytest.mark.parametrize("limit", [50.0, 1.0])
@pytest.mark.parametrize("method", ["sgt", "f_tis"])
def test_a_method_by_token_is_its_equation(method, limit):
    options = {"answer_divergence_limit": limit} if method == "f_tis" else {}
    config = config_of(method, ratio_level="token", **options)
    assert (config.eps_low, config.eps_high, config.is_token_level) == (0.2, 0.28, True)
    for seed in range(3):
        check_objective(lambda *case: loss_by_token(method, limit, *case), config, cases(seed, gap=0.1))


def test_the_limit_of_an_answer_is_the_texts_and_borders_are_kept():
    """A sum of exactly 50 nats over ten tokens is kept, a little more is dropped; A > 0 is always kept."""
    config = config_of("f_tis", ratio_level="token")
    for gap, A, weight in ((5.0, -1.0, math.exp(-5.0)), (5.125, -1.0, 0.0), (5.125, 1.0, math.exp(-5.125))):
        now = torch.full((10,), -6.0, dtype=torch.float64)
        tokens_R, *columns = packed([(now, now + gap, A, False)])
        answers = answers_of(tokens_R, *columns, 0, old_logprob_R=now + gap)
        _, terms = objective_loss(answers, objective_of(config), config)
        assert terms.weight_B.item() == pytest.approx(weight, rel=16 * U64)


@given(seed=st.integers(0, 2**16), shift=st.floats(-0.6, 1.5))
@settings(max_examples=10)
def test_f_tis_by_token_is_that_by_answer_where_tokens_have_one_ratio(seed, shift):
    """And no limit acts: min(r_t, C) is then min(s, C), and 1/|b| sum logprob_t the mean log-prob."""
    found = [(now, now - shift, A, False) for now, _, A, _ in cases(seed)]
    tokens_R, starts, source_B, advantage_B, is_self_B, length_B = packed(found)
    token = config_of("f_tis", ratio_level="token", answer_divergence_limit=1e3)
    answers = answers_of(
        tokens_R, starts, source_B, advantage_B, is_self_B, length_B, 0, old_logprob_R=tokens_R.detach() - shift
    )
    objective_loss(answers, objective_of(token), token)[0].sum().backward()
    mean_B = torch.stack([now.mean() for now, *_ in found])
    _, slope_B, _ = sequence_objective(
        mean_B, source_B, advantage_B, is_self_B, 0, config_of("f_tis", divergence_limit=1e3)
    )
    expected_R = torch.repeat_interleave(slope_B / length_B, length_B.long())
    torch.testing.assert_close(tokens_R.grad, expected_R, rtol=256 * U64, atol=0)


@given(seed=st.integers(0, 2**16), method=st.sampled_from(["sgt", "f_tis"]))
@settings(max_examples=10)
def test_an_agent_alone_under_a_method_by_token_is_grpo(seed, method):
    found = [(now, old, A, True) for now, old, A, _ in cases(seed)]
    config, old_R = config_of(method, ratio_level="token"), torch.cat([old for _, old, *_ in found])
    gradients = []
    for is_grpo in (True, False):
        tokens_R, *columns = packed(found)
        if is_grpo:
            loss_B, _ = token_objective(tokens_R, old_R, columns[2], columns[0], config_of("grpo"))
        else:
            loss_B, _ = objective_loss(
                answers_of(tokens_R, *columns, 1, old_logprob_R=old_R), objective_of(config), config
            )
        loss_B.sum().backward()
        gradients.append(tokens_R.grad)
    torch.testing.assert_close(*gradients, rtol=64 * U64, atol=0)
    rewards, capability = cube(seed, 1), torch.ones(1)
    ours, grpo = (advantages_of(judged(rewards, capability, 0), which) for which in (config, config_of("grpo")))
    assert torch.equal(ours, grpo)


# ---- through an update


def micro_batch(found: list[Case], *, others_have_tokens: bool) -> MicroBatch:
    samples = [
        Sample(
            prompt_ids=np.zeros(1, np.int32),
            answer_ids=np.zeros(len(now), np.int32),
            num_trained=len(now),
            source=0 if own else 1,
            is_self=own,
            prompt_index=10 + b,
            rollout_index=b,
            advantage=A,
            source_logprob=np.float32(old.mean()).item(),
            length=float(len(now)),
            old_logprobs=old.float().numpy() if own or others_have_tokens else None,
        )
        for b, (now, old, A, own) in enumerate(found)
    ]
    starts = torch.tensor([0, *(sample.num_trained for sample in samples)]).cumsum(0).int()
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(none, none, starts, none, none, none, starts, tuple(samples), int(starts[-1]))


@pytest.mark.parametrize("method", ["sgt", "f_tis"])
def test_an_update_by_token_is_the_weighted_sum(method):
    """float32 tokens; sgt needs no log-prob of others' tokens, so agents of any tokenizer can have it."""
    found, config = cases(5, gap=0.1), config_of(method, ratio_level="token")
    tokens = torch.cat([now for now, *_ in found]).float().requires_grad_()
    batch = micro_batch(found, others_have_tokens=method == "f_tis")
    loss, report = PolicyLoss(1, 0.125, config, reference={})(tokens, batch)
    loss.backward()
    losses, gradient_R, _ = reference(lambda *case: loss_by_token(method, 50.0, *case), found)
    # a token ratio is off by the roundings of two log-probs below 2.9 nats, and the sum of nine losses by theirs
    bound = 16 * 2.9 * U32
    assert loss.item() == pytest.approx(0.125 * sum(losses), abs=bound * 0.125 * sum(map(abs, losses)))
    torch.testing.assert_close(tokens.grad.double(), 0.125 * gradient_R, rtol=bound, atol=bound * 0.125)
    assert report.terms.is_self_B.tolist() == [own for *_, own in found]


# ---- the examples


def advantage_by_hand(name: str, rewards: list[list[float]], k: int, j: int, g: int) -> float:
    """The equations of configs/methods/value.py for one answer; rewards[agent][answer] of one prompt."""
    judged_rewards = [r for group in rewards for r in group if not math.isnan(r)]
    reward = rewards[j][g]
    if math.isnan(reward) or max(judged_rewards) - min(judged_rewards) <= 1e-6:
        return 0.0
    own = [r for r in rewards[k] if not math.isnan(r)]
    surplus = reward - (statistics.fmean(own) if own else 0.0)
    surplus = surplus if j == k else max(surplus, 0.0)
    return 2.0 * surplus if name == "value_raw" else surplus / (statistics.stdev(judged_rewards) + 1e-6)


@pytest.mark.parametrize("name", ["value", "value_raw"])
@pytest.mark.parametrize("num_agents", [2, 3])
def test_the_example_of_advantages_is_its_equation(name, num_agents):
    config = config_of("naive", advantages=f"{METHODS}/value.py:{name}")
    for seed in range(3):
        rewards, learner = cube(seed, num_agents), seed % num_agents
        ours = advantages_of(judged(rewards, torch.ones(num_agents), learner), config)
        for place in np.ndindex(*rewards.shape):
            p, j, g = place
            by_hand = advantage_by_hand(name, rewards[p].tolist(), learner, j, g)
            # R - V over a deviation of at least .05
            assert ours[place].item() == pytest.approx(by_hand, abs=64 * U64 / 0.05), place


def test_the_example_by_skill_is_hacpo_with_each_skills_capability():
    """Two skills; eq. 10 in plain Python, with 64 answers of the pooled capability beside those of a skill."""
    config = config_of("hacpo", advantages=f"{METHODS}/by_skill.py:by_skill")
    rewards = (cube(1, 2) > 0.5).double()
    skill_P = torch.arange(len(rewards)) % 2
    mean_NS, count_NS = torch.tensor([[0.8, 0.1], [0.3, torch.nan]]), torch.tensor([[128.0, 64.0], [32.0, 0.0]])
    known = {"skill_names": ("chain", "sum"), "skill_P": skill_P}
    known |= {"skill_capability_NS": mean_NS.double(), "skill_judged_NS": count_NS.double()}
    capability = [[(128 * 0.8 + 64 * 0.5) / 192, (64 * 0.1 + 64 * 0.5) / 128], [(32 * 0.3 + 64 * 0.4) / 96, 0.4]]
    pooled = torch.tensor([0.5, 0.4], dtype=torch.float64)
    ours = advantages_of(replace(judged(rewards, pooled, 1), **known), config)
    for p, j, g in np.ndindex(*rewards.shape):
        own, other = (capability[k][p % 2] for k in (1, 0))
        flat = rewards[p].flatten().tolist()
        # the baseline of the answer's author, the coefficient omega(author, learner)
        mine, theirs = rewards[p, j].sum().item(), rewards[p, 1 - j].sum().item()
        ratio = own / other if j == 1 else other / own
        baseline = (mine + ratio * theirs) / len(flat)
        spread = statistics.stdev(flat)
        by_hand = 0.0 if spread == 0 else (rewards[p, j, g].item() - baseline) / (spread + 1e-6)
        by_hand *= 1.0 if j == 1 else other / own
        assert ours[p, j, g].item() == pytest.approx(by_hand, abs=1e-6), (p, j, g)


def cispo(now: torch.Tensor, old: torch.Tensor, A: float, own: bool) -> torch.Tensor:
    return -sum(min((n - o).exp().item(), 1.28) * A * n for n, o in zip(now, old)) / len(now)


def sapo(now: torch.Tensor, old: torch.Tensor, A: float, own: bool) -> torch.Tensor:
    tau = 1.0 if A > 0 else 1.05
    return -sum(4 / tau / (1 + (-tau * ((n - o).exp() - 1)).exp()) * A for n, o in zip(now, old)) / len(now)


@pytest.mark.parametrize("loss_of", [cispo, sapo])
def test_an_example_of_an_objective_is_its_equation(loss_of):
    name = loss_of.__name__
    config = config_of("gspo", objective=f"{METHODS}/{name}.py:{name}")
    for seed in range(3):
        own = [(now, old, A, True) for now, old, A, _ in cases(seed)]
        check_objective(loss_of, config, own)
    tokens = torch.cat([now for now, *_ in own]).float().requires_grad_()
    loss, _ = PolicyLoss(1, 0.125, config, reference={})(tokens, micro_batch(own, others_have_tokens=False))
    loss.backward()
    losses, gradient_R, _ = reference(loss_of, own)
    bound = 16 * 2.9 * U32  # as above
    assert loss.item() == pytest.approx(0.125 * sum(losses), abs=bound * 0.125 * sum(map(abs, losses)))
    torch.testing.assert_close(tokens.grad.double(), 0.125 * gradient_R, rtol=bound, atol=bound * 0.125)


@pytest.mark.parametrize("file", sorted(METHODS.glob("*.py")), ids=lambda file: file.stem)
def test_what_an_example_says_to_write_is_a_configuration_that_is_taken(file, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = file.read_text()
    table = tomllib.loads(text[text.index("    [algorithm]") : text.index('"""', 3)].replace("\n    ", "\n"))
    agents = [agent_table(tmp_path, name, "qwen3", CHARACTERS) for name in ("a", "b")]
    written = load_config(write_config(tmp_path, agents, algorithm=table["algorithm"]))
    assert table["algorithm"].items() <= written.algorithm.model_dump().items()


def test_f_tis_by_token_is_refused_where_tokenizers_differ(tmp_path):
    files = {}
    for name, vocabulary in (("same", CHARACTERS), ("other", CHARACTERS + PAIRS)):
        folder = tmp_path / name
        folder.mkdir()
        agents = [agent_table(folder, "a", "qwen3", CHARACTERS), agent_table(folder, "b", "qwen3", vocabulary)]
        files[name] = write_config(folder, agents, algorithm={"method": "f_tis", "ratio_level": "token"})
    assert load_config(files["same"]).algorithm.needs_one_tokenizer
    with pytest.raises(ValueError, match=r"algorithm\.ratio_level: 'token' of method 'f_tis' .* a, b have different"):
        load_config(files["other"])
    assert load_config(files["other"], ["algorithm.method=sgt"]).algorithm.is_token_level  # no token ratio of others'
