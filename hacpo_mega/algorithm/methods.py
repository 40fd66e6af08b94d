"""Functions of every method, by `algorithm.method`: its advantages and, where the kernels have none, its objective.

config/tables/methods.py has the other half of each record: defaults, and the options that a method reads. The paper's
advantages are in advantage.py; here are those of two later methods, which learn from peers' answers without omega.

sgt, success-gated transfer (Mutual RL, arXiv 2605.07244): own answers as in GSPO. If the learner failed all of its own
answers to a prompt, it imitates the peers' verified ones, each with the weight of an own answer of advantage
`transfer_weight`. The paper has neither ratio nor clip there, and calls the gradient a score direction. It leaves open
the strength of the pull, and the meaning of success with graded rewards, which the judge defines (`reward.success`).
f_tis, filtered truncated importance sampling (arXiv 2605.22537): all answers are trained on with a truncated weight. An
answer's baseline is the mean over its author's answers ("vertical" in that paper, its default), or over all agents'.
The filter depends on the ratio, so it is part of the objective (objective.py).

Both papers are token-level, with GRPO's loss of own answers. `ratio_level = "token"` follows them: own answers as grpo,
others' answers
    sgt      -A mean log-prob, which needs no ratio
    f_tis    -1/|b| sum_t sg[min(r_t, C)] A logprob_t, 0 where A < 0 and sum_t (old_t - logprob_t) > g nats
C = 2 and g = 50 are from summaries of the paper, whose text was not available. f_tis then needs log-probs of the
source's tokens, which exist where all agents have one tokenizer.

Elsewhere: functions of the user's in place of a method's (user_functions.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hacpo_mega.algorithm.advantage import checked_rewards, hacpo_advantages, own_advantages
from hacpo_mega.algorithm.answers import PackedAnswers
from hacpo_mega.algorithm.judged import Judged
from hacpo_mega.algorithm.user_functions import named_advantages
from hacpo_mega.config import AlgorithmConfig


class MethodFunctions(NamedTuple):
    """Functions of a method. Pure torch: no collectives, files or tokenizers.

    advantages   (judged, config) -> float64 [P, N, G], 0 for answers that the learner does not train on
    objective    (answers, config) -> loss_B, of own and others' answers, differentiated by autograd
                 (`objective_loss`); None: that of the kernels, chosen by `Method.cross`
    by_token     the same for `ratio_level = "token"`; None for a method without it
    """

    advantages: Callable[[Judged, AlgorithmConfig], Tensor]
    objective: Callable[[PackedAnswers, AlgorithmConfig], Tensor] | None = None
    by_token: Callable[[PackedAnswers, AlgorithmConfig], Tensor] | None = None


def advantages_of(judged: Judged, config: AlgorithmConfig) -> Tensor:
    """Advantage with which `judged.learner` trains on every answer; 0 for answers that it does not train on.

    Returns float64 [P, N, G]. Raises ValueError for shapes that do not fit.
    """
    rewards_PNG = checked_rewards(judged.rewards_PNG, judged.capability_N, judged.learner)
    judged = replace(judged, rewards_PNG=rewards_PNG)
    if config.advantages is not None:
        return named_advantages(judged, config)
    return FUNCTIONS[config.method].advantages(judged, config)


def has_autograd_objective(config: AlgorithmConfig) -> bool:
    """True if a function of the user or of the method replaces the kernels' objective (`objective_loss`)."""
    return config.objective is not None or objective_of(config) is not None


def objective_of(config: AlgorithmConfig) -> Callable[[PackedAnswers, AlgorithmConfig], Tensor] | None:
    """The method's own function in place of the kernels' objective; None without one, and for a user's function."""
    if config.objective is not None:
        return None
    functions = FUNCTIONS[config.method]
    return functions.by_token if config.ratio_level == "token" else functions.objective


def grouped_advantages(judged: Judged, config: AlgorithmConfig) -> Tensor:
    """Advantages of HACPO, of its ablations, and of methods that compare own answers alone. float64 [P, N, G]."""
    return hacpo_advantages(judged.rewards_PNG, judged.capability_N, judged.learner, config)


