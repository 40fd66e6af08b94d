"""Own turns parsed into words, thinking and tool calls; calls that are JSON between markers are read here."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from hacpo_grading.texts.answer_text import CLOSES
from hacpo_mega.models.files.answer_ends import ANSWER

Message = dict[str, Any]
PYTHON_TAG = "<|python_tag|>"  # with which Llama's models may begin a call; their templates do not write it
BARE_WORDS = {"True": ("boolean", True), "False": ("boolean", False), "None": ("null", None)}
# An argument that Qwen3.5, MiniMax and GLM write bare: its text, without JSON's quotes.
BARE = (
    r"(?:<parameter={key}>\n?|<parameter name=\"{key}\">|<arg_key>\s*{key}\s*</arg_key>\s*<arg_value>)"
    r"(.*?)(?:\n?</parameter>|</arg_value>)"
)
TRIAL_TOOL = "look_up"  # tool of the conversations with which a template is tried


@dataclass(frozen=True)
class ParsedTurn:
    """An own turn, parsed: words, thinking, and (name, arguments) of each tool call.

    error  the reason why something that begins as a tool call is none; the turn then has no call at all
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    error: str | None = None

    @property
    def message(self) -> Message:
        """The turn as a chat message. Ids of calls are call00000, call00001, ...: nine signs, as Mistral demands."""
        calls = [call_message(n, name, arguments) for n, (name, arguments) in enumerate(self.tool_calls)]
        thinking = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.content, **thinking, **({"tool_calls": calls} if calls else {})}


def call_message(number: int, name: str, arguments: object) -> dict[str, Any]:
    """A tool call as chat messages have it, with an id of nine signs."""
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True)
class CallSyntax:
    """Form of tool calls that are JSON: `marker`, an object or a list of them with these two keys, `end`."""

    marker: str
    end: str
    name: str
    arguments: str

    @classmethod
    def of(cls, text: str, template: str) -> Self:
        """Reads the form from a template's own rendering of a call. ValueError for another than JSON."""
        for at in (place.start() for place in re.finditer(r"[\[{]", text)):
            try:
                found, end = json.JSONDecoder().raw_decode(text, at)
            except ValueError:
                continue
            first = found[0] if isinstance(found, list) and found else found
            if not isinstance(first, dict):
                continue
            keys = [key for key, value in first.items() if value in ({"text": ANSWER}, json.dumps({"text": ANSWER}))]
            names = [key for key, value in first.items() if value == TRIAL_TOOL]
            if keys and names:
                marker = text[:at].rpartition(CLOSES)[2].strip()
                return cls(marker, text[end:].strip(), names[0], keys[0])
        raise ValueError(f"{template} writes tool calls in a form that is neither a renderer's nor JSON: {text[:80]!r}")

    def read(self, text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Words before the first call, and the calls. ValueError for a call that cannot be read."""
        content, start, rest = text.partition(self.marker) if self.marker else _after_tag(text)
        calls: list[tuple[str, dict[str, Any]]] = []
        while start:
            new, behind = self._first(rest.strip())
            calls += new
            start, rest = _begins(behind), behind
            if self.marker and (self.end or not start):
                _, start, rest = behind.partition(self.marker)
        return (content.rstrip(), calls) if calls else (text, [])

    def _first(self, text: str) -> tuple[list[tuple[str, dict[str, Any]]], str]:
        """The calls of the JSON at the start of a text, and what stands behind their end."""
        try:
            found, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tool call: no JSON: {text[:80]!r}") from error
        behind = text[end:].strip()
        if not behind.startswith(self.end):
            raise ValueError(f"tool call: no {self.end!r} behind it: {text[:80]!r}")
        calls = []
        for one in found if isinstance(found, list) else [found]:
            name = one.get(self.name) if isinstance(one, dict) else None
            if not self.marker and name is None:
                return [], ""  # an answer that is JSON
            arguments = one.get(self.arguments, one.get("arguments")) if name is not None else None
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise ValueError(f"tool call: needs {self.name!r} and an object {self.arguments!r}: {text[:80]!r}")
            calls.append((name, arguments))
        return calls, behind.removeprefix(self.end).lstrip("; ,\n")


def _after_tag(text: str) -> tuple[str, str, str]:
    """As `str.partition`, for calls without a marker: one follows Llama's tag, or JSON begins the text."""
    rest = text.lstrip().removeprefix(PYTHON_TAG)
    return "", _begins(rest) or (PYTHON_TAG if text.lstrip() != rest else ""), rest


def _begins(text: str) -> str:
    """The first sign of a text that begins with JSON; empty for another one."""
    first = text.lstrip()[:1]
    return first if first in ("{", "[") else ""


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Types that a parameter may have; none for one of any type."""
    branches = [schema, *(b for key in ("anyOf", "oneOf") for b in schema.get(key) or () if isinstance(b, dict))]
    named = [branch.get("type") or [] for branch in branches]
    nullable = {"null"} if schema.get("nullable") else set()
    return {kind for one in named for kind in ([one] if isinstance(one, str) else one)} | nullable


def _parameters(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Schemas of a tool's parameters."""
    properties = (spec.get("parameters") or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def parser_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools for a renderer's parser, their types simplified to what it reads rightly.

    Where arguments are written bare, it takes a word for broken JSON at every union but anyOf and at a parameter of any
    type, and a text of digits for a number at one that may only be a text or null.
    """
    simplified = []
    for tool in tools:
        spec = tool.get("function", tool)
        schemas = {key: _parser_schema(schema) for key, schema in _parameters(spec).items()}
        simplified.append({**spec, "parameters": {**(spec.get("parameters") or {}), "properties": schemas}})
    return simplified


def _parser_schema(schema: Any) -> Any:
    kinds = _types(schema) if isinstance(schema, dict) else {"other"}
    if kinds in ({"string"}, {"string", "null"}):
        return {"type": "string"}
    return {"anyOf": [{"type": "string"}]} if not kinds or "string" in kinds else schema


def typed_arguments(
    name: str, arguments: Mapping[str, Any], raw: str, tools: Sequence[Mapping[str, Any]], *, is_whole: bool
) -> dict[str, Any] | None:
    """Arguments of a call with the types of their schemas, from those that a renderer's parser read in `raw`.

    Where they are written bare, texts get back the blanks around them, which the parser cuts off, and words become the
    values that they stand for (BARE_WORDS, as Qwen3.5's template writes them). None, unless `is_whole`, for a text that
    is no value of its type.
    """
    schemas = next((_parameters(spec) for tool in tools if (spec := tool.get("function", tool))["name"] == name), {})
    made = dict(arguments)
    for key, value in arguments.items():
        if not isinstance(value, str):
            continue
        kinds = _types(schemas.get(key) or {})
        if kinds == {"string", "null"} and value == "null":
            made[key] = None
        elif kinds and "string" not in kinds and not is_whole:
            kind, made[key] = BARE_WORDS.get(value, ("", None))
            if kind not in kinds:
                return None
        else:
            bare = (found[1] for found in re.finditer(BARE.format(key=re.escape(key)), raw, re.DOTALL))
            made[key] = next((text for text in bare if text.strip() == value), value)
    return made
