"""Packed answers of a micro-batch, as an objective sees them: the argument of users' functions, and of methods whose
ratio is one per token.

Elsewhere: what advantages see (judged.py), and the objectives that the kernels have (objective.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedAnswers:
    """B answers of one learner, own and others', with R trained tokens end to end; all numbers float64.

    logprob_R        log-prob of each trained token under the learner now, nats; differentiable
    old_logprob_R    log-prob of the same token under the policy that wrote it, before the step's first update; NaN for
                     an answer whose source has another tokenizer
    starts_B1        int64 [B + 1]: the tokens of answer b are starts_B1[b]:starts_B1[b + 1]
    log_ratio_B      log s, learner over source of mean log-probs, bounded by log_ratio_clamp; differentiable
    advantage_B      A, with omega in it
    is_self_B        bool, own answers
    source_B         int64, number of the agent that wrote it
    prompt_B         int64, place of its prompt in the step; own and others' answers to it have the same
    length_B         token count that divides the learner's sum of log-probs in log_ratio_B (`ratio_length`)
    update_index     m, the updates already made in this step
    step, num_steps  the current step, from 1, and the last one
    A micro-batch has some of an update's answers, chosen by their length: a result must not depend on the others. A NaN
    that enters exp reaches the gradient even behind torch.where: replace it first.
    """

    logprob_R: Tensor
    old_logprob_R: Tensor
    starts_B1: Tensor
    log_ratio_B: Tensor
    advantage_B: Tensor
    is_self_B: Tensor
    source_B: Tensor
    prompt_B: Tensor
    length_B: Tensor
    update_index: int
    step: int = 1
    num_steps: int = 1

    @property
    def num_tokens_B(self) -> Tensor:
        """Number of trained tokens of each answer, int64 [B]."""
        return self.starts_B1.diff()

    @property
    def ratio_R(self) -> Tensor:
        """r_t, learner over source of each token, differentiable [R]; NaN where old_logprob_R is."""
        return (self.logprob_R - self.old_logprob_R).exp()

    def by_token(self, value_B: Tensor) -> Tensor:
        """The value of its answer for each token, [R], from values [B]."""
        return torch.repeat_interleave(value_B, self.num_tokens_B, output_size=len(self.logprob_R))

    def mean(self, value_R: Tensor) -> Tensor:
        """Mean over the tokens of each answer, [B], from values [R]; 0 for an answer without tokens."""
        return self.sum(value_R) / self.num_tokens_B.clamp(min=1)

    def sum(self, value_R: Tensor) -> Tensor:
        """Sum over the tokens of each answer, [B], from values [R]."""
        return torch.segment_reduce(value_R, "sum", offsets=self.starts_B1)