def sgt_advantages(judged: Judged, config: AlgorithmConfig) -> Tensor:
    """Own answers: their advantage in the own group. A peer's answer j, g to prompt p:

        A[p, j, g] = transfer_weight  if j, g is a success and none of p, learner, . is one, else 0

    float64 [P, N, G]. A prompt to which the learner has no judged answer does not count as failed.
    """
    rewards_PNG, successes_PNG, learner = judged.rewards_PNG, judged.successes_PNG, judged.learner
    is_known_P = ~rewards_PNG[:, learner].isnan().all(dim=1)
    has_failed_P = is_known_P & ~successes_PNG[:, learner].any(dim=1)
    is_followed_PNG = successes_PNG & has_failed_P[:, None, None]
    # The learner's own answers to a failed prompt are no successes, so these are peers' answers alone.
    return own_advantages(rewards_PNG, learner, config) + config.transfer_weight * is_followed_PNG.double()


def f_tis_advantages(judged: Judged, config: AlgorithmConfig) -> Tensor:
    """(R - mean) / (std + eps) over the answers of the author (`answer_group = "author"`) or of all agents ("all").

    float64 [P, N, G], the same for every learner.
    """
    rewards_PNG = judged.rewards_PNG
    num_prompts, num_agents, _ = rewards_PNG.shape
    if config.answer_group == "author":
        return sum(own_advantages(rewards_PNG, agent, config) for agent in range(num_agents))
    return own_advantages(rewards_PNG.reshape(num_prompts, 1, -1), 0, config).reshape(rewards_PNG.shape)


def clipped_by_token(answers: PackedAnswers, config: AlgorithmConfig) -> Tensor:
    """GRPO's loss: -1/|b| sum_t min(r_t A, clip(r_t, 1 - eps_low, 1 + eps_high) A), float64 [B], for own answers."""
    ratio_R, advantage_R = token_ratios(answers, config), answers.by_token(answers.advantage_B)
    clipped_R = ratio_R.clamp(1.0 - config.eps_low, 1.0 + config.eps_high)
    return answers.mean(-torch.minimum(ratio_R * advantage_R, clipped_R * advantage_R))


def token_ratios(answers: PackedAnswers, config: AlgorithmConfig) -> Tensor:
    """r_t of each token [R], its log within log_ratio_clamp; 1 where there is no old log-prob."""
    difference_R = (answers.logprob_R - answers.old_logprob_R).nan_to_num()
    return difference_R.clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()


def sgt_by_token(answers: PackedAnswers, config: AlgorithmConfig) -> Tensor:
    """Own answers as GRPO's; a followed answer: -A mean log-prob. float64 [B]."""
    followed_B = -answers.advantage_B * answers.mean(answers.logprob_R)
    return torch.where(answers.is_self_B, clipped_by_token(answers, config), followed_B)


def f_tis_by_token(answers: PackedAnswers, config: AlgorithmConfig) -> Tensor:
    """Own answers as GRPO's; others' as the file says. float64 [B]; NaN where an answer has no old log-probs."""
    weight_R = (answers.logprob_R.detach() - answers.old_logprob_R).exp().clamp(max=config.ratio_cap)
    divergence_B = answers.sum((answers.old_logprob_R - answers.logprob_R).detach())
    is_dropped_B = (answers.advantage_B < 0) & (divergence_B > config.answer_divergence_limit)
    kept_B = torch.where(is_dropped_B, 0.0, answers.advantage_B)
    followed_B = -kept_B * answers.mean(weight_R * answers.logprob_R)
    return torch.where(answers.is_self_B, clipped_by_token(answers, config), followed_B)


FUNCTIONS: Mapping[str, MethodFunctions] = {
    **dict.fromkeys(("grpo", "gspo", "gspo_x2", "naive", "hacpo"), MethodFunctions(grouped_advantages)),
    "sgt": MethodFunctions(sgt_advantages, by_token=sgt_by_token),
    "f_tis": MethodFunctions(f_tis_advantages, by_token=f_tis_by_token),
}
