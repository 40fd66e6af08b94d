"""Functions of every method, by `algorithm.method`: its advantages and, where the kernels have none, its objective.

config/tables/methods.py has the other half of each record: defaults, and the options that a method reads. The paper's
advantages are in advantage.py; here are those of two later methods, which learn from peers' answers without omega.

sgt, success-gated transfer (Mutual RL, arXiv 2605.07244): own answers as in GSPO. If the learner failed all of its own
answers to a prompt, it imitates the peers' verified ones, each with the weight of an own answer of advantage
`transfer_weight`. The text calls this a score direction: no ratio, no clip. It leaves open the strength of the pull,
and the meaning of success with graded rewards: the judge defines it (`reward.success`).
f_tis, filtered truncated importance sampling (arXiv 2605.22537): all answers are trained on with a truncated weight. An
answer's baseline is the group of its author ("vertical" in the text, its default), or all agents' answers. Its filter
depends on the ratio, so it is part of the objective (objective.py). The text is token-level; here one ratio belongs to
an answer, as in every method but grpo.

The user may name functions in the configuration, in place of a method's:

    [algorithm]
    method = "naive"                          # who learns from whom
    advantages = "mine.py:advantages"         # (rewards_PNG, capability_N, learner) -> advantages_PNG
    objective = "mine.py:objective"           # (log_ratio_B, advantage_B, is_self_B, update_index) -> loss_B

All must be pure: every rank computes them for itself, and a different result would train a different model. An
objective here is differentiated by autograd, in float64 torch, instead of the fused kernel.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from hacpo_kernels import SequenceTerms
from torch import Tensor

from hacpo_mega.algorithm.advantage import checked_rewards, hacpo_advantages, own_advantages
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.config.user_code import named_function


class Judged(NamedTuple):
    """A lane's judged answers.

    rewards_PNG   float64 [P, N, G], in [0, 1]; NaN marks an unjudged answer: it enters no mean and gets advantage 0
    successes_PNG bool [P, N, G]: which of them the judge calls correct
    capability_N  [N], P_hat > 0
    """

    rewards_PNG: Tensor
    successes_PNG: Tensor
    capability_N: Tensor


class MethodFunctions(NamedTuple):
    """Functions of a method. Pure torch: no collectives, files or tokenizers.

    advantages   (judged, learner, config) -> float64 [P, N, G], 0 for answers that the learner does not train on
    objective    (log_ratio_B, advantage_B, is_self_B, update_index, config) -> loss_B, of own and others' answers,
                 differentiated by autograd (`named_objective`); None: that of the kernels, chosen by `Method.cross`
    """

    advantages: Callable[[Judged, int, AlgorithmConfig], Tensor]
    objective: Callable[..., Tensor] | None = None


def advantages_of(
    rewards_PNG: Tensor, successes_PNG: Tensor, capability_N: Tensor, learner: int, config: AlgorithmConfig
) -> Tensor:
    """Advantage with which `learner` trains on every answer; 0 for answers that it does not train on.

    Arguments as in `Judged`. Returns float64 [P, N, G]. Raises ValueError for shapes that do not fit.
    """
    rewards_PNG = checked_rewards(rewards_PNG, capability_N, learner)
    if config.advantages is not None:
        return named_advantages(rewards_PNG, capability_N, learner, config)
    return FUNCTIONS[config.method].advantages(Judged(rewards_PNG, successes_PNG, capability_N), learner, config)


def has_own_objective(config: AlgorithmConfig) -> bool:
    """True if a function of the user or of the method replaces the kernels' objective (`named_objective`)."""
    return config.objective is not None or FUNCTIONS[config.method].objective is not None


def grouped_advantages(judged: Judged, learner: int, config: AlgorithmConfig) -> Tensor:
    """HACPO's advantages, its ablations, and those of methods that compare own answers alone. float64 [P, N, G]."""
    return hacpo_advantages(judged.rewards_PNG, judged.capability_N, learner, config)


def sgt_advantages(judged: Judged, learner: int, config: AlgorithmConfig) -> Tensor:
    """Own answers: their advantage in the own group. A peer's answer j, g to prompt p:

        A[p, j, g] = transfer_weight  if j, g is a success and none of p, learner, . is one, else 0

    float64 [P, N, G]. A prompt to which the learner has no judged answer does not count as failed.
    """
    rewards_PNG, successes_PNG, _ = judged
    is_known_P = ~rewards_PNG[:, learner].isnan().all(dim=1)
    has_failed_P = is_known_P & ~successes_PNG[:, learner].any(dim=1)
    is_followed_PNG = successes_PNG & has_failed_P[:, None, None]
    # the learner's own answers to a failed prompt are no successes, so this names peers' answers alone
    return own_advantages(rewards_PNG, learner, config) + config.transfer_weight * is_followed_PNG.double()


