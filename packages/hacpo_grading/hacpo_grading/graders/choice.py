r"""The judge of multiple-choice questions: one letter from A to J, exactly.

The letter of an answer is, in this order:
1. in the last box or <answer>: the letter alone ("B", "(b)", "\text{B}"), or before its option ("B. 42", "(B) 42");
2. in the last statement "answer is B", "answer: (b)", "I think it's B", "B is correct";
3. the last line, when that is nothing but the letter ("B", "[B]", "#### B").
Two letters ("A or B") are no choice: wrong. Text without a letter at these places has no answer.
"""

import re
from typing import Any

from hacpo_grading.texts.answer_text import after_thinking, boxed_or_all, gold_answer, last_boxed, unicode_as_latex

WRAPPING = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textrm|textit|mbox)\s*\{([^{}]*)\}")
SPACES, MARKS = re.compile(r"\\[,;!: ]|~"), re.compile(r'\\left|\\right|\\[()\[\]]|[$*`"“”]')
NO_OTHER = r"(?!(?:[\s,;/&]|or\b|and\b)*\(?[A-J](?:\)|\s*\Z))"
ALONE = re.compile(
    rf"(?:(?i:option|choice) )?\(?([A-J])[).:]?|\(?([A-J])[).:]\s{NO_OTHER}.*|\(([A-J])\){NO_OTHER}.*", re.DOTALL
)
# A formula may begin with a letter in brackets: behind "(A)" an option begins with a word or a number, apart from it.
OPTION = re.compile(r"(?:(?i:option|choice) )?\(?[A-Ja-j][).:]?(?:\s+(?:[\w.({\[\"']|-?\\?(?:\d|.?frac|sqrt|pi\b))|\Z)")
IN_BRACKETS = re.compile(r"(?<![\w)])\([a-j]\)(?![\w(])")
SQUARE = re.compile(r"(?<![\w)\]])(?:\[\[([A-J])\]\]|\[([A-J])\])(?![\w(\[])")
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.DOTALL)
# A and I are words too: "the answer is a matrix", "the answer is I think B".
ANSWER_IS = re.compile(
    r"\b(?i:answer|(?:correct|right) (?:option|choice))(?i: is| ?:| =)(?::| :)?\s{0,3}"
    r"(?i:(?:for sure|surely|clearly|definitely|probably|therefore|thus),? )?(?i:option |choice )?\(?([A-J])(?![\w'])"
    r"(?:\)|(?<![AI])|(?= {0,3}(?:[.,;:/&!(}–—]|- |$|(?:or|and|because|since)\b)))",
    re.MULTILINE,
)
CONCLUSION = re.compile(
    r"(?:\b(?i:it'?s|it is|it must be|so) (?i:option |choice )?"
    r"|(?:\A|(?<=[.:\n]) ?|\b(?i:therefore|hence|thus|so),? |\b(?i:option|choice|answer) )(?=\(?[A-J]\)? is ))"
    r"\(?([A-J])\)?((?i: is (?:the )?(?:correct|right)(?: option| choice| answer| one)?))?[.!]?\s*\Z"
)
CLAUSE = re.compile(r"[.,;:!?\n]|\b(?i:so|but|hence|thus|therefore)\b")
# "I don't think option A is correct", "either option A or option B is correct"
DENIED = re.compile(r"(?i:n['’]t|\b(?:not?|never|n?either|nor|doubt|unlikely|if|both))\b|\b[A-J]\)? (?:or|and) \Z")
# "I don't think the answer is B", but not "I can't believe the answer is B" and "I don't think so: the answer is B";
# "I doubt that the answer is B", but not "no doubt the answer is B"
UNBELIEVED = re.compile(
    r"(?i:\b(?:(?:do|does|did|would)(?:n['’]t| not) (?:think|believe|say)|i (?:really |highly |seriously )?doubt)"
    r"(?: that)?(?: the| my)?(?: final| correct)? )\Z"
)
UNBELIEVED_CHARACTERS = 50  # that may be before "answer"
ANOTHER = re.compile(  # but not "B, I think" and "B, and A is wrong"
    r"\)? ?(?:[,;/&]|\(?(?:or|and)\b) ?(?:(?:or|and|possibly|maybe) )?"
    r"\(?(?!I (?!or |and )[a-z])[A-J](?!\w| is (?:wrong|incorrect|not)\b)"
)


