"""A device without a GPU: what is asked of `torch.cuda` by any thread, and what of it is certain to come after what.

Streams are queues, events and waits order them, and the host knows of work only what it has waited for. Each operation
carries a clock (stream -> number of its operations that are certainly over before it), as a happens-before checker's. A
`Memory` that is read or written without order behind its last writer, or written without order behind its readers, is a
race: what a device may do right a thousand times. Threads hand on what they know when they start and are joined.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from unittest import mock

import torch


@dataclass(frozen=True)
class Operation:
    what: str
    stream: str
    number: int
    clock: Counter
    thread: str

    def is_after(self, other: "Operation") -> bool:
        return self.clock[other.stream] >= other.number


class RecordedCuda:
    """One device; `races` are said in words, `operations` are in the order in which they were asked for."""

    def __init__(self, index: int = 3) -> None:
        self.index, self.operations, self.races = index, [], []
        self.numbers, self.chosen, self.default = Counter(), threading.local(), None
        self.default = self.stream_class()()
        self.default.name = "trainer"

    # ---- what torch has of it

    def stream_class(self) -> type:
        cuda = self

        class Stream:
            def __init__(self, device=None, priority=0) -> None:
                self.device, self.clock = torch.device("cuda", cuda.index), Counter()
                cuda.numbers["streams"] += 1
                self.name = f"stream {cuda.numbers['streams']}"

            def record_event(self, event=None):
                event = event or Event()
                event.record(self)
                return event

            def wait_event(self, event) -> None:
                self.clock |= event.clock

            def wait_stream(self, other) -> None:
                self.wait_event(other.record_event())

            def synchronize(self) -> None:
                cuda.learns(self.clock)

        class Event:
            def __init__(self, **_how) -> None:
                self.clock = Counter()

            def record(self, stream=None) -> None:
                self.clock = Counter((stream or cuda.current_stream()).clock)

            def wait(self, stream=None) -> None:
                (stream or cuda.current_stream()).wait_event(self)

            def synchronize(self) -> None:
                cuda.learns(self.clock)

        self.event_class = Event
        return Stream

    def current_stream(self, _device=None):
        if not hasattr(self.chosen, "stream"):
            # As torch: a thread begins on device 0, and on the default stream, which is everybody's.
            self.chosen.stream, self.chosen.device = self.default, 0
        return self.chosen.stream

    def set_stream(self, stream) -> None:
        self.current_stream()
        self.chosen.stream, self.chosen.device = stream, stream.device.index

    def set_device(self, device) -> None:
        self.current_stream()
        self.chosen.device = getattr(device, "index", device)

    def current_device(self) -> int:
        self.current_stream()
        return self.chosen.device

    @contextmanager
    def device(self, device) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    @contextmanager
    def stream(self, stream) -> Iterator[None]:
        before = self.current_stream()
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)

    @contextmanager
    def installed(self, vllm: ModuleType | None = None) -> Iterator["RecordedCuda"]:
        """In place of torch's, behind what `vllm` (its utils.torch_utils) puts in front of it."""
        fakes = {
            "Stream": type(self.default), "Event": self.event_class, "is_available": lambda: True,
            "current_stream": self.current_stream, "current_device": self.current_device, "stream": self.stream,
            "set_device": self.set_device, "device": self.device,
            "set_stream": self.set_stream if vllm is None else vllm._patched_set_stream,
            "get_rng_state": lambda _device=None: None, "set_rng_state": lambda _state, _device=None: None,
        }  # fmt: skip
        start, join = threading.Thread.start, threading.Thread.join

        def started(thread: threading.Thread) -> None:
            thread.knows_of_the_device = Counter(self.host())
            start(thread)

        def joined(thread: threading.Thread, timeout=None) -> None:
            join(thread, timeout)
            self.learns(getattr(thread, "knows_of_the_device", Counter()))

        threads = mock.patch.multiple(threading.Thread, start=started, join=joined)
        behind = nullcontext() if vllm is None else mock.patch.object(vllm, "prev_set_stream", self.set_stream)
        with mock.patch.multiple(torch.cuda, **fakes), behind, threads:
            self.set_device(self.index)
            self.host().clear()  # of another device
            yield self

    # ---- what is asked of it

    @staticmethod
    def host() -> Counter:
        """The work that this thread knows to be over."""
        return threading.current_thread().__dict__.setdefault("knows_of_the_device", Counter())

    def learns(self, clock: Counter) -> None:
        """This thread has waited for that."""
        known = self.host()
        known |= clock

    def ask(self, what: str, reads: tuple["Memory", ...] = (), writes: tuple["Memory", ...] = ()) -> Operation:
        """An operation on the current stream of this thread."""
        stream = self.current_stream()
        assert self.current_device() == stream.device.index, f"{what} on device {self.current_device()}"
        stream.clock |= self.host()
        self.numbers[stream.name] += 1
        stream.clock[stream.name] = self.numbers[stream.name]
        done = Operation(
            what, stream.name, self.numbers[stream.name], Counter(stream.clock), threading.current_thread().name
        )
        self.operations.append(done)
        for memory in reads:
            self.order(done, memory, memory.writers)
            memory.readers.append(done)
        for memory in writes:
            self.order(done, memory, memory.writers + memory.readers)
            memory.writers, memory.readers = [done], []
        return done

    def order(self, done: Operation, memory: "Memory", others: list[Operation]) -> None:
        for other in others:
            if not done.is_after(other):
                self.races.append(f"{done.what} ({done.stream}) of {memory.name} after {other.what} ({other.stream})")

    def read_on_host(self, memory: "Memory") -> None:
        for writer in memory.writers:
            if self.host()[writer.stream] < writer.number:
                self.races.append(f"the host's read of {memory.name} after {writer.what} ({writer.stream})")


@dataclass(eq=False)
class Memory:
    name: str
    writers: list[Operation] = field(default_factory=list)
    readers: list[Operation] = field(default_factory=list)


class TensorThere:
    """As much of a tensor on the device as vLLM's copy to the host asks for."""

    def __init__(self, cuda: RecordedCuda, memory: Memory, numbers: list) -> None:
        self.cuda, self.memory, self.numbers = cuda, memory, numbers

    def to(self, _device: str, *, non_blocking: bool, copy: bool = True) -> "TensorThere":
        pinned = Memory(f"the copy of {self.memory.name}")
        done = self.cuda.ask("copy", reads=(self.memory,), writes=(pinned,))
        if not non_blocking:
            self.cuda.learns(done.clock)
        return TensorThere(self.cuda, pinned, self.numbers)

    def numpy(self) -> "TensorThere":
        return self

    def tolist(self) -> list:
        self.cuda.read_on_host(self.memory)
        return [list(row) if isinstance(row, list) else row for row in self.numbers]


def told(action: Callable[[], object]) -> str:
    """The error that an action dies of, in words."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
