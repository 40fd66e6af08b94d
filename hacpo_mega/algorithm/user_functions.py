"""Calls of functions in place of the kernels' or a method's own: the user's, by name, and token-level objectives.

    [algorithm]
    method = "naive"                          # who learns from whom
    advantages = "mine.py:advantages"         # Judged -> advantages_PNG
    objective = "mine.py:objective"           # PackedAnswers -> loss_B

All must be pure: every rank computes them for itself, and a different result would train a different model. An
objective is differentiated by autograd, in float64 torch, instead of the fused kernel. Functions of version 0.2 took
(rewards_PNG, capability_N, learner) and (log_ratio_B, advantage_B, is_self_B, update_index). They are called with these
as before; config/user_code.py recognises them by their parameters.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from hacpo_kernels import SequenceTerms
from torch import Tensor

from hacpo_mega.algorithm.answers import PackedAnswers
from hacpo_mega.algorithm.judged import Judged
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.config.user_code import named_function, takes_record

Record = TypeVar("Record", Judged, PackedAnswers)


def reads_skills(config: AlgorithmConfig) -> bool:
    """True if advantages of the user's may read capability by skill."""
    return config.advantages is not None and takes_record("advantages", config.advantages)


def reads_source_tokens(config: AlgorithmConfig) -> bool:
    """True if an objective reads token log-probs of others' answers, which must travel then."""
    if not config.shares_answers:
        return False
    is_own = config.objective is not None and takes_record("objective", config.objective)
    return is_own or config.needs_one_tokenizer


def _copied(record: Record) -> Record:
    """The record with copies of its tensors, which a function may change in place without effect on later code."""
    return replace(record, **{name: value.clone() for name, value in vars(record).items() if isinstance(value, Tensor)})


def named_advantages(judged: Judged, config: AlgorithmConfig) -> Tensor:
    """Result of `algorithm.advantages` on a lane's judged answers, float64 [P, N, G].

    0 for unjudged answers, and for others' if the method shares none. ValueError for anything but finite numbers of
    that shape.
    """
    function, rewards_PNG = named_function(config.advantages), judged.rewards_PNG
    copied = _copied(replace(judged, capability_N=judged.capability_N.detach().cpu()))
    if takes_record("advantages", config.advantages):
        result = function(copied)
    else:
        result = function(copied.rewards_PNG, copied.capability_N, judged.learner)
    shape = tuple(rewards_PNG.shape)
    if not isinstance(result, Tensor) or tuple(result.shape) != shape:
        found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"algorithm.advantages: {config.advantages} must return a tensor {shape}, found {found}")
    advantages_PNG = result.detach().to("cpu", torch.float64).masked_fill(rewards_PNG.isnan(), 0.0)
    if not advantages_PNG.isfinite().all():
        raise ValueError(f"algorithm.advantages: {config.advantages} returned a number that is not finite")
    if not config.shares_answers:
        others_N = torch.arange(shape[1]) != judged.learner
        advantages_PNG[:, others_N] = 0.0
    return advantages_PNG


def objective_loss(
    answers: PackedAnswers, function: Callable[..., Tensor] | None, config: AlgorithmConfig
) -> tuple[Tensor, SequenceTerms]:
    """Loss of packed answers by a method's `function`, or by the user's (None): (loss_B, terms), float64.

    loss_B is differentiable in the tokens' log-probs. `terms` has the ratio s of each answer (with one per token, their
    mean), and the total weight of its tokens, w = - (sum of d loss / d log-prob) / A, which equals the kernels' for a
    loss of s. ValueError for a loss of another shape, for one that does not depend on the learner, and for NaN where
    another tokenizer leaves an answer without old log-probs.
    """
    if function is not None:
        name, loss_B = f"algorithm.method: {config.method}", function(answers, config)
    else:
        name, user_function = f"algorithm.objective: {config.objective}", named_function(config.objective)
        copied = _copied(answers)
        if takes_record("objective", config.objective):
            loss_B = user_function(copied)
        else:
            loss_B = user_function(copied.log_ratio_B, copied.advantage_B, copied.is_self_B, copied.update_index)
    if not isinstance(loss_B, Tensor) or loss_B.shape != answers.log_ratio_B.shape:
        found = tuple(loss_B.shape) if isinstance(loss_B, Tensor) else type(loss_B).__name__
        shape = tuple(answers.log_ratio_B.shape)
        raise ValueError(f"{name} must return a loss per answer, a tensor {shape}, found {found}")
    # NaN would skip every update without a reason. The check waits for the device: a step's first update alone has it.
    if answers.update_index == 0 and _lacks_old(loss_B, answers).any():
        raise ValueError(
            f"{name} returned NaN for an answer without old_logprob_R, whose source has another tokenizer. Read "
            "log_ratio_B there, or share none: algorithm.method = 'gspo'"
        )
    with torch.no_grad():
        ratio_B = answers.log_ratio_B.exp().masked_fill(answers.num_tokens_B == 0, torch.nan)
        if config.is_token_level:
            of_tokens_B = answers.mean(answers.ratio_R)
            ratio_B = torch.where(of_tokens_B.isnan() | ratio_B.isnan(), ratio_B, of_tokens_B)
        weight_B = _weights(loss_B, ratio_B, answers, name)
    return loss_B, SequenceTerms(loss_B.detach(), ratio_B, weight_B, answers.advantage_B, answers.is_self_B)


def _lacks_old(loss_B: Tensor, answers: PackedAnswers) -> Tensor:
    """True for answers whose loss is NaN for no other reason than missing old log-probs, bool [B]."""
    is_sound_B = answers.log_ratio_B.isfinite()
    return loss_B.detach().isnan() & is_sound_B & answers.mean(answers.old_logprob_R).isnan()


def _weights(loss_B: Tensor, ratio_B: Tensor, answers: PackedAnswers, name: str) -> Tensor:
    """w of SequenceTerms [B], from d loss / d mean log-prob = -w A.

    Where A is 0 it is s, as in the kernels: a weight of 0 would count such an answer as clipped.
    """
    if not answers.logprob_R.requires_grad:
        return torch.zeros_like(answers.advantage_B)
    slope_R = None
    if loss_B.requires_grad:
        ones_B = torch.ones_like(loss_B)
        (slope_R,) = torch.autograd.grad(loss_B, answers.logprob_R, ones_B, retain_graph=True, allow_unused=True)
    if slope_R is None:
        raise ValueError(f"{name} returned a loss that does not depend on log_ratio_B or logprob_R")
    slope_B = answers.mean(slope_R) * answers.length_B
    plain_B = ratio_B.masked_fill(answers.num_tokens_B == 0, 0.0)
    return torch.where(answers.advantage_B == 0.0, plain_B, -slope_B / answers.advantage_B)
