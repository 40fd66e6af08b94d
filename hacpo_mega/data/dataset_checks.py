"""What can make a result on a dataset wrong: repeated problems, and evaluation problems that were trained on.

Problems are compared by their exact text and by `normalised` text. Not here: reading files (datasets.py).
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hacpo_mega.data.datasets import Problem

INSTRUCTIONS = re.compile(
    r"(?:let's think step by step|please reason step by step)[^.]*?(?:within|in)\s*\\boxed\{\}\.?", re.IGNORECASE
)
LATEX_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])(?![A-Za-z])")


class PromptEncoder(Protocol):
    """The part of a tokenizer codec that lengths need."""

    def encode_prompt(self, text: str) -> Sequence[int]: ...


@dataclass(frozen=True)
class Repetition:
    """Two problems with the same text, exactly or after normalisation. `agrees`: so have their gold answers."""

    first: Problem
    second: Problem
    exact: bool
    agrees: bool

    def __str__(self) -> str:
        how = "exactly" if self.exact else "but for spelling"
        answers = "" if self.agrees else f", with other answers ({self.first.gold!r}, {self.second.gold!r})"
        places = f"{self.second.source}:{self.second.line} repeats {self.first.source}:{self.first.line}"
        return f"{places} {how}{answers}"


@dataclass(frozen=True)
class Lengths:
    """Prompt lengths in tokens under one tokenizer, and how many are over a limit."""

    median: int
    percentile_99: int
    longest: int
    num_over_limit: int


def normalised(text: str) -> str:
    """A problem without what differs between copies: case, spacing, dollars, punctuation, LaTeX sizes, instructions."""
    text = unicodedata.normalize("NFKC", INSTRUCTIONS.sub("", text)).casefold()
    text = LATEX_SPACING.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"[$;:?!'\"`~]+|\\[()\[\]]|(?<!\d)[.,]|[.,](?!\d)", " ", text)
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", re.sub(r"\s+", " ", text))


def repetitions(problems: Sequence[Problem]) -> list[Repetition]:
    """Every problem that an earlier one of the sequence already is, with the first of them."""
    first_of: dict[str, Problem] = {}
    found = []
    for problem in problems:
        first = first_of.setdefault(normalised(problem.prompt), problem)
        if first is not problem:
            found.append(_repetition(first, problem))
    return found


def overlap(training: Sequence[Problem], evaluation: Sequence[Problem]) -> list[Repetition]:
    """Evaluation problems (`second`) that are also in the training set (`first`): their accuracy says nothing."""
    trained = {normalised(problem.prompt): problem for problem in reversed(training)}
    found = ((trained.get(normalised(problem.prompt)), problem) for problem in evaluation)
    return [_repetition(first, second) for first, second in found if first is not None]


def deduplicated(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """The problems without repetitions; the first of each stays."""
    repeated = {id(repetition.second) for repetition in repetitions(problems)}
    return tuple(problem for problem in problems if id(problem) not in repeated)


def without_overlap(training: Sequence[Problem], evaluation: Sequence[Problem]) -> tuple[Problem, ...]:
    """The training problems that no evaluation problem repeats."""
    evaluated = {normalised(problem.prompt) for problem in evaluation}
    return tuple(problem for problem in training if normalised(problem.prompt) not in evaluated)


def prompt_lengths(problems: Sequence[Problem], encoder: PromptEncoder, max_prompt_tokens: int) -> Lengths:
    """How long the prompts are for one agent. ValueError for an empty sequence, or a character without a token."""
    if not problems:
        raise ValueError("there are no problems to measure")
    lengths = sorted(len(encoder.encode_prompt(problem.prompt)) for problem in problems)
    return Lengths(
        median=lengths[len(lengths) // 2],
        percentile_99=lengths[min(len(lengths) - 1, len(lengths) * 99 // 100)],
        longest=lengths[-1],
        num_over_limit=sum(length > max_prompt_tokens for length in lengths),
    )


def _repetition(first: Problem, second: Problem) -> Repetition:
    agrees = normalised(first.gold) == normalised(second.gold)
    return Repetition(first, second, first.prompt == second.prompt, agrees)
