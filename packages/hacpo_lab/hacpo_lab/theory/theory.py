"""`hacpo-mega theory`: the theorems of HACPO (arXiv 2603.02604) as numbers, from the functions that train.

Theorem 4.1, a capability-aware baseline is unbiased: rewards.py. Theorem 4.3, the cross gradient points along
the own one: gradients.py. Here: how much is simulated, the tables, theory.json. Not here: the figure (report/),
and what the numbers mean (docs/measurements/theory.md).
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hacpo_lab.theory.gradients import GradientRow, GradientSize, measure_gradients
from hacpo_lab.theory.rewards import (
    ESTIMATED,
    ONE,
    ORACLE,
    PRESETS,
    WINDOWS,
    OmegaRow,
    PromptRow,
    RatioRow,
    measure_omegas,
    measure_prompts,
    measure_ratios,
)
from hacpo_lab.theory.world import Estimate, Size, World
from hacpo_mega.logbook.run.provenance import source_commit

RESULT = "theory.json"
WIDTH = 400  # more than any table needs, whatever the terminal's is: a cut number is of no use

# A weak and a strong agent on easy, middling and hard prompts; the weak one improves four times as fast.
WORLD = World(("weak", "strong"), abilities=(-1.0, 0.7), speeds=(0.02, 0.005), difficulties=(-2.0, 0.0, 2.0))


@dataclass(frozen=True)
class Scale:
    """How much is simulated for each table. `ratios` holds for each of the `ratio_prompts` numbers of prompts."""

    omegas: Size
    ratios: Size
    ratio_prompts: tuple[int, ...]
    gradients: GradientSize


# About a quarter of a minute on one core.
FULL = Scale(
    omegas=Size(num_replications=1500, num_prompts=16, num_rollouts=8),
    ratios=Size(num_replications=4000, num_prompts=16, num_rollouts=8),
    ratio_prompts=(4, 16, 128),
    gradients=GradientSize(num_exact=512, num_updates=64, num_rollouts=8, distances=(0.0, 0.5, 1.0, 2.0)),
)


@dataclass(frozen=True)
class Theory:
    """What was measured, and what made it; wall and processor seconds."""

    seed: int
    commit: str | None
    world: World
    scale: Scale
    omegas: tuple[OmegaRow, ...]
    ratios: tuple[RatioRow, ...]
    prompts: tuple[PromptRow, ...]
    gradients: tuple[GradientRow, ...]
    wall_s: float
    cpu_s: float


def check_theory(out: Path, seed: int, scale: Scale = FULL) -> Path:
    """Measures everything, prints the tables and writes `out`/theory.json, whose path it returns.

    The same seed gives the same numbers on the same kind of processor; only the seconds differ.
    """
    start, start_cpu = time.perf_counter(), time.process_time()
    generator = torch.Generator().manual_seed(seed)
    theory = Theory(
        seed=seed,
        commit=source_commit(),
        world=WORLD,
        scale=scale,
        omegas=tuple(measure_omegas(WORLD, scale.omegas, [ORACLE, ONE, *ESTIMATED], generator)),
        ratios=tuple(measure_ratios(WORLD, scale.ratios, scale.ratio_prompts, WINDOWS, generator)),
        prompts=tuple(measure_prompts(WORLD, scale.omegas, generator)),
        gradients=tuple(measure_gradients(scale.gradients, generator)),
        wall_s=round(time.perf_counter() - start, 1),
        cpu_s=round(time.process_time() - start_cpu, 1),
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / RESULT
    path.write_text(json.dumps(asdict(theory), indent=1) + "\n", encoding="utf-8")
    console = Console(width=WIDTH)
    for table in tables(theory):
        console.print(table, end="\n\n")
    console.print(f"seed {seed}, commit {theory.commit}, {theory.wall_s} s, of which {theory.cpu_s} s processor time")
    console.print("0.0276(36) is 0.0276 with a standard error of 0.0036")
    return path


def with_error(estimate: Estimate) -> str:
    """A mean with its standard error in units of the last digit: 0.0276(36) is 0.0276 +- 0.0036."""
    if not math.isfinite(estimate.error):
        return "-"
    if estimate.error >= 1000:  # an omega of an agent that earned nothing
        return f"{estimate.mean:.1e}({estimate.error:.1e})"
    if estimate.error < 1e-12:
        decimals = 4
    else:
        exponent = int(f"{estimate.error:.1e}".partition("e")[2])  # of the error rounded to two digits
        decimals = min(5, max(0, 1 - exponent))
    mean = round(estimate.mean, decimals) + 0.0  # no -0
    return f"{mean:.{decimals}f}({round(estimate.error * 10**decimals)})"


def tables(theory: Theory) -> Iterator[Table]:
    """Everything measured, as tables for people."""
    size = theory.scale.omegas
    step = f"{size.num_prompts} prompts x {size.num_rollouts} answers, {size.num_replications} replications"
    for preset in PRESETS:
        rows = [row for row in theory.omegas if row.preset == preset]
        yield _omega_table(f"Theorem 4.1, preset {preset}: means. {step}", rows, ("numerator", "advantage"))
        yield _omega_table(
            f"Variance of the advantage, and mean square error against the oracle's, preset {preset}; "
            "both over the variance under omega = 1",
            rows,
            ("variance", "added_error"),
        )
    yield _table(
        "E[omega_hat] / omega - 1, strong over weak, stationary agents, current step left out",
        ("prompts", "K", "paper", "authors' bounds", "second order", "P_hat_weak at its floor"),
        (
            (str(r.num_prompts), str(r.window), r.paper, r.authors, f"{r.predicted:.5f}", r.unrewarded)
            for r in theory.ratios
        ),
    )
    yield _table(
        "Own answers by difficulty, oracle omega, preset paper",
        ("agent", "difficulty", "success", "exact R - mu", "R - mu", "advantage", "mu > 1"),
        (
            (
                r.agent,
                f"{r.difficulty:g}",
                f"{r.success:.4f}",
                f"{r.expected:.4f}",
                r.numerator,
                r.advantage,
                r.above_one,
            )
            for r in theory.prompts
        ),
    )
    yield _gradient_table(theory)


def _omega_table(title: str, rows: Sequence[OmegaRow], quantities: tuple[str, str]) -> Table:
    pairs = list(dict.fromkeys((row.learner, row.source) for row in rows))
    heads = [f"{_NAMES[name]}\n{k if k == j else f'{k} <- {j}'}" for name in quantities for k, j in pairs]
    lines: dict[tuple[str, str], dict[tuple[str, str], OmegaRow]] = {}
    for row in rows:
        lines.setdefault((row.agents, row.omega), {})[row.learner, row.source] = row
    cells = (
        (*line, *(getattr(by_pair[pair], name) for name in quantities for pair in pairs))
        for line, by_pair in lines.items()
    )
    return _table(title, ("agents", "omega", *heads), cells)


_NAMES = {"numerator": "R - mu", "advantage": "advantage", "variance": "variance", "added_error": "error"}


def _gradient_table(theory: Theory) -> Table:
    size = theory.scale.gradients
    title = (
        f"Theorem 4.3: cross against own gradient. Exact: {size.num_exact} prompts; sampled: {size.num_rollouts} "
        f"answers per agent, {size.num_updates} updates of 64 prompts"
    )
    heads = ("source", "baseline", "objective", "distance", "KL", "mean s", "inside", "mu > 1", "exact\ncosine")
    heads += ("exact\nopposed", "of those with\nmu <= 1", "sampled\ncosine", "sampled\nopposed")
    heads += ("update\ncosine", "update\nopposed")
    return _table(
        title,
        heads,
        (
            (
                *(row.source, row.cross_baseline, row.objective, f"{row.distance:g}", row.kl, row.ratio, row.inside),
                *(row.above_one, row.cosine, row.opposed, row.opposed_below, row.sampled_cosine, row.sampled_opposed),
                *(row.update_cosine, row.update_opposed),
            )
            for row in theory.gradients
        ),
    )


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str | Estimate]]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    cells = [[with_error(cell) if isinstance(cell, Estimate) else cell for cell in row] for row in rows]
    for index, head in enumerate(heads):
        is_number = all(row[index][:1] in "-0123456789" for row in cells)
        table.add_column(head, justify="right" if is_number else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    return table
