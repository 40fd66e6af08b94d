"""The trace of a step: what is recorded, whose clock it is on, who waited for whom, and a disk that takes nothing."""

import resource
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hacpo_mega.cluster.groups.spans import Span, Spans, WatchedGroup, measure_offset
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.logbook.files.trace import Track, chrome_trace, find_waits, write_trace

RANKS = RankMap(1, tuple(AgentShape(f"agent {n}") for n in range(16)))


def track(rank: int, *spans: Span, offset_s: float = 0.0, accuracy_s: float = 0.0) -> Track:
    return Track(RANKS.coordinate(rank), offset_s, accuracy_s, spans)


def collective(name: str, begin_s: float, end_s: float, turn: int = 0) -> Span:
    return Span(name, "collective", begin_s, end_s, "lane/0", turn)


def test_spans_are_recorded_between_start_and_stop_alone() -> None:
    ticks = iter(range(100))
    spans = Spans(clock=lambda: float(next(ticks)))
    with spans.span("before", "phase"):
        pass
    spans.start()
    with spans.span("learn", "phase"):
        with spans.span("allgather", "collective", "lane/0"):
            pass
        with spans.span("allgather", "collective", "lane/0"):
            pass
    found = spans.stop()
    with spans.span("after", "phase"):
        pass
    assert found == [
        Span("allgather", "collective", 1.0, 2.0, "lane/0", 0),
        Span("allgather", "collective", 3.0, 4.0, "lane/0", 1),
        Span("learn", "phase", 0.0, 5.0),
    ]
    assert next(ticks) == 6, "while nothing is recorded nobody asks for the time"


def test_a_span_ends_when_the_device_has_done_its_work() -> None:
    told: list[str] = []
    spans = Spans(settle=lambda: told.append("settled"), clock=lambda: float(len(told)))
    with spans.span("off", "phase"):
        pass
    assert told == []
    spans.start()
    with spans.span("learn", "phase"):
        pass
    assert spans.stop() == [Span("learn", "phase", 0.0, 1.0)]


class Group:
    """A process group as it looks from outside."""

    def name(self) -> str:
        return "gloo"

    def barrier(self) -> "Group":
        return self

    def wait(self) -> None:
        self.has_waited = True


def test_a_watched_group_is_the_group_and_its_collectives_are_spans() -> None:
    spans = Spans()
    group = WatchedGroup(Group(), "job", spans)
    group.barrier()
    spans.start()
    assert group.name() == "gloo"
    assert group.barrier().has_waited, "a recorded collective ends when all have come"
    assert [(span.name, span.group, span.turn) for span in spans.stop()] == [("barrier", "job", 0)]


class Sender(Group):
    """A group of four as its rank 1 sees it, or its root."""

    def __init__(self, rank: int = 1) -> None:
        self._rank = rank

    def size(self) -> int:
        return 4

    def rank(self) -> int:
        return self._rank

    def allgather(self, *_: object) -> "Sender":
        return self

    broadcast = gather = send = allgather


def test_bytes_are_counted_by_phase_and_group_where_they_are_sent() -> None:
    spans, ten = Spans(), torch.zeros(10, dtype=torch.uint8)
    lane, root = WatchedGroup(Sender(), "lane/3", spans), WatchedGroup(Sender(0), "row/0/0", spans)
    with spans.span("exchange", "phase"):
        lane.allgather([[ten] * 4], [ten])
        for group in (lane, root):
            group.broadcast([ten], None)
            group.gather([], [ten], None)
            group.send([ten.double()], 0, 0)
        lane.barrier()
    with spans.span("publish", "phase"), spans.span("gather", "part"):
        spans.sent("tp", 7)
    # to three others; a root broadcasts and is sent what is gathered
    assert spans.take_sent() == {("exchange", "lane"): 30 + 10 + 80, ("exchange", "row"): 30 + 80, ("publish", "tp"): 7}
    assert spans.take_sent() == {}


def test_who_comes_first_waits_for_the_last_on_the_clock_of_rank_0() -> None:
    """Rank 1's clock is 100 s ahead: it came at 3 on rank 0's, when rank 0 had waited for 2 s and rank 2 for 1."""
    tracks = [
        track(0, collective("allgather", 1.0, 3.5)),
        track(1, collective("allgather", 103.0, 103.5), offset_s=-100.0),
        track(2, collective("allgather", 2.0, 3.5)),
    ]
    waits = find_waits(tracks)
    assert waits == {
        0: [Span("waits for rank 1", "wait", 1.0, 3.0, "lane/0", 0)],
        1: [],
        2: [Span("waits for rank 1", "wait", 2.0, 3.0, "lane/0", 0)],
    }


