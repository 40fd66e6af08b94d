"""Advantages of two later methods, which learn from peers' answers without omega.

sgt, success-gated transfer (Mutual RL, arXiv 2605.07244): own answers as in GSPO. If the learner failed all of its own
answers to a prompt, it imitates the peers' verified ones, each with the weight of an own answer of advantage
`transfer_weight`. The text calls this a score direction: no ratio, no clip. It leaves open the strength of the pull,
and the meaning of success with graded rewards: the judge defines it (`reward.success`).
f_tis, filtered truncated importance sampling (arXiv 2605.22537): all answers are trained on with a truncated weight. An
answer's baseline is the group of its author ("vertical" in the text, its default), or all agents' answers. Its filter
depends on the ratio, so it is part of the objective (objective.py). The text is token-level; here one ratio belongs to
an answer, as in every method but grpo.
Unlike `hacpo`, neither uses capability. Not here: their objectives.
"""

from torch import Tensor

from hacpo_mega.algorithm.advantage import own_advantages
from hacpo_mega.config import AlgorithmConfig


def sgt_advantages(rewards_PNG: Tensor, successes_PNG: Tensor, learner: int, config: AlgorithmConfig) -> Tensor:
    """Own answers: their advantage in the own group. A peer's answer j, g to prompt p:

        A[p, j, g] = transfer_weight  if j, g is a success and none of p, learner, . is one, else 0

    rewards_PNG float64 [P, N, G], NaN where unjudged; successes_PNG bool; float64 [P, N, G]. A prompt to which the
    learner has no judged answer does not count as failed.
    """
    is_known_P = ~rewards_PNG[:, learner].isnan().all(dim=1)
    has_failed_P = is_known_P & ~successes_PNG[:, learner].any(dim=1)
    is_followed_PNG = successes_PNG & has_failed_P[:, None, None]
    # the learner's own answers to a failed prompt are no successes, so this names peers' answers alone
    return own_advantages(rewards_PNG, learner, config) + config.transfer_weight * is_followed_PNG.double()


def f_tis_advantages(rewards_PNG: Tensor, config: AlgorithmConfig) -> Tensor:
    """(R - mean) / (std + eps) over the answers of the author (`answer_group = "author"`) or of all agents ("all").

    rewards_PNG float64 [P, N, G], NaN where unjudged; float64 [P, N, G], the same for every learner.
    """
    num_prompts, num_agents, _ = rewards_PNG.shape
    if config.answer_group == "author":
        return sum(own_advantages(rewards_PNG, agent, config) for agent in range(num_agents))
    return own_advantages(rewards_PNG.reshape(num_prompts, 1, -1), 0, config).reshape(rewards_PNG.shape)
