"""A lane's answers as one learner sees them: its own tokens, its own advantages (ALGORITHM section 2, steps 6 to 9).

Own answers keep the ids that were sampled, and so do answers of sources whose tokenizer is the same by content. All
others are decoded text, encoded with the learner's tokenizer, with its EOS behind them if the answer ended by itself.
Not here: what an advantage is (algorithm/), and packing (batches.py).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hacpo_mega.data.tokenizers import TextCodec
from hacpo_mega.records import Pool, Prompt, Sample, Stop, Trajectory

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class ViewCounts:
    """What became of the answers of one source: numbers of answers, and tokens of both sides over the kept ones.

    unjudged       no verdict: not trained, except that own ones stay in their micro-batch with advantage 0
    empty          nothing to train: no token, or none but an EOS that is not trained
    undecodable    the text holds U+FFFD, so the learner may read other bytes than the source wrote; only counted
    unwritable     a character has no token of the learner: dropped
    too_long       longer than the learner's limit after encoding: dropped, never cut
    """

    num_answers: int = 0
    num_kept: int = 0
    num_unjudged: int = 0
    num_empty: int = 0
    num_undecodable: int = 0
    num_unwritable: int = 0
    num_too_long: int = 0
    source_tokens: int = 0
    learner_tokens: int = 0


class LearnerView:
    """How one learner reads the answers of every source."""

    def __init__(
        self,
        learner: int,
        codecs: Sequence[TextCodec],
        *,
        shares_answers: bool,
        eos_in_loss: bool,
        ratio_length: str,
        max_answer_tokens: int,
    ) -> None:
        """`codecs` are those of all agents, in order; whether two agree is decided by their content."""
        self._learner = learner
        self._codec = codecs[learner]
        self._keeps_ids = tuple(codec.fingerprint == self._codec.fingerprint for codec in codecs)
        self._shares_answers = shares_answers
        self._eos_in_loss = eos_in_loss
        self._ratio_length = ratio_length
        self._max_answer_tokens = max_answer_tokens

    def samples(self, pool: Pool, advantages_PNG: Tensor) -> tuple[list[Sample], dict[int, ViewCounts]]:
        """The samples to train on, by prompt, source and rollout, and the counts of every source (by its index)."""
        sources = range(len(self._keeps_ids)) if self._shares_answers else (self._learner,)
        tallies = {source: Counter() for source in sources}
        samples = [
            sample
            for prompt, by_agent, advantages_NG in zip(pool.prompts, pool.trajectories_PNG, advantages_PNG.tolist())
            for source in sources
            for trajectory, advantage in zip(by_agent[source], advantages_NG[source], strict=True)
            if (sample := self._sample(prompt, trajectory, advantage, tallies[source])) is not None
        ]
        return samples, {source: ViewCounts(**tally) for source, tally in tallies.items()}

    def _sample(self, prompt: Prompt, trajectory: Trajectory, advantage: float, tally: Counter) -> Sample | None:
        """The answer as a sample, or None when it cannot be trained; counts what was met."""
        rollout, is_self = trajectory.rollout, trajectory.agent == self._learner
        tally["num_answers"] += 1
        tally["num_unjudged"] += not trajectory.verdict.is_judged
        tally["num_undecodable"] += REPLACEMENT in rollout.text
        # An own answer without a verdict stays, with advantage 0: leaving it out would pack the others differently from
        # when they were scored, and their first ratio would no longer be exactly 1.
        if not trajectory.verdict.is_judged and not is_self:
            return None
        try:
            answer_ids = self._answer_ids(trajectory)
        except ValueError:
            tally["num_unwritable"] += 1
            return None
        num_trained = len(answer_ids) - (rollout.stop is Stop.EOS and not self._eos_in_loss)
        if num_trained == 0 or trajectory.num_scored == 0:
            tally["num_empty"] += 1
            return None
        if len(answer_ids) > self._max_answer_tokens:
            tally["num_too_long"] += 1
            return None
        tally["num_kept"] += 1
        tally["source_tokens"] += len(rollout.token_ids)
        tally["learner_tokens"] += len(answer_ids)
        return Sample(
            source=trajectory.agent,
            is_self=is_self,
            prompt_index=prompt.index,
            rollout_index=rollout.rollout_index,
            prompt_ids=np.array(self._codec.encode_prompt(prompt.text), dtype=np.int32),
            answer_ids=answer_ids,
            num_trained=num_trained,
            advantage=advantage,
            source_logprob=trajectory.mean_logprob,
            length=float(num_trained if self._ratio_length == "own" else trajectory.num_scored),
        )

    def _answer_ids(self, trajectory: Trajectory) -> np.ndarray:
        rollout, ended = trajectory.rollout, trajectory.rollout.stop is Stop.EOS
        if trajectory.agent == self._learner:
            return rollout.token_ids
        if self._keeps_ids[trajectory.agent]:
            # A base model and its instruct twin may share every token but the one that ends an answer.
            tail = [self._codec.eos_id] if ended else []
            return np.concatenate([rollout.token_ids[: len(rollout.token_ids) - ended], tail]).astype(np.int32)
        return np.array(self._codec.encode_answer(rollout.text, ended), dtype=np.int32)
