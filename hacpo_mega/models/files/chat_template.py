"""The chat template of a model folder: finds it, and renders messages with it. Imports no torch.

A template is a program of whoever made the folder. It is rendered in a process of its own, for which this file is the
script: bounded in CPU seconds, memory and output, whatever the template does. The environment is that of
transformers.utils.chat_template_utils, which imports torch; a test holds the two against each other.
A template may read the clock (`strftime_now`) and draw at random. Here its clock stands at one time, in UTC, which a
run keeps (config/checks/tokenizer_checks.py), and what it draws follows from the messages: a prompt is one text,
wherever and whenever it is rendered.
Elsewhere: what a prompt must be in the end (config/tables/prompting.py), rendering in a run (samples/tokenizers.py).
"""

import datetime
import functools
import json
import random
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.sandbox

CPU_SECONDS = 2
WAIT_SECONDS = 300.0  # of a crowded machine; what counts is CPU_SECONDS
MEMORY_BYTES = 2**30
MAX_CHARACTERS = 2**20
MAX_ERROR = 300
# The name by which a template reads the clock, and those by which it draws: a filter and a function.
CLOCK, DRAWS = "strftime_now", frozenset(("random", "lipsum"))
# Text that Python prints for a function or an object.
ADDRESS = re.compile(r"<[^\n]{1,200} at 0x[0-9a-f]+>")
# A strftime directive. %s, the seconds since 1970, is replaced: the C library counts them by the machine's time zone.
DIRECTIVE = re.compile(r"%(.)", re.DOTALL)

Messages = Sequence[Mapping[str, str]]
_drawing = threading.Lock()


def render(
    template: str, conversations: Sequence[Messages], variables: Mapping[str, Any], time: str | None = None
) -> list[str]:
    """The text of every conversation, the assistant's turn opened. ValueError, one line, where the template fails.

    The template's clock stands at `time`, as `utc_now` writes it; None: now.
    """
    results = _render_apart(template, conversations, variables, time)
    if problem := next((error for _, error in results if error is not None), None):
        raise ValueError(problem)
    return [text for text, _ in results]


def render_closed(
    template: str, conversations: Sequence[Messages], variables: Mapping[str, Any], time: str | None = None
) -> list[str | None]:
    """The text of every conversation, no further turn opened; None of one that the template refuses or fails on."""
    results = _render_apart(template, conversations, {**variables, "add_generation_prompt": False}, time)
    return [text for text, _ in results]


def _render_apart(
    template: str, conversations: Sequence[Messages], variables: Mapping[str, Any], time: str | None
) -> list[tuple[str | None, str | None]]:
    """(text, None) of each conversation, or (None, one line about the failure), rendered in a process of its own.

    ValueError if the process fails or never ends.
    """
    inputs = {"template": template, "conversations": conversations, "variables": variables, "time": time or utc_now()}
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(command, input=json.dumps(inputs).encode(), capture_output=True, timeout=WAIT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"does not end within {WAIT_SECONDS:.0f} s") from error
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ValueError(f"does not end within {CPU_SECONDS} CPU seconds")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise ValueError(f"cannot be rendered: {lines[-1][:MAX_ERROR]}")
    return json.loads(done.stdout)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's tokens; here only its content counts."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def utc_now() -> str:
    """The time in UTC, to the second, such as 2026-11-26T14:10:00."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")


def clock_at(time: str) -> Callable[[str], str]:
    """`strftime_now` of a template with its clock fixed at `time`."""
    moment = datetime.datetime.fromisoformat(time)
    seconds = str(int(moment.replace(tzinfo=datetime.UTC).timestamp()))
    return lambda form: moment.strftime(DIRECTIVE.sub(lambda match: seconds if match[1] == "s" else match[0], form))


@contextmanager
def same_draws(template: str, messages: Messages) -> Iterator[None]:
    """Around the rendering of messages: seeds the template's random draws from them."""
    if not draws(template) and "map" not in names_in(template):  # `map` may get a filter's name from any text
        yield
        return
    with _drawing:
        state = random.getstate()
        random.seed(json.dumps(messages, sort_keys=True))
        try:
            yield
        finally:
            random.setstate(state)


def reads_clock(template: str) -> bool:
    """True if a template that can be rendered asks for the time anywhere."""
    return CLOCK in names_in(template)


@functools.lru_cache(maxsize=64)
def draws(template: str) -> bool:
    """True if a template that can be rendered draws at random anywhere, also by the name of a filter in quotes."""
    quoted = {value[1:-1] for _, kind, value in environment().lex(template) if kind == "string"}
    return not DRAWS.isdisjoint(names_in(template) | quoted)


def environment(time: str | None = None) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The Jinja sandbox of templates, with the filters and functions of transformers and a fixed clock."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
                sort_keys: bool = False) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals[CLOCK] = clock_at(time or utc_now())
    return made


@functools.lru_cache(maxsize=64)
def names_in(template: str) -> frozenset[str]:
    """Every name that a template could read, text and quoted words aside. For one that has been rendered."""
    return frozenset(value for _, kind, value in environment().lex(template) if kind == "name")


def _rendering(template: str, messages: Messages, given: Mapping[str, Any], time: str) -> tuple[str | None, str | None]:
    try:
        made = environment(time).from_string(template)
        with same_draws(template, messages):
            text = made.render(messages=messages, **given)
    except Exception as error:  # a template is a program: whatever it raises is its fault
        message = (str(error).splitlines() or [""])[0][:MAX_ERROR]
        if type(error) is jinja2.TemplateError:  # by raise_exception
            return None, f"refuses the prompt: {message}"
        return None, f"fails with {type(error).__name__}{': ' if message else ''}{message}"
    if len(text) > MAX_CHARACTERS:
        return None, f"makes {len(text)} characters of a prompt"
    if (found := ADDRESS.search(text)) and found[0] not in str(messages):
        return None, f"prints {found[0]}, whose address is another in every process: it does not call it"
    return text, None


def _limit(kind: int, most: int) -> None:
    """Limits this process; a login node may have set a lower limit, which cannot be raised."""
    _, allowed = resource.getrlimit(kind)
    bound = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(kind, (bound, bound))


if __name__ == "__main__":
    _limit(resource.RLIMIT_CPU, CPU_SECONDS)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    inputs = json.load(sys.stdin)
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **inputs["variables"]}
    print(json.dumps([_rendering(inputs["template"], chat, given, inputs["time"]) for chat in inputs["conversations"]]))
