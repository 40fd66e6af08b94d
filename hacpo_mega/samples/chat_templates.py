"""Rendering of tasks through a tokenizer's chat template: a program of the model's, which is checked against probes.

Not here: the messages of a prompt (config/tables/prompting.py), and their ids (tokenizers.py).
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from hacpo_grading.texts.chat_messages import tools_of
from hacpo_mega.config import Prompting
from hacpo_mega.config.tables.prompting import TRIALS
from hacpo_mega.models.answer_ends import QUESTION, AnswerEnds, Chat, answer_ends, chats_with_answer, written_ends
from hacpo_mega.models.files.chat_template import CLOCK, clock_at, reads_clock, same_draws
from hacpo_mega.models.files.folder import named_ends


def rendered(tokenizer: PreTrainedTokenizerBase, prompting: Prompting, text: str) -> str:
    """Text of a task inside the tokenizer's chat template. ValueError if the template refuses it or fails."""
    given = {**prompting.template_kwargs, **({"tools": tools} if (tools := tools_of(text)) else {})}
    return _rendered(tokenizer, prompting, prompting.messages(text), True, given)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, prompting: Prompting, chat: Chat, opens_answer: bool, given: Mapping[str, Any]
) -> str:
    template = _template_of(tokenizer)
    try:
        if reads_clock(template) and prompting.time is not None:
            given = {CLOCK: clock_at(prompting.time), **given}  # takes the place of transformers' own, whose clock runs
        with same_draws(template, chat):
            return tokenizer.apply_chat_template(chat, add_generation_prompt=opens_answer, tokenize=False, **given)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of {tokenizer.name_or_path} refuses the prompt: {error}") from error
    except Exception as error:  # a template is a program and can raise anything
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"the chat template of {tokenizer.name_or_path} fails with {what}") from error


def template_reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if a template of the tokenizer reads the time."""
    return reads_clock(_template_of(tokenizer))


def _template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of the template; of several named ones, all."""
    found = tokenizer.chat_template
    return "\n".join(found.values()) if isinstance(found, dict) else str(found)


def check_chat_template(tokenizer: PreTrainedTokenizerBase, prompting: Prompting) -> None:
    """ValueError for a tokenizer without a template, or with one that silently ignores what it does not know."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"chat_template is on, but the tokenizer of {tokenizer.name_or_path} has none; "
            "switch it off for a base model, or add chat_template.jinja to the folder"
        )
    texts = [rendered(tokenizer, prompting, probe) for probe in TRIALS]
    if problem := prompting.template_problem(str(tokenizer.chat_template), texts):
        raise ValueError(f"the chat template of {tokenizer.name_or_path} {problem}")


def ends_of(tokenizer: PreTrainedTokenizerBase, prompting: Prompting, control: Collection[int]) -> AnswerEnds:
    """End tokens of an agent's answers, from its model folder and, if it is used, its chat template.

    The folder is the one that the tokenizer was loaded from; `control` are the tokenizer's control tokens.
    """
    folder = Path(tokenizer.name_or_path) if tokenizer.name_or_path else None
    written: tuple[int, ...] = ()
    if prompting.chat_template:
        steering = sorted({*control, *(named_ends(folder)[1] if folder is not None else ())})
        texts = [_tried(tokenizer, prompting, chat) for chat in chats_with_answer(prompting.messages(QUESTION))]
        written = written_ends(texts, dict(zip(tokenizer.convert_ids_to_tokens(steering), steering)))
    return answer_ends(folder, tokenizer.eos_token_id, written, tokenizer.bos_token_id)


def _tried(tokenizer: PreTrainedTokenizerBase, prompting: Prompting, chat: Chat) -> str | None:
    """Renders a chat that holds an answer already; None if the template refuses it, which no prompt needs."""
    try:
        return _rendered(tokenizer, prompting, chat, False, prompting.template_kwargs)
    except ValueError:
        return None
