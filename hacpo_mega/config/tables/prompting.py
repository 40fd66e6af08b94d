"""Prompt format: turns a task's text into an agent's prompt (chat template, system prompt, few-shot). Imports no torch.

Training and evaluation share this record, so an agent is asked in one way in both. Elsewhere: the rendering itself,
which needs a tokenizer (samples/tokenizers.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hacpo_grading.texts.answer_text import CLOSES, OPENS
from hacpo_grading.texts.chat_messages import messages_of
from hacpo_mega.models.files.chat_template import names_in, utc_now

PLACE = "{prompt}"
# Arguments that a template is always given.
RESERVED = {"messages", "add_generation_prompt", "continue_final_message"}
# Trial input of a template: two tasks, one of them long, since a template may truncate.
TRIALS = ("Which number is 17 more than 25? Answer with it alone.", f"Count these: {'word, ' * 500}and end with 4711.")


@dataclass(frozen=True)
class Prompting:
    """The wording around a task. The defaults add nothing: the task's text is the prompt.

    chat_template     one user message, or the task's own messages, in the tokenizer's chat template, the assistant's
                      turn opened
    template_kwargs   arguments of that template, such as enable_thinking = false
    system_prompt     the message before the user's
    prompt_template   text with `{prompt}` where the task goes: an instruction, or worked examples for a base model
    time              fixed time, in UTC, of the template's clock; None: the time of the first rendering (`timed`)

    Raises ValueError for what would otherwise be ignored in silence.
    """

    chat_template: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    prompt_template: str | None = None
    time: str | None = None

    def __post_init__(self) -> None:
        if not self.chat_template and (self.template_kwargs or self.system_prompt is not None):
            raise ValueError(
                "chat_template_kwargs and system_prompt are read by a chat template only: set chat_template = true, "
                "or write the text into prompt_template"
            )
        if not self.chat_template and self.time is not None:
            raise ValueError("chat_template_time is read by a chat template only: remove it")
        if owned := sorted(self.template_kwargs.keys() & RESERVED):
            raise ValueError(f"chat_template_kwargs sets {', '.join(owned)}, which every prompt has already: remove it")
        if self.prompt_template is not None and self.prompt_template.count(PLACE) != 1:
            raise ValueError(
                f"prompt_template has {PLACE} {self.prompt_template.count(PLACE)} times; it needs it exactly once, "
                "where the task goes"
            )

    def timed(self) -> "Prompting":
        """The same prompting with the current time where none is given."""
        return replace(self, time=utc_now()) if self.chat_template and self.time is None else self

    def filled(self, text: str) -> str:
        """The task inside the prompt template. Other braces of the template are text, so LaTeX needs no escaping."""
        return text if self.prompt_template is None else self.prompt_template.replace(PLACE, text)

    def without_template(self, text: str) -> str:
        """The prompt of a model without a chat template. ValueError for a task that is chat messages."""
        if messages_of(text) is not None:
            raise ValueError(
                f"the prompt {text[:80]!r} is chat messages, which need chat_template = true of every agent"
            )
        return self.filled(text)

    def messages(self, text: str) -> list[dict[str, str]]:
        """The task as the messages of a chat.

        If the task is messages itself, the last one is filled in, and a system message of its own replaces ours.
        """
        *before, last = messages_of(text) or [{"role": "user", "content": text}]
        has_system = bool(before) and before[0]["role"] == "system"
        if self.system_prompt is not None and not has_system:
            before = [{"role": "system", "content": self.system_prompt}, *before]
        return [*before, last | {"content": self.filled(last["content"])}]

    def opened_thinking(self, read: str, text: str) -> str:
        """Start of the answer that the prompt itself contains: from a <think> left open at its end; else empty.

        `read` is the task `text` as the model reads it. After the last message all text is the template's. In plain
        text a <think> counts only at the very end, since it may be a word of the task.
        """
        task = self.messages(text)[-1]["content"].strip() if self.chat_template else read
        behind = read[read.rfind(task) + len(task) :] if task in read else ""
        for opened in (behind, read if read.rstrip().endswith(OPENS) else ""):
            if opened.rfind(OPENS) > opened.rfind(CLOSES):
                return opened[opened.rfind(OPENS) :]
        return ""

    def template_problem(self, template: str, texts: Sequence[str]) -> str | None:
        """The texts of TRIALS that a chat template loses; None if all are there.

        A template ignores in silence what it does not know: a misspelled argument, a system prompt, the task itself.
        """
        if unread := sorted(self.template_kwargs.keys() - names_in(template)):
            return f"never reads {', '.join(unread)}; correct or remove it in chat_template_kwargs"
        if len(set(texts)) < len(TRIALS):
            return "makes one text of all prompts: it leaves the user's message out; give the template of a chat model"
        tasks = [self.filled(trial).strip() for trial in TRIALS]
        if any(task not in text for task, text in zip(tasks, texts, strict=True)):
            return "leaves out or changes a part of the user's message; give the template of a chat model"
        around = [text.replace(task, "") for task, text in zip(tasks, texts, strict=True)]
        if any((self.system_prompt or "").strip() not in text for text in around):
            return "leaves the system prompt out; write it into prompt_template instead"
        return None
