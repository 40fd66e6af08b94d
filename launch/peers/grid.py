"""hacpo_mega beside TRL over sizes, vocabularies, prompts and lengths of answers: one agent, one table.

    make bench-peers-grid                                            the whole grid; goes on where it was stopped
    make bench-peers-grid GRID="--sizes 10M 60M --prompts 20"        a part of it

All trainers of a model live side by side and take measured steps by turns, one while the others wait. GSPO, 8 answers
to a prompt, random weights (the work does not depend on them); answers of one length, and of a long tail. hacpo_mega is
there as one process on all cores and as one a core, by lanes and by tensor parallelism, and the table has the fastest.
Differences from TRL: docs/measurements/peers.md. Every finished part lies in --out as JSON and is not measured again.
Cores are those that the process may use (taskset).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from bench import THEIRS, WARM_UP, Machine, checked
from cells import (
    EQUAL,
    LEFT_OUT,
    LENGTHS,
    LONGEST,
    SIZES,
    VOCABULARIES,
    Cell,
    G,
    layouts_of,
    num_parameters,
    with_layout,
    workload_of,
    write_inputs,
)
from paced import paced_job, say, wait
from table import Turn, grid_markdown

from hacpo_mega.cluster.machine.environment import prepare_environment
from hacpo_mega.cluster.machine.machine_limits import num_cores

MOST_WORK = 1e12  # parameters times tokens of all steps
# TRL's environment for large vocabularies: otherwise it maps and returns logits in every update, half of its seconds.
KEEPS_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
# {lengths: {layout of hacpo_mega, or TRL: turns by round}}
Measured = dict[str, dict[str, list[Turn]]]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--vocabularies", nargs="+", type=int, choices=VOCABULARIES, default=list(VOCABULARIES))
    parser.add_argument("--prompts", nargs="+", type=int, choices=(20, 400), default=[20, 400], help="tokens of one")
    parser.add_argument("--everything", action="store_true", help=f"also {LEFT_OUT}")
    parser.add_argument("--peer", type=Path, default=Path("build/peers-env/bin/python"), help="a Python that has TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/peers-grid"), help="folder of grid.md and of the parts")
    return parser.parse_args()


def cells(asked: argparse.Namespace) -> list[Cell]:
    """The part of the grid that was asked for, the cheap ones first."""
    found = [(s, v, p) for p in asked.prompts for s in asked.sizes for v in asked.vocabularies]
    return [Cell(*cell) for cell in found if asked.everything or cell not in LEFT_OUT]


def measure(cell: Cell, asked: argparse.Namespace, peer: dict[str, str], work: Path) -> Measured:
    """Every trainer takes every step of every kind of lengths, one after the other. RuntimeError when one fails."""
    kinds, cores = LENGTHS * rounds_of(cell, asked.rounds), num_cores()
    file = write_inputs(cell, work, WARM_UP + len(kinds))
    asked = argparse.Namespace(**{**vars(asked), "config": file, "overrides": [], "steps": len(kinds)})
    config, _ = checked(asked)
    workload = workload_of(cell, kinds)
    machine = Machine(config, workload, asked, peer | (KEEPS_PAGES if cell.vocabulary > 1000 else {}))
    with ExitStack() as stack:
        theirs = stack.enter_context(machine.peer_process(0, work, cores))
        stack.callback(theirs.kill)
        try:
            jobs = {}
            for name, layout in layouts_of(cell, cores).items():
                run = with_layout(file, name, layout)
                world_size = layout.lanes * layout.tp
                job = paced_job(machine.server, world_size, run.parent / f"ours_{name}", run, len(kinds), workload)
                jobs[name] = stack.enter_context(job)
            for job in jobs.values():
                job.is_ready()
            wait(theirs.stdout)
            for _ in kinds:
                for job in jobs.values():
                    job.step()
                say(theirs.stdin, "go")
                wait(theirs.stdout)
            tokens = [sum(n for group in step.values() for n, _ in group) for step in workload.steps[WARM_UP:]]
            found = {name: job.turns(tokens) for name, job in jobs.items()}
        except OSError as error:
            said = [f"{name.relative_to(work)}: {name.read_text(errors='replace')[-1500:]}" for name in errors_of(work)]
            raise RuntimeError(f"a trainer of {cell.name} failed ({error}). {' '.join(said)}") from error
        theirs.communicate()
    found[THEIRS] = machine.read(0, work, cores)
    return {
        kind: {trainer: turns[place :: len(LENGTHS)] for trainer, turns in found.items()}
        for place, kind in enumerate(LENGTHS)
    }


def rounds_of(cell: Cell, asked: int) -> int:
    """Fewer than asked where a part would take more than some three minutes of two quiet cores; at least one."""
    tokens = cell.num_prompts * G * (cell.prompt_tokens + LONGEST)
    return max(1, min(asked, int(MOST_WORK / (len(LENGTHS) * tokens * num_parameters(cell)))))


def errors_of(work: Path) -> list[Path]:
    """The files of what trainers have said before they ended."""
    return [file for file in (*work.glob("ours_*/*.err"), work / "0" / "err") if file.stat().st_size]


def row_name(cell: Cell, kind: str) -> tuple[str, ...]:
    """The work of a row of the table (table.GRID_WORK)."""
    tokens = f"{EQUAL}" if kind == "equal" else kind
    return (
        f"{num_parameters(cell) / 1e6:.1f}M",
        f"{cell.vocabulary}, {cell.prompt_tokens}",
        f"{cell.num_prompts * G}, {tokens}",
    )


def faster(found: Measured) -> str:
    """The layout with which hacpo_mega has taken the fewest seconds over all that was measured."""
    names = [name for name in found[LENGTHS[0]] if name != THEIRS]
    return min(names, key=lambda name: sum(turn.wall_s for kind in LENGTHS for turn in found[kind][name]))


def found_before(file: Path, made_with: dict[str, object]) -> Measured | None:
    """A part that was finished so; None: there is none."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if found.pop("made with", None) != made_with:
        return None
    return {kind: {who: [Turn(**turn) for turn in turns] for who, turns in found[kind].items()} for kind in LENGTHS}


