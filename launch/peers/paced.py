"""A job of hacpo_mega whose ranks take a step when they are told to: others are measured by turns with it."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from bench import WARM_UP
from table import Turn, resident

from hacpo_mega.config import load_config

if TYPE_CHECKING:
    from hacpo_lab.forked import JobServer
    from hacpo_lab.throughput.workload import Workload

WRITTEN_S = 0.3  # until a step's lines are written: that is processor time of the step, others' turns are not


class PacedJob:
    """Its ranks, which wait for each other in every step."""

    def __init__(self, lines: list[TextIO]) -> None:
        """`lines` to the ranks."""
        self._lines = lines

    def step(self) -> None:
        """Lets all ranks take a step; OSError when one is gone."""
        for line in self._lines:
            say(line, "go")
        self.is_ready()

    def is_ready(self) -> None:
        """Returns when all wait for the next step; OSError when one is gone."""
        for line in self._lines:
            wait(line)

    def turns(self, tokens: list[int]) -> list[Turn]:
        """The cost of its steps, of so many `tokens` of answers each: on the clock the slowest rank, else all."""
        found = [json.loads(line.readline()) for line in self._lines]
        memory = [sum(rank[part] for rank in found) for part in ("peak_bytes", "imported_bytes")]
        steps = zip(*(rank["steps"] for rank in found), strict=True)
        took = [(max(wall for wall, _ in ranks), sum(cpu for _, cpu in ranks)) for ranks in steps]
        return [Turn(1, *seconds, number, number, *memory) for seconds, number in zip(took, tokens, strict=True)]


@contextmanager
def paced_job(
    server: "JobServer", world_size: int, folder: Path, config_file: Path, num_steps: int, workload: "Workload"
) -> Iterator[PacedJob]:
    """A job of `num_steps` after those of warm-up; what a rank r says of an error is in r.err of `folder`."""
    folder.mkdir()
    place = str(folder / "line")
    call = (str(config_file), WARM_UP + num_steps, workload, place)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(place)
        listener.listen()
        ranks = stack.enter_context(server.ranks(world_size, folder, paced_rank, *call))
        yield PacedJob([stack.enter_context(_accepted(listener, ranks)) for _ in ranks])


def paced_rank(config_file: str, num_steps: int, workload: "Workload", place: str) -> None:
    """A rank, in a process forked from the server: over the socket `place` it is told to take a step."""
    imported_bytes = resident("VmRSS")
    from hacpo_lab.throughput.measured_trainer import measured_trainer

    steps, config = [], load_config(config_file)
    with socket.socket(socket.AF_UNIX) as connection, measured_trainer(config, workload) as trainer:
        connection.connect(place)
        line = connection.makefile("rw")
        for number in range(num_steps):
            if number >= WARM_UP:
                say(line, "ready")
                line.readline()
            wall_began, cpu_began = time.perf_counter(), time.process_time()
            trainer.step()
            wall_s = time.perf_counter() - wall_began
            time.sleep(WRITTEN_S)
            steps.append((wall_s, time.process_time() - cpu_began))
        say(line, "ready")
        found = {"steps": steps[WARM_UP:], "peak_bytes": resident("VmHWM"), "imported_bytes": imported_bytes}
        say(line, json.dumps(found))


def _accepted(listener: socket.socket, ranks: list[BaseProcess]) -> TextIO:
    """The next rank's end of a line; ConnectionError when one has ended before."""
    listener.settimeout(1.0)
    while all(rank.is_alive() for rank in ranks):
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(None)
            return connection.makefile("rw")
    raise ConnectionError("a rank has ended before its first step")


def say(line: TextIO, word: str) -> None:
    """A line of one word."""
    line.write(word + "\n")
    line.flush()


def wait(line: TextIO) -> None:
    """Until the other end is ready; ConnectionError when it is gone."""
    while (said := line.readline()) != "ready\n":
        if not said:
            raise ConnectionError("a trainer has ended")
