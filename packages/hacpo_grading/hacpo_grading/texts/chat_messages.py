"""Chat messages as a prompt's text: a canonical JSON list, so that hashes, logs and resumed runs see one string.

    [{"role":"system","content":"Be brief."},{"role":"user","content":"1+1="}]
Schemas of tools that a template shows the model come first, as the content of the role "tools".
A text is messages exactly if writing them again gives the same text; a task that only looks so is refused when rows are
read. Elsewhere: the template that renders them (hacpo_mega/samples/tokenizers.py).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant")
TOOLS = "tools"  # no role of a row: schemas have a field of their own
START = '[{"role":"'


def messages_text(messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text for messages and tools that `messages_problem` and `tools_problem` have accepted."""
    parts = [{"role": TOOLS, "content": _compact(tools)}] if tools else []
    parts += [{"role": message["role"], "content": message["content"]} for message in messages]
    return _compact(parts)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def messages_of(text: str) -> list[dict[str, str]] | None:
    """The messages of a `messages_text`; None for any other text."""
    found = _chat_of(text)
    return None if found is None else found[0]


def tools_of(text: str) -> list[dict[str, Any]]:
    """The schemas of tools of a `messages_text`; none for any other text."""
    found = _chat_of(text)
    return [] if found is None else found[1]


def _chat_of(text: str) -> tuple[list[dict[str, str]], list[dict[str, Any]]] | None:
    if not text.startswith(START):
        return None
    try:
        found = json.loads(text)
        tools = json.loads(found.pop(0)["content"]) if found[0]["role"] == TOOLS else []
        is_chat = messages_problem(found) is None and tools_problem(tools) is None
    except (ValueError, RecursionError, TypeError, KeyError, IndexError):
        return None
    return (found, tools) if is_chat and messages_text(found, tools) == text else None


def contents(text: str) -> list[str]:
    """The text itself, or for messages the content of each, and the schemas of tools as text."""
    found, tools = messages_of(text), tools_of(text)
    parts = [text] if found is None else [message["content"] for message in found]
    return [*parts, _compact(tools)] if tools else parts


def tools_problem(found: object) -> str | None:
    """The reason why a value is not the schemas of a prompt's tools, or None. Nothing here ever runs a tool."""
    if not isinstance(found, list):
        return f"is a {type(found).__name__}, needs a list of JSON schemas of functions, or its JSON text"
    names = [_tool_name(tool) for tool in found]
    if None in names:
        return f"has a tool {names.index(None) + 1} without a name: each is {{type, function: {{name, ...}}}}"
    return None if len(set(names)) == len(names) else "names one tool twice"


def _tool_name(tool: object) -> str | None:
    """The name of a tool, as OpenAI nests it or flat."""
    described = tool.get("function", tool) if isinstance(tool, dict) else None
    name = described.get("name") if isinstance(described, dict) else None
    return name if isinstance(name, str) and name else None


def lost_message(text: str, read: str) -> str | None:
    """The message or tool of `text` that a template's output lacks; None if all are there, the assistant's aside.

    Templates take the thinking out of earlier answers, and one that knows no tools ignores them in silence.
    """
    for name in map(_tool_name, tools_of(text)):
        if name not in read:
            return f"leaves out the tool {name!r}: it is of no model that calls tools; leave data.tools_field out"
    for message in messages_of(text) or [{"role": "user", "content": text}]:
        if message["role"] != "assistant" and message["content"].strip() not in read:
            return f"leaves out or changes the message {message['content'][:80]!r} of {message['role']}"
    return None


def messages_problem(found: Sequence[object]) -> str | None:
    """The reason why a list is not a prompt's messages, or None: a system message may come first, a user's is last."""
    for number, message in enumerate(found, start=1):
        if problem := _message_problem(message, is_first=number == 1):
            return f"has a message {number} {problem}"
    last = found[-1]["role"] if found else None
    return None if last == "user" else f"ends with a message of {last!r}, and an answer follows one of 'user'"


def _message_problem(message: object, is_first: bool) -> str | None:
    if not isinstance(message, dict):
        return f"that is a {type(message).__name__}, needs role and content"
    role, content = message.get("role"), message.get("content")
    others = sorted(key for key, value in message.items() if key not in ("role", "content") and value is not None)
    if others:
        return f"with {', '.join(map(repr, others))}: only role and content are read, no tool calls"
    if role not in ROLES or (role == "system" and not is_first):
        return f"of role {repr(role)[:80]}; roles are {', '.join(ROLES)}, the first of them in the first message alone"
    if isinstance(content, list):
        kinds = sorted({str(part.get("type")) for part in content if isinstance(part, dict)})
        return f"in parts ({', '.join(kinds) or 'none'}): images and the like are not read; content must be one text"
    return None if isinstance(content, str) and content.strip() else "whose content is no text, or empty"
