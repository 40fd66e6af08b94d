"""Turn formats: tokens of whole conversations against turns written by hand and Hugging Face's own rendering."""

import asyncio
import random

import numpy as np
import pytest
from repository import SHARED
from run_cases import CHARACTERS
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from turn_cases import CALL, CASES, CHATML, CONTROL, LLAMA3, QWEN35, TOOLS, WORDS, ByHand, TurnCase, said

from hacpo_mega.config import Prompting
from hacpo_mega.conversations.foreign_conversation import ForeignConversation, Terms
from hacpo_mega.conversations.seat import Ending, PlayLimits, Seat, SeatContext, TurnSampling
from hacpo_mega.conversations.tool_calls import ParsedTurn
from hacpo_mega.conversations.turn_format import TurnFormat
from hacpo_mega.conversations.turn_queue import TurnQueue
from hacpo_mega.records import Completion, History, Prompt, Stop
from hacpo_mega.rollout.vllm.engine_loop import TurnLimits
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer, make_tokenizer

QUESTION = {"role": "user", "content": "What is 6*7?"}


@pytest.fixture
def by_hand(tmp_path):
    return ByHand(tmp_path)


def format_of(by_hand, case: TurnCase) -> TurnFormat:
    return TurnFormat.of(by_hand.codec(case), TOOLS if case.call else (), plays_user=True)


def others_of(case: TurnCase, text: str) -> list[list[dict]]:
    """Messages that may follow an own turn: the user's, and with tools one and two results."""
    answer = {"role": "tool", "content": text}
    return [[{"role": "user", "content": text}], *([[answer], [answer, answer]] if case.call else [])]


@pytest.mark.parametrize("name", CASES)
def test_what_follows_a_turn_is_written_by_hand(by_hand, name):
    """Own turns closed and cut, control tokens spelled in others' texts."""
    case = CASES[name]
    turns = format_of(by_hand, case)
    assert turns.kind == case.kind
    head = turns.opening([QUESTION])
    assert head == list(by_hand.codec(case).tokenizer.apply_chat_template(
        [QUESTION], tools=TOOLS if case.call else None, add_generation_prompt=True, return_dict=False))  # fmt: skip
    for text in ("It is 42.", f"42{case.eos}\n<s>[INST]<think><|im_start|>assistant"):
        for others in others_of(case, text):
            for ended in (True, False):
                own = by_hand.ids("I think" + f"⟦{case.eos}⟧" * ended)
                found = turns.continuation([*head, *own], others, ended=ended)
                assert found == by_hand.ids(case.write(others, ended)), (others, ended)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.call])
def test_a_conversation_with_a_tool_is_the_templates_own(by_hand, name):
    """Question, call, result, answer: the engine's prompts are beginnings of Hugging Face's tokens for all of it."""
    case = CASES[name]
    turns = format_of(by_hand, case)
    answer = {"role": "tool", "name": "calculate", "tool_call_id": "call00000", "content": "42"}
    thought = "⟦<think>⟧\nA tool.\n⟦</think>⟧\n\n" if "</think>" in case.template else ""
    head, own = turns.opening([QUESTION]), by_hand.ids(f"{thought}{case.call}⟦{case.eos}⟧")
    parsed = turns.parse(own, head)
    assert parsed == ParsedTurn("", "A tool." if thought else "", (("calculate", {"term": "6*7"}),))
    assert parsed.message.items() >= CALL.items()
    head += own
    head += turns.continuation(head, [answer], ended=True)
    messages = [QUESTION, parsed.message, answer]
    whole = list(by_hand.codec(case).tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=False))  # fmt: skip
    assert turns.rewritten(head, messages) is None
    if name == "llama":  # "\n\n" at the end of a prompt is one token and before a word two: the engine's stay
        assert head != whole
        assert by_hand.codec(case).tokenizer.decode(head) == by_hand.codec(case).tokenizer.decode(whole)
    else:
        assert head == whole
    assert turns.parse(by_hand.ids(f"42⟦{case.eos}⟧"), head) == ParsedTurn("42")


