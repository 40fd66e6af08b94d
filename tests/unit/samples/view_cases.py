"""Hand-made pools, and a learner's view of them with the rules of an ordinary run."""

import math
from dataclasses import replace

import numpy as np
import torch
from run_cases import CHARACTERS

from hacpo_mega.records import Pool, Prompt, ReencodingCounts, Rollout, Score, Stop, Trajectory, Verdict, trained_tokens
from hacpo_mega.samples import learner_view as view
from hacpo_mega.samples.learner_view import ReencodingRules

PAIRS = (*CHARACTERS, *map(str, range(10, 20)), "+1", "=1", ",1", ";1")
PROMPTS = (Prompt(4, "a", "47+85=", "132"), Prompt(5, "b", "s5281=", "1258"))


def rules_of(sources, **changes):
    rules = ReencodingRules(
        tuple(sources),
        shares_answers=True,
        trains_changed=False,
        eos_in_loss=True,
        ratio_length="own",
        max_answer_tokens=24,
        max_prompt_tokens=100,
    )
    return replace(rules, **changes)


UNJUDGED = (Verdict.TIMEOUT, Verdict.ERROR)


def trajectory(codec, agent, g, text, stop=Stop.EOS, verdict=Verdict.WRONG, eos_in_loss=True, ids=None):
    ids = np.array(codec.encode_answer(text, stop == Stop.EOS) if ids is None else ids, dtype=np.int32)
    num_scored = trained_tokens(len(ids), stop == Stop.EOS, eos_in_loss)
    reward = float(verdict == Verdict.CORRECT) if verdict not in UNJUDGED else math.nan
    return Trajectory(agent, Rollout(4, g, ids, text, stop), verdict, reward, -0.1 * (g + 1), num_scored)


def one_prompt(*by_agent):
    return Pool((PROMPTS[0],), (tuple(by_agent),))


def constant(pool, value=0.5):
    shape = (len(pool.prompts), len(pool.trajectories_PNG[0]), len(pool.trajectories_PNG[0][0]))
    return torch.full(shape, value, dtype=torch.float64)


def own_scores(pool, learner):
    """A score of every own answer that no other answer has."""
    return {
        (prompt.index, g): Score(
            own.mean_logprob, np.linspace(-0.1, -prompt.index - g, own.num_scored, dtype=np.float32)
        )
        for prompt, by_agent in zip(pool.prompts, pool.trajectories_PNG)
        for g, own in enumerate(by_agent[learner])
    }


def view_by_source(pool, advantages_PNG, learner, codec, rules, trains_PNG=None):
    everything_PNG = torch.ones_like(advantages_PNG, dtype=torch.bool)
    trains_PNG = everything_PNG if trains_PNG is None else trains_PNG
    return view.learner_view(pool, advantages_PNG, trains_PNG, learner, codec, rules, own_scores(pool, learner))


def learner_view(*arguments):
    """Samples, and the counts of all sources together: every answer is a sample, or left out for one reason."""
    samples, counts = view_by_source(*arguments)
    pool, learner, rules = arguments[0], arguments[2], arguments[4]
    offered = {
        (prompt.index, j, answer.rollout.rollout_index)
        for prompt, by_agent in zip(pool.prompts, pool.trajectories_PNG)
        for j, group in enumerate(by_agent)
        for answer in (group if j == learner or rules.shares_answers else ())
    }
    trained = [(sample.prompt_index, sample.source, sample.rollout_index) for sample in samples]
    left_out = [(a.prompt_index, j, a.rollout_index) for j, view in enumerate(counts) for a in view.dropped]
    assert sorted(trained + left_out) == sorted(offered)
    return samples, sum(counts, start=ReencodingCounts())
