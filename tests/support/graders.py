"""A graded reward for trainer tests: a model with random weights can climb it within a few steps."""


def share_of_ones(prompt: str, answer: str, gold: str) -> float | None:
    """How much of the answer is the digit 1; an empty answer is none."""
    return answer.count("1") / len(answer) if answer else None


def odd_length(prompt: str, answer: str, gold: str) -> float:
    """Whether the answer has an odd number of characters."""
    return float(len(answer) % 2)


def text(prompt: str, answer: str, gold: str) -> str:
    """A broken grader: it returns its verdict as text."""
    return "correct"
