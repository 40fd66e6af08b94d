"""The judge of a run, made from its [reward]."""

from hacpo_grading.judge import FULL, Judge
from hacpo_grading.weighted_judge import AnyJudge, RewardPart, WeightedJudge
from hacpo_mega.config import RewardConfig


def judge_of(reward: RewardConfig) -> AnyJudge:
    """One grader, or the weighted mean of several. ValueError as theirs."""
    common = {
        "num_workers": reward.num_workers,
        "timeout_s": reward.timeout_s,
        "start_timeout_s": reward.start_timeout_s,
        "require_stop": reward.require_stop,
    }
    success = FULL if reward.success is None else reward.success
    if not reward.parts:
        return Judge(reward.kind, options=reward.options, reward_range=reward.range, success=success, **common)
    parts = [RewardPart(name, p.kind, p.options, p.weight, p.range) for name, p in reward.parts.items()]
    return WeightedJudge(parts, success, **common)
