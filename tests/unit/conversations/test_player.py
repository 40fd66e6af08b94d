"""The driver of conversations: limits, ends, failures, order. The engine's turns are written here, one by one."""

import asyncio
import gc
import json
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from repository import ROOT
from written_engine import SIGNS, Written

from hacpo_mega.config.load import load_unchecked
from hacpo_mega.conversations.environment import EnvironmentClass
from hacpo_mega.conversations.player import Player, PlayLimits, play_once
from hacpo_mega.conversations.seat import turn_seed
from hacpo_mega.records import Completion, History, Prompt, Stop
from hacpo_mega.rollout.vllm.engine_loop import TurnLimits
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

    def played(environment, script, texts=("12*3=",), error=None, rows=None, **limits):
        sizes = {"max_turns": 4, "total": 40, "prompt": 8} | limits
        of_run = PlayLimits(sizes["max_turns"], sizes["prompt"], sizes["total"], sizes.get("as_rendered", False))
        player = Player(environment, codec, of_run)
        players.append(player)
        engine = Written(codec, script)
        engine.error = error
        rows = rows or [{}] * len(texts)
        places = [(Prompt(n, str(n), texts[n], "0", row=json.dumps(row)), 0) for n, row in enumerate(rows)]
        how = {"max_tokens": sizes.get("turn", min(12, sizes["total"])), "return_logprobs": True}
        return player.play(engine, places, range(100, 100 + len(texts)), **how), engine

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


def test_training_does_not_take_the_lengths_of_evaluation(play, calculator):
    config = load_unchecked(ROOT / "configs/tools.toml", ["evaluation.max_answer_tokens=64"])
    assert PlayLimits.of(config).max_total_tokens == 32 < config.longest_answer
    for turn in (12, 24):  # the second is of an evaluation
        (found,), _ = play(calculator, lambda read: ("1" * 30, Stop.LENGTH), total=16, turn=turn)
        assert len(found.token_ids) == turn


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


def test_an_engine_that_dies_leaves_no_error_that_nobody_read(codec, calculator, caplog):
    """The play is cancelled after one conversation has failed and before the other has."""
    asks_again, is_cancelled = threading.Event(), threading.Event()

    class Held(TurnLimits):
        def require(self, request):
            if request.key == "0.1":
                asks_again.set()
                assert is_cancelled.wait(30)

    class Dies(Written):
        def serve(self, source):
            waiting = {}
            while len(waiting) < 2:
                waiting |= {request.key: request for request in source.take(True)[0]}
            ids = np.array(self.codec.encode_answer("?1+1", True), dtype=np.int32)
            source.give("0.0", Completion(ids, Stop.EOS, np.zeros(len(ids), np.float32)))
            assert asks_again.wait(30)
            source.fail(RuntimeError("no engine any more"))
            raise RuntimeError("no engine any more")

    engine = Dies(codec, asks_then_repeats)
    engine.turn_limits = Held(len(codec.tokenizer), 1100)
    places = [(Prompt(n, str(n), "1+1=", "0", row="{}"), 0) for n in range(2)]
    with closing(Player(calculator, codec, PlayLimits(4, 8, 40))) as player:
        with pytest.raises(RuntimeError, match="no engine any more"):
            player.play(engine, places, [7, 8], max_tokens=12, return_logprobs=True)
        is_cancelled.set()
        while asyncio.all_tasks(player._loop):  # the player's end would read it
            time.sleep(0.01)
    gc.collect()
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


def test_the_first_turns_seed_is_the_answers_own():
    seeds = [turn_seed(7, turn) for turn in range(5)]
    assert seeds[0] == 7 and len(set(seeds)) == 5 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.fixture(scope="module")
def asks():
    with EnvironmentClass.load(f"{ENVIRONMENTS}:Asks", call_s=2.0) as found:
        yield found


def says_digits(read):
    return read.replace("=", "")[-2:], Stop.EOS


