"""Flaws of a dataset that distort results: repeated problems, and evaluation problems that were trained on.

A problem is compared with another in three ways, the stricter first:

    same text         character by character
    same normalised   without what differs between copies: case, spacing, dollars, punctuation (`normalised`)
    contained         half of the 8-grams of words of the shorter text are in the other, and all numbers of one text are
                      in the other, and so are the words of the gold answers

The last finds copies whose LaTeX or wording was edited. Numbers and golds are asked for because a book varies its
problems: the same sentence with other numbers, or another question about the same figure, is another problem. A chat
is the text of its messages; a system message, which many problems share, is no part of what is copied.
Elsewhere: reading files (datasets.py).
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hacpo_grading.texts.chat_messages import contents, messages_of
from hacpo_mega.data.datasets import Problem
from hacpo_mega.data.reading.row_values import quoted

Kind = Literal["same text", "same normalised", "contained"]

INSTRUCTIONS = re.compile(
    r"(?:let's think step by step|please reason step by step)[^.]*?(?:within|in)\s*\\boxed\{\}\.?", re.IGNORECASE
)
LATEX_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])(?![A-Za-z])")
GRAM_WORDS = 8
# Measured in docs/measurements/data.md: edited copies of competition problems share .5 to 1, unrelated ones at most .3.
MIN_SHARED_GRAMS = 0.5
# A gold of one letter names a choice: the golds of one in five unrelated problems agree, so the text has to.
MIN_SHARED_WITH_CHOICE = 0.9
CHOICE = re.compile(r"(?:\\(?:text|textbf|mathrm|mbox)\s*)?[({]*[A-Za-z][)}.]*")
# Letters and digits apart, one character of a script without spaces, and the signs that change what is asked.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+|\d+|[-+*/=<>^!|%]")
MARKUP = re.compile(r"\\(?:mathrm|text|textbf|textit|mathbf|operatorname|mbox|emph|rm|bf|[lcd]?dots)(?![A-Za-z])")
SPELLINGS = ((re.compile(r"\\[dtc]frac"), r"\\frac"), (re.compile(r"\\([lgn]e)q(?![A-Za-z])"), r"\\\1"))
SMALL_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBER_WORDS = {word: str(number) for number, word in enumerate(SMALL_NUMBERS)}
NOTATION = frozenset(("frac", "times", "cdot", "e", "^", "*", "/"))


@dataclass(frozen=True)
class Repetition:
    """A repetition: `second` copies `first` as `kind` says. `agrees`: their gold answers are the same."""

    first: Problem
    second: Problem
    kind: Kind
    agrees: bool

    def __str__(self) -> str:
        answers = "" if self.agrees else f", with other answers ({quoted(self.first.gold)}, {quoted(self.second.gold)})"
        places = f"{self.second.source}:{self.second.line} repeats {self.first.source}:{self.first.line}"
        return f"{places} ({self.kind}){answers}"


@dataclass(frozen=True)
class _Wording:
    """A problem for the containment check: its 8-grams (hashed), its numbers, and the words of its gold."""

    problem: Problem
    text: str
    normalised: str
    grams: frozenset[int]
    numbers: Counter[str]
    gold: Counter[str]

    @classmethod
    def of(cls, problem: Problem) -> "_Wording":
        chat = messages_of(problem.prompt) or [{"role": "user", "content": problem.prompt}]
        text = "\n".join(message["content"] for message in chat if message["role"] != "system")
        words = _words(text)
        # a text of fewer words is one gram of another length: it meets only texts of exactly its words
        num_grams = max(1, len(words) - GRAM_WORDS + 1) if words else 0
        return cls(
            problem,
            text,
            normalised(text),
            frozenset(hash(tuple(words[i : i + GRAM_WORDS])) for i in range(num_grams)),
            Counter(word for word in words if word.isdigit()),
            Counter(word for word in _words(_unpadded(problem.gold)) if word not in NOTATION),
        )

    def kind_of_copy(self, other: "_Wording", num_common: int) -> Kind | None:
        """The kind of copy that this problem is of the other, given `num_common` common grams; None if it is none."""
        if self.text == other.text:
            return "same text"
        if self.normalised == other.normalised:
            return "same normalised"
        is_choice = any(CHOICE.fullmatch(gold.strip()) for gold in (self.problem.gold, other.problem.gold))
        share = MIN_SHARED_WITH_CHOICE if is_choice else MIN_SHARED_GRAMS
        enough = num_common >= share * min(len(self.grams), len(other.grams))
        return "contained" if enough and _one_contains(self.numbers, other.numbers) and self._agrees(other) else None

    def _agrees(self, other: "_Wording") -> bool:
        """True if one gold answer holds the words of the other, and beside them no number but the 10 of 4 x 10^3."""
        differing = (self.gold - other.gold) + (other.gold - self.gold)
        no_number = not any(word.isdigit() and word != "10" for word in differing)
        return bool(self.gold and other.gold) and _one_contains(self.gold, other.gold) and no_number


def _one_contains(one: Counter[str], other: Counter[str]) -> bool:
    return one <= other or other <= one


def _words(text: str) -> list[str]:
    text = MARKUP.sub(" ", LATEX_SPACING.sub(" ", INSTRUCTIONS.sub("", text).replace("\\!", "")))
    for spelling, usual in SPELLINGS:
        text = spelling.sub(usual, text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", unicodedata.normalize("NFKC", text).casefold())
    return [NUMBER_WORDS.get(word, word) for word in WORD.findall(text)]


def normalised(text: str) -> str:
    """A problem normalised against differences between copies: case, spacing, dollars, punctuation, LaTeX sizes,
    instructions."""
    text = unicodedata.normalize("NFKC", INSTRUCTIONS.sub("", text)).casefold()
    text = LATEX_SPACING.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"[$;:?!'\"`~]+|\\[()\[\]]|(?<!\d)[.,]|[.,](?!\d)", " ", text)
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", re.sub(r"\s+", " ", text))


def _same_gold(one: Problem, other: Problem) -> bool:
    """True if golds differ in spelling and fonts alone: 2340 and \\mathbf{2340}. Brackets stay: they tell intervals."""
    golds = {re.sub(r"[{}]", "", MARKUP.sub("", normalised(_unpadded(p.gold)))) for p in (one, other)}
    return len(golds) == 1


def _unpadded(gold: str) -> str:
    """The gold without zeros in front of whole numbers: AIME's 025 is 25."""
    return re.sub(r"(?<![\d.,])0+(?=\d)", "", gold)


