"""The driver of conversations: limits, ends, failures, order. The engine's turns are written here, one by one."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from repository import ROOT
from written_engine import SIGNS, Written

from hacpo_mega.conversations.environment import EnvironmentClass
from hacpo_mega.conversations.player import Player
from hacpo_mega.conversations.seat import turn_seed
from hacpo_mega.records import Prompt, Stop
from hacpo_mega.samples.tokenizers import TextCodec, make_tokenizer

FATES = {"raise": "1", "exit": "2", "bytes": "3"}
ENVIRONMENTS = ROOT / "tests/support/environments.py"


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return TextCodec(make_tokenizer(tmp_path_factory.mktemp("signs"), SIGNS))


@pytest.fixture(scope="module")
def calculator():
    with EnvironmentClass.load("calculator") as found:
        yield found


@pytest.fixture
def play(codec):
    players = []

    def played(environment, script, texts=("12*3=",), error=None, **limits):
        sizes = {"max_turns": 4, "total": 40, "prompt": 8} | limits
        config = SimpleNamespace(
            conversation=SimpleNamespace(max_turns=sizes["max_turns"]),
            rollout=SimpleNamespace(max_prompt_tokens=sizes["prompt"]),
            longest_answer=sizes["total"],
        )
        player = Player(environment, codec, config)
        players.append(player)
        engine = Written(codec, script)
        engine.error = error
        places = [(Prompt(n, str(n), text, "0"), 0) for n, text in enumerate(texts)]
        how = {"max_tokens": 12, "return_logprobs": True}
        return player.play(engine.serve, places, range(100, 100 + len(texts)), **how), engine

    yield played
    for player in players:
        player.close()


def turns_of(completion):
    return [(turn.role, turn.content) for turn in completion.conversation.turns]


def asks_then_repeats(read):
    task, _, said = read.partition("=")
    return (";" + said.removeprefix(f"?{task}").rstrip("=") if said else f"?{task}"), Stop.EOS


def test_a_tool_is_asked_and_its_answer_read_in_place(play, codec, calculator):
    (found,), engine = play(calculator, asks_then_repeats)
    assert turns_of(found) == [("assistant", "?12*3"), ("tool", "36"), ("assistant", ";36")]
    ids = [*codec.encode_answer("?12*3", True), *codec.encode_answer("36=", False), *codec.encode_answer(";36", True)]
    assert found.token_ids.tolist() == ids and found.stop is Stop.EOS
    assert found.conversation.counts["calls"] == 1
    first, second = (len(codec.encode_answer(text, True)) for text in ("?12*3", ";36"))
    expected = [*np.linspace(-1, -2, first), *[0] * 3, *np.linspace(-1, -2, second)]
    assert found.logprobs.tolist() == pytest.approx(expected)
    head = list(codec.encode_prompt("12*3="))
    assert [list(request.prompt_ids) for request in engine.asked] == [head, [*head, *ids[: first + 3]]]
    assert [request.seed for request in engine.asked] == [100, turn_seed(100, 1)]


def test_conversations_keep_the_order_of_their_prompts(play, calculator):
    texts = [f"{n}+{n}=" for n in range(10, 40)]
    found, _ = play(calculator, asks_then_repeats, texts)
    assert [turns_of(one)[-1] for one in found] == [("assistant", f";{2 * n}") for n in range(10, 40)]


@pytest.mark.parametrize(
    "limits, turns, counts",
    [
        ({"max_turns": 2}, 2, {"calls": 2, "truncated": 1}),
        ({"total": 16}, 2, {"calls": 2, "truncated": 1}),  # a third call has no room behind 6 + 3 + 6 tokens
        ({"max_turns": 9, "total": 1000}, 9, {"calls": 9, "truncated": 1}),
    ],
)
def test_limits_end_a_conversation_behind_an_own_turn(play, calculator, limits, turns, counts):
    (found,), _ = play(calculator, lambda read: ("?1*12", Stop.EOS), **limits)
    own = [turn for turn in found.conversation.turns if turn.is_own]
    assert len(own) == turns and found.conversation.turns[-1].is_own and found.stop is Stop.LENGTH
    assert {name: found.conversation.counts[name] for name in counts} == counts
    assert len(found.token_ids) <= limits.get("total", 40)


def test_a_turn_that_is_cut_ends_a_conversation(play, calculator):
    (found,), _ = play(calculator, lambda read: ("?12*3", Stop.LENGTH))
    assert turns_of(found) == [("assistant", "?12*3")] and found.stop is Stop.LENGTH
    assert found.conversation.counts["truncated"] == 1 and "calls" not in found.conversation.counts


def test_a_tools_error_goes_on_and_is_counted(play, calculator):
    (found,), _ = play(calculator, lambda read: (("?+" if read == "12*3=" else ";1"), Stop.EOS))
    assert [role for role, _ in turns_of(found)] == ["assistant", "tool", "assistant"]
    assert found.conversation.counts["call_errors"] == 1


@pytest.mark.parametrize("fate", ["raise", "exit", "bytes"])
def test_an_environment_that_fails_costs_its_conversation_alone(codec, play, fate):
    """The first digit of a turn is the fate of `respond`."""
    with EnvironmentClass.load(f"{ENVIRONMENTS}:Moody") as moody:
        found, _ = play(moody, lambda read: (read.partition("=")[0], Stop.EOS), [f"{FATES[fate]}=", "9="])
    lost, sound = found
    assert lost.conversation.counts["failed"] == 1 and lost.conversation.reward is None
    assert sound.conversation.reward == 0.5 and "failed" not in sound.conversation.counts


def test_an_opening_that_is_too_long_fails_before_the_first_turn(play):
    with EnvironmentClass.load(f"{ENVIRONMENTS}:Chatter") as chatter:
        (found,), engine = play(chatter, lambda read: ("01", Stop.EOS), prompt=5)
    assert not engine.asked and not len(found.token_ids)
    counts = found.conversation.counts
    assert (counts["too_long"], counts["failed"], found.conversation.reward) == (1, 1, None)


def test_an_engine_that_dies_is_raised_and_nobody_waits(play, calculator):
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no engine any more"):
        play(calculator, asks_then_repeats, ["1+1=", "2+2="], error=RuntimeError("no engine any more"))
    assert threading.active_count() <= before + 1


def test_the_first_turns_seed_is_the_answers_own():
    seeds = [turn_seed(7, turn) for turn in range(5)]
    assert seeds[0] == 7 and len(set(seeds)) == 5 and all(0 <= seed < 2**63 for seed in seeds)
