"""The exchange keeps every bit of every answer, refuses damaged messages, and ends with one full cube everywhere."""

import math
import struct
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from job import run_job

from hacpo_mega.cluster.groups.tree import join, split
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.records import Completion, Judgement, Pool, Prompt, Rollout, Score, Stop, Trajectory, Verdict
from hacpo_mega.rollout import wire
from hacpo_mega.rollout.exchange import (
    ROW,
    assemble,
    deal_rollouts,
    decode,
    encode,
    exchange,
    judged_rollouts,
    scored_trajectories,
    share_completions,
    share_rewards,
)

SENDER = "rank 3 (agent B)"
INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)


def trajectory(prompt: int = 0, agent: int = 0, rollout: int = 0, text: str = "42", tokens=(1, 2, 3)) -> Trajectory:
    ids = np.array(tokens, dtype=np.int32)
    return Trajectory(agent, Rollout(prompt, rollout, ids, text, Stop.EOS), Verdict.CORRECT, 1.0, -0.5, len(ids))


@st.composite
def trajectories(draw) -> Trajectory:
    ids = np.array(draw(st.lists(INT32, max_size=6)), dtype=np.int32)
    # st.text() leaves lone surrogates out, and draws emoji, combining marks, NUL and right-to-left text
    rollout = Rollout(
        draw(st.integers(0, 2**62)), draw(COUNT), ids, draw(st.text(max_size=12)), draw(st.sampled_from(Stop))
    )
    verdict = draw(st.sampled_from(Verdict))
    unfinished = verdict in (Verdict.TIMEOUT, Verdict.ERROR)
    reward = draw(st.sampled_from((0.0, math.nan)) if unfinished else st.floats(allow_nan=False))
    weight = draw(st.floats(0.0, 1e3))
    return Trajectory(draw(COUNT), rollout, verdict, reward, draw(st.floats()), draw(st.integers(0, len(ids))), weight)


def bits(t: Trajectory) -> tuple:
    """A trajectory as something that == compares, NaN and signed zero by their bits."""
    r = t.rollout
    floats = (
        struct.pack("<dd", t.reward, t.mean_logprob) if not math.isnan(t.mean_logprob) else struct.pack("<d", t.reward)
    )
    ids = (r.token_ids.dtype, r.token_ids.tolist())
    weight = struct.pack("<d", t.engine_weight)
    return t.agent, r.prompt_index, r.rollout_index, ids, r.text, r.stop, t.verdict, floats, t.num_scored, weight


@settings(max_examples=200)
@given(st.lists(trajectories(), max_size=5))
def test_what_arrives_is_what_was_sent(sent):
    assert [bits(t) for t in decode(encode(sent), SENDER)] == [bits(t) for t in sent]


def test_layout_by_hand():
    """The documented bytes, written out with struct: another program could read them."""
    message = encode([trajectory(prompt=7, agent=1, rollout=5, text="é", tokens=(258,))])
    header = b"HACPOMSG" + struct.pack("<6I4Q", 4, 47, 0, 0, 0, 0, 1, 1, 2, 0)
    row = struct.pack("<dddqiiiBBB", 1.0, -0.5, 1.0, 7, 5, 1, 1, 0, 0, 0)
    counts = struct.pack("<ii", 1, 2)
    assert message == header + row + counts + b"\x02\x01\x00\x00" + b"\xc3\xa9"


def test_layout_with_logprobs_by_hand():
    table = wire.Table(
        np.zeros(2, "u1"), [np.int32([258]), np.int32([])], ["é", ""], [np.float32([-2.5]), np.float32([])]
    )
    header = b"HACPOMSG" + struct.pack("<6I4Q", 4, 1, 1, 0, 0, 0, 2, 1, 2, 0)
    counts = struct.pack("<iiii", 1, 0, 2, 0)
    logprobs = b"\x02\x01\x00\x00" + struct.pack("<f", -2.5)
    assert wire.encode(table) == header + b"\0\0" + counts + logprobs + b"\xc3\xa9"
    routed = table._replace(routing=[np.array([[[7, 300]]] * 2, np.uint16), np.zeros((1, 1, 2), np.uint16)])
    header = b"HACPOMSG" + struct.pack("<6I4Q", 4, 1, 1, 2, 1, 2, 2, 1, 2, 3)
    experts = struct.pack("<6H", 7, 300, 7, 300, 0, 0)
    counts += struct.pack("<ii", 2, 1)
    assert wire.encode(routed) == header + b"\0\0" + counts + logprobs + experts + b"\xc3\xa9"


