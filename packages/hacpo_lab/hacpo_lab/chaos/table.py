"""A campaign as a table for people and as chaos.json: the cost of each fault, and the comparison of the runs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from hacpo_lab.chaos.campaign import Attempt, step_seconds
from hacpo_lab.chaos.verdict import Verdict
from hacpo_mega.logbook.run.provenance import source_commit

HEADER = ("fault", "struck", "ended the job", "not noticed", "steps done again", "most", "s to recover, mean", "worst")


@dataclass(frozen=True)
class Cost:
    """The cost of one fault.

    ended_job    whether it ended the job      lost_steps   finished steps that were done again
    recovery_s   seconds until the run was open again; None: it did not end, or has not resumed yet
    """

    kind: str
    phase: str | None
    ended_job: bool
    lost_steps: int
    recovery_s: float | None
    unnoticed: bool


def costs(attempts: Sequence[Attempt]) -> list[Cost]:
    """The cost of every fault, in order. If a further fault strikes the recovery, it counts until the run is open."""
    found = []
    for number, attempt in enumerate(attempts):
        for place, (fault, when) in enumerate(attempt.struck):
            ended = place == len(attempt.struck) - 1 and not attempt.is_done
            opened = next((later.opened for later in attempts[number + 1 :] if later.opened is not None), None)
            found.append(
                Cost(
                    kind=fault.kind,
                    phase=attempt.phase if ended else None,
                    ended_job=ended,
                    lost_steps=max(0, attempt.last_step - attempt.committed) if ended and attempt.opened else 0,
                    recovery_s=opened - when if ended and opened is not None else None,
                    unnoticed=ended and attempt.unnoticed,
                )
            )
    return found


def training_share(attempts: Sequence[Attempt], run_dir: Path) -> float:
    """Effective training time ratio: seconds of the steps that count, over all seconds of starts and of running."""
    whole = sum(attempt.ended - attempt.launched for attempt in attempts)
    return sum(step_seconds(run_dir).values()) / whole if whole else 0.0


def table(attempts: Sequence[Attempt], run_dir: Path, verdict: Verdict | None) -> str:
    """The campaign in Markdown; `verdict` is None while it goes on."""
    found = costs(attempts)
    rows = [_row(kind, [cost for cost in found if cost.kind == kind]) for kind in sorted({c.kind for c in found})]
    rows.append(_row("all", found))
    phases = [cost.phase or "unknown" for cost in found if cost.ended_job]
    counted = ", ".join(
        f"{phase} {phases.count(phase)}" for phase in sorted(set(phases), key=phases.count, reverse=True)
    )
    lines = [
        *(f"| {' | '.join(cells)} |" for cells in (HEADER, ["---"] * len(HEADER), *rows)),
        "",
        f"Starts: {len(attempts)}. Phases in which a fault ended the job: {counted or 'none'}.",
        f"Share of time spent in steps that count (ETTR): {training_share(attempts, run_dir):.3f}.",
        *_verdict_lines(verdict),
    ]
    return "\n".join(lines)


def _row(name: str, found: Sequence[Cost]) -> list[str]:
    recovered = [cost.recovery_s for cost in found if cost.recovery_s is not None]
    lost = [cost.lost_steps for cost in found]
    return [
        name,
        str(len(found)),
        str(sum(cost.ended_job for cost in found)),
        str(sum(cost.unnoticed for cost in found)),
        str(sum(lost)),
        str(max(lost, default=0)),
        f"{fmean(recovered):.1f}" if recovered else "",
        f"{max(recovered):.1f}" if recovered else "",
    ]


def _verdict_lines(verdict: Verdict | None) -> Iterator[str]:
    if verdict is None:
        yield "The run goes on."
        return
    trained = ", ".join(f"{learner} {number}" for learner, number in verdict.num_trained.items())
    yield (
        f"Compared with the undisturbed run: {verdict.num_shards} shards of weights and optimizer, {verdict.num_files} "
        f"exported files, {verdict.num_values} metrics, all answers. Answers trained, each once: {trained}."
    )
    yield "Equal to the last bit." if not verdict.problems else "NOT EQUAL:"
    yield from verdict.problems


def write_table(out: Path, attempts: Sequence[Attempt], run_dir: Path, verdict: Verdict | None) -> str:
    """Writes table.txt and chaos.json into `out`; the text of the table."""
    text = table(attempts, run_dir, verdict)
    (out / "table.txt").write_text(text + "\n", encoding="utf-8")
    record = {
        "commit": source_commit(),
        "training_share": training_share(attempts, run_dir),
        "faults": [asdict(cost) for cost in costs(attempts)],
        "verdict": None if verdict is None else asdict(verdict),
    }
    (out / "chaos.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return text
