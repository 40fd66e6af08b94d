"""The kinds of judges: which grader a `reward.kind` names, where it runs, and how gold itself looks as an answer.

Those of the house are (prompt, answer text, gold) -> a reward from 0 to 1, or None for a text without an answer; how
others are called is in grader_calls.py. Each reads gold before it reads the answer, so that a gold it cannot use is an
error whatever the answer is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

HERE = "hacpo_mega.grading.graders"


@dataclass(frozen=True)
class Kind:
    """A grader by name.

    explainer     the function (kind, answer, gold) that explains a verdict, where the grader itself has no `explain`
    is_linear     its time is linear in the text and it calls nothing of anybody else, so it runs in this process
    gold_before, gold_after   what makes an answer of a gold, to see whether the gold itself can be judged
    is_own        the user's: what it raises may be its own fault
    """

    grader: str
    explainer: str | None = None
    is_linear: bool = False
    gold_before: str = ""
    gold_after: str = ""
    is_own: bool = False

    def gold_as_answer(self, gold: str) -> str:
        """A text that answers with gold."""
        return f"{self.gold_before}{gold}{self.gold_after}"


KINDS: Mapping[str, Kind] = {
    "math": Kind(f"{HERE}.math_grader:boxed", f"{HERE}.math_grader:explain", gold_before="\\boxed{", gold_after="}"),
    "math_any": Kind(f"{HERE}.math_grader:anywhere", f"{HERE}.math_grader:explain"),
    "number": Kind(f"{HERE}.number:Number", is_linear=True),
    "choice": Kind(f"{HERE}.choice:choice", f"{HERE}.choice:explain", is_linear=True),
    "json": Kind(f"{HERE}.json_equality:json_equality", f"{HERE}.json_equality:explain", is_linear=True),
    "program": Kind(f"{HERE}.program:Program"),
    "exact": Kind(f"{HERE}.graders:exact", f"{HERE}.graders:explain", is_linear=True),
    "arithmetic": Kind(f"{HERE}.graders:arithmetic", f"{HERE}.graders:explain", is_linear=True, gold_before=";"),
    "model": Kind(f"{HERE}.model_judge:ModelJudge"),
}


def find_kind(name: str) -> Kind:
    """The kind of that name, or the user's own grader for "module:name" and "file.py:name". ValueError for others."""
    if ":" in name:
        return Kind(name, is_own=True)
    if name not in KINDS:
        raise ValueError(f"reward kind {name!r} is unknown; known: {', '.join(KINDS)}, or your own as module:function")
    return KINDS[name]
