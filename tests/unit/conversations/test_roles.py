"""Conversations of two agents, each with a player, an engine and a tokenizer of its own, over a real connection."""

import asyncio
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
from repository import ROOT
from written_engine import SIGNS, Written

from hacpo_mega.cluster.security.secret import AuthListener, Secret, authenticate
from hacpo_mega.config import Prompting
from hacpo_mega.conversations.environment import EnvironmentClass, merged_user_messages
from hacpo_mega.conversations.environment_process import MAX_FRAME_BYTES, frame_of
from hacpo_mega.conversations.partners import OtherSeat, Partners
from hacpo_mega.conversations.player import Player, PlayLimits, environment_of, play_roles
from hacpo_mega.conversations.seat import Spoken, turn_seed
from hacpo_mega.records import Prompt, Stop
from hacpo_mega.rollout.wire import conversation_of, conversation_text
from hacpo_mega.samples.tokenizers import TextCodec, make_tokenizer

ENVIRONMENTS = ROOT / "tests/support/environments.py"
SECRET = Secret(bytes(range(32)))
EOS = Stop.EOS


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    """Codecs of `left`, with one sign a token, and of `right`, with some pairs of digits too."""
    folders = [tmp_path_factory.mktemp(name) for name in ("left", "right")]
    return [TextCodec(make_tokenizer(*made)) for made in zip(folders, (SIGNS, (*SIGNS, "12", "36")), strict=True)]