@pytest.mark.parametrize(
    ("name", "waits_of"),
    [("broadcast", {2: 0}), ("gather", {0: 1}), ("barrier", {0: 1, 2: 1}), ("reduce gradients", {0: 1, 2: 1})],
)
def test_nobody_waits_for_whom_it_does_not_need(name: str, waits_of: dict[int, int]) -> None:
    """Rank 1 comes last. A sender does not wait for receivers, and a receiver waits for the sender alone."""
    begins = {0: 2.0, 1: 3.0, 2: 1.0}
    tracks = [track(rank, collective(name, begin, 4.0)) for rank, begin in begins.items()]
    found = {rank: waits[0].name for rank, waits in find_waits(tracks).items() if waits}
    assert found == {rank: f"waits for rank {other}" for rank, other in waits_of.items()}


def test_a_wait_below_the_accuracy_of_the_clocks_is_not_claimed() -> None:
    """2 ms, and the clocks are known to 1.5 ms and either to 0.4 or to 0.6."""
    late = track(1, collective("barrier", 1.002, 1.01), accuracy_s=0.0015)
    for accuracy_s, number in ((0.0004, 1), (0.0006, 0)):
        early = track(0, collective("barrier", 1.0, 1.01), accuracy_s=accuracy_s)
        assert len(find_waits([early, late])[0]) == number


def test_turns_of_a_group_are_not_mixed_up() -> None:
    tracks = [
        track(0, collective("barrier", 1.0, 2.0, 0), collective("barrier", 5.0, 6.0, 1)),
        track(1, collective("barrier", 2.0, 2.0, 0), collective("barrier", 4.0, 6.0, 1)),
    ]
    waits = find_waits(tracks)
    assert [(w.begin_s, w.end_s, w.turn) for w in waits[0]] == [(1.0, 2.0, 0)]
    assert [(w.begin_s, w.end_s, w.turn) for w in waits[1]] == [(4.0, 5.0, 1)]


def test_a_trace_has_microseconds_since_its_first_span_and_named_ranks() -> None:
    tracks = [
        track(0, collective("allgather", 10.0, 10.5), Span("exchange", "phase", 9.5, 10.5)),
        track(3, Span("exchange", "phase", 2.0, 2.25), offset_s=8.0, accuracy_s=0.001),
    ]
    table = chrome_trace(12, tracks)
    drawn = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in table["traceEvents"] if e["ph"] == "X"]
    assert drawn == [
        (0, 0, "exchange", 0.0, 1e6),
        (0, 0, "allgather", 0.5e6, 0.5e6),
        (3, 3, "exchange", 0.5e6, 0.25e6),
    ]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in table["traceEvents"] if e["ph"] == "M"}
    assert names[0, None] == "agent 0" and names[3, 3] == "rank 3 lane 0 cell 0"
    assert table["otherData"] == {"step": 12, "clock_accuracy_s": {"rank 0": 0.0, "rank 3": 0.001}}


def test_the_offset_of_a_clock_is_as_accurate_as_it_says() -> None:
    """Three ranks share a store; two clocks are set otherwise, and a busy machine may stop any rank for a while."""
    store, found = dist.HashStore(), {}

    def run(rank: int) -> None:
        found[rank] = measure_offset(store, rank, 3, lambda: time.perf_counter() + {0: 0.0, 1: 12.5, 2: -3.0}[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == (0.0, 0.0)
    for rank, ahead in ((1, 12.5), (2, -3.0)):
        assert abs(found[rank].offset_s + ahead) <= found[rank].accuracy_s
    assert store.num_keys() == 0


def test_a_disk_that_takes_nothing_is_one_line_with_the_arithmetic(tmp_path: Path) -> None:
    table = chrome_trace(7, [track(0, Span("learn", "phase", 0.0, 1.0))])
    (tmp_path / "trace").mkdir()
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, most))
    try:
        problem = write_trace(tmp_path, 7, table)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert problem.startswith("step 7 leaves no trace (File too large): ")
    assert " bytes, the file system has " in problem and "\n" not in problem
    assert list((tmp_path / "trace").iterdir()) == []
    assert write_trace(tmp_path, 7, table) is None
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "trace").write_text("in the way")
    assert "(File exists)" in write_trace(tmp_path / "file", 7, table)