@given(st.lists(st.lists(st.floats(width=32), max_size=4), max_size=4), st.booleans())
def test_logprobs_arrive_as_they_were_sent_or_not_at_all(sent, travel):
    """Also where no record has a token: nothing to send and nothing known are different answers."""
    logprobs = [np.array(row, dtype=np.float32) for row in sent]
    tokens = [np.arange(len(row), dtype=np.int32) for row in sent]
    rows, texts = np.zeros(len(sent), "u1"), ["é"] * len(sent)
    arrived = wire.decode(
        wire.encode(wire.Table(rows, tokens, texts, logprobs if travel else None)), rows.dtype, SENDER
    )
    assert arrived.texts == texts
    assert [ids.tolist() for ids in arrived.tokens] == [ids.tolist() for ids in tokens]
    if travel:
        assert [x.dtype for x in arrived.logprobs] == [np.float32] * len(sent)
        assert [x.tobytes() for x in arrived.logprobs] == [x.tobytes() for x in logprobs]
    else:
        assert arrived.logprobs is None


def test_lone_surrogates_are_replaced_and_counted(caplog):
    (arrived,) = decode(encode([trajectory(prompt=3, text="a\ud800b\udfff😀")]), SENDER)
    assert arrived.rollout.text == "a\ufffdb\ufffd😀"
    assert "agent 0, prompt 3, rollout 0: 2 lone surrogates" in caplog.text


def damaged(offset: int, value: bytes) -> bytes:
    message = bytearray(encode([trajectory(), trajectory(rollout=1)]))
    message[offset : offset + len(value)] = value
    return bytes(message)


FIRST_ROW = wire.HEADER.size
FIELD = {name: FIRST_ROW + ROW.fields[name][1] for name in ROW.names}
TOKEN_COUNTS = FIRST_ROW + 2 * ROW.itemsize
TEXT_COUNTS = TOKEN_COUNTS + 2 * 4


@pytest.mark.parametrize(
    "message, complaint",
    [
        (b"", "less than the header's"),
        (encode([trajectory()])[:30], "less than the header's"),
        (encode([trajectory()])[:-1], "take "),
        (encode([trajectory()]) + b"x", "take "),
        (damaged(0, b"PICKLE"), "starts with b'PICKLE"),
        (damaged(8, struct.pack("<I", 1)), "layout 1 with rows of 47 bytes, this is 4 with 47"),
        (damaged(12, struct.pack("<I", 40)), "layout 4 with rows of 40 bytes, this is 4 with 47"),
        (damaged(16, struct.pack("<I", 1)), "take "),
        (damaged(16, struct.pack("<I", 2)), "1 or 0, but the header says 2"),
        (damaged(20, struct.pack("<I", 3)), "1 or 2 bytes, but the header says 3"),
        (damaged(20, struct.pack("<I", 1)), "take "),
        (damaged(32, struct.pack("<Q", 2**63)), "take "),
        (damaged(40, struct.pack("<Q", 7)), "take "),
        (damaged(TOKEN_COUNTS, struct.pack("<i", 4)), "the tokens of its records do not add up to the header's 6"),
        (damaged(TEXT_COUNTS, struct.pack("<i", -2)), "the bytes of text of its records do not add up to"),
        (damaged(FIELD["stop"], b"\x4d"), "trajectory 0 is damaged: 77 is not a valid Stop"),
        (damaged(FIELD["verdict"], b"\x63"), "trajectory 0 is damaged: 99 is not a valid Verdict"),
        (damaged(FIELD["num_scored"], struct.pack("<i", 9)), "trajectory 0 is damaged"),
        (damaged(TEXT_COUNTS + 2 * 4 + 6 * 4, b"\xff"), "the text of record 0 is damaged: 'utf-8'"),
    ],
)
def test_a_damaged_message_is_refused_with_its_sender(message, complaint):
    with pytest.raises(ValueError, match=r"^message of rank 3 \(agent B\): ") as error:
        decode(message, SENDER)
    assert complaint in str(error.value)


