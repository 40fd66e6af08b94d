"""The cost of the same work in several trainers, one turn of each, and the table of turns. Pure; bench.py runs them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

MIB = 2**20
# Numbers that trl_gspo.py notes of a step, in its order.
MEASURED = ("wall_s", "cpu_s", "generated_tokens", "trained_tokens")
# Cells that name a row: model; vocabulary and tokens of a prompt; number and length of answers; our processes.
GRID_WORK = ("model", "vocabulary, prompt", "answers, tokens", "processes")


@dataclass(frozen=True)
class Turn:
    """The measured steps of one turn.

    num_steps        how many; a step is all answers to its prompts and all updates on them
    wall_s, cpu_s    seconds of all of them together: on the clock, and of processors
    generated, trained   tokens of answers in all of them
    peak_bytes       most that was in RAM     imported_bytes   of it, once the libraries were imported
    """

    num_steps: int
    wall_s: float
    cpu_s: float
    generated: int
    trained: int
    peak_bytes: int
    imported_bytes: int


def at_once(turns: Sequence[Turn]) -> Turn:
    """Trainers that ran beside each other from a common start: the last one ends the turn, memory adds up."""
    return _joined(turns, max(turn.wall_s for turn in turns), sum)


def in_turns(turns: Sequence[Turn]) -> Turn:
    """Trainers that ran one after the other: seconds add up, the larger one needs the memory."""
    return _joined(turns, sum(turn.wall_s for turn in turns), max)


def _joined(turns: Sequence[Turn], wall_s: float, memory: type[max] | type[sum]) -> Turn:
    return Turn(
        num_steps=turns[0].num_steps,
        wall_s=wall_s,
        cpu_s=sum(turn.cpu_s for turn in turns),
        generated=sum(turn.generated for turn in turns),
        trained=sum(turn.trained for turn in turns),
        peak_bytes=memory(turn.peak_bytes for turn in turns),
        imported_bytes=memory(turn.imported_bytes for turn in turns),
    )


def whole(steps: Sequence[Turn]) -> Turn:
    """Steps of one process, as a turn of them all."""
    return replace(in_turns(steps), num_steps=len(steps))


def read_turn(file: Path, *, tokens: Sequence[int], prompt_tokens: int, threads: int) -> list[Turn]:
    """Reads, step by step, what trl_gspo.py wrote of steps of so many `tokens`. ValueError if it is not whole, or other
    work than ours.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        steps, memory = found["steps"], (int(found["peak_bytes"]), int(found["imported_bytes"]))
        seconds = [tuple(float(step[name]) for name in MEASURED[:2]) for step in steps]
        generated, trained = ([step[name] for step in steps] for name in MEASURED[2:])
        other = {name: found[name] for name in ("prompt_tokens", "threads", "dtype")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not what trl_gspo.py writes ({type(error).__name__}: {error})") from error
    if not generated == trained == list(tokens):
        raise ValueError(
            f"{file}: TRL generated {generated} and trained {trained} tokens in its steps, asked were {list(tokens)}: "
            "these are not the same work"
        )
    wanted = {"prompt_tokens": prompt_tokens, "threads": threads, "dtype": "float32"}
    if other != wanted:
        raise ValueError(f"{file}: TRL had {other}, hacpo_mega {wanted}: these are not the same work")
    return [Turn(1, *took, number, number, *memory) for took, number in zip(seconds, tokens, strict=True)]


def resident(field: str) -> int:
    """Memory of this process that is in RAM (VmRSS), or the most that ever was (VmHWM), in bytes. Linux alone."""
    return 1024 * int(re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def to_markdown(turns: Mapping[tuple[str, str], Sequence[Turn]]) -> str:
    """A row for each (work, trainer), turns by round. The first trainer of a work, hacpo_mega, over the one of the row:
    how many times as many tokens it generates and trains, per second of the clock and per core-second.
    """
    head = (
        *("work", "trainer", "s/step", "by round", "generated + trained tokens/s", "tokens per core-second"),
        *("peak MiB", "of it imports", "hacpo_mega over it: tokens/s", "by round", "tokens per core-second"),
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    first = {work: rows for (work, _), rows in reversed(turns.items())}
    for (work, trainer), rows in turns.items():
        ours = first[work]
        by_round = [theirs.wall_s / own.wall_s for theirs, own in zip(rows, ours, strict=True)]
        cells = (
            work,
            trainer,
            f"{_sum(rows, 'wall_s') / _sum(rows, 'num_steps'):.2f}",
            " ".join(f"{turn.wall_s / turn.num_steps:.2f}" for turn in rows),
            f"{_rate(rows, 'wall_s'):.0f}",
            f"{_rate(rows, 'cpu_s'):.0f}",
            f"{max(turn.peak_bytes for turn in rows) / MIB:.0f}",
            f"{max(turn.imported_bytes for turn in rows) / MIB:.0f}",
            f"{_rate(ours, 'wall_s') / _rate(rows, 'wall_s'):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in by_round),
            f"{_rate(ours, 'cpu_s') / _rate(rows, 'cpu_s'):.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def grid_markdown(rows: Mapping[Sequence[str], tuple[Sequence[Turn], Sequence[Turn]]]) -> str:
    """A row for each work, named by its first cells (GRID_WORK): turns by round of hacpo_mega, and of TRL."""
    head = [*GRID_WORK]
    for unit in ("tokens/s", "per core-second", "peak MiB"):
        head += [unit, "TRL", "ratio"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for work, (ours, theirs) in rows.items():
        cells = [*work]
        for own, other in ((_rate(ours, s), _rate(theirs, s)) for s in ("wall_s", "cpu_s")):
            cells += [f"{own:.0f}", f"{other:.0f}", f"{own / other:.2f}"]
        by_round = [other.wall_s / own.wall_s for own, other in zip(ours, theirs, strict=True)]
        cells[len(work) + 2] += f" ({min(by_round):.2f} to {max(by_round):.2f})"
        own, other = (max(turn.peak_bytes for turn in turns) / MIB for turns in (ours, theirs))
        cells += [f"{own:.0f}", f"{other:.0f}", f"{own / other:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _rate(turns: Sequence[Turn], seconds: str) -> float:
    """Generated and trained tokens per second."""
    return (_sum(turns, "generated") + _sum(turns, "trained")) / _sum(turns, seconds)


def _sum(turns: Sequence[Turn], field: str) -> float:
    return sum(getattr(turn, field) for turn in turns)
