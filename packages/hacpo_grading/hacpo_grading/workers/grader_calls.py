"""Calls a grader with the arguments of its signature (grader_signature.py), and checks the rewards that it returns.

A grader returns a number in the declared range, None for a text without an answer, or a table with "score" and other
numbers, which are logged; for a batch, a list of these. Imported by worker processes: the standard library alone.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

from hacpo_grading.judgement import Asked, Outcome
from hacpo_grading.texts.chat_messages import messages_of
from hacpo_grading.workers.grader_signature import PLURAL, SINGLE, VERL, Signature, signature_of
from hacpo_grading.workers.own_file import load_by_name

MAX_ERROR = 500
MAX_PARTS, MAX_PART_NAME = 16, 40  # of a table that a grader returns
UNIT = (0.0, 1.0)
RETURNED = "the grader returned"  # begins the error about a value that is no reward


class Unjudged(Exception):
    """Raised by a grader that is at fault itself, such as a server out of reach: the answer stays unjudged."""


class GraderCall:
    """A grader with its options, and how it is called.

    reward_range   lowest and highest reward that it may return; [low, high] is mapped linearly to [0, 1]
    patience_s     seconds that an async grader may take for each answer of a call; None: it limits itself
    """

    def __init__(
        self,
        spec: str,
        options: Mapping[str, Any],
        reward_range: Sequence[float] = UNIT,
        patience_s: float | None = None,
    ) -> None:
        """ValueError for what cannot be loaded or called, and for an option that it does not have."""
        self.grader = _with_options(load_by_name(spec), options)
        self.signature = signature_of(self.grader)
        self._low, self._high = reward_range
        self._patience_s = patience_s
        # one event loop for all calls: locks and clients that a grader makes at its import belong to the first
        self._runner = asyncio.Runner()

    def grade(self, asked: Sequence[Asked], *, is_worker: bool = False) -> list[Outcome]:
        """One outcome per answer: a reward, None for a text without an answer, or an error.

        After an error of a whole batch the grader is called again for each answer alone, to find the cause.
        """
        try:
            results = self._call(asked)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if not is_worker and not isinstance(error, Exception):
                raise  # the trainer is being ended
            if len(asked) > 1:
                return [reply for one in asked for reply in self.grade([one], is_worker=is_worker)]
            return [_failure(error)]
        if len(results) != len(asked):
            error = f"{RETURNED} {len(results)} rewards for {len(asked)} answers"
            return [Outcome(None, error, is_misuse=True)] * len(asked)
        return [_failure(one) if isinstance(one, BaseException) else self._outcome(one) for one in results]

    def _call(self, asked: Sequence[Asked]) -> Sequence[Any]:
        signature = self.signature
        if signature.takes_lists:
            columns = _columns(signature, asked)
            (rewards,) = self._awaited([self.grader(**columns)], len(asked))
            if isinstance(rewards, BaseException):
                raise rewards
            return rewards if isinstance(rewards, Sequence) and not isinstance(rewards, str) else list(rewards)
        return self._awaited([self._call_single(one) for one in asked])

    def _call_single(self, asked: Asked) -> Any:
        if self.signature.style == "position":
            return self.grader(asked.prompt, asked.answer, asked.gold)
        arguments_of = _verl if self.signature.style == "verl" else _single
        return self.grader(**arguments_of(self.signature, asked))

    def _awaited(self, calls: Sequence[Any], num_answers: int = 1) -> list[Any]:
        """The results or errors of calls about `num_answers` each; what a plain function returns is awaited, too."""
        if not all(map(inspect.isawaitable, calls)):
            return [*calls]
        limit_s = None if self._patience_s is None else self._patience_s * num_answers

        async def together() -> list[Any]:
            waits = [asyncio.wait_for(call, limit_s) for call in calls]
            return await asyncio.gather(*waits, return_exceptions=True)

        return self._runner.run(together())

    def _outcome(self, returned: Any) -> Outcome:
        parts: dict[str, float] = {}
        if isinstance(returned, Mapping):
            if "score" not in returned:
                error = f'{RETURNED} a table without "score": {_shown(returned)}'[:MAX_ERROR]
                return Outcome(None, error, is_misuse=True)
            parts = _numbers_of(returned)
            returned = returned["score"]
        if returned is None:
            return Outcome(None, parts=parts)
        number = _number(returned)
        if not self._low <= number <= self._high:
            shown = f"{RETURNED} {type(returned).__name__} {_shown(returned)}"[:MAX_ERROR]
            error = f"{shown}, expected a number in [{self._low:g}, {self._high:g}] or None"
            return Outcome(None, error, is_misuse=True)
        return Outcome((number - self._low) / (self._high - self._low), parts=parts)


def _single(signature: Signature, asked: Asked) -> dict[str, Any]:
    """Arguments of a grader that asks by name, for one answer. Unjudged names a field that the row lacks."""
    return _by_name(signature, {name: _value(asked, name) for name in SINGLE}, asked.fields)


def _value(asked: Asked, name: str) -> Any:
    """The value of one of SINGLE; `row` has every field of the data row but the prompt."""
    return asked.fields if name == "row" else getattr(asked, name)


def _verl(signature: Signature, asked: Asked) -> dict[str, Any]:
    """Arguments as verl's reward managers give them. Other parameters keep their defaults, whatever a row has."""
    row = {name: asked.fields[name] for name in signature.fields if name in asked.fields}
    return _by_name(signature, _verl_values(asked), row)