@settings(max_examples=300)
@given(st.binary(max_size=40), st.integers(0, 400), st.booleans())
def test_no_noise_brings_anything_but_a_value_error(noise, offset, whole):
    """Decoding gives trajectories or the documented error, never another one, whatever bytes are changed."""
    message = noise if whole else damaged(offset, noise)
    with suppress(ValueError):
        assert all(isinstance(answer, Trajectory) for answer in decode(message, SENDER))


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=5))
def test_joined_messages_come_apart_again(messages):
    assert split(join(messages)) == messages


MAP = RankMap(2, (AgentShape("A", tp=2, engine_tp=2), AgentShape("B", cells_per_lane=2)))


def lane_prompts(lane: int) -> tuple[Prompt, ...]:
    # three prompts for two cells: the cells of an agent owe different numbers of answers
    return tuple(Prompt(index, f"id{index}", "?", "!") for index in range(3 * lane, 3 * lane + 3))


def answers_of(rank_map: RankMap, rank: int, num_rollouts: int) -> list[Trajectory]:
    """Answers of the cell of a rank; every answer says in its text and tokens whose it is."""
    my = rank_map.coordinate(rank)
    mine = lane_prompts(my.lane)[my.cell_in_lane :: rank_map.agents[my.agent].cells_per_lane]
    return [expected_answer(prompt.index, my.agent, g) for prompt in mine for g in range(num_rollouts)]


def expected_answer(prompt: int, agent: int, rollout: int) -> Trajectory:
    unjudged, is_success = (prompt + rollout) % 4 == 3, (prompt + agent + rollout) % 3 == 0
    ids = np.arange(100 * prompt + 10 * agent + rollout, dtype=np.int32)
    return Trajectory(
        agent=agent,
        rollout=Rollout(prompt, rollout, ids, f"p{prompt} n{agent} g{rollout} 🦜" * rollout, Stop.LENGTH),
        verdict=Verdict.TIMEOUT if unjudged else Verdict.CORRECT if is_success else Verdict.WRONG,
        reward=math.nan if unjudged else (prompt + agent / 5 + rollout / 50) / 7,
        mean_logprob=-1 / (1 + rollout),
        num_scored=len(ids) // 2,
        engine_weight=(1 + rollout) / 3,
    )


@pytest.mark.parametrize(
    "spoil, complaint",
    [
        (
            lambda sent: sent.pop(),
            r"no cell of B in lane 0 sent 1 .*\(prompt 2, agent 1, rollout 1\)",
        ),
        (lambda sent: sent.append(sent[0]), r"rank 4 .* sent twice.* \(prompt 0, agent 1, rollout 0\)"),
        (
            lambda sent: sent.append(expected_answer(1, 1, 0)),
            r"rank 5 .* twice.* \(prompt 1, agent 1, rollout 0\)",
        ),
        (lambda sent: sent.append(expected_answer(0, 0, 0)), r"rank 4 .* another agent, .*\(prompt 0, agent 0, rol"),
        (lambda sent: sent.append(expected_answer(3, 1, 0)), r"rank 4 .* another agent, .*\(prompt 3, agent 1, rol"),
    ],
)
def test_a_cube_that_is_not_full_names_answer_and_sender(spoil, complaint):
    by_sender = [answers_of(MAP, rank, 2) for rank in MAP.leaders(0)]
    spoil(by_sender[1])
    with pytest.raises(AssertionError, match=complaint):
        assemble(by_sender, lane_prompts(0), MAP, 0, rollouts_per_prompt=2)


