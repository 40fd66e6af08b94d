"""Graders that compare strings: (prompt, answer, gold) -> a reward from 0 to 1, or None for a text without an answer.

They are linear in the text and call nothing of anybody else, so they cannot hang and run where they are called. Graders
that parse mathematics are in math_grader.py and run in guarded workers.
"""

from collections.abc import Callable, Mapping


def arithmetic(prompt: str, answer: str, gold: str) -> float | None:
    """The task of tasks.py: exactly one `;`, and the text after it is exactly the result. The working is not judged."""
    if ";" not in answer:
        return None
    _, _, result = answer.partition(";")
    return float(result == gold)


def exact(prompt: str, answer: str, gold: str) -> float | None:
    """The whole answer is the gold text, white space around either aside."""
    return float(answer.strip() == gold.strip()) if answer.strip() else None


IN_PROCESS: Mapping[str, Callable[[str, str, str], float | None]] = {"arithmetic": arithmetic, "exact": exact}
GUARDED: Mapping[str, str] = {
    "math": "hacpo_mega.data.math_grader:boxed",
    "math_any": "hacpo_mega.data.math_grader:anywhere",
}