def test_calls_that_cannot_be_read_are_errors(by_hand):
    turns = format_of(by_hand, CASES["chatml"])
    for text, error in (
        ('⟦<tool_call>⟧{"name": calculate}⟦</tool_call>⟧', "no JSON"),
        ('⟦<tool_call>⟧{"name": "calculate", "arguments": {}}', "no '</tool_call>' behind it"),
        ('⟦<tool_call>⟧{"name": "calculate", "arguments": 7}⟦</tool_call>⟧', "needs 'name' and an object"),
        (f"⟦<tool_call>⟧{'[' * 3000}", "no JSON"),
    ):
        parsed = turns.parse(by_hand.ids(text))
        assert parsed.tool_calls == () and error in parsed.error
    two = '⟦<tool_call>⟧{"name": "a", "arguments": {}}⟦</tool_call>⟧'
    assert turns.parse(by_hand.ids(f"So: {two}\n{two}")) == ParsedTurn("So:", tool_calls=(("a", {}), ("a", {})))
    broken = format_of(by_hand, CASES["qwen3"]).parse(
        by_hand.ids('⟦<tool_call>⟧\n{"name": 1\n⟦</tool_call>⟧⟦<|im_end|>⟧')
    )
    assert broken.tool_calls == () and "invalid_json" in broken.error
    assert format_of(by_hand, CASES["llama"]).parse(by_hand.ids("{1} is a set")).error.startswith("tool call: no JSON")


def test_a_call_that_is_weighed_in_a_thinking_block_is_not_made(by_hand):
    """Also under a template that knows no thinking, and a draft that is no JSON spoils no call behind it."""
    turns = format_of(by_hand, CASES["chatml"])
    call = CASES["chatml"].call
    thought = f"⟦<think>⟧Maybe {call}? No.⟦</think>⟧"
    found = turns.parse(by_hand.ids(f"{thought}It is 42."))
    assert found.tool_calls == () and found.error is None and found.content.endswith("No.</think>It is 42.")
    draft = "⟦<think>⟧Between ⟦<tool_call>⟧ signs.⟦</think>⟧"
    found = turns.parse(by_hand.ids(f"{draft}\n\n{call}"))
    assert found.tool_calls == (("calculate", {"term": "6*7"}),)
    assert found.content == "<think>Between <tool_call> signs.</think>"
    quoted = '⟦<tool_call>⟧{"name": "a", "arguments": {"term": "⟦<tool_call>⟧"}}⟦</tool_call>⟧'
    assert turns.parse(by_hand.ids(quoted)).tool_calls == (("a", {"term": "<tool_call>"}),)


@pytest.mark.parametrize("name", ["llama", "llama 3", "re-orders tools"])
def test_every_call_is_read_where_nothing_stands_behind_one(by_hand, name):
    """Also where the library's own parser takes Llama's calls for words; an answer that is JSON is no call."""
    case = TurnCase(LLAMA3, "<|eot_id|>", said("", "", "", ""), CASES["llama"].call, named=["<|eom_id|>"])
    case = CASES.get(name, case)
    codec = by_hand.codec(case)
    if name == "llama 3":  # as Llama's own tokenizer, in which two ends of lines are one word
        codec.tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Split("\n\n", "isolated"), ByteLevel(add_prefix_space=False)]
        )
    turns = TurnFormat.of(codec, TOOLS, plays_user=True)
    assert turns.kind == ("renderer llama-3" if name == "llama 3" else "template")
    call = ("calculate", {"term": "6*7"})
    for between in ("; ", "\n"):
        again = case.call.removeprefix("⟦[TOOL_CALLS]⟧ ")
        assert turns.parse(by_hand.ids(f"{case.call}{between}{again}")).tool_calls == (call, call)
        assert "no JSON" in turns.parse(by_hand.ids(f"{case.call}{between}{again[:-2]}")).error
    if "llama" in name:
        assert turns.parse(by_hand.ids(f"⟦<|python_tag|>⟧{case.call}")).tool_calls == (call,)
        assert turns.parse(by_hand.ids(case.call.replace("parameters", "arguments"))).tool_calls == (call,)
        assert "no JSON" in turns.parse(by_hand.ids("⟦<|python_tag|>⟧print(6*7)")).error
        for answer in ('{"x": 42}', "[6, 7]", "[]"):
            assert turns.parse(by_hand.ids(answer)) == ParsedTurn(answer)