def _verl_values(asked: Asked) -> dict[str, Any]:
    """The values of verl's names: ground_truth is the row's reward_model's where it has one, else the gold."""
    row, of_model = asked.fields, asked.fields.get("reward_model")
    has_truth = isinstance(of_model, Mapping) and "ground_truth" in of_model
    truth = of_model["ground_truth"] if has_truth else asked.gold
    values = (row.get("data_source", ""), asked.answer, truth, row.get("extra_info", row))
    return dict(zip(VERL, values, strict=True))


def _by_name(signature: Signature, given: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments from `given` and the row's fields; for **kwargs all of these. Unjudged if one lacks."""
    arguments = dict(row) if signature.is_open and signature.style != "verl" else {}
    for name, has_default in signature.names.items():
        if name in given:
            arguments[name] = given[name]
        elif name in row:
            arguments[name] = row[name]
        elif not has_default:
            raise Unjudged(missing_field(name, row))
    return arguments


def _columns(signature: Signature, asked: Sequence[Asked]) -> dict[str, list[Any]]:
    """Lists, one place per answer; a field that only some rows have is None in the others."""
    fields = dict.fromkeys(name for one in asked for name in one.fields)
    row = {name: [one.fields.get(name) for one in asked] for name in fields}
    if signature.style == "trl":
        chats = [messages_of(one.prompt) for one in asked]  # as in TRL, completions have the prompts' form
        as_chat = signature.has_messages or (not signature.has_texts and all(chat is not None for chat in chats))
        completions = [[{"role": "assistant", "content": one.answer}] if as_chat else one.answer for one in asked]
        prompts = [one.prompt if chat is None else chat for one, chat in zip(asked, chats)]
        given = {"prompts": prompts, "completions": completions}
    elif signature.style == "verl_batch":
        each = [_verl_values(one) for one in asked]
        return _by_name(signature, {f"{name}s": [one[name] for one in each] for name in VERL}, {})
    else:
        given = {plural: [_value(one, name) for one in asked] for plural, name in PLURAL.items()}
    return _by_name(signature, given, row) | ({"prompts": given["prompts"]} if signature.is_open else {})


def missing_field(name: str, row: Mapping[str, Any]) -> str:
    """The error about a parameter without a value."""
    return (
        f"the grader asks for {name!r}, which is none of {', '.join(SINGLE)} and no field of the row, which has: "
        f"{', '.join(map(str, row)) or 'none'}"
    )


def _with_options(found: Any, options: Mapping[str, Any]) -> Callable:
    if not callable(found):
        raise ValueError(f"it is a {type(found).__name__}, and a grader is a function (prompt, answer, gold)")
    kinds = (inspect.Parameter.KEYWORD_ONLY,)
    if isinstance(found, type):
        kinds = (*kinds, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [p.name for p in inspect.signature(found).parameters.values() if p.kind in kinds]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"it has no option {', '.join(unknown)}; its options are: {', '.join(known) or 'none'}")
    return found(**options) if isinstance(found, type) else functools.partial(found, **options)


def explain(grader: Callable, explainer: str | None, kind: str, asked: Asked) -> dict[str, Any]:
    """Explains a verdict: by the grader's own `explain`, else by the function `explainer` of (kind, answer, gold); {}
    without either."""
    try:
        if hasattr(grader, "explain"):
            return grader.explain(asked.answer, asked.gold)
        return load_by_name(explainer)(kind, asked.answer, asked.gold) if explainer else {}
    except Exception as error:
        return {"explanation failed": error_text(error)}


def _number(found: Any) -> float:
    try:
        return float(found) if isinstance(found, SupportsFloat) else math.nan  # numpy's scalars are welcome
    except Exception:
        return math.nan


def _numbers_of(table: Mapping[Any, Any]) -> dict[str, float]:
    """The other finite numbers of a table, which are logged as verl does; all else is ignored."""
    named = {k: _number(v) for k, v in table.items() if isinstance(k, str) and k != "score" and not isinstance(v, str)}
    good = [(k, v) for k, v in named.items() if math.isfinite(v) and len(k) <= MAX_PART_NAME and k.isidentifier()]
    return dict(good[:MAX_PARTS])


def _failure(error: BaseException) -> Outcome:
    if isinstance(error, TimeoutError):  # of asyncio.wait_for, or of what the grader itself waited for
        return Outcome(None, timed_out=True)
    return Outcome(None, error_text(error), is_misuse=isinstance(error, Unjudged))


def error_text(error: BaseException) -> str:
    """An error as the judge reports it, at most 500 characters."""
    return f"{type(error).__name__}: {_shown(error, str)}"[:MAX_ERROR]


def _shown(found: object, show: Callable[[Any], str] = repr) -> str:
    try:
        return show(found)
    except Exception:  # such as that of an int with too many digits
        return "that cannot be shown"
