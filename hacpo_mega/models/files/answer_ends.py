"""The tokens that end an agent's answers, and the one that ends the answers it learns from others. No torch.

Families have several ends: Gemma's <eos> and <end_of_turn>, Phi-3's <|endoftext|> and <|end|>, GLM's <|user|>. The
sampler stops at all of them. An answer of another agent gets the one that the learner itself would have sampled.
Elsewhere: the engine that stops (rollout/engine.py), and the files that name ends (folder.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_mega.models.files.folder import named_ends

Chat = list[dict[str, Any]]

# Texts that a template is tried with; trimming changes none of them.
QUESTION, ANSWER, NEXT = "Which number is 8 more than 34?", "It is forty-two, I think.", "Which is 7 less than 19?"


@dataclass(frozen=True)
class AnswerEnds:
    """The ends of one agent.

    ids     every token that ends an answer, first the one that ends the answers of others in this agent's tokens
    added   one of them that the chat template writes and no file of the folder names; None where there is none
    """

    ids: tuple[int, ...]
    added: int | None = None

    def added_line(self, text_of: Callable[[int], str]) -> str | None:
        """A line for the user about the end that the template adds; None without one."""
        if self.added is None:
            return None
        named = ", ".join(text_of(number) for number in self.ids if number != self.added) or "none"
        return (
            f"the chat template ends an answer with {text_of(self.added)} (id {self.added}), which is no end in the "
            f"files of the model folder (they name {named}): answers end there, too, and the export names it"
        )


def answer_ends(folder: Path | None, eos_id: int | None, written: Sequence[int], bos_id: int | None) -> AnswerEnds:
    """The end tokens of an agent with this `eos_id` of its tokenizer and the text `written` that its chat template puts
    after an answer.

    Every id that a file of the folder or the tokenizer names is an end. Others' answers end with the first of these
    that the template writes after an answer. Where it writes another control token alone, that is an end, too, and the
    one of others' answers: a model under this template ends its turn so. A token that begins texts is none. Without a
    template, or with one that writes no control token there, others' answers end with the tokenizer's eos_token, if
    the model names it or names none, else with the first end that the model names.
    """
    of_model, named = named_ends(folder) if folder is not None else ((), ())
    named = tuple(dict.fromkeys((*named, *(() if eos_id is None else (eos_id,)))))
    if not named:
        return AnswerEnds(())
    known = [number for number in written if number in named]
    others = [number for number in written if number not in named and number != bos_id]
    if not known and others:
        return AnswerEnds((others[0], *named), added=others[0])
    if not known:
        known = [eos_id if eos_id is not None and (eos_id in of_model or not of_model) else named[0]]
    return AnswerEnds((known[0], *(number for number in named if number != known[0])))


def chats_with_answer(before: Chat) -> tuple[Chat, Chat]:
    """Input of `written_ends`: the messages `before` with an answer and a further question, and with an answer alone.

    Some templates close an answer only where the next message begins (GLM), others only the last one.
    """
    answered = [*before, {"role": "assistant", "content": ANSWER}]
    return [*answered, {"role": "user", "content": NEXT}], answered


def written_ends(texts: Sequence[str | None], control: Mapping[str, int]) -> tuple[int, ...]:
    """The first control token that each rendered chat has behind its answer, and before the next question, if any.

    `texts` are of `chats_with_answer`; None is a chat that the template refuses. `control` are control tokens by text.
    """
    ends = (_first(_behind_answer(text), control) for text in texts if text is not None)
    return tuple(dict.fromkeys(number for number in ends if number is not None))


def _behind_answer(text: str) -> str:
    """Text between the answer and the next question; empty if the template has changed the answer."""
    _, answer, behind = text.rpartition(ANSWER)
    return behind.partition(NEXT)[0] if answer else ""


def _first(text: str, control: Mapping[str, int]) -> int | None:
    positions = {token: text.find(token) for token in control if token and token in text}
    if not positions:
        return None
    return control[min(positions, key=lambda token: (positions[token], -len(token)))]  # of two there, the longer