@pytest.mark.parametrize(("name", "schema", "written", "meant"), [
    ("flag", {"type": "boolean"}, "True", True), ("flag", {"type": "boolean"}, "false", False),
    ("flag", {"type": "boolean"}, "maybe", None),
    ("number", {"type": "integer", "nullable": True}, "None", (None,)), ("number", {"type": "integer"}, "7", 7),
    ("either", {"type": ["integer", "string"]}, "north", "north"), ("either", {"type": ["integer", "string"]}, "7", 7),
    ("any", {}, "north", "north"), ("zip", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "90210", "90210"),
    ("zip", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", (None,)),
    ("code", {"type": "string"}, "    return 7\n", "    return 7\n"), ("code", {"type": "string"}, "7", "7"),
])  # fmt: skip
def test_bare_arguments_have_the_types_of_the_schema(by_hand, name, schema, written, meant):
    """As Qwen3.5 writes them: Python's True and None, unions, and the blanks around a text."""
    tool = {"name": "calculate", "parameters": {"type": "object", "properties": {name: schema}}}
    case = TurnCase(QWEN35, "<|im_end|>", said("", "", "", ""))
    turns = TurnFormat.of(by_hand.codec(case), [{"type": "function", "function": tool}], plays_user=True)
    assert turns.kind == "renderer qwen3.5"
    call = f"<function=calculate>\n<parameter={name}>\n{written}\n</parameter>\n</function>"
    found = turns.parse(
        by_hand.ids(f"So.\n⟦</think>⟧\n\n⟦<tool_call>⟧\n{call}\n⟦</tool_call>⟧"), turns.opening([QUESTION])
    )
    if meant is None:
        assert found.tool_calls == () and "invalid_json" in found.error
    else:
        meant = None if meant == (None,) else meant
        assert found == ParsedTurn("", "So.", (("calculate", {name: meant}),))
        assert type(found.tool_calls[0][1][name]) is type(meant)


def test_history_that_a_template_rewrites_begins_a_segment(by_hand):
    """The new segment is Hugging Face's rendering of all messages; where nothing is rewritten there is none."""
    for name, case in CASES.items():
        turns = format_of(by_hand, case)
        assert (turns.rewrites is not None) == case.rewrites, (name, turns.rewrites)
    turns = format_of(by_hand, CASES["drops thinking"])
    assert turns.rewrites.startswith("'It is forty-two") and turns.rewrites.endswith("It is fort'")
    head, own = turns.opening([QUESTION]), by_hand.ids("⟦<think>⟧\nSo 42.\n⟦</think>⟧\n\n42⟦<|im_end|>⟧")
    messages = [QUESTION, turns.parse(own, head).message, {"role": "user", "content": "And 6*8?"}]
    segment = [*head, *own, *turns.continuation([*head, *own], messages[2:], ended=True)]
    written = by_hand.codec(CASES["drops thinking"]).tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert turns.rewritten(segment, messages) == list(written) and len(written) < len(segment)
    plain = [*head, *by_hand.ids("42⟦<|im_end|>⟧")]
    messages[1] = {"role": "assistant", "content": "42"}
    assert turns.rewritten([*plain, *turns.continuation(plain, messages[2:], ended=True)], messages) is None


@pytest.mark.parametrize("name", ["drops thinking", "chatml"])
def test_a_seat_reads_the_templates_own_history(by_hand, name):
    """The segment is Hugging Face's rendering, which another agent's format writes from the record alone."""
    codec = by_hand.codec(CASES[name])
    turns = TurnFormat.of(codec, plays_user=True)
    words = (
        "⟦<think>⟧\nSo 42.\n⟦</think>⟧\n\n42⟦<|im_end|>⟧",
        "⟦<think>⟧\n⟦</think>⟧\n\n48⟦<|im_end|>⟧",
        "7⟦<|im_end|>⟧",
    )
    words = [text if name != "chatml" else text.rpartition("\n")[2] for text in words]
    sampled, asked = [by_hand.ids(text) for text in words], []

    async def ask(request):
        ids = np.array(sampled[len(asked)], dtype=np.int32)
        asked.append(list(request.prompt_ids))
        return Completion(ids, Stop.EOS, np.full(len(ids), -1, np.float32))

    said = [{"role": "user", "content": text} for text in ("And 6*8?", "And 7?")]

    async def play(as_rendered):
        asked.clear()
        how = TurnSampling(50, return_logprobs=True)
        context = SeatContext(codec, turns, PlayLimits(3, 500, 5000, as_rendered), ask, how)
        seat = Seat("0", Prompt(0, "0", "What is 6*7?", "42"), 0, context)
        for heard in ([], said[:1], said[1:]):
            assert not (await seat.speak(heard, "")).trouble
        await seat.end(Ending(Stop.EOS, 1.0))
        return await seat.completion

    plain, found = asyncio.run(play(False)), asyncio.run(play(True))
    assert plain.conversation.segment_starts is None
    if name == "chatml":
        assert found.token_ids.tolist() == plain.token_ids.tolist() and "segments" not in found.conversation.counts
        return
    messages = [
        QUESTION,
        {"role": "assistant", "content": "42"},
        said[0],
        {"role": "assistant", "content": "48"},
        said[1],
    ]
    written = [
        list(codec.tokenizer.apply_chat_template(part, add_generation_prompt=True, return_dict=False))
        for part in (messages[:3], messages)
    ]
    assert asked == [turns.opening([QUESTION]), *written] and found.conversation.counts["segments"] == 2
    assert found.token_ids.tolist() == [*sampled[0], *written[0], *sampled[1], *written[1], *sampled[2]]
    starts = [len(sampled[0]), len(sampled[0]) + len(written[0]) + len(sampled[1])]
    assert found.conversation.segment_starts.tolist() == starts
    trained = np.flatnonzero(found.logprobs)
    assert found.conversation.trained_places(True).tolist() == trained.tolist()
    histories = [History.of(turn.content) for turn in found.conversation.turns if turn.is_history]
    assert [turns.segment("What is 6*7?", "", history.messages) for history in histories] == written


def test_a_close_in_the_middle_or_open_thinking_keeps_what_was_sampled(by_hand):
    """The renderer's bridge cuts at the last close within a cut turn, and closes thinking that is open."""
    turns = format_of(by_hand, CASES["qwen3"])
    head, answer = turns.opening([QUESTION]), [{"role": "tool", "content": "42"}]
    new = by_hand.ids(CASES["qwen3"].write(answer, False))
    assert turns.continuation([*head, *by_hand.ids("one⟦<|im_end|>⟧ two")], answer, ended=False) == new
    cut = by_hand.ids("⟦<think>⟧\nSo")
    assert turns.continuation([*head, *cut], answer, ended=False) == [*by_hand.ids("⟦</think>⟧"), *new]
    assert turns.continuation([*head, *cut, *by_hand.ids("⟦<|im_end|>⟧")], answer, ended=True) == new[1:]


@pytest.mark.parametrize("name", CASES)
def test_what_others_say_before_the_first_turn_is_ordinary_text(by_hand, name):
    """A control token that a seat hears before it speaks is read letter by letter, as in a later turn."""
    case = CASES[name]
    turns, codec = format_of(by_hand, case), by_hand.codec(case)
    prompts = []

    async def ask(request):
        prompts.append(list(request.prompt_ids))
        return Completion(np.array([codec.eos_id], np.int32), Stop.EOS, None)

    async def play(text):
        how = TurnSampling(9)
        seat = Seat(
            "0",
            Prompt(0, "0", QUESTION["content"], "42"),
            0,
            SeatContext(codec, turns, PlayLimits(1, 99, 99), ask, how),
        )
        assert not (await seat.speak([{"role": "user", "content": text, "name": "other"}], "")).trouble
        await seat.end(Ending(Stop.EOS))
        return (await seat.completion).conversation

    asyncio.run(play("It is 42."))
    spelled = f"It is {case.eos}<s>42."
    heard = asyncio.run(play(spelled))
    without, found = prompts
    shown = codec.tokenizer.decode(found)
    assert shown == codec.tokenizer.decode(without).replace("It is 42.", spelled)
    assert [found.count(i) for i in codec.control_ids] == [without.count(i) for i in codec.control_ids]
    assert (
        turns.segment(QUESTION["content"], heard.opening, [])
        == found
        == list(codec.encode_prompt(QUESTION["content"], heard.opening))
    )


def test_another_end_closes_a_turn_unless_it_opens_the_next_message(by_hand):
    llama = format_of(by_hand, CASES["llama"])
    others = [{"role": "user", "content": "And?"}]
    head = [*llama.opening([QUESTION]), *by_hand.ids("42⟦<|eom_id|>⟧")]
    assert llama.continuation(head, others, ended=True) == by_hand.ids(CASES["llama"].write(others, True))
    glm = format_of(by_hand, CASES["glm"])
    head = [*glm.opening([QUESTION]), *by_hand.ids("42⟦<|endoftext|>⟧")]
    assert glm.continuation(head, others, ended=True) == by_hand.ids(CASES["glm"].write(others, False))


@pytest.mark.skipif(not (SHARED / "tokenizers").is_dir(), reason=f"the real tokenizers are not in {SHARED}")
def test_a_tokenizer_that_marks_the_start_of_texts():
    """Phi-3's own template: a first blank is no part of the text, spelled control tokens are pieces of words."""
    codec = TextCodec(load_tokenizer(SHARED / "tokenizers/phi-3"), Prompting(chat_template=True))
    turns, tokenizer = TurnFormat.of(codec, plays_user=True), codec.tokenizer
    answer, further = {"role": "assistant", "content": "Forty-two."}, {"role": "user", "content": "And 6*8?"}
    head = [*turns.opening([QUESTION]), *codec.encode_answer(answer["content"], ended=True)]
    new = turns.continuation(head, [further], ended=True)
    whole = tokenizer.apply_chat_template([QUESTION, answer, further], add_generation_prompt=True, return_dict=False)
    assert new == list(whole)[-len(new) :] and turns.rewrites is None
    assert turns.rewritten(head + new, [QUESTION, answer, further]) is None
    spelled = turns.continuation(head, [{**further, "content": "</s><|end|>"}], ended=True)
    pieces = [piece.replace("▁", "") for piece in tokenizer.convert_ids_to_tokens(spelled)]
    assert "".join(pieces[5:-6]) == "</s><|end|>" and pieces[-6] == "<|end|>"
    with pytest.raises(ValueError, match="shows no tools: it leaves out 'calculate'"):
        TurnFormat.of(codec, TOOLS)


UNCLOSED = """{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
REFUSED = {
    "shows no tools: it leaves out 'calculate'": CASES["gemma"].template,
    "leaves out the message 'Found it: 7, and more.' of 'tool'": CHATML.replace("{{ m.content }}</tool_r", "</tool_r"),
    "writes a turn otherwise behind a longer conversation, '5": CHATML.replace("{{ m.role }}", "{{ loop.index }}"),
    "writes tool calls in a form that is neither a renderer's nor JSON": CHATML.replace('{"name": "', "<name>"),
    "writes no end token behind the agent's words": UNCLOSED,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_template_that_cannot_be_appended_to_is_refused(by_hand, reason):
    with pytest.raises(ValueError, match="the chat template of .*" + reason.replace("(", r"\(")) as refusal:
        TurnFormat.of(
            by_hand.codec(TurnCase(REFUSED[reason], "<|im_end|>", said("", "", "", ""))), TOOLS, plays_user=True
        )
    assert "\n" not in str(refusal.value)


def fuzzed(by_hand, name: str, number: int, seed: int) -> None:
    """Plays conversations of random own tokens and random texts. The engine's prompt is the record so far, own tokens
    stay where they were sampled, and the tokens between them are those written by hand.
    """
    case, draw = CASES[name], random.Random(seed)
    turns = format_of(by_hand, case)
    size, eos = len(by_hand.codec(case).tokenizer), by_hand.ids(f"⟦{case.eos}⟧")[0]
    words = [word for word in WORDS if word in case.template or "think" in word]
    pieces = [*CONTROL, *words, "42", " is", "\n\n", "ä", "東", "x", "{", '"']
    for _ in range(number):
        record, is_own, seen = turns.opening([QUESTION]), [], []
        is_own += [False] * len(record)
        for _ in range(draw.randint(1, 4)):
            seen.append(list(record))
            ended = draw.random() < 0.7
            own = [i for i in (draw.randrange(size) for _ in range(draw.randint(0, 9))) if i not in turns.stop_ids]
            own = own if ended or draw.random() < 0.7 else [*own, eos, *own]  # cut behind an end that was ignored
            own, start = [*own, *([eos] * ended)], len(record)
            record, is_own = record + own, is_own + [True] * len(own)
            turns.parse(own, record[:start])
            text = "".join(draw.choices(pieces, k=draw.randint(1, 6))).strip() or "."
            others = draw.choice(others_of(case, text))
            new = turns.continuation(record, others, ended=ended)
            expected = by_hand.ids(case.write(others, ended))
            closing = by_hand.ids("⟦</think>⟧") if case.kind != "template" and not ended else []
            assert new == expected or (closing and new == closing + expected), (seed, own, others)
            assert record[start:] == own
            record, is_own = record + new, is_own + [False] * len(new)
        assert all(record[: len(prompt)] == prompt and is_own[len(prompt) - 1] is False for prompt in seen)


async def fuzzed_as_rendered(by_hand, name: str, number: int, seed: int) -> int:
    """Plays conversations whose segments are the template's own histories; returns how many began.

    The engine's prompt is the record since its segment's start, and a history is written again from the record.
    """
    case, draw = CASES[name], random.Random(seed)
    turns, codec = format_of(by_hand, case), by_hand.codec(case)
    size, eos = len(codec.tokenizer), by_hand.ids(f"⟦{case.eos}⟧")[0]
    calls, num_segments = [by_hand.ids(text) for text in (case.call or "42", "⟦<think>⟧\nSo.\n⟦</think>⟧\n\n4")], 0

    async def ask(request):
        words = [i for i in (draw.randrange(size) for _ in range(draw.randint(0, 9))) if i not in turns.stop_ids]
        ids = np.array([*draw.choice([words, *calls]), eos], dtype=np.int32)
        asked.append((list(request.prompt_ids), len(ids)))
        return Completion(ids, Stop.EOS, np.full(len(ids), -1, np.float32))

    how = TurnSampling(99, return_logprobs=True)
    context = SeatContext(codec, turns, PlayLimits(4, 5000, 50_000, as_rendered=True), ask, how)
    for _ in range(number):
        asked, heard = [], []
        seat = Seat("0", Prompt(0, "0", QUESTION["content"], "42"), 0, context)
        for _ in range(draw.randint(1, 4)):
            if (await seat.speak(heard, "")).trouble:  # a template refuses what the agent has said
                break
            heard = draw.choice(others_of(case, draw.choice([*CONTROL, "42", "ä", "東\n"])))
        await seat.end(Ending(Stop.EOS, 1.0))
        found = await seat.completion
        tokens, before = found.token_ids.tolist(), list(codec.encode_prompt(QUESTION["content"]))
        requests, places = iter(asked), []
        for turn, place in found.conversation.parts():
            if turn.is_history:
                before = turns.segment(QUESTION["content"], "", History.of(turn.content).messages)
                assert before == tokens[place]
                num_segments += 1
                continue
            if turn.is_own:
                assert next(requests) == (before, turn.num_tokens)
                places += range(place.start, place.stop)
            before = [*before, *tokens[place]]
        assert found.conversation.trained_places(True).tolist() == places
    return num_segments


@pytest.mark.parametrize("name", CASES)
def test_prefix_and_turn_are_what_the_engine_saw(by_hand, name):
    fuzzed(by_hand, name, 13, seed=1)
    num_segments = asyncio.run(fuzzed_as_rendered(by_hand, name, 13, seed=3))
    assert num_segments or not CASES[name].rewrites


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_prefix_and_turn_are_what_the_engine_saw_2000_times(by_hand, name):
    fuzzed(by_hand, name, 250, seed=2)
    asyncio.run(fuzzed_as_rendered(by_hand, name, 250, seed=4))


def test_the_plain_format_of_a_vocabulary_without_chat(tmp_path):
    """`?` calls the one tool, "=" stands behind its result; what cannot be written is read as empty and counted."""
    with pytest.raises(ValueError, match=r"has no '\?', with which a model without a chat template calls its tool"):
        TurnFormat.of(TextCodec(make_tokenizer(tmp_path, CHARACTERS)), TOOLS)
    codec = TextCodec(make_tokenizer(tmp_path, (*CHARACTERS, "?")))
    number = dict(zip(("<pad>", "<eos>", *CHARACTERS, "?"), range(99)))
    turns = TurnFormat.of(codec, TOOLS)
    spelled = lambda text: [number[sign] for sign in text]  # noqa: E731
    head = turns.opening([{"role": "user", "content": "6*7="}])
    own = [*spelled("?6*7"), number["<eos>"]]
    assert head == spelled("6*7=") and turns.parse(own, head) == ParsedTurn(
        "", tool_calls=(("calculate", {"term": "6*7"}),)
    )
    answer = [{"role": "tool", "content": "42"}]
    assert turns.continuation(head + own, answer, ended=True) == spelled("42=")
    assert turns.continuation(head + own[:-1], answer, ended=False) == [number["<eos>"], *spelled("42=")]
    error = [{"role": "tool", "content": "{'error': 'no <eos>'}"}]
    assert turns.continuation(head + own, error, ended=True) == spelled("=")
    assert turns.parse(spelled("42")) == ParsedTurn("42") and turns.rewritten(head, []) is None
    two = [{"function": {"name": name, "parameters": {}}} for name in "ab"]
    with pytest.raises(ValueError, match="can call one tool with one required argument, and these are a, b"):
        TurnFormat.of(codec, two)


def test_what_is_heard_first_in_a_plain_format_is_ordinary_text(tmp_path):
    """Letters of <eos>, behind a task whose own <eos> is the data's; what the tokenizer puts first stays first."""
    tokenizer = make_tokenizer(tmp_path, (*CHARACTERS, *"<>eob", "<bos>"))
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos = tokenizer.bos_token_id
    start = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", bos)])
    tokenizer.backend_tokenizer.post_processor = start
    tokenizer.save_pretrained(tmp_path)
    codec = TextCodec(load_tokenizer(tmp_path))
    turns = TurnFormat.of(codec)
    heard = turns.text_of_others([{"role": "user", "content": "1<eos>2"}])
    letters = [codec.tokenizer.convert_tokens_to_ids(sign) for sign in heard]
    task = [bos, *(codec.tokenizer.convert_tokens_to_ids(token) for token in ("4", "<eos>", "="))]
    assert list(codec.encode_prompt("4<eos>=", heard)) == [*task, *letters]
    said = [{"role": "assistant", "content": "3"}, {"role": "tool", "content": "1<eos>2"}]
    own = list(codec.encode_answer("3", ended=True))
    assert turns.segment("4<eos>=", heard, said) == [*task, *letters, *own, *letters]


def test_a_plain_argument_has_the_type_of_its_schema(tmp_path):
    codec = TextCodec(make_tokenizer(tmp_path, (*CHARACTERS, "?")))
    schema = {"name": "square", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}
    turns = TurnFormat.of(codec, [{"function": schema}])
    assert turns.parse(codec.encode_answer("?12", True)).tool_calls == (("square", {"x": 12}),)
    assert turns.parse(codec.encode_answer("?1+2", True)).error == "'1+2' is no integer, which x of square is"


@pytest.mark.parametrize("name", CASES)
def test_what_a_program_says_is_a_prompt_that_every_agent_can_read(by_hand, name):
    """Its first messages and its tools, as a text of a run's prompts, have the tokens of the template's own opening;
    a result of a tool behind a sampled call is context, with the tool's name."""
    case = CASES[name]
    tools, codec, turns = TOOLS if case.call else [], by_hand.codec(case), format_of(by_hand, case)
    queue = TurnQueue(TurnLimits(100_000, 4000))
    talk = ForeignConversation("t", 1, queue, Terms(turns.stop_ids, PlayLimits(4, 4000, 1000), 100))
    first = talk.prompt_of([QUESTION], tools, turns, codec)
    assert list(first.ids) == turns.opening([QUESTION]) and first.task is not None
    turn = talk.ask(first, None, 1.0)
    thought = "⟦<think>⟧\nA tool.\n⟦</think>⟧\n\n" if "</think>" in case.template else ""
    own = by_hand.ids(f"{thought}{case.call or '41'}⟦{case.eos}⟧")
    queue.take(idle=False)
    queue.give(turn.name, Completion(np.array(own, np.int32), Stop.EOS, np.full(len(own), -1.0, np.float32)))
    parsed = turns.parse(own, first.ids)
    talk.note_answer(turn, [QUESTION], parsed, tools)
    said = turn.message
    called = [call["id"] for call in said.get("tool_calls", ())]
    answer = {"role": "tool", "tool_call_id": called[0], "content": "42"} if called else QUESTION
    second = talk.prompt_of([QUESTION, said, answer], tools, turns, codec)
    head = [*first.ids, *own]
    assert list(second.ids) == head + turns.continuation(head, [answer], ended=True) and second.parent is turn
    assert [one["name"] for one in second.others] == (["calculate"] if called else [""])
    talk.ask(second, None, 1.0)
    queue.take(idle=False)
    queue.give("t/1", Completion(np.array([7, 8], np.int32), Stop.LENGTH, np.zeros(2, np.float32)))
    found = talk.completion(codec, 0.5, {})
    assert [turn.is_own for turn in found.conversation.turns] == [True, False, True]
    assert list(first.ids) + found.token_ids.tolist() == [*second.ids, 7, 8]
    assert list(codec.encode_prompt(found.conversation.task)) == list(first.ids)
    other = {"role": "assistant", "content": "Another."}
    assert talk.prompt_of([QUESTION, other, QUESTION], tools, turns, codec).task is not None
    if called:  # a history with calls is no prompt of a row
        again = talk.ask(talk.prompt_of([QUESTION, other, QUESTION], tools, turns, codec), None, 1.0)
        again.parsed = parsed
        ids = [call["id"] for call in (*said["tool_calls"], *again.message["tool_calls"])]
        assert len(set(ids)) == len(ids) and all(len(one) == 9 and one.isalnum() for one in ids)
        assert talk.prompt_of([QUESTION, said, answer, other, QUESTION], tools, turns, codec).task is None


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.call])
def test_a_history_with_calls_has_the_wording_of_the_run(by_hand, name):
    """As the prompts of the first messages have it; it is what another agent with this template reads."""
    wording = Prompting(chat_template=True, system_prompt="Be brief.", prompt_template="{prompt} Say it.")
    codec = by_hand.codec(CASES[name], wording)
    turns = TurnFormat.of(codec, TOOLS, plays_user=True)
    talk = ForeignConversation(
        "t", 1, TurnQueue(TurnLimits(100_000, 4000)), Terms(turns.stop_ids, PlayLimits(4, 4000, 1000), 100)
    )
    answer = {"role": "tool", "tool_call_id": "call00000", "content": "42"}
    found = talk.prompt_of([QUESTION, CALL, answer], TOOLS, turns, codec)
    assert found.task is None and "What is 6*7? Say it." in codec.tokenizer.decode(found.ids)
    other = TurnFormat.of(codec, plays_user=True)
    assert list(found.ids) == other.segment(found.history.task, "", found.history.messages)
