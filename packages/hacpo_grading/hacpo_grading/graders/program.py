"""The judge of programs: what the answer's Python program prints for given inputs, run in a process of its own.

Gold is a JSON list of cases, [{"stdin": "1 2\\n", "stdout": "3\\n"}, ...]. The program is the last fenced block of the
answer; text without one has no answer. A case is passed when the program ends with status 0 within its limits and
prints the expected text, white space at the ends of lines and of the text aside. sandbox.py says what a program can
reach; where the kernel does not allow that isolation, nothing is run unless `isolated` is turned off.
"""

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hacpo_grading.graders.json_equality import fenced
from hacpo_grading.graders.options import PROGRAM_OPTIONS, wrong_value
from hacpo_grading.texts.answer_text import after_thinking
from hacpo_grading.workers.sandbox import SETUP_FAILED
from hacpo_grading.workers.system_calls import filter_program

SANDBOX = Path(__file__).parents[1] / "workers" / "sandbox.py"
SYSTEM = ("/usr", "/bin", "/lib", "/lib64")
MAX_SHOWN_BYTES = 2000
# Wall time of a case: it ends programs that sleep, however crowded the machine is.
WALL_FACTOR = 10
WALL_GRACE_S = 10.0


@dataclass(frozen=True)
class Case:
    """One input and the output it must give."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Run:
    """The end of the program on one case. `ending`: "exit status 1", "signal 9", "output too long", ..."""

    stdout: bytes
    stderr: bytes
    ending: str

    def passes(self, case: Case) -> bool:
        """Tells whether it ended well and printed what was expected."""
        printed = self.stdout.decode("utf-8", errors="replace")
        return self.ending == "exit status 0" and _lines(printed) == _lines(case.stdout)


@dataclass(frozen=True, kw_only=True)
class Program:
    """1 when every case is passed, else 0; with `graded` the share of cases that are.

    cpu_s           whole seconds of CPU time of each process of a case
    memory_mb       of the program with all that it starts and writes, and address space of each process; /tmp has half
    num_processes   of the program together, threads counted
    output_kb       of standard output; a program that prints more is ended
    """

    graded: bool = False
    isolated: bool = True
    cpu_s: int = 2
    memory_mb: int = 512
    num_processes: int = 16
    output_kb: int = 1024

    def __post_init__(self) -> None:
        """ValueError for an option that makes no sense, and where the kernel does not allow the isolation."""
        if problem := wrong_value(PROGRAM_OPTIONS, asdict(self)):
            raise ValueError(problem)
        trial = self.run("print(1)", Case("", "1"))
        if not trial.passes(Case("", "1")):
            reason = trial.stderr.decode(errors="replace").strip() or trial.ending
            raise ValueError(
                f"programs cannot be run isolated on this machine ({reason}). Allow user namespaces, or set option "
                "isolated = false: then they can read and write what this user can, and reach the network"
                if self.isolated
                else f"programs cannot be run on this machine: {reason}"
            )

    def __call__(self, prompt: str, answer: str, gold: str) -> float | None:
        """The grader."""
        cases = read_cases(gold)
        program, is_fenced = fenced(after_thinking(answer))
        if not is_fenced:
            return None
        num_passed = 0
        for case in cases:
            if self.run(program, case).passes(case):
                num_passed += 1
            elif not self.graded:
                return 0.0
        return num_passed / len(cases)

    def explain(self, answer: str, gold: str, limit_s: float = math.inf) -> dict[str, Any]:
        """The program, and what it did on the first case that it does not pass, within `limit_s` for all cases."""
        cases, deadline = read_cases(gold), time.monotonic() + limit_s
        program, is_fenced = fenced(after_thinking(answer))
        if not is_fenced:
            return {"extracted": None, "rule": "the last fenced block of the answer is its program"}
        report = {"extracted": program[:MAX_SHOWN_BYTES], "rule": "every case ends with status 0 and prints its stdout"}
        for number, case in enumerate(cases, start=1):
            run = self.run(program, case, deadline)
            if not run.passes(case):
                output = {"ending": run.ending, "printed": _shown(run.stdout), "standard error": _shown(run.stderr)}
                return report | {"failed case": number, "expected": case.stdout[:MAX_SHOWN_BYTES]} | output
        return report | {"failed case": None}

    def run(self, program: str, case: Case, deadline: float = math.inf) -> Run:
        """Runs a program on one case, and ends it with everything it started, by `deadline` (monotonic)."""
        order = {
            "program": program,
            "stdin": case.stdin,
            "python": sys.executable,
            "visible": visible_folders(),
            "cpu_s": self.cpu_s,
            "memory_bytes": self.memory_mb << 20,
            "num_processes": self.num_processes,
            "disk_bytes": self.memory_mb << 19,
            "filter": filter_program(os.uname().machine).hex() if self.isolated else "",
            "is_isolated": self.isolated,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SANDBOX)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        cut: str | None = "interrupted"
        with process:
            try:
                with contextlib.suppress(BrokenPipeError):  # it ended before it read: its exit status says why
                    process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.close()
                stdout, stderr, cut = self._read_output(process, deadline)
            finally:
                if cut is not None:
                    process.kill()
                status = process.wait()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # without namespaces nothing else ends its children
        return Run(stdout, stderr, cut or _ending(status))

    def _read_output(self, process: subprocess.Popen, deadline: float) -> tuple[bytes, bytes, str | None]:
        """Standard output and error of a process until it ends, and the reason if they were cut short."""
        deadline = min(deadline, time.monotonic() + WALL_FACTOR * self.cpu_s + WALL_GRACE_S)
        stdout, stderr = bytearray(), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, stdout)
            selector.register(process.stderr, selectors.EVENT_READ, stderr)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    data = key.fileobj.read(1 << 16)
                    key.data.extend(data)
                    if not data:
                        selector.unregister(key.fileobj)
                del stderr[:-MAX_SHOWN_BYTES]
                if len(stdout) > self.output_kb << 10:
                    return bytes(stdout), bytes(stderr), f"output longer than {self.output_kb} KiB"
                if time.monotonic() > deadline:
                    return bytes(stdout), bytes(stderr), "out of wall time"
        return bytes(stdout), bytes(stderr), None


def read_cases(gold: str) -> list[Case]:
    """The cases of a gold text. ValueError for what is no such list."""
    try:
        cases = [Case(**case) for case in json.loads(gold)]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f'gold must be a JSON list of {{"stdin", "stdout"}}, found {gold[:80]!r}: {error}') from error
    if not cases or not all(isinstance(text, str) for case in cases for text in (case.stdin, case.stdout)):
        raise ValueError(f'gold must be a JSON list of {{"stdin", "stdout"}} with texts, found {gold[:80]!r}')
    return cases


def wall_s(options: Mapping[str, Any], gold: str) -> float:
    """The wall time that all cases of a gold text may take, however crowded the machine is; 0 without a case."""
    return WALL_FACTOR * options.get("cpu_s", Program.cpu_s) * gold.count('"stdout"')


def visible_folders() -> list[str]:
    """The folders that a program needs to run at all: the interpreter and the system's libraries, each folder once."""
    # An environment may be reached by a link, which must exist inside, too.
    folders = [*SYSTEM, sys.base_prefix, *dict.fromkeys([sys.prefix, os.path.realpath(sys.prefix)])]
    return [f for f in folders if not any(f != other and f.startswith(f"{other}/") for other in folders)]


def _ending(status: int) -> str:
    if status == SETUP_FAILED:
        return "not started"
    return f"signal {status - 128}" if status > 128 else f"exit status {status}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _shown(data: bytes) -> str:
    return data[-MAX_SHOWN_BYTES:].decode("utf-8", errors="replace")