class CountingGroup:
    """The real lane group, with its all-gathers counted."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.num_gathers = group, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def allgather(self, *tensors) -> dist.Work:
        self.num_gathers += 1
        return self.group.allgather(*tensors)


def check_exchange(place: Place, rank_map: RankMap) -> int:
    if place.is_leader:
        place.lane_group = CountingGroup(place.lane_group)
    prompts = lane_prompts(place.lane)
    mine = answers_of(rank_map, place.coordinate.global_rank, 3)
    pool = exchange(mine, prompts, place, rollouts_per_prompt=3)
    assert pool.prompts == prompts
    for p, prompt in enumerate(prompts):
        for n in range(len(rank_map.agents)):
            for g in range(3):
                assert bits(pool.trajectories_PNG[p][n][g]) == bits(expected_answer(prompt.index, n, g))
    rollouts = [t.rollout for t in mine]
    judged = judged_rollouts(place, rollouts, [Judgement(t.verdict, t.reward) for t in mine])
    rewards_PNG, successes_PNG, tokens_PNG, text_hash_PNG = share_rewards(judged, len(prompts), place, 3)
    texts = [[[t.rollout.text for t in group] for group in by_agent] for by_agent in pool.trajectories_PNG]
    hash_of = dict(zip(np.array(texts).ravel(), text_hash_PNG.flatten().tolist(), strict=True))
    assert len(set(hash_of.values())) == len(hash_of) > 1  # as many hashes as texts, and equal texts have equal ones
    assert text_hash_PNG.flatten().tolist() == [hash_of[text] for text in np.array(texts).ravel()]
    assert tokens_PNG[1, -1].tolist() == [100 * prompts[1].index + 10 * (tokens_PNG.shape[1] - 1) + g for g in range(3)]
    pairs = [[[(t.reward, t.verdict) for t in group] for group in by_agent] for by_agent in pool.trajectories_PNG]
    expected_PNG2 = torch.tensor(pairs, dtype=torch.float64)
    torch.testing.assert_close(rewards_PNG, expected_PNG2[..., 0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(successes_PNG, expected_PNG2[..., 1] == Verdict.CORRECT) and successes_PNG.any()
    num_gathers = place.lane_group.num_gathers if place.is_leader else 0
    check_token_logprobs(mine, pool, prompts, place)
    return num_gathers


def check_token_logprobs(mine: list[Trajectory], plain: Pool, prompts: tuple[Prompt, ...], place: Place) -> None:
    """Log-probs of the scored tokens reach everybody if the leaders send them, and nothing else changes."""

    def logprobs_of(t: Trajectory) -> np.ndarray:
        return t.agent - 0.25 * np.arange(t.num_scored, dtype=np.float32)

    scores = [
        None if t.rollout.rollout_index == 1 else Score(t.mean_logprob, logprobs_of(t), t.engine_weight) for t in mine
    ]
    pool = exchange(scored_trajectories(mine, scores, by_token=True), prompts, place, rollouts_per_prompt=3)
    for group_N, plain_N in zip(pool.trajectories_PNG, plain.trajectories_PNG, strict=True):
        for t, without in zip(sum(group_N, ()), sum(plain_N, ()), strict=True):
            assert bits(t) == bits(without) and t.rollout.logprobs is None and without.token_logprobs is None
            sent = np.full(t.num_scored, np.nan) if t.rollout.rollout_index == 1 else logprobs_of(t)
            np.testing.assert_array_equal(t.token_logprobs, sent)


def check_deal(place: Place, rank_map: RankMap) -> int:
    """Every answer is at the cell that it was dealt to, with engine log-probs and routing, and the cube is full."""
    prompts, my = lane_prompts(place.lane), place.coordinate
    mine = [engine_answer(t.rollout) for t in answers_of(rank_map, my.global_rank, 3)]
    cell_PG = np.arange(9).reshape(3, 3) // 2 % rank_map.agents[my.agent].cells_per_lane
    judged = judged_rollouts(place, mine, [Judgement(Verdict.CORRECT, 1 / (1 + r.rollout_index)) for r in mine])
    dealt, judged = deal_rollouts(mine, judged, prompts, cell_PG, place)
    owed = [(prompts[p].index, g) for p in range(3) for g in range(3) if cell_PG[p, g] == my.cell_in_lane]
    assert [(r.prompt_index, r.rollout_index) for r in dealt] == owed
    for rollout in dealt:
        expected = engine_answer(expected_answer(rollout.prompt_index, my.agent, rollout.rollout_index).rollout)
        for name in ("token_ids", "logprobs", "routing"):
            np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name))
        assert (rollout.text, rollout.stop) == (expected.text, expected.stop)
    assert [t.rollout for t in judged] == (dealt if place.is_leader else [])
    assert [t.reward for t in judged] == [1 / (1 + g) for _, g in owed if place.is_leader]
    sent = scored_trajectories(judged, [None if r.rollout_index else Score(-1.0, r.logprobs) for r in dealt])
    pool = exchange(sent, prompts, place, rollouts_per_prompt=3)
    assert {t.num_scored > 0 for group_N in pool.trajectories_PNG for t in group_N[my.agent][1:]} == {False}
    return sum(rollout not in mine for rollout in dealt)


def engine_answer(rollout: Rollout) -> Rollout:
    """The answer with log-probs and a routing of two layers that say whose they are."""
    routing = np.full((len(rollout.token_ids), 2, 1), rollout.rollout_index, np.uint8)
    return replace(rollout, logprobs=-rollout.token_ids.astype(np.float32), routing=routing)


def test_answers_reach_the_cells_that_they_are_dealt_to():
    """Agent B has two cells; of its nine answers cell 0 trains the places 0, 1, 4, 5, 8, and wrote 0 to 2, 6 to 8."""
    rank_map = RankMap(1, (AgentShape("A"), AgentShape("B", tp=2, cells_per_lane=2)))
    assert run_job(rank_map, check_deal) == [0, 2, 2, 3, 3]


@pytest.mark.parametrize(
    "rank_map",
    [
        pytest.param(RankMap(2, (AgentShape("A", tp=2, engine_tp=1), AgentShape("B"))), id="two-lanes"),
        pytest.param(
            RankMap(1, (AgentShape("A", tp=2, engine_tp=2), AgentShape("B", cells_per_lane=2))),
            id="two-cells-in-a-lane",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            RankMap(1, (AgentShape("A"), AgentShape("B", pp=2, engine_tp=2), AgentShape("C"))),
            id="three-agents",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_every_rank_of_a_lane_gets_the_same_full_cube(rank_map):
    num_gathers = run_job(rank_map, check_exchange)
    leaders = {rank for lane in range(rank_map.lanes) for rank in rank_map.leaders(lane)}
    assert num_gathers == [4 if rank in leaders else 0 for rank in range(rank_map.world_size)]


def check_completions(place: Place, _: RankMap) -> int:
    """Two engines of one rank each were asked five prompts in turn; every rank of the cell gets all five in order."""
    for asked in (True, False):
        expected = [
            Completion(
                np.arange(i, dtype=np.int32), Stop.LENGTH if i % 2 else Stop.EOS, logprobs_of(i) if asked else None
            )
            for i in range(5)
        ]
        shared = share_completions(expected[place.coordinate.engine :: 2], place, 5)
        for completion, original in zip(shared, expected, strict=True):
            assert completion.stop is original.stop
            np.testing.assert_array_equal(completion.token_ids, original.token_ids)
            assert (completion.logprobs is not None) == asked
            assert not asked or completion.logprobs.tobytes() == original.logprobs.tobytes()
    return len(shared)


def logprobs_of(answer: int) -> np.ndarray:
    return np.log(np.arange(1, answer + 1, dtype=np.float32) / 9)


def test_all_ranks_of_a_cell_get_the_answers_of_all_its_engines():
    assert run_job(RankMap(1, (AgentShape("A", tp=2, engine_tp=1),)), check_completions) == [5, 5]


def check_damage_is_seen(place: Place, rank_map: RankMap) -> str:
    """Agent B's cell speaks another layout; both sides of the lane say so, and name it."""
    if place.coordinate.agent_name == "B":
        wire.VERSION = 9
    message = answers_of(rank_map, place.coordinate.global_rank, 1)
    try:
        exchange(message, lane_prompts(place.lane), place, rollouts_per_prompt=1)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.nightly
def test_two_versions_in_one_job_name_each_other():
    from_a, from_b = run_job(RankMap(1, (AgentShape("A"), AgentShape("B"))), check_damage_is_seen)
    assert from_a.startswith("message of rank 1 (agent B,")
    assert from_b.startswith("message of rank 0 (agent A,")
