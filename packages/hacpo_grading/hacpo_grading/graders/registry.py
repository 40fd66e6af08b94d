"""The built-in graders: one record each, with all that judges, configurations and evaluations need of it.

A new grader costs a file beside this one and a record here. A grader is (prompt, answer text, gold) -> a reward from 0
to 1, or None for a text without an answer; grader_calls.py calls those with other parameters. Each reads gold before
the answer, so that an unusable gold is an error whatever the answer is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hacpo_grading.graders import program
from hacpo_grading.graders.options import (
    MODEL_OPTIONS,
    NUMBER_OPTIONS,
    PROGRAM_OPTIONS,
    SHARE,
    Option,
    model_wall_s,
    wrong_value,
)
from hacpo_grading.texts.answer_text import after_thinking, last_boxed, plain

HERE = "hacpo_grading.graders"
MAX_VOTE_CHARACTERS = 500


def _whole_text(text: str) -> str:
    return text.strip()[:MAX_VOTE_CHARACTERS]


def _boxed_answer(text: str) -> str | None:
    boxed = last_boxed(after_thinking(text))
    return None if boxed is None else plain(boxed[:MAX_VOTE_CHARACTERS])


def _result(text: str) -> str:
    return text.partition(";")[2]


@dataclass(frozen=True)
class Grader:
    """A grader by name.

    function      "module:name" or "file.py:name", loaded where it runs
    explainer     the function (name, answer, gold) that explains a verdict, where the grader itself has no `explain`
    options       its keyword arguments and the values that each takes; those of `needed` must be given
    is_linear     its time is linear in the text and it calls no library, so it runs in this process
    is_binary     a reward is 0 or 1, unless the option `graded_by` is on
    is_own        the user's: an error in it may be its own fault
    acts          it runs the answer's code or sends it to a server (`asks_server`), and so is tried with care
    gold_as_answer    turns a gold into a text that answers with it, to see whether the gold itself can be judged
    solution          turns a gold into an answer that earns the full reward; None: `gold_as_answer` does
    wall_s        seconds that its programs or servers may take, by its options and a gold
    vote          the text that an answer votes for under maj@k: its final answer, normalised
    """

    name: str
    function: str
    explainer: str | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    is_linear: bool = False
    is_binary: bool = True
    graded_by: str = ""
    is_own: bool = False
    acts: bool = False
    asks_server: bool = False
    gold_as_answer: Callable[[str], str] = str
    solution: Callable[[str], str] | None = None
    wall_s: Callable[[Mapping[str, Any], str], float] = lambda options, gold: 0.0
    vote: Callable[[str], str | None] = _whole_text


PROGRAM_SOLUTION = """```python
import json, sys
given = sys.stdin.buffer.read().decode()
print(next(case["stdout"] for case in json.loads({gold!r}) if case.get("stdin", "") == given), end="")
```"""

_BUILT_IN = (
    Grader(
        name="math",
        function=f"{HERE}.math_grader:boxed",
        explainer=f"{HERE}.math_grader:explain",
        options={"relative": SHARE},
        gold_as_answer=lambda gold: f"\\boxed{{{gold}}}",
        vote=_boxed_answer,
    ),
    Grader(
        name="math_any",
        function=f"{HERE}.math_grader:anywhere",
        explainer=f"{HERE}.math_grader:explain",
        options={"relative": SHARE},
        vote=_boxed_answer,
    ),
    Grader(
        name="number",
        function=f"{HERE}.number:Number",
        options=NUMBER_OPTIONS,
        is_linear=True,
    ),
    Grader(name="choice", function=f"{HERE}.choice:choice", explainer=f"{HERE}.choice:explain", is_linear=True),
    Grader(
        name="json",
        function=f"{HERE}.json_equality:json_equality",
        explainer=f"{HERE}.json_equality:explain",
        is_linear=True,
    ),
    Grader(
        name="program",
        function=f"{HERE}.program:Program",
        options=PROGRAM_OPTIONS,
        graded_by="graded",
        acts=True,
        wall_s=program.wall_s,
        solution=lambda gold: PROGRAM_SOLUTION.format(gold=gold),
    ),
    Grader(name="exact", function=f"{HERE}.graders:exact", explainer=f"{HERE}.graders:explain", is_linear=True),
    Grader(
        name="arithmetic",
        function=f"{HERE}.graders:arithmetic",
        explainer=f"{HERE}.graders:explain",
        is_linear=True,
        gold_as_answer=lambda gold: f";{gold}",
        vote=_result,
    ),
    Grader(
        name="model",
        function=f"{HERE}.model_judge:ModelJudge",
        options=MODEL_OPTIONS,
        needed=("url", "model"),
        is_binary=False,
        acts=True,
        asks_server=True,
        wall_s=model_wall_s,
    ),
)
GRADERS: Mapping[str, Grader] = {grader.name: grader for grader in _BUILT_IN}


def find_grader(name: str) -> Grader:
    """The grader of that name, or the user's own for "module:name" and "file.py:name". ValueError for others."""
    if name in GRADERS:
        return GRADERS[name]
    if ":" in name:
        return Grader(name, name, is_own=True, is_binary=False, acts=True)
    raise ValueError(f"reward kind {name!r} is unknown; known: {', '.join(GRADERS)}, or your own as module:function")


def value_problem(name: str, options: Mapping[str, Any]) -> str | None:
    """A complaint about an option that a built-in grader lacks or that has a wrong value; all names are known."""
    grader = GRADERS[name]
    if missing := [option for option in grader.needed if option not in options]:
        return f"{name!r} needs {' and '.join(f'{option} ({grader.options[option].words})' for option in missing)}"
    return wrong_value(grader.options, options)


def gives_parts(name: str, options: Mapping[str, Any]) -> bool:
    """Tells whether a grader may give a part of a reward, as the user's own may."""
    grader = GRADERS.get(name)
    return grader is None or not grader.is_binary or bool(options.get(grader.graded_by))


def final_answer(name: str, text: str) -> str | None:
    """The text that an answer votes for under maj@k, None without a final answer.

    Two wrong answers that are equal but written differently stay two candidates.
    """
    return find_grader(name).vote(text) or None
