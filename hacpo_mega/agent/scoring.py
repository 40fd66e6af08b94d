"""Scores of an agent's own answers: the actor's log-probs before it learns (log-prob recompute).

Answers are scored before the step's first update: first those of that update, packed as it will pack them, then the
rest together. With `training.score_in_first_update` the former are skipped: that update computes the same log-probs,
from the same weights in the same micro-batches, and its report has them bit for bit. This works only where nothing else
needs the scores first: another agent needs them before it learns, engine_correction before it makes an advantage.
With `rollout.one_step_off` the actor scores nothing: an older policy wrote the answers, and the engine returned its
log-probs with them.

Not here: the forward pass (megatron/actor.py), the ratios that use the scores (policy_loss.py).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hacpo_mega.agent.devices import OwnDevices
from hacpo_mega.agent.policy_loss import scores_of_update
from hacpo_mega.algorithm import engine_weights
from hacpo_mega.config import Config
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.records import Prompt, Rollout, Score, Stop, TokenSequence, UpdateStats
from hacpo_mega.samples.learner_view import trained_tokens
from hacpo_mega.samples.tokenizers import TextCodec


class Scoring:
    """Scores of one cell's own answers, step by step. Every rank of the cell makes every call with equal arguments."""

    def __init__(self, actor: Actor, devices: OwnDevices, codec: TextCodec, config: Config, num_cells: int) -> None:
        """`num_cells` cells share the agent's prompts; `devices` are those of `actor`."""
        self._actor, self._devices, self._codec = actor, devices, codec
        self._rollout, self._eos_in_loss = config.rollout, config.algorithm.eos_in_loss
        self._answers_per_prompt = config.answers_per_prompt
        self._answers_per_update = config.prompts_per_update // num_cells * config.answers_per_prompt
        self._in_first_update = config.scores_in_first_update

    def before_learning(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], own_P: Tensor, wanted_PG: Tensor
    ) -> list[Score | None]:
        """Log-probs under the actor before any update of this step; None for answers that need none now.

        rollouts    result of `Agent.roll_out`, in its order
        own_P       bool [P], prompts whose own answers this agent trains on: all of these are scored
        wanted_PG   bool [P, G], answers that others train on

        The answers of the first update are scored as it will pack them, so that it repeats these forwards bit by bit.
        The rest, and what only others want, follow together.
        """
        own_B, wanted_B = own_P.repeat_interleave(self._answers_per_prompt).tolist(), wanted_PG.flatten().tolist()
        texts = {prompt.index: prompt.text for prompt in prompts}
        scores: list[Score | None] = [None] * len(rollouts)
        of_first = [b for b in range(self._answers_per_update) if own_B[b]]
        asked = [b for b in range(len(rollouts)) if own_B[b] or wanted_B[b]]
        batches = [of_first, sorted({*asked} - {*of_first})]
        if self._in_first_update:
            for b in batches.pop(0):
                if self._num_trained(rollouts[b]) == 0:  # the update computes nothing for it either
                    scores[b] = Score(0.0, np.zeros(0, dtype=np.float32))
            if len(rollouts) == self._answers_per_update:  # nobody else wants any (config/checks/checks.py)
                return scores  # so nobody needs the device for it
        with self._devices.scoring():
            for batch in batches:
                sequences = [self._sequence(texts[rollouts[b].prompt_index], rollouts[b]) for b in batch]
                for b, score in zip(batch, self._actor.score(sequences), strict=True):
                    scores[b] = self._weighted(score, rollouts[b])
        return scores

    def after_learning(
        self, rollouts: Sequence[Rollout], scores: Sequence[Score | None], updates: Sequence[UpdateStats]
    ) -> list[Score | None]:
        """Completes `scores` with those that the step's first update has computed."""
        found = scores_of_update(updates[0])
        return [
            found.get((rollout.prompt_index, rollout.rollout_index)) if score is None else score
            for rollout, score in zip(rollouts, scores, strict=True)
        ]

    def _weighted(self, score: Score, rollout: Rollout) -> Score:
        """The score with weights for engine-trainer mismatch, as rollout.engine_correction asks."""
        of_answer, of_tokens = engine_weights(
            trainer_T=torch.from_numpy(score.token_logprobs),
            engine_T=torch.from_numpy(rollout.logprobs[: len(score.token_logprobs)]),
            correction=self._rollout.engine_correction,
            cap=self._rollout.engine_correction_cap,
        )
        return replace(score, engine_weight=of_answer, token_weights=None if of_tokens is None else of_tokens.numpy())

    def _sequence(self, prompt_text: str, rollout: Rollout) -> TokenSequence:
        prompt_ids = np.array(self._codec.encode_prompt(prompt_text), dtype=np.int32)
        return TokenSequence(prompt_ids, rollout.token_ids, self._num_trained(rollout), routing=rollout.routing)

    def _num_trained(self, rollout: Rollout) -> int:
        return trained_tokens(len(rollout.token_ids), rollout.stop is Stop.EOS, self._eos_in_loss)


class WritersScoring(Scoring):
    """Scores by the policy that wrote the answers, as its engine returned them."""

    def before_learning(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], own_P: Tensor, wanted_PG: Tensor
    ) -> list[Score | None]:
        """Engine log-probs of the answers that an agent trains on; no computation, no wait.

        own_P is bool [P], wanted_PG bool [P, G].
        """
        asked_B = own_P.repeat_interleave(self._answers_per_prompt) | wanted_PG.flatten()
        return [
            self._writers_score(rollout) if asked else None
            for rollout, asked in zip(rollouts, asked_B.tolist(), strict=True)
        ]

    def _writers_score(self, rollout: Rollout) -> Score:
        logprobs = rollout.logprobs[: self._num_trained(rollout)]
        mean = np.float32(logprobs.mean(dtype=np.float64)) if len(logprobs) else 0.0
        return Score(float(mean), logprobs)
