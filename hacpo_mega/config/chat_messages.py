"""Chat messages as a prompt's text: a canonical JSON list, so that hashes, logs and resumed runs see one string.

    [{"role":"system","content":"Be brief."},{"role":"user","content":"1+1="}]
A text is messages exactly if writing them again gives the same text; a task that only looks so is refused when rows are
read. Not here: whose template renders them (prompting.py, samples/tokenizers.py).
"""

import json
from collections.abc import Mapping, Sequence

ROLES = ("system", "user", "assistant")
START = '[{"role":"'


def messages_text(messages: Sequence[Mapping[str, str]]) -> str:
    """The text that stands for messages in which `messages_problem` found nothing."""
    said = [{"role": message["role"], "content": message["content"]} for message in messages]
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


def messages_of(text: str) -> list[dict[str, str]] | None:
    """The inverse of `messages_text`; None for any other text."""
    if not text.startswith(START):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if messages_problem(found) is None and messages_text(found) == text else None


def contents(text: str) -> list[str]:
    """The text itself, or of messages what each of them says."""
    found = messages_of(text)
    return [text] if found is None else [message["content"] for message in found]


def lost_message(text: str, read: str) -> str | None:
    """Which message of `text` is not in what a template made of them; None when all are, the assistant's aside.

    Templates take the thinking out of earlier answers.
    """
    for message in messages_of(text) or ():
        if message["role"] != "assistant" and message["content"].strip() not in read:
            return f"leaves out or changes the message {message['content'][:80]!r} of {message['role']}"
    return None


def messages_problem(found: Sequence[object]) -> str | None:
    """What keeps a list from being a prompt's messages, or None: a system message may come first, a user's is last."""
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
        return f"of role {role!r}; roles are {', '.join(ROLES)}, the first of them in the first message alone"
    if isinstance(content, list):
        kinds = sorted({str(part.get("type")) for part in content if isinstance(part, dict)})
        return f"in parts ({', '.join(kinds) or 'none'}): images and the like are not read; content must be one text"
    return None if isinstance(content, str) and content.strip() else "whose content is no text, or empty"
