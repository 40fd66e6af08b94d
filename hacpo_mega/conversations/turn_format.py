"""Turn formats: the tokens between an agent's own turns, and what an own turn says.

An agent's own tokens stay as they were sampled. Texts of others are encoded once, as the template's continuation:
only new tokens are made, so that head + continuation begins with head in every way.

    way         used where                                            continuation                       tool calls
    renderer X  the library `renderers` has one that gives the        its bridge, where the result       its parser
                template's own tokens for every trial conversation    begins with head; else as below
    template    else: two renderings of a short conversation differ   text behind the agent's words      a JSON object
                by what follows an own turn, whatever stands before   in the longer rendering            between markers
    plain       no chat template                                      text, then a separator             `?argument`

A template is tried before it is used (`TurnFormat.of`): it must show tools and every message, and end with the same
tokens behind a short and a long conversation. One that writes earlier own turns otherwise is accepted: sampled tokens
stay, and `rewritten` gives the prompt of a new segment where a run wants the template's own history.
Texts of others are ordinary text: a control token that they spell steers nothing (samples/ordinary_text.py).

Elsewhere: who speaks next, the form of tool calls (tool_calls.py), answers that cross agents (samples/tokenizers.py).
"""

import abc
import json
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from renderers import Renderer, RendererConfig, create_renderer

from hacpo_grading.texts.answer_text import CLOSES, OPENS
from hacpo_grading.texts.chat_messages import tools_of
from hacpo_mega.conversations.environment import merged_user_messages
from hacpo_mega.conversations.tool_calls import (
    TRIAL_TOOL,
    CallSyntax,
    Message,
    ParsedTurn,
    call_message,
    parser_tools,
    typed_arguments,
)
from hacpo_mega.models.files.answer_ends import ANSWER, NEXT, QUESTION
from hacpo_mega.samples.ordinary_text import OrdinaryText
from hacpo_mega.samples.tokenizers import TextCodec, with_opening

# In a plain format: the first sign of a tool call, and separators that may stand behind a text of others. The format
# uses the first separator that the vocabulary writes as one token. The quickstart's prompts end with "=", too.
CALL_MARK, SEPARATORS = "?", ("\n", "=", ";", " ")
# Kinds of renderers without a template of their own, and one that loads its vocabulary from the network.
NO_FAMILY = ("auto", "default", "custom", "gpt-oss")
THOUGHT = f"{OPENS}\nPlus eight.\n{CLOSES}\n\n"


class TurnFormat(abc.ABC):
    """Tokens of a conversation as one agent reads them.

    kind         "renderer qwen3", "template" or "plain"
    stop_ids     tokens that end an own turn
    rewrites     the first text that the template changes in an earlier own turn; None where it changes none
    around_others  text before and behind what others said before the agent's first turn
    """

    kind: str
    _codec: TextCodec
    _ordinary: OrdinaryText
    stop_ids: tuple[int, ...]
    rewrites: str | None = None
    around_others: tuple[str, str] = ("\n\n", "")

    @classmethod
    def of(cls, codec: TextCodec, tools: Sequence[Mapping[str, Any]] = (), *, plays_user: bool = False) -> "TurnFormat":
        """The format of an agent with these tools (JSON schemas); `plays_user`: others speak as the user, too.

        ValueError, one line, for a template in which such a conversation cannot be written by appending.
        """
        return TemplateFormat(codec, tools, plays_user) if codec.prompting.chat_template else PlainFormat(codec, tools)

    @abc.abstractmethod
    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a prompt: messages as of `Prompting.messages`, tools of the environment and the task shown, the
        agent's turn opened."""

    def segment(self, task: str, opening: str, messages: Sequence[Message]) -> list[int]:
        """Ids of the prompt that begins a segment: a task's text with an opening, and `messages` behind it.

        ValueError for what has no token, and where the template refuses these messages.
        """
        if not messages:
            return list(self._codec.encode_prompt(task, opening))
        return self.opening([*self._codec.prompting.messages(with_opening(task, opening)), *messages], tools_of(task))

    def text_of_others(self, messages: Sequence[Message]) -> str:
        """Text of a prompt behind the task, for an agent to which others have spoken before its first turn."""
        before, behind = self.around_others
        return "".join(f"{before}{message['content']}{behind}" for message in messages)

    @abc.abstractmethod
    def continuation(self, head: Sequence[int], others: Sequence[Message], *, ended: bool) -> list[int]:
        """The new ids behind `head`, all tokens so far: the own turn closed where it is open, the others' messages, and
        the next own turn opened.

        `ended`: the last token of `head` is an end that was sampled; else the turn was cut.
        ValueError where the template refuses these messages.
        """

    @abc.abstractmethod
    def parse(self, token_ids: Sequence[int], head: Sequence[int] = ()) -> ParsedTurn:
        """Meaning of an own turn's ids; `head` is what stood before them, which may have opened the thinking."""

    def rewritten(
        self, head: Sequence[int], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int] | None:
        """Prompt of a new segment where the template writes all `messages` otherwise than `head` has them; else None.

        `head` ends with an opened own turn. Texts are compared, so other tokens of the same text are no rewriting.
        """
        return None