def f_tis_advantages(judged: Judged, learner: int, config: AlgorithmConfig) -> Tensor:
    """(R - mean) / (std + eps) over the answers of the author (`answer_group = "author"`) or of all agents ("all").

    float64 [P, N, G], the same for every learner.
    """
    rewards_PNG = judged.rewards_PNG
    num_prompts, num_agents, _ = rewards_PNG.shape
    if config.answer_group == "author":
        return sum(own_advantages(rewards_PNG, agent, config) for agent in range(num_agents))
    return own_advantages(rewards_PNG.reshape(num_prompts, 1, -1), 0, config).reshape(rewards_PNG.shape)


FUNCTIONS: Mapping[str, MethodFunctions] = {
    **dict.fromkeys(("grpo", "gspo", "gspo_x2", "naive", "hacpo"), MethodFunctions(grouped_advantages)),
    "sgt": MethodFunctions(sgt_advantages),
    "f_tis": MethodFunctions(f_tis_advantages),
}


# ---- functions in their place: of the user, or of a method


def named_advantages(rewards_PNG: Tensor, capability_N: Tensor, learner: int, config: AlgorithmConfig) -> Tensor:
    """Result of `algorithm.advantages` on a lane's checked rewards [P, N, G] and capabilities [N], float64 [P, N, G].

    0 for unjudged answers, and for others' if the method shares none. ValueError for anything but finite numbers of
    that shape.
    """
    found = named_function(config.advantages)(rewards_PNG.clone(), capability_N.detach().cpu().clone(), learner)
    shape = tuple(rewards_PNG.shape)
    if not isinstance(found, Tensor) or tuple(found.shape) != shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"algorithm.advantages: {config.advantages} must return a tensor {shape}, found {what}")
    advantages_PNG = found.detach().to("cpu", torch.float64).masked_fill(rewards_PNG.isnan(), 0.0)
    if not advantages_PNG.isfinite().all():
        raise ValueError(f"algorithm.advantages: {config.advantages} returned a number that is not finite")
    if not config.shares_answers:
        others_N = torch.arange(shape[1]) != learner
        advantages_PNG[:, others_N] = 0.0
    return advantages_PNG


def named_objective(
    token_logprob_R: Tensor,
    row_cu_seqlens_B: Tensor,
    source_logprob_B: Tensor,
    advantage_B: Tensor,
    is_self_B: Tensor,
    length_B: Tensor,
    update_index: int,
    config: AlgorithmConfig,
) -> tuple[Tensor, SequenceTerms]:
    """Loss of packed answers by the user's or the method's function: (loss_B, terms), differentiable in the tokens [R].

    The function gets the log of each answer's ratio (learner over source of mean log-probs), float64 [B], bounded by
    log_ratio_clamp; advantages [B] with omega in them; is_self [B]; and m, the updates already made in this step.
    ValueError for a loss of another shape, or one that does not depend on the ratio.
    """
    if config.objective is not None:
        function, name, more = named_function(config.objective), f"algorithm.objective: {config.objective}", ()
    else:
        function, name, more = FUNCTIONS[config.method].objective, f"algorithm.method: {config.method}", (config,)
    sum_B = torch.segment_reduce(token_logprob_R.double(), "sum", offsets=row_cu_seqlens_B.long())
    bound = config.log_ratio_clamp
    log_ratio_B = (sum_B / length_B.double() - source_logprob_B.double()).clamp(-bound, bound)
    advantage_B = advantage_B.double()
    loss_B = function(log_ratio_B, advantage_B, is_self_B, update_index, *more)
    if not isinstance(loss_B, Tensor) or loss_B.shape != log_ratio_B.shape:
        what = tuple(loss_B.shape) if isinstance(loss_B, Tensor) else type(loss_B).__name__
        raise ValueError(f"{name} must return a loss per answer, a tensor {tuple(log_ratio_B.shape)}, found {what}")
    with torch.no_grad():
        weight_B = _weights(loss_B, log_ratio_B, advantage_B, name)
        ratio_B = log_ratio_B.exp().masked_fill(row_cu_seqlens_B.diff() == 0, torch.nan)
    terms = SequenceTerms(loss_B.detach(), ratio_B, weight_B, advantage_B, is_self_B)
    return loss_B.to(token_logprob_R.dtype), terms


def _weights(loss_B: Tensor, log_ratio_B: Tensor, advantage_B: Tensor, name: str) -> Tensor:
    """w of SequenceTerms [B], from d loss / d mean log-prob = -w A; 0 where A is 0."""
    if not log_ratio_B.requires_grad:
        return torch.zeros_like(advantage_B)
    slope_B = None
    if loss_B.requires_grad:
        ones_B = torch.ones_like(loss_B)
        (slope_B,) = torch.autograd.grad(loss_B, log_ratio_B, ones_B, retain_graph=True, allow_unused=True)
    if slope_B is None:
        raise ValueError(f"{name} returned a loss that does not depend on log_ratio_B")
    return torch.where(advantage_B == 0.0, 0.0, -slope_B / advantage_B)
