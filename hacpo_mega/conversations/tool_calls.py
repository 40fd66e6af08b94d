"""Own turns as they were meant: words, thinking and tool calls; calls that are JSON between markers are read here."""

import json
import re
from dataclasses import dataclass
from typing import Any, Self

from hacpo_grading.texts.answer_text import CLOSES
from hacpo_mega.models.files.answer_ends import ANSWER

Message = dict[str, Any]
CALLED = "look_up"  # tool of the conversations with which a template is tried


@dataclass(frozen=True)
class ParsedTurn:
    """An own turn as it was meant: words, thinking, and (name, arguments) of each tool call.

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
        return {
            "role": "assistant",
            "content": self.content,
            **thinking,
            **({"tool_calls": calls} if calls else {}),
        }


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
            names = [key for key, value in first.items() if value == CALLED]
            if keys and names:
                marker = text[:at].rpartition(CLOSES)[2].strip()
                return cls(marker, text[end:].strip(), names[0], keys[0])
        raise ValueError(f"{template} writes tool calls in a form that is neither a renderer's nor JSON: {text[:80]!r}")

    def read(self, text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Words before the first call, and the calls. ValueError for a call that cannot be read."""
        if not self.marker and not text.lstrip().startswith(("{", "[")):
            return text, []
        content, *parts = text.split(self.marker) if self.marker else ("", text)
        if not parts:
            return text, []
        calls = [call for part in parts for call in self._calls_of(part.strip())]
        return content.rstrip(), calls

    def _calls_of(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        try:
            found, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tool call: no JSON: {text[:80]!r}") from error
        if not text[end:].strip().startswith(self.end):
            raise ValueError(f"tool call: no {self.end!r} behind it: {text[:80]!r}")
        calls = []
        for one in found if isinstance(found, list) else [found]:
            name, given = (one.get(self.name), one.get(self.arguments)) if isinstance(one, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(given, dict):
                raise ValueError(f"tool call: needs {self.name!r} and an object {self.arguments!r}: {text[:80]!r}")
            calls.append((name, given))
        return calls
