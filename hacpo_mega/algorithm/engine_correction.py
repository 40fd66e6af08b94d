"""Truncated importance sampling between engine and trainer. Off by default (`rollout.engine_correction`).

Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".

Engine and trainer compute one policy with different kernels, so answers are sampled from pi_engine and trained as if
they were sampled from pi_trainer. With d_t = log pi_trainer(t) - log pi_engine(t), both before the step's first update,

by token      w_t = min(exp(d_t), cap)          scales the gradient of token t; the value of the loss stays
by sequence   w   = min(exp(sum_t d_t), cap)    scales the answer's advantage, for every learner
by ratio      w   = 1                           the ratio's denominator is pi_engine; pi_trainer is not computed

The weight of a sequence on the advantage is exact: own losses -min(s A, clip(s) A) and cross losses -c sg[c]^alpha A
are both linear in |A|, so loss and gradient are multiplied by w. Weights by token exist for own answers only: another
agent's answer has other tokens in the learner's tokenizer, and keeps weight 1. A KL to the initial policy is not
weighted.

Elsewhere: the measured mismatch (logbook/steps/step_metrics.py).
"""

from typing import Literal

from torch import Tensor


def engine_weights(
    trainer_T: Tensor, engine_T: Tensor, correction: Literal["none", "token", "sequence", "ratio"], cap: float
) -> tuple[float, Tensor | None]:
    """(weight of an answer, weights [T] of its tokens) from the log-probs [T] of its trained tokens, in nats.

    Both are rounded to fp32. Without a correction by sequence, and for an answer of no tokens, the weight of the answer
    is 1; without one by token, that of the tokens is None.
    """
    difference_T = trainer_T.double() - engine_T.double()
    if correction == "sequence":
        return difference_T.sum().exp().clamp(max=cap).float().item(), None
    if correction == "token":
        return 1.0, difference_T.exp().clamp(max=cap).float()
    return 1.0, None


def scale_gradient(token_logprob_R: Tensor, weight_R: Tensor) -> Tensor:
    """Returns the same values [R], bit for bit if finite; the gradient of each is multiplied by its weight [R]."""
    constant_R = token_logprob_R.detach()
    return constant_R + weight_R * (token_logprob_R - constant_R)
