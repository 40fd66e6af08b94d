"""The default of reward.success: the answers that a run counts as a success, and the places that count them.

Not here: the judge, whose verdict "correct" is a success (hacpo_grading/judge.py).
"""

from collections.abc import Iterator

from hacpo_mega.config.tables.schema import Config


def default_success_note(config: Config) -> Iterator[str]:
    """The line for a run without reward.success whose rewards may lie between 0 and 1."""
    reward = config.reward
    if reward.success is not None or not reward.may_be_graded:
        return
    readers = ", ".join((*config.algorithm.success_readers, "pass@k and maj@k of eval"))
    heaviest = max(reward.parts, key=lambda name: reward.parts[name].weight, default=None)
    whole = next((name for name, part in reward.parts.items() if not part.may_be_graded), heaviest)
    part = "" if whole is None else f'reward.success = "{whole}", for the full reward of that part, or '
    yield (
        "reward.success is not given: nothing says which answers are a success, so those with the full reward of 1 "
        f"count, for {readers}. Set {part}the least reward of one, such as reward.success = 0.9"
    )