def write_part(file: Path, made_with: dict[str, object], found: Measured) -> None:
    """Writes what `found_before` reads; a file that was begun is none."""
    told = {kind: {who: [asdict(turn) for turn in turns] for who, turns in found[kind].items()} for kind in LENGTHS}
    begun = file.with_suffix(".begun")
    begun.write_text(json.dumps({"made with": made_with, **told}), encoding="utf-8")
    begun.rename(file)


def run(asked: argparse.Namespace, peer: dict[str, str]) -> str:
    """Measures what is missing; the table of all that was asked for. RuntimeError when parts of it failed."""
    from hacpo_mega.logbook.run.provenance import source_commit

    rows, failed = {}, []
    made_with = {"commit": source_commit() or "unknown", "rounds": asked.rounds, "cores": num_cores()}
    asked.out.mkdir(parents=True, exist_ok=True)
    for cell in cells(asked):
        file, began = asked.out / f"{cell.name}.json", time.monotonic()
        if (found := found_before(file, made_with)) is None:
            try:
                with tempfile.TemporaryDirectory(prefix="hacpo_grid_") as work:
                    found = measure(cell, asked, peer, Path(work))
            except RuntimeError as error:  # the others are worth their minutes
                failed.append(str(error))
                print(error, file=sys.stderr, flush=True)
                continue
            write_part(file, made_with, found)
            print(f"{cell.name}: {time.monotonic() - began:.0f} s; {said_of(found)}", flush=True)
        for kind in LENGTHS:
            ours = faster(found)
            rows[*row_name(cell, kind), ours] = found[kind][ours], found[kind][THEIRS]
        (asked.out / "grid.md").write_text(grid_markdown(rows), encoding="utf-8")
    if failed:
        raise RuntimeError(f"{len(failed)} parts failed; the others: {asked.out}/grid.md")
    return grid_markdown(rows)


def said_of(found: Measured) -> str:
    """Seconds a step of each trainer, of processors in brackets."""
    said = []
    for who in found[LENGTHS[0]]:
        turns = [turn for kind in LENGTHS for turn in found[kind][who]]
        wall_s, cpu_s = (sum(seconds) / len(turns) for seconds in zip(*((turn.wall_s, turn.cpu_s) for turn in turns)))
        said.append(f"{who} {wall_s:.2f} s a step ({cpu_s:.2f})")
    return ", ".join(said)


def main() -> None:
    """Measures, prints and writes the table. Exit 2 with a line for bad input, 1 when a trainer fails."""
    asked = arguments()
    # The user's, less PYTHONPATH: the folder `kernels` of this repository would shadow a package of theirs.
    peer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    os.environ.pop("OMP_NUM_THREADS", None)  # cores are shared by the processes of a trainer
    prepare_environment()
    try:
        print("\n" + run(asked, peer))
    except ValueError as error:
        sys.exit(print(error, file=sys.stderr) or 2)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
