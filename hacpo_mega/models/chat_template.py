"""The chat template of a model folder: which one it is, and what it makes of messages. Imports no torch.

A template is a program of whoever made the folder. It is rendered in a process of its own, for which this file is the
script: bounded in CPU seconds, memory and output, whatever the template does. The environment is that of
transformers.utils.chat_template_utils, which imports torch; a test holds the two against each other.
Not here: what a prompt must be in the end (config/prompting.py), and rendering in a run (samples/tokenizers.py).
"""

import datetime
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.sandbox

CPU_SECONDS = 2
WAIT_SECONDS = 300.0  # of a crowded machine; what counts is CPU_SECONDS
MEMORY_BYTES = 2**30
MAX_CHARACTERS = 2**20
MAX_ERROR = 300

Messages = Sequence[Mapping[str, str]]


def render(template: str, conversations: Sequence[Messages], variables: Mapping[str, Any]) -> list[str]:
    """The text of every conversation, the assistant's turn opened. ValueError, one line, where the template fails."""
    answer = _asked(template, conversations, variables)
    if answer["errors"]:
        raise ValueError(answer["errors"][0])
    return answer["texts"]


def render_closed(template: str, conversations: Sequence[Messages], variables: Mapping[str, Any]) -> list[str | None]:
    """The text of every conversation, no further turn opened; None of one that the template refuses or fails on."""
    return _asked(template, conversations, {**variables, "add_generation_prompt": False})["texts"]


def _asked(template: str, conversations: Sequence[Messages], variables: Mapping[str, Any]) -> dict[str, Any]:
    """What the process answers. ValueError where it comes to no end."""
    asked = json.dumps({"template": template, "conversations": conversations, "variables": variables})
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(command, input=asked.encode(), capture_output=True, timeout=WAIT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"does not end within {WAIT_SECONDS:.0f} s") from error
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ValueError(f"does not end within {CPU_SECONDS} CPU seconds")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise ValueError(f"cannot be rendered: {said[-1][:MAX_ERROR]}")
    return json.loads(done.stdout)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's tokens for whoever asks; here only its content counts."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Where a template runs: the sandbox, filters and functions that transformers gives it."""

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
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def names_in(template: str) -> set[str]:
    """Every name that a template could read by, text and quoted words aside. For one that has been rendered."""
    return {value for _, kind, value in environment().lex(template) if kind == "name"}


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the process says of a request: of each conversation its text, or None and in one line what went wrong."""
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **asked["variables"]}
    texts: list[str | None] = []
    errors = []
    for messages in asked["conversations"]:
        text, error = _rendered(asked["template"], messages, given)
        texts.append(text)
        errors += [] if error is None else [error]
    return {"texts": texts, "errors": errors}


def _rendered(template: str, messages: Messages, given: Mapping[str, Any]) -> tuple[str | None, str | None]:
    try:
        text = environment().from_string(template).render(messages=messages, **given)
    except Exception as error:  # a template is a program: whatever it raises is its fault
        said = (str(error).splitlines() or [""])[0][:MAX_ERROR]
        if type(error) is jinja2.TemplateError:  # by raise_exception
            return None, f"refuses the prompt: {said}"
        return None, f"fails with {type(error).__name__}{': ' if said else ''}{said}"
    if len(text) > MAX_CHARACTERS:
        return None, f"makes {len(text)} characters of a prompt"
    return text, None


def _limit(kind: int, most: int) -> None:
    """Bounds this process; a login node may have bound it more, which nobody can take back."""
    _, allowed = resource.getrlimit(kind)
    bound = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(kind, (bound, bound))


if __name__ == "__main__":
    _limit(resource.RLIMIT_CPU, CPU_SECONDS)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    print(json.dumps(_answer(json.load(sys.stdin))))
