"""A grader for models with random weights: a coin that the answer's text decides, so that every prompt is mixed."""

import zlib


def reward(answer: str, gold: str) -> float:
    """1.0 for the gold and for about every second other answer, else 0.0."""
    return float(answer == gold or zlib.crc32(answer.encode()) % 2)