class PlainFormat(TurnFormat):
    """Turns without a chat template: own turn, its end token, then each text of others with a separator behind it.

    With a tool, which must be one of one argument, an own turn that begins with `?` calls it with the rest.
    """

    kind = "plain"

    def __init__(self, codec: TextCodec, tools: Sequence[Mapping[str, Any]]) -> None:
        """ValueError if the vocabulary can write no separator, or tools cannot be called."""
        self._codec, self.stop_ids = codec, codec.ends.ids
        self._ordinary = codec.ordinary_text
        separators = [sign for sign in SEPARATORS if len(codec.encode_answers([sign])[0] or ()) == 1]
        if not separators:
            raise ValueError(
                f"the vocabulary of {codec.tokenizer.name_or_path} has none of {', '.join(map(repr, SEPARATORS))}, "
                "and one must stand between what others say and the agent's turn; add one"
            )
        self._separator, self.around_others = separators[0], ("", separators[0])
        self._tool = _only_tool(tools) if tools else None
        if tools and codec.encode_answers([CALL_MARK]) == [None]:
            raise ValueError(
                f"the vocabulary of {codec.tokenizer.name_or_path} has no {CALL_MARK!r}, with which a model without a "
                "chat template calls its tool; add it"
            )

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        first, *rest = messages
        return [*self._codec.encode_rendered(first["content"]), *self._history(rest)]

    def segment(self, task: str, opening: str, messages: Sequence[Message]) -> list[int]:
        return [*self._codec.encode_prompt(task, opening), *self._history(messages)]

    def _history(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            is_own = message["role"] == "assistant"
            ids += self._codec.encode_answer(message["content"], ended=True) if is_own else self._encoded([message])
        return ids

    def continuation(self, head: Sequence[int], others: Sequence[Message], *, ended: bool) -> list[int]:
        return [*(() if ended else (self._codec.eos_id,)), *self._encoded(others)]

    def _encoded(self, others: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for text in (message["content"] for message in others):
            with suppress(ValueError):  # a text that the vocabulary cannot write is read as empty
                ids += self._ordinary.encode(self._ordinary.hidden(text), lambda t: self._codec.encode_answer(t, False))
            ids += self._codec.encode_answer(self._separator, ended=False)
        return ids

    def parse(self, token_ids: Sequence[int], head: Sequence[int] = ()) -> ParsedTurn:
        text = self._codec.decode_answer(token_ids)
        if self._tool is None or not text.startswith(CALL_MARK):
            return ParsedTurn(text)
        name, argument, kind = self._tool
        value: Any = text.removeprefix(CALL_MARK)
        if kind in ("integer", "number"):
            try:
                value = int(value) if kind == "integer" else float(value)
            except ValueError:
                return ParsedTurn(text, error=f"{value[:40]!r} is no {kind}, which {argument} of {name} is")
        return ParsedTurn("", tool_calls=((name, {argument: value}),))


def _only_tool(tools: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """(name, argument, type of the argument) of the one tool that a plain format can call. ValueError for others."""
    functions = [tool.get("function", tool) for tool in tools]
    names = ", ".join(tool["name"] for tool in functions)
    if len(functions) == 1:
        schema = functions[0].get("parameters", {})
        arguments = schema.get("required") or list(schema.get("properties", {}))
        if len(arguments) == 1:
            return names, arguments[0], str(schema["properties"][arguments[0]].get("type", "string"))
    raise ValueError(
        f"a model without a chat template can call one tool with one required argument, and these are {names}; "
        "give a model with a chat template, or one such tool"
    )


class TemplateFormat(TurnFormat):
    """Turns inside a chat template, by a renderer of the same tokens or by the difference of two renderings."""

    def __init__(self, codec: TextCodec, tools: Sequence[Mapping[str, Any]], plays_user: bool) -> None:
        """ValueError as of `TurnFormat.of`."""
        self._codec, self._tools = codec, [dict(tool) for tool in tools]
        self._name = f"the chat template of {codec.tokenizer.name_or_path}"
        template = str(codec.tokenizer.chat_template)
        self._ordinary, self._knows_thinking = codec.ordinary_text, CLOSES in template
        self._before = codec.prompting.messages(QUESTION)
        family, self._renderer = self._find_renderer()
        self.kind = "template" if self._renderer is None else f"renderer {family}"
        stops = () if self._renderer is None else self._renderer.get_stop_token_ids()
        self.stop_ids = tuple(dict.fromkeys((*codec.ends.ids, *stops)))
        self._ends = codec.tokenizer.convert_ids_to_tokens(list(self.stop_ids))
        self._opener, self._blanks = self._find_opener()
        self._check_tools()
        self._calls = self._call_syntax()
        self._check_turns(plays_user)

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self._encode(self._rendered(self._plain_messages(messages), tools, opens=True))

    def continuation(self, head: Sequence[int], others: Sequence[Message], *, ended: bool) -> list[int]:
        merged = merged_user_messages(others)
        others = self._plain_messages(merged)
        spell_control = any(plain["content"] != message["content"] for plain, message in zip(others, merged))
        if not spell_control and (bridged := self._bridged(head, others)) is not None:
            return bridged
        _, _, behind, closes = self._after_own_turn(self._before, others)
        ids = self._encode(behind)
        # An end that opens the next message (GLM) is that message's first token, and only where it is the same.
        is_closed = ended and (head[-1] == ids[0] or (closes and head[-1] in self.stop_ids))
        return ids[1:] if is_closed else ids

    def parse(self, token_ids: Sequence[int], head: Sequence[int] = ()) -> ParsedTurn:
        if self._renderer is not None and self._calls is None:
            return self._parsed_by_renderer(self._renderer, list(token_ids), list(head))
        end = len(token_ids) - (len(token_ids) > 0 and token_ids[-1] in self.stop_ids)
        before = list(head[-16:]) or self._opener  # a text by itself may lose its first blank
        text = self._shown([*before, *token_ids[:end]]).removeprefix(self._shown(before)).removeprefix(self._blanks)
        has_opened = self._opened_thinking(head) != ""
        thinks = has_opened or (CLOSES in text and self._knows_thinking)
        reasoning, closes, words = text.partition(CLOSES) if thinks else ("", "", text)
        if has_opened and not closes:
            return ParsedTurn("", reasoning.strip())
        words = words.lstrip("\n") if closes else words
        reasoning = reasoning.replace(OPENS, "").strip()
        # A thought is words where the template knows no thinking, but a call that it mentions is not made.
        has_thought = not thinks and text.lstrip().startswith(OPENS) and CLOSES in text
        thought = text[: text.index(CLOSES) + len(CLOSES)] if has_thought else ""
        try:
            behind = words.removeprefix(thought)
            content, calls = (behind, ()) if self._calls is None else self._calls.read(behind)
        except ValueError as error:
            return ParsedTurn(words, reasoning, error=str(error))
        return ParsedTurn(self._ordinary.without_control(thought + content), reasoning, tuple(calls))

    def rewritten(
        self, head: Sequence[int], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int] | None:
        ids = self.opening(messages, tools)
        return None if self._shown(ids) == self._shown(head) else ids

    def _shown(self, ids: Sequence[int]) -> str:
        tokenizer = self._codec.tokenizer
        return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _plain_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Copies in which texts of others spell no control token, and answers of tools have the ids of calls."""
        copies, number = [], 0
        for message in messages:
            if message["role"] != "assistant":
                message = {**message, "content": self._ordinary.hidden(message["content"])}
            number = number + 1 if message["role"] == "tool" else 0
            if number:
                message = {"name": TRIAL_TOOL, "tool_call_id": f"call{number - 1:05d}", **message}
            copies.append(message)
        return copies

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, opens: bool) -> str:
        shown = [*tools, *self._tools]
        options = {**self._codec.prompting.template_kwargs, **({"tools": shown} if shown else {})}
        return self._codec.rendered_chat(list(messages), options, opens_answer=opens)

    def _encode(self, text: str) -> list[int]:
        return self._ordinary.encode(text, self._codec.encode_rendered)

    def _after_own_turn(self, before: Sequence[Message], others: Sequence[Message]) -> tuple[Message, str, str, bool]:
        """(own, whole, behind, closes) of a made-up own turn between `before` and `others`.

        The turn's message; the rendering of all; the part of it behind the own words, from the token that ends the turn
        on; and whether the template writes that token where nothing follows, too.
        """
        answers = [message for message in others if message["role"] == "tool"]
        refusal = ValueError(f"{self._name} leaves out the agent's words")
        for own in self._own_turns(answers):
            try:
                whole = self._rendered([*before, own, *others], opens=True)
                alone = self._rendered([*before, own], opens=False)
            except ValueError as error:
                refusal = error
                continue
            if ANSWER in alone:
                break
        else:
            raise refusal
        place = -1
        for _ in range(alone.count(ANSWER)):
            place = whole.find(ANSWER, place + 1)
        closing = alone[alone.rfind(ANSWER) :]
        ends = [at for end in self._ends if (at := closing.find(end)) >= 0]
        own_text = closing[: min(ends, default=len(closing))]
        behind = whole[place:].removeprefix(own_text)
        if not whole[place:].startswith(own_text) or not behind.startswith(tuple(self._ends)):
            raise ValueError(f"{self._name} writes no end token behind the agent's words, so no turn can follow them")
        return own, whole, behind, bool(ends)

    def _own_turns(self, answers: Sequence[Message]) -> list[Message]:
        """Forms of an own turn before these answers of tools: a template takes one form of arguments, or one call."""
        if not answers:
            return [{"role": "assistant", "content": ANSWER}]
        forms: list[Message] = []
        for given in ({"text": ANSWER}, json.dumps({"text": ANSWER})):
            calls = [{**call_message(n, m["name"], given), "id": m["tool_call_id"]} for n, m in enumerate(answers)]
            forms.append({"role": "assistant", "content": "", "tool_calls": calls})
        return [*forms, {"role": "assistant", "content": ANSWER}]

    def _call_syntax(self) -> CallSyntax | None:
        """The form of calls; None without tools, and where a renderer reads them. Calls without a marker (Llama) are
        read here: the renderer takes two of them, or one behind <|python_tag|>, for words.
        """
        if not self._tools:
            return None
        try:
            syntax = CallSyntax.of(self._own_call_text(), self._name)
        except ValueError:
            if self._renderer is None:
                raise
            return None
        return syntax if self._renderer is None or not syntax.marker else None

    def _own_call_text(self) -> str:
        """An own turn that calls a tool, as the template writes it, up to its end."""
        opened = self._rendered(self._before, opens=True)
        answer = self._plain_messages([{"role": "tool", "content": ""}])
        own, _, behind, _ = self._after_own_turn(self._before, answer)
        whole = self._rendered([*self._before, own, *answer], opens=True)
        text = whole[: len(whole) - len(behind)]
        return text[_num_same(opened, text) :]

    def _find_opener(self) -> tuple[list[int], str]:
        """Ids that open an own turn, and the blanks that the template writes before its words, as Mistral's does."""
        closed, opened = (self._rendered(self._before, opens=opens) for opens in (False, True))
        own = self._rendered([*self._before, {"role": "assistant", "content": ANSWER}], opens=False)
        blanks = own.removeprefix(opened).partition(ANSWER)[0]
        ids = self._encode(opened[len(closed) :]) if opened.startswith(closed) and opened != closed else []
        return ids, blanks if own.startswith(opened) and blanks.isspace() else ""

    def _find_renderer(self) -> tuple[str, Renderer | None]:
        """Name and renderer that give the template's own tokens for each trial conversation; ("", None) without."""
        expected = []
        for chat, opens in self._trials():
            try:
                expected.append((chat, opens, self._encode(self._rendered(chat, opens=opens))))
            except ValueError:
                continue  # the template refuses this conversation, so no renderer has to render it
        for config in typing.get_args(typing.get_args(RendererConfig)[0]):
            family = config.model_fields["name"].default
            if family in NO_FAMILY:
                continue
            try:
                given = dict(self._codec.prompting.template_kwargs) or None
                renderer = create_renderer(self._codec.tokenizer, config(), chat_template_kwargs=given)
                if all(
                    renderer.render_ids(chat, tools=self._tools or None, add_generation_prompt=opens) == ids
                    for chat, opens, ids in expected
                ):
                    return family, renderer
            except Exception:  # a family whose tokens this tokenizer lacks; each says so in its own way
                continue
        return "", None

    def _trials(self) -> list[tuple[list[Message], bool]]:
        """Conversations by which a renderer is chosen, and whether the next own turn is opened. Calls stand alone: own
        turns stay as sampled, so how a template parts two calls does not count.
        """
        own, further = {"role": "assistant", "content": ANSWER}, {"role": "user", "content": NEXT}
        thinking = {**own, "content": THOUGHT + ANSWER}
        call = {**own, "content": "", "tool_calls": [call_message(0, TRIAL_TOOL, {"text": "a 'b' ä", "n": 1})]}
        worded_call = {**call, "content": ANSWER}
        answer = {"role": "tool", "name": TRIAL_TOOL, "tool_call_id": "call00000", "content": " [1,\n2]\n"}
        chats = [
            [],
            [own, further],
            [thinking, further],
            [own, further, thinking, further],
            [call, answer],
            [call, answer, own, further],
            [{**call, "content": THOUGHT}, answer],
            [worded_call, answer, {**answer, "tool_call_id": "call00001"}],
            [worded_call, answer, {**answer, "tool_call_id": "call00001"}, thinking, further],
        ]
        closed = [[own], [thinking], [call, answer, thinking]]
        return [
            *(([*self._before, *chat], True) for chat in chats),
            *(([*self._before, *chat], False) for chat in closed),
        ]

    def _bridged(self, head: Sequence[int], others: Sequence[Message]) -> list[int] | None:
        """The renderer's continuation; None if it has none, or one that changes `head`."""
        start = _end_of_last(head, self._opener)
        if self._renderer is None or start is None:
            return None
        try:
            prompt, own = list(head[:start]), list(head[start:])
            bridge = self._renderer.bridge_to_next_turn(prompt, own, list(others), tools=self._tools or None)
        except Exception:  # the library may raise anything at what a model has sampled
            return None
        if bridge is None or bridge.token_ids[: len(head)] != list(head):
            return None
        return bridge.token_ids[len(head) :]

    def _parsed_by_renderer(self, renderer: Renderer, ids: list[int], head: list[int]) -> ParsedTurn:
        try:
            parsed = renderer.parse_response(ids, tools=parser_tools(self._tools) or None, prompt_ids=head or None)
        except Exception as error:  # the library may raise anything at what a model has sampled
            return ParsedTurn(self._codec.decode_answer(ids), error=f"unreadable: {type(error).__name__}")
        calls, reasoning = [], parsed.reasoning_content or ""
        for call in parsed.tool_calls:
            arguments, is_whole = None, call.status == "ok"
            is_named = isinstance(call.name, str) and isinstance(call.arguments, dict)
            if is_named and (is_whole or call.status == "invalid_json"):
                arguments = typed_arguments(call.name, call.arguments, call.raw, self._tools, is_whole=is_whole)
            if arguments is None:
                return ParsedTurn(parsed.content, reasoning, error=f"tool call: {call.status}: {call.raw[:80]!r}")
            calls.append((call.name, arguments))
        return ParsedTurn(parsed.content, reasoning, tuple(calls))

    def _check_tools(self) -> None:
        """ValueError for a template that ignores tools in silence."""
        shown = self._rendered(self._before, opens=True)
        if missing := [name for tool in self._tools if (name := tool.get("function", tool)["name"]) not in shown]:
            raise ValueError(
                f"{self._name} shows no tools: it leaves out {missing[0]!r}; it is of a model without them"
            )

    def _check_turns(self, plays_user: bool) -> None:
        """Tries turns as they will come: no message is left out, and a turn's tokens depend on nothing before them.

        ValueError with the reason.
        """
        tool = {"role": "tool", "content": "Found it: 7, and more."}
        turns = [[tool], [tool, {"role": "tool", "content": "Nothing here."}]] if self._tools else []
        turns += [[{"role": "user", "content": NEXT}]] if plays_user else []
        turns = [self._plain_messages(turn) for turn in turns]
        for others in turns:
            own, _, text, _ = self._after_own_turn(self._before, others)
            if lost := [message for message in others if message["content"] not in text]:
                raise ValueError(f"{self._name} leaves out the message {lost[0]['content']!r} of {lost[0]['role']!r}")
            ids = self._encode(text)
            for further in turns:
                _, whole, behind, _ = self._after_own_turn([*self._before, own, *others], further)
                expected = text if further is others else self._after_own_turn(self._before, further)[2]
                if behind != expected:
                    at = _num_same(behind, expected)
                    raise ValueError(
                        f"{self._name} writes a turn otherwise behind a longer conversation, {behind[at:][:40]!r} for "
                        f"{expected[at:][:40]!r}: no turn can be appended"
                    )
                if further is others and self._encode(whole)[-len(ids) :] != ids:
                    raise ValueError(f"{self._name} and its tokenizer merge the end of a turn with the words before it")
            self._compare_renderer(others, ids)

    def _compare_renderer(self, others: Sequence[Message], ids: list[int]) -> None:
        """Drops a renderer that bridges otherwise than the template, and notes where the template rewrites history."""
        head = self._encode(self._rendered(self._before, opens=True))
        thought = f"{THOUGHT}{ANSWER}".removeprefix(self._opened_thinking(head))
        own = [*self._codec.encode_answer(self._blanks + thought, ended=False), ids[0]]
        bridged = self._bridged([*head, *own], others)
        if bridged is not None and bridged != ids[1:]:
            self._renderer, self.kind = None, "template"
            self._calls = self._call_syntax()
        full = [*head, *own, *ids[1:]]
        again = self.rewritten(full, [*self._before, self.parse(own, head).message, *others])
        if again is not None and self.rewrites is None:
            sampled, written = self._shown(full), self._shown(again)
            at = _num_same(sampled, written)
            self.rewrites = f"{written[at:][:40]!r} for {sampled[at:][:40]!r}"

    def _opened_thinking(self, head: Sequence[int]) -> str:
        """The start of a thinking block that a prompt has opened; empty if it opens none."""
        text = self._shown(head[-16:])
        return text[text.rfind(OPENS) :] if text.rstrip().endswith(OPENS) else ""


def _num_same(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def _end_of_last(head: Sequence[int], opener: Sequence[int]) -> int | None:
    """Index behind the last `opener` in `head`; None without one."""
    for start in range(len(head) - len(opener), -1, -1):
        if opener and head[start] == opener[0] and list(head[start : start + len(opener)]) == list(opener):
            return start + len(opener)
    return None
