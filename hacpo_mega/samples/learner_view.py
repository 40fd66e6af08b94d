"""A lane's pool as one learner trains on it: own tokens, own prompt, own advantage (ALGORITHM section 2, step 7).

Own answers keep the ids that were sampled: decoding and encoding them again would train on tokens nobody sampled. So do
answers of a source with the identical tokenizer, except that the final EOS becomes the learner's own (a base model and
its instruct twin differ in that one token). Other answers are encoded from text as a continuation of a prompt.
Not here: the advantages themselves (algorithm/) and which samples share an update (packing.py).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hacpo_mega.records import Pool, Prompt, Sample, Stop, Trajectory, ViewCounts
from hacpo_mega.samples.tokenizers import TextCodec

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class ViewRules:
    """How a learner sees the answers of a pool.

    same_tokenizer      per source agent: whether its tokenizer is the learner's, by content (`TextCodec.fingerprint`)
    shares_answers      whether answers of other agents are trained on at all
    eos_in_loss         whether the final EOS is a trained token
    ratio_length        what the learner's log-prob sum is divided by: its own token count, or the source's
    max_answer_tokens   a re-encoded answer of more tokens is dropped, never cut: its ending is what was judged
    """

    same_tokenizer: tuple[bool, ...]
    shares_answers: bool
    eos_in_loss: bool
    ratio_length: Literal["own", "source"]
    max_answer_tokens: int


def trained_tokens(num_tokens: int, ended: bool, eos_in_loss: bool) -> int:
    """How many leading tokens of an answer its loss trains, and its score averages: all, or all but the final EOS."""
    return num_tokens - 1 if ended and not eos_in_loss else num_tokens


def learner_view(
    pool: Pool, advantages_PNG: torch.Tensor, learner: int, codec: TextCodec, rules: ViewRules
) -> tuple[list[Sample], ViewCounts]:
    """The samples of `learner`, ordered by (prompt, source, rollout), and what became of the rest.

    `advantages_PNG` has omega applied already; it may be NaN where an answer is unjudged. `codec` is the learner's.
    """
    tally: Counter[str] = Counter()
    samples = []
    for p, prompt in enumerate(pool.prompts):
        prompt_ids = np.array(codec.encode_prompt(prompt.text), dtype=np.int32)
        for j, group in enumerate(pool.trajectories_PNG[p]):
            if j != learner and not rules.shares_answers:
                continue
            for g, trajectory in enumerate(group):
                answer_ids = _answer_ids(trajectory, j == learner, codec, rules, tally)
                if answer_ids is not None:
                    advantage = float(advantages_PNG[p, j, g]) if trajectory.is_judged else 0.0
                    samples.append(_sample(prompt, prompt_ids, trajectory, answer_ids, advantage, learner, rules))
    return samples, ViewCounts(**tally)


def _answer_ids(
    trajectory: Trajectory, is_self: bool, codec: TextCodec, rules: ViewRules, tally: Counter[str]
) -> np.ndarray | None:
    """The answer in the learner's tokens, or None when it is not trained on; counts which and why."""
    rollout = trajectory.rollout
    tally["num_unjudged"] += not trajectory.is_judged
    # An own answer without a verdict stays, with advantage 0: leaving it out would pack the others differently from
    # when they were scored, and their first ratio would no longer be exactly 1.
    if not trajectory.is_judged and not is_self:
        return None
    if is_self:
        ids = rollout.token_ids
    elif rules.same_tokenizer[trajectory.agent]:
        ids = _with_own_end(rollout.token_ids, rollout.stop == Stop.EOS, codec.eos_id)
    else:
        ids = _reencoded(trajectory, codec, rules.max_answer_tokens, tally)
    if ids is not None:
        tally["num_own" if is_self else "num_cross"] += 1
        tally["num_empty"] += rollout.text == ""
        tally["num_truncated"] += rollout.stop != Stop.EOS
        tally["num_undecodable"] += REPLACEMENT in rollout.text
    return ids


def _with_own_end(ids: np.ndarray, ended: bool, eos_id: int) -> np.ndarray:
    return np.append(ids[:-1], np.int32(eos_id)) if ended else ids


def _reencoded(trajectory: Trajectory, codec: TextCodec, max_tokens: int, tally: Counter[str]) -> np.ndarray | None:
    rollout = trajectory.rollout
    try:
        ids = codec.encode_answer(rollout.text, ended=rollout.stop == Stop.EOS)
    except ValueError:
        tally["num_unencodable"] += 1
        return None
    if len(ids) > max_tokens:
        tally["num_too_long"] += 1
        return None
    tally["num_reencoded"] += 1
    tally["num_changed"] += codec.decode_answer(ids) != rollout.text
    tally["token_ratio_sum"] += len(ids) / max(1, len(rollout.token_ids))
    return np.array(ids, dtype=np.int32)


def _sample(
    prompt: Prompt,
    prompt_ids: np.ndarray,
    trajectory: Trajectory,
    answer_ids: np.ndarray,
    advantage: float,
    learner: int,
    rules: ViewRules,
) -> Sample:
    rollout = trajectory.rollout
    num_trained = trained_tokens(len(answer_ids), rollout.stop == Stop.EOS, rules.eos_in_loss)
    is_self = trajectory.agent == learner
    # an own ratio is only 1 before the first update if both sides average over the same tokens
    assert not is_self or num_trained == trajectory.num_scored, (num_trained, trajectory.num_scored)
    assert np.isfinite(advantage), (prompt, trajectory.agent, rollout.rollout_index)
    assert np.isfinite(trajectory.mean_logprob), (prompt, trajectory.agent, rollout.rollout_index)
    length = num_trained if rules.ratio_length == "own" else trajectory.num_scored
    return Sample(
        source=trajectory.agent,
        is_self=is_self,
        prompt_index=prompt.index,
        rollout_index=rollout.rollout_index,
        prompt_ids=prompt_ids,
        answer_ids=answer_ids,
        num_trained=num_trained,
        advantage=advantage,
        source_logprob=trajectory.mean_logprob,
        length=float(max(1, length)),  # an answer without a trained token has the empty sum 0, and 0 / 1 is its mean
    )


def same_tokenizers(learner_fingerprint: str, source_fingerprints: Sequence[str]) -> tuple[bool, ...]:
    """Per source: whether its tokenizer is the learner's, by content."""
    return tuple(fingerprint == learner_fingerprint for fingerprint in source_fingerprints)