def choice(prompt: str, answer: str, gold: str) -> float | None:
    """1 for the letter of gold, 0 for another one, None without any. ValueError for a gold that is no letter."""
    wanted = _gold_letter(gold)
    found, _ = _letter(answer)
    return None if found is None else float(found == wanted)


def explain(kind: str, answer: str, gold: str) -> dict[str, Any]:
    """The letter that was found, and the rule that found it."""
    found, rule = _letter(answer)
    return {"extracted": found, "parsed_gold": _gold_letter(gold), "rule": rule}


def lone_letter(text: str) -> str | None:
    """The letter that a text is, alone or before its option as in "(D) four"; None for other texts, as "(D)^2"."""
    return _alone(text) if OPTION.match(_unmarked(text).strip()) else None


def stated_letter(text: str) -> str | None:
    """The letter that a text without a box states, "" for two of them, None for none."""
    return _letter(text)[0] if last_boxed(text) is None else None


def _letter(answer: str) -> tuple[str | None, str]:
    """The letter ("" for what is no single letter) and the rule that found it."""
    text = after_thinking(answer)
    content = last_boxed(text)
    if content is not None:
        return _alone(content) or "", "the last box"
    tagged = TAGGED.findall(text)
    text = IN_BRACKETS.sub(lambda letter: letter[0].upper(), _as_round(_unmarked(tagged[-1] if tagged else text)))
    stated = [found for found in ANSWER_IS.finditer(text) if not _is_unbelieved(text, found.start())]
    if statement := stated[-1] if stated else _concluded(text):
        return "" if ANOTHER.match(text, statement.end()) else statement[1], "the last 'answer is'"
    if tagged:
        return _alone(text) or "", "the last <answer>"
    last = text.strip().rpartition("\n")[2].strip().removeprefix("####").strip()  # as GSM8K writes an answer
    return (_alone(last) if len(last) <= 4 else None), "the last line"


def _is_unbelieved(text: str, start: int) -> bool:
    return UNBELIEVED.search(text[max(0, start - UNBELIEVED_CHARACTERS) : start]) is not None


def _concluded(text: str) -> re.Match[str] | None:
    """The letter that the last words of a text name, "so B"; None where their clause denies it."""
    words = CONCLUSION.search(text)
    return None if words and words[2] and DENIED.search(CLAUSE.split(text[: words.start()])[-1]) else words


def _unmarked(text: str) -> str:
    text = unicode_as_latex(text)
    for _ in range(3):
        text = WRAPPING.sub(r"\1", text)
    return MARKS.sub("", SPACES.sub(" ", text))


def _alone(text: str) -> str | None:
    stripped = _as_round(_unmarked(text)).strip()
    found = ALONE.fullmatch(stripped[:1].upper() + stripped[1:] if len(stripped) == 1 else _upper_in_brackets(stripped))
    return None if found is None else found[1] or found[2] or found[3]


def _as_round(text: str) -> str:
    return SQUARE.sub(r"(\1\2)", text)


def _upper_in_brackets(text: str) -> str:
    return re.sub(r"^\(([a-j])\)", lambda letter: letter.group().upper(), text)


def _gold_letter(gold: str) -> str:
    # an option may be a letter, and of gold there is one
    letter = _alone(re.sub(r"(?<=[).:])\s+[A-J]\Z", "", boxed_or_all(gold_answer(gold))))
    if letter is None:
        raise ValueError(f"the gold answer {gold[-80:]!r} is no letter from A to J")
    return letter
