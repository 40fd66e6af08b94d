r"""The judge of multiple-choice questions: one letter from A to J, exactly.

The letter of an answer is, in this order:
1. in the last box or <answer>: the letter alone ("B", "(b)", "\text{B}"), or before its option ("B. 42", "(B) 42");
2. in the last statement "answer is B", "answer: B", "I think it's B", "B is correct";
3. the last line, when that is nothing but the letter.
Two letters ("A or B") are no choice: wrong. Text without a letter at these places has no answer.
"""

import re
from typing import Any

from hacpo_grading.texts.answer_text import after_thinking, gold_answer, last_boxed, without_odd_signs

WRAPPING = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textrm|textit|mbox)\s*\{([^{}]*)\}")
SPACES, MARKS = re.compile(r"\\[,;!: ]|~"), re.compile(r"\\left|\\right|[$*`]")
NO_OTHER = r"(?!(?:[\s,;/&]|or\b|and\b)*\(?[A-J](?:\)|\s*\Z))"
ALONE = re.compile(
    rf"(?:(?i:option|choice) )?\(?([A-J])[).:]?|\(?([A-J])[).:]\s{NO_OTHER}.*|\(([A-J])\){NO_OTHER}.*", re.DOTALL
)
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.DOTALL)
# A and I are words too: "the answer is a matrix", "the answer is I think B".
SAID = re.compile(
    r"\b(?i:answer|(?:correct|right) (?:option|choice))(?i: is|:| =)(?::| :)?\s{0,3}"
    r"(?i:(?:for sure|surely|clearly|definitely|probably|therefore|thus),? )?(?i:option |choice )?\(?([A-J])(?![\w'])"
    r"(?:\)|(?<![AI])|(?= ?(?:[.,;:/&]|$|or\b|and\b)))",
    re.MULTILINE,
)
MEANT = re.compile(
    r"\b(?:(?i:it'?s|it is|it must be|so) (?i:option |choice )?|(?i:option|choice|answer) (?=\(?[A-J]\)? is ))"
    r"\(?([A-J])\)?(?i: is (?:the )?(?:correct|right)(?: option| choice| answer| one)?)?[.!]?\s*\Z"
)
ANOTHER = re.compile(r"\)? ?(?:,|/|&|or\b|and\b) ?(?:or |and )?\(?[A-J](?!\w)")


def choice(prompt: str, answer: str, gold: str) -> float | None:
    """1 for the letter of gold, 0 for another one, None without any. ValueError for a gold that is no letter."""
    wanted = _gold_letter(gold)
    found, _ = _letter(answer)
    return None if found is None else float(found == wanted)


def explain(kind: str, answer: str, gold: str) -> dict[str, Any]:
    """The letter that was found, and the rule that found it."""
    found, rule = _letter(answer)
    return {"extracted": found, "parsed_gold": _gold_letter(gold), "rule": rule}


def stated_letter(text: str) -> str | None:
    """The letter that a text without a box states, "" for two of them, None for none."""
    return _letter(text)[0] if last_boxed(text) is None else None


def _letter(answer: str) -> tuple[str | None, str]:
    """The letter ("" for what is no single letter) and the rule that found it."""
    text = after_thinking(answer)
    content = last_boxed(text)
    if content is not None:
        return lone_letter(content) or "", "the last box"
    tagged = TAGGED.findall(text)
    text = _unmarked(tagged[-1] if tagged else text)
    said = None
    for said in SAID.finditer(text):  # noqa: B007
        pass
    if said := said or MEANT.search(text):
        return "" if ANOTHER.match(text, said.end()) else said[1], "the last 'answer is'"
    if tagged:
        return lone_letter(text) or "", "the last <answer>"
    lines = text.strip().split("\n")
    return (lone_letter(lines[-1]) if lines and len(lines[-1].strip()) <= 4 else None), "the last line"


def _unmarked(text: str) -> str:
    text = without_odd_signs(text)
    for _ in range(3):
        text = WRAPPING.sub(r"\1", text)
    return MARKS.sub("", SPACES.sub(" ", text))


def lone_letter(text: str) -> str | None:
    """The letter that a text is, alone or before its option as in "(D) four"; None for other texts."""
    stripped = _unmarked(text).strip()
    found = ALONE.fullmatch(stripped[:1].upper() + stripped[1:] if len(stripped) == 1 else _upper_in_brackets(stripped))
    return None if found is None else found[1] or found[2] or found[3]


def _upper_in_brackets(text: str) -> str:
    return re.sub(r"^\(([a-j])\)", lambda letter: letter.group().upper(), text)


def _gold_letter(gold: str) -> str:
    text = gold_answer(gold)
    content = last_boxed(text)
    letter = lone_letter(text if content is None else content)
    if letter is None:
        raise ValueError(f"the gold answer {gold[-80:]!r} is no letter from A to J")
    return letter