@pytest.fixture
def play(codecs):
    players, servers = [], []

    def played(environment, scripts, texts=("12*3=",), before=(None, None), codecs=codecs, **limits):
        """Completions of both, and their engines; `before` is what a thread waits for before it plays."""
        sizes = {"max_turns": 1, "total": 60, "prompt": 24, "wait_s": 20.0} | limits
        sizes_of = PlayLimits(sizes["max_turns"], sizes["prompt"], sizes["total"])
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        address = server.getsockname()

        def connect(rank):
            assert rank == 5
            connection = socket.create_connection(address)
            authenticate(connection, SECRET, "seats 5", 5.0)
            return connection

        engines = [Written(codec, script) for codec, script in zip(codecs, scripts, strict=True)]
        both = []
        for mine, codec in enumerate(codecs):
            partners = Partners(("left", "right"), mine, connect, lambda *_: 5, lambda r: f"rank {r}", sizes["wait_s"])
            both.append(Player(environment, codec, sizes_of, partners))
        players.extend(both)
        both[1].serve_seats(AuthListener(server, SECRET, "seats 5"))
        found, is_over = [None, None], threading.Event()
        places = [(Prompt(10 + n, str(n), text, "0"), n) for n, text in enumerate(texts)]

        def run(mine):
            if before[mine] is not None:
                before[mine]()
            seeds = range(100 + 100 * mine, 100 + 100 * mine + len(texts))
            how = {"max_tokens": 12, "return_logprobs": True, "is_unwanted": is_over.is_set}
            try:
                found[mine] = both[mine].play(engines[mine], places, seeds, **how)
            except Exception as error:
                found[mine] = error
                is_over.set()  # as the end of the job ends the other process

        threads = [threading.Thread(target=run, args=(mine,)) for mine in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return found, engines

    yield played
    for player in players:
        player.close()


@pytest.fixture(scope="module")
def relay():
    with EnvironmentClass.load("relay") as found:
        yield found


@pytest.fixture(scope="module")
def debate():
    with EnvironmentClass.load(f"{ENVIRONMENTS}:Debate") as found:
        yield found


def turns_of(completion):
    return [(turn.role, turn.content, turn.name) for turn in completion.conversation.turns]


def counts_of(completion):
    return {name: count for name, count in completion.conversation.counts.items() if name != "environment_ms"}


def test_a_turn_is_heard_by_the_next_role_in_its_own_tokens(play, codecs, relay):
    texts = [f"{n}*3=" for n in range(12, 20)]
    first, second = lambda read: (f"36-{read[:2]}", EOS), lambda read: (f"4,{read[:2]}", EOS)
    (left, right), engines = play(relay, (first, second), texts)
    for n, text in enumerate(texts):
        number = text[:2]
        assert turns_of(left[n]) == [("assistant", f"36-{number}", ""), ("user", f"4,{number}", "right")]
        assert turns_of(right[n]) == [("assistant", f"4,{number}", "")]
        assert right[n].conversation.opening == f"36-{number}=" and left[n].conversation.opening == ""
        assert left[n].token_ids.tolist() == list(codecs[0].encode_answer(f"36-{number}", True))
        assert [one[n].conversation.answer.content for one in (left, right)] == [f"4,{number}"] * 2
        assert left[n].stop is right[n].stop is EOS and counts_of(left[n]) == {}
        assert conversation_of(conversation_text(left[n].conversation)) == left[n].conversation
    asked = {codecs[1].decode_answer(request.prompt_ids): request for request in engines[1].asked}
    assert sorted(asked) == sorted(f"{text}36-{text[:2]}=" for text in texts)
    assert {asked[f"{text}36-{text[:2]}="].seed for text in texts} == set(range(200, 208))
    assert list(asked["12*3=36-12="].prompt_ids) == list(codecs[1].encode_prompt("12*3=", "36-12="))


def test_whoever_begins_to_play_first_waits_for_the_other(play, relay):
    for late in (0, 1):
        before = [None, None]
        before[late] = lambda: threading.Event().wait(0.3)
        (left, right), _ = play(relay, (lambda read: ("1", EOS), lambda read: ("2", EOS)), before=before)
        assert turns_of(left[0]) == [("assistant", "1", ""), ("user", "2", "right")] and len(right) == 1


def test_an_environment_speaks_between_turns_and_rewards_each_role(play, codecs, debate):
    scripts = (lambda read: ("01", EOS), lambda read: ("89", EOS))
    ((left,), (right,)), engines = play(debate, scripts, ("3=",), max_turns=3)
    assert turns_of(left) == [
        ("assistant", "01", ""), ("user", "1", ""), ("user", "89", "right"), ("user", "2", ""),
        ("assistant", "01", ""), ("user", "89", "right"),
    ]  # fmt: skip
    assert turns_of(right) == [
        ("assistant", "89", ""), ("user", "2", ""), ("user", "01", "left"), ("user", "3", ""), ("assistant", "89", ""),
    ]  # fmt: skip
    assert right.conversation.opening == "701=1="
    assert (left.conversation.reward, right.conversation.reward) == (1.0, 0.0)
    heads = [codecs[0].decode_answer(request.prompt_ids) for request in engines[0].asked]
    assert heads[0] == "3=7" and [request.seed for request in engines[0].asked] == [100, turn_seed(100, 1)]
    own = sum(turn.num_tokens for turn in left.conversation.turns if turn.is_own)
    assert own < sum(turn.num_tokens for turn in left.conversation.turns) == len(left.token_ids)


def test_thinking_that_one_roles_prompt_opens_is_judged_for_all(play, relay, debate, tmp_path):
    """Its answer is the same text for both, whoever's last turn it is; a turn whose prompt opens nothing has none."""
    tokenizer = make_tokenizer(tmp_path, (*SIGNS, "<think>", "</think>"))
    thinks, other = TextCodec(tokenizer, Prompting(prompt_template="{prompt}<think>")), TextCodec(tokenizer)
    plain, thinking = lambda read: ("1", EOS), lambda read: ("6</think>4", EOS)
    for roles, scripts, said in (
        ([other, thinks], (plain, thinking), "<think>6</think>4"),
        ([thinks, other], (thinking, plain), "1"),
    ):
        found, _ = play(relay, scripts, codecs=roles)
        answers = [one.conversation.answer for (one,) in found]
        assert [answer.opened + answer.content for answer in answers] == [said] * 2
        assert all(conversation_of(conversation_text(one.conversation)) == one.conversation for (one,) in found)
    (_, (right,)), _ = play(debate, (plain, thinking), ("3=",), codecs=[other, thinks], max_turns=3)
    assert [turn.opened for turn in right.conversation.turns if turn.is_own] == ["<think>", ""]


def test_a_role_that_was_not_reached_is_silent_and_unjudged(play, relay):
    ((left,), (right,)), engines = play(relay, (lambda read: ("36", Stop.LENGTH), lambda read: ("4", EOS)))
    assert left.stop is right.stop is Stop.LENGTH and not engines[1].asked
    assert counts_of(left) == {"truncated": 1} and counts_of(right) == {"truncated": 1, "silent": 1}
    assert turns_of(right) == [("assistant", "", ""), ("user", "36", "left")] and not len(right.token_ids)


def test_a_turn_too_long_for_the_next_roles_prompt_ends_the_conversation(play, relay):
    scripts = (lambda read: ("123456789", EOS), lambda read: ("4", EOS))
    ((left,), (right,)), _ = play(relay, scripts, prompt=10)
    assert counts_of(right) == {"truncated": 1, "too_long": 1, "silent": 1}
    assert left.stop is Stop.LENGTH and turns_of(left) == [("assistant", "123456789", "")]


def test_rewards_that_name_other_roles_fail_the_conversation(play):
    with EnvironmentClass.load(f"{ENVIRONMENTS}:OtherRoles") as wrong:
        ((left,), (right,)), _ = play(wrong, (lambda read: ("1", EOS), lambda read: ("2", EOS)))
    for one in (left, right):
        assert one.conversation.counts["failed"] == 1 and one.conversation.reward is None


@pytest.mark.nightly
def test_an_engine_that_does_not_answer_is_named(play, relay):
    def never():
        threading.Event().wait(3.0)

    found, _ = play(relay, (lambda read: ("1", EOS), lambda read: ("2", EOS)), before=(None, never), wait_s=0.5)
    assert "the engine of rank 5 has not answered a turn for 0.5 s" in str(found[0])


def test_a_process_without_the_secret_is_asked_nothing(play, relay):
    listeners, heard = [], []

    def intrude():
        with socket.create_connection(listeners[0]) as stranger:
            stranger.sendall(bytes(96))
            stranger.settimeout(5.0)
            with suppress(ConnectionResetError):
                while more := stranger.recv(64):
                    heard.append(more)

    create = socket.create_server
    socket.create_server = lambda *a, **k: (lambda s: (listeners.append(s.getsockname()), s)[1])(create(*a, **k))
    try:
        (left, _), _ = play(relay, (lambda read: ("1", EOS), lambda read: ("2", EOS)), before=(intrude, None))
    finally:
        socket.create_server = create
    assert turns_of(left[0])[-1] == ("user", "2", "right")
    assert len(b"".join(heard)) == 32, "a challenge, and nothing behind a wrong proof"


def test_an_environment_that_says_nothing_is_for_roles_alone():
    conversation = SimpleNamespace(environment="relay", turn_timeout_s=60.0)
    with pytest.raises(ValueError, match=r"environment relay has no tool .* and does not derive from Responder"):
        environment_of(conversation)
    assert environment_of(conversation, has_roles=True).name == "relay"


def test_messages_of_the_user_become_one_for_a_template():
    said = [{"role": role, "content": text} for role, text in zip(("tool", "user", "user", "tool", "user"), "abcde")]
    assert [message["content"] for message in merged_user_messages(said)] == ["a", "b\n\nc", "d", "e"]


def test_a_conversation_of_roles_is_shown_before_a_run(codecs):
    """Every turn is the given text; the second agent reads the first one's in its prompt, in its own tokens."""
    limits, prompt = PlayLimits(max_turns=1, max_prompt_tokens=24, max_total_tokens=60), Prompt(0, "0", "12*3=", "36")
    with EnvironmentClass.load("relay") as relay:
        left, right = play_roles(relay, dict(zip(("left", "right"), codecs)), limits, prompt, "36", max_tokens=4)
    turns = [[(turn.role, turn.name, turn.content) for turn in one.conversation.turns] for one in (left, right)]
    assert turns == [[("assistant", "", "36"), ("user", "right", "36")], [("assistant", "", "36")]]
    assert [one.token_ids.tolist() for one in (left, right)] == [list(c.encode_answer("36", True)) for c in codecs]
    assert [len(one.token_ids) for one in (left, right)] == [3, 2] and right.conversation.opening == "36="
    assert [one.stop for one in (left, right)] == [EOS, EOS]


def test_results_beyond_a_frame_end_the_conversation_not_the_run():
    heard = [{"role": "tool", "content": "\N{GRINNING FACE}" * 800_000}] * 2
    assert len(frame_of({"others": heard})) > MAX_FRAME_BYTES
    assert asyncio.run(OtherSeat(None, None, 5, (1, 10, 0)).speak(heard, "")) == Spoken(trouble="full")
