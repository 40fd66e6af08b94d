"""Graders that compare strings, and wrappers that change the reward of another grader.

A grader is (prompt, answer text, gold) -> a reward from 0 to 1, or None for a text without an answer. Graders here are
linear in the text and call nobody else's code, so they cannot hang and run where they are called. Graders that
parse mathematics are in math_grader.py and run in guarded workers, and so does anything composed in a file of yours:

    from hacpo_grading.graders.graders import length_penalised, requiring_format
    from hacpo_grading.graders.math_grader import boxed
    reward = length_penalised(requiring_format(boxed, r"</think>"), free_characters=4000, characters_to_zero=8000)

is reward.kind = "my_rewards.py:reward".
"""

import re
from collections.abc import Callable

Grader = Callable[[str, str, str], float | None]


def arithmetic(prompt: str, answer: str, gold: str) -> float | None:
    """The task of tasks.py: exactly one `;`, and the text after it is exactly the result. The working is not judged."""
    if ";" not in answer:
        return None
    _, _, result = answer.partition(";")
    return float(result == gold)


def exact(prompt: str, answer: str, gold: str) -> float | None:
    """The whole answer is the gold text, white space around either aside."""
    return float(answer.strip() == gold.strip()) if answer.strip() else None


def length_penalised(grader: Grader, free_characters: int, characters_to_zero: int) -> Grader:
    """The grader's reward times a factor that falls linearly from 1 to 0 between the two lengths of the answer."""
    if not 0 <= free_characters < characters_to_zero:
        raise ValueError(
            f"free_characters ({free_characters}) must be below characters_to_zero ({characters_to_zero}); "
            "the reward falls from the one to the other"
        )

    def penalised(prompt: str, answer: str, gold: str) -> float | None:
        reward = grader(prompt, answer, gold)
        share = (characters_to_zero - len(answer)) / (characters_to_zero - free_characters)
        return None if reward is None else reward * min(1.0, max(0.0, share))

    return penalised


def requiring_format(grader: Grader, pattern: str, reward_without: float = 0.0) -> Grader:
    """The grader's reward where the regular expression is found in the answer, else `reward_without` times it."""
    if not 0.0 <= reward_without <= 1.0:
        raise ValueError(f"reward_without ({reward_without}) is a share of the reward, from 0 to 1")
    wanted = re.compile(pattern, re.DOTALL)

    def formatted(prompt: str, answer: str, gold: str) -> float | None:
        reward = grader(prompt, answer, gold)
        return reward if reward is None or wanted.search(answer) else reward * reward_without

    return formatted


def explain(kind: str, answer: str, gold: str) -> dict[str, str | None]:
    """The text that "arithmetic" and "exact" take for the answer, and the one they compare it with."""
    if kind == "arithmetic":
        result = answer.partition(";")[2] if ";" in answer else None
        return {"extracted": result, "gold": gold, "rule": "what follows the first ; is the gold text"}
    return {"extracted": answer.strip(), "gold": gold.strip(), "rule": "the whole answer is the gold text"}
