"""The forms in which a grader is called: by position, by name, or as TRL and verl call theirs; plain, batched, async.

    def reward(prompt, answer, gold): ...                                  by position, whatever the names are
    def reward(answer, level, gold, *, strict=False): ...                  by name: the value of that name
    def reward(answers, golds, level): ...                                 a batch: lists, one place per answer
    def reward(completions, **kwargs): ...                                 TRL's: every field of the rows as a list
    def compute_score(data_source, solution_str, ground_truth, extra_info): ...                             verl's

Names are prompt, answer, gold, agent (who wrote the answer), group (all answers of that agent to the prompt), row
(every field of the row but the prompt), and the row's own fields. Keyword-only parameters with a default are options
of the user's configuration, never fields. `async def` is awaited for many answers at once. Imported by worker
processes: the standard library alone.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

SINGLE = ("prompt", "answer", "gold", "agent", "group", "row")
PLURAL = {f"{name}s": name for name in SINGLE}
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
POSITIONS = {"prompt": 0, "solution_str": 1, "gold": 2, "ground_truth": 2}  # of a call by position
VERL_PLURAL = tuple(f"{name}s" for name in VERL)


@dataclass(frozen=True)
class Signature:
    """The way a grader is called, as its parameters say.

    style      how it is called
    names      parameters that are given by name, and whether each has a default
    is_open    whether it takes every other field, too (**kwargs)
    is_async   it is awaited
    has_messages, has_texts   TRL's completions are annotated as chat messages, or as texts; else they have the form of
               the prompts
    """

    style: Literal["position", "names", "batch", "trl", "verl", "verl_batch"]
    names: Mapping[str, bool]
    is_open: bool = False
    is_async: bool = False
    has_messages: bool = False
    has_texts: bool = False

    @property
    def takes_lists(self) -> bool:
        """Tells whether several answers go into one call."""
        return self.style in ("batch", "trl", "verl_batch")

    @property
    def takes_many(self) -> bool:
        """Tells whether several answers go into one call or are awaited together."""
        return self.is_async or self.takes_lists

    @property
    def wants(self) -> frozenset[str]:
        """Its needs beyond prompt, answer and gold: any of row, agent, group."""
        asked = {PLURAL.get(name, name) for name in self.names} & {"agent", "group"}
        reads_row = (
            self.fields
            or self.is_open
            or self.style in ("trl", "verl", "verl_batch")
            or {"row", "rows"} & self.names.keys()
        )
        may_read = any(has_default and name not in self._given for name, has_default in self.names.items())
        return frozenset(asked | ({"row"} if reads_row or may_read else set()))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of the data's rows that it cannot do without."""
        return tuple(name for name, has_default in self.names.items() if not has_default and name not in self._given)

    @property
    def _given(self) -> tuple[str, ...]:
        return {
            "position": (),
            "names": SINGLE,
            "batch": tuple(PLURAL),
            "trl": ("prompts", "completions"),
            "verl": VERL,
            "verl_batch": VERL_PLURAL,
        }[self.style]

    def __str__(self) -> str:
        completions = "texts" if self.has_texts else "the prompts are"
        if self.has_messages:
            completions = "chat messages"
        form = {
            "position": "by position, with (prompt, answer, gold)",
            "names": f"by name, with {', '.join(self.names)}",
            "batch": f"with lists, of {', '.join(self.names)}",
            "trl": f"as TRL's, with completions as {completions} and the row's fields",
            "verl": f"as verl's, with {', '.join(name for name in self.names if name in VERL)}",
            "verl_batch": f"as verl's, with lists of {', '.join(name for name in self.names if name in VERL_PLURAL)}",
        }[self.style]
        return form + (", many awaited at once" if self.is_async else "")


def signature_of(grader: Callable) -> Signature:
    """The form in which a callable is called, from its parameters' names. ValueError where it fits no known form."""
    called = grader.func if isinstance(grader, functools.partial) else grader
    is_async = inspect.iscoroutinefunction(grader) or inspect.iscoroutinefunction(type(called).__call__)
    return form_of(inspect.signature(grader), is_async=is_async)


def form_of(signature: inspect.Signature, *, is_async: bool = False) -> Signature:
    """The same for a signature that may have been read from source. ValueError where it fits no known form."""
    parameters = signature.parameters.values()
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [
        p
        for p in parameters
        if p.kind in fixed or (p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is inspect.Parameter.empty)
    ]
    names = {p.name: p.default is not inspect.Parameter.empty for p in named}
    common = {
        "is_open": any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        "is_async": is_async,
    }
    if "completions" in names:
        annotation = str(next(p.annotation for p in named if p.name == "completions"))
        is_chat = any(word in annotation for word in ("dict", "Dict", "Mapping"))
        return Signature("trl", names, has_messages=is_chat, has_texts="str" in annotation and not is_chat, **common)
    if {"solution_str", "ground_truth"} <= names.keys():
        return Signature("verl", names, **common)
    if {"solution_strs", "ground_truths"} <= names.keys():
        return Signature("verl_batch", names, **common)
    if "answers" in names:
        return Signature("batch", names, **common)
    if "answer" in names:
        return Signature("names", names, **common)
    try:
        signature.bind("", "", "")
        if wrong := [name for position, name in enumerate(names) if POSITIONS.get(name, position) != position]:
            raise TypeError(f"{wrong[0]!r} would get another of these")
    except TypeError as error:
        raise ValueError(
            f"it takes {signature}, and is called with (prompt, answer, gold), or by name where it "
            f"takes an `answer`, `answers`, TRL's `completions`, or verl's `solution_str` and `ground_truth`: {error}"
        ) from error
    return Signature("position", {}, is_async=is_async)
