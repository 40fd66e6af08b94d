"""The judge of a run, made from its [reward], and the judgement of an environment's reward."""

import math

from hacpo_grading.judge import FULL, AnyJudge, Judge, RewardPart, WeightedJudge, is_success
from hacpo_grading.judgement import Judgement, Verdict
from hacpo_mega.config import RewardConfig


def judge_of(reward: RewardConfig) -> AnyJudge:
    """The judge with one grader, or with the weighted mean of several. ValueError as `Judge` and `WeightedJudge`."""
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


def environment_judgement(reward: RewardConfig, given: float | None) -> Judgement:
    """Judgement of a conversation by its environment's reward, which reward.range maps to 0 to 1.

    Unjudged where the environment failed (None) or its reward is outside that range.
    """
    low, high = reward.range
    if given is None or not low <= given <= high:
        return Judgement(Verdict.ERROR, math.nan)
    mapped = (given - low) / (high - low)
    has_succeeded = is_success(mapped, reward.success if isinstance(reward.success, float) else FULL)
    return Judgement(Verdict.CORRECT if has_succeeded else Verdict.WRONG, mapped)