def repetitions(problems: Sequence[Problem]) -> list[Repetition]:
    """Every problem that repeats an earlier one's text, exactly or normalised, with the first of them."""
    first_of: dict[str, Problem] = {}
    found = []
    for problem in problems:
        first = first_of.setdefault(normalised("\n".join(contents(problem.prompt))), problem)
        if first is not problem:
            kind = "same text" if first.prompt == problem.prompt else "same normalised"
            found.append(Repetition(first, problem, kind, _same_gold(first, problem)))
    return found


def contradictions(problems: Sequence[Problem]) -> list[Repetition]:
    """Repetitions with another gold answer than the first one's: either may be right."""
    return [repetition for repetition in repetitions(problems) if not repetition.agrees]


def copies(training: Sequence[Problem], evaluation: Sequence[Problem]) -> Iterator[Repetition]:
    """Every pair of a training problem (`first`) and an evaluation problem (`second`) that is a copy of it.

    Only the evaluation set is indexed: time and memory grow with its size and with the number of 8-grams in common.
    """
    evaluated = [_Wording.of(problem) for problem in evaluation]
    index: dict[int | str, list[int]] = defaultdict(list)
    for number, wording in enumerate(evaluated):
        for key in (wording.normalised, *wording.grams):
            index[key].append(number)
    for problem in training:
        wording = _Wording.of(problem)
        num_common = Counter(number for gram in wording.grams for number in index.get(gram, ()))
        num_common.update(dict.fromkeys(index.get(wording.normalised, ()), 0))
        for number, common in sorted(num_common.items()):
            if kind := wording.kind_of_copy(evaluated[number], common):
                agrees = kind == "contained" or _same_gold(problem, evaluated[number].problem)
                yield Repetition(problem, evaluated[number].problem, kind, agrees)


def overlap(training: Sequence[Problem], evaluation: Sequence[Problem]) -> list[Repetition]:
    """Evaluation problems (`second`) that are also in the training set (`first`), so that their accuracy means nothing.

    One per evaluation problem, in their order: the first training problem of the strictest kind.
    """
    strictness: tuple[Kind, ...] = ("same text", "same normalised", "contained")
    best: dict[int, Repetition] = {}
    for found in copies(training, evaluation):
        known = best.get(id(found.second))
        if known is None or strictness.index(found.kind) < strictness.index(known.kind):
            best[id(found.second)] = found
    return [best[id(problem)] for problem in evaluation if id(problem) in best]


def deduplicated(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """The problems without repetitions; the first of each stays, none if they contradict each other."""
    found = repetitions(problems)
    left_out = {id(pair.second) for pair in found} | {id(pair.first) for pair in found if not pair.agrees}
    return tuple(problem for problem in problems if id(problem) not in left_out)


def without_overlap(training: Sequence[Problem], evaluation: Sequence[Problem]) -> tuple[Problem, ...]:
    """The training problems that no evaluation problem is a copy of, in any of the three ways."""
    leaked = {id(repetition.first) for repetition in copies(training, evaluation)}
    return tuple(problem for problem in training if id(problem) not in leaked)