def test_a_program_is_one_conversation_of_what_was_sampled(play, codec, asks):
    """The same turns as a class of an environment would have: tokens, seeds of their own, and the program's reward."""
    (found,), engine = play(asks, says_digits)
    assert turns_of(found) == [("assistant", "*3"), ("user", "2"), ("assistant", "32")]
    ids = [*codec.encode_answer("*3", True), *codec.encode_answer("2=", False), *codec.encode_answer("32", True)]
    assert found.token_ids.tolist() == ids and found.stop is Stop.EOS
    talk = found.conversation
    assert (talk.task, talk.opening, talk.reward) == ("12*3=", "", 0.5)
    assert talk.counts.keys() <= {"environment_ms"} and talk.trained_places(True).tolist() == [0, 1, 2, 5, 6, 7]
    head = list(codec.encode_prompt("12*3="))
    assert [list(request.prompt_ids) for request in engine.asked] == [head, [*head, *ids[:5]]]
    assert [request.temperature for request in engine.asked] == [1.0, 1.0]  # the run's, not the program's
    _, other = play(asks, says_digits)
    assert [request.seed for request in other.asked] == [request.seed for request in engine.asked]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fate, turns, counts",
    [
        ("raise", 1, {"failed": 1, "play": 1}),
        ("silent", 1, {"failed": 1}),
        ("key", 1, {"failed": 1, "play": 1}),
        ("hang", 1, {"failed": 1, "timeouts": 1, "hung": 1}),
        ("endless", 4, {"truncated": 1}),
    ],
)
def test_a_program_that_fails_costs_its_conversation_alone(play, asks, fate, turns, counts):
    rows = [{"fate": fate}, {}]
    (lost, sound), _ = play(asks, says_digits, ["12*3=", "45*6="], rows=rows)
    assert {name: n for name, n in lost.conversation.counts.items() if name != "environment_ms"} == counts
    assert sum(turn.is_own for turn in lost.conversation.turns) == turns
    assert lost.conversation.reward == (1.0 if fate == "endless" else None)
    assert lost.stop is (Stop.LENGTH if fate == "endless" else lost.stop)
    assert len(sound.conversation.turns) == 3 and sound.conversation.reward == 0.5


def test_a_program_that_rewrites_its_history_trains_one_segment(play, codec, asks):
    (found,), engine = play(
        asks, lambda read: (read[:-1] * 2 if len(read) < 6 else "1", Stop.EOS), rows=[{"fate": "rewrite"}]
    )
    assert [codec.decode_answer(request.prompt_ids) for request in engine.asked] == ["12*3=", "12*312*3"]
    assert (turns_of(found), found.conversation.task) == ([("assistant", "12*312*3")], "12*3=")
    assert found.conversation.counts["untrained_segments"] == 1 and found.conversation.reward == 0.5


def test_all_histories_of_a_program_are_trained_as_segments(play, codec, asks):
    """Its second prompt is longer than that of an answer may be, and counts in the conversation's length."""
    for total, others in ((19, 0), (18, 1)):  # 9 tokens, 8 of a further prompt, and 2
        (found,), _ = play(
            asks,
            lambda read: (read[:-1] * 2 if len(read) < 6 else "1", Stop.EOS),
            rows=[{"fate": "rewrite"}],
            **{"as_rendered": True, "prompt": 5, "total": total},
        )
        talk = found.conversation
        if others:
            assert turns_of(found) == [("assistant", "12*312*3")] and talk.segment_starts is None
            assert talk.counts["untrained_segments"] == 1 and talk.task == "12*3="
            continue
        task = "12*312*3"
        assert turns_of(found) == [("assistant", task), ("history", History([], task).content), ("assistant", "1")]
        first, prompt, last = codec.encode_answer(task, True), codec.encode_prompt(task), codec.encode_answer("1", True)
        assert found.token_ids.tolist() == [*first, *prompt, *last]
        assert talk.segment_starts.tolist() == [len(first)] and (talk.counts["segments"], talk.reward) == (1, 0.5)
        assert (found.logprobs == 0).tolist() == [*[False] * len(first), *[True] * len(prompt), *[False] * len(last)]


@pytest.mark.parametrize("limits, message", [({"prompt": 3}, 0), ({"total": 4}, 1)])
def test_a_program_meets_the_limits_of_tokens(play, asks, limits, message):
    (found,), engine = play(asks, says_digits, **limits)
    assert len(engine.asked) == message
    assert found.conversation.counts["truncated" if message else "failed"] == 1


def test_a_program_writes_its_prompts_itself(play):
    with EnvironmentClass.load(f"{ENVIRONMENTS}:Opened") as opened:
        (found,), engine = play(opened, says_digits)
    assert not engine.asked and found.conversation.counts["failed"] == 1
    assert opened.failures == {"reset": 1}


def test_a_conversation_is_shown_before_a_run(codec, calculator, asks):
    """With canned turns: the last of them again and again, until the environment or a limit ends it."""
    limits = PlayLimits(max_turns=2, max_prompt_tokens=8, max_total_tokens=40)
    for environment, texts, said in (
        (calculator, ["?12*3", "36"], ["?12*3", "36", "36"]),
        (asks, ["0123456789"], ["0123456", "7", "0123456"]),
    ):
        with closing(Player(environment, codec, limits)) as player:
            found = play_once(player, codec, limits, Prompt(0, "0", "12*3=", "36"), texts, max_tokens=7)
        assert [turn.content for turn in found.conversation.turns] == said
