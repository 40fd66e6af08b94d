"""Shared parts of the kernel benchmarks: fair timing, memory, and the table, CSV and plot of a run.

Fair means: every candidate in the same process on the same tensors, in rotated order within every round, after warm-up,
with the L2 cache flushed, and only if it passed the accuracy gate. A time is a median over rounds.
"""

import argparse
import csv
import datetime
import gc
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One candidate at one shape. Times in milliseconds; `fraction` is of the bare cuBLAS products."""

    device: str
    commit: str
    shape: str
    candidate: str
    what: str  # forward, or forward and backward
    note: str
    gate: str
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    teraflops: float | None = None
    fraction: float | None = None
    peak_mib: float | None = None


def arguments(description: str, shapes: Iterable[str], rounds: int) -> argparse.Namespace:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", choices=tuple(shapes), default="targets")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--warmups", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[""], help="candidates whose name starts with one of these")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of table, CSV and plot")
    return parser.parse_args()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return models[0].split(":", 1)[1].strip() if models else platform.machine()


def commit_name() -> str:
    """The commit that is measured, marked when the kernels differ from it."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--", "hacpo_kernels", "bench/*.py"], capture_output=True)
    return (name or "unknown") + ("-dirty" if changed.stdout else "")


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Larger than any L2 cache, so that no candidate finds what another one left there.
        self.flushed = torch.empty(256 << 20, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def once(self, call: Callable[[], object]) -> float:
        """Milliseconds of one call."""
        if self.flushed is None:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        self.flushed.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)

    def interleaved(self, calls: dict[str, Callable[[], object]], rounds: int, warmups: int) -> dict[str, list[float]]:
        """Sorted times of every call; each round runs all of them, starting with another one."""
        for call in calls.values():
            for _ in range(warmups):
                call()
        names, times = list(calls), {name: [] for name in calls}
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(self.once(calls[name]))
        return {name: sorted(values) for name, values in times.items()}

    def peak_mib(self, call: Callable[[], object]) -> float | None:
        """Memory that the call needs beyond what lives already, its results included. None on a CPU."""
        if self.flushed is None:
            return None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def gpu_state(device: torch.device) -> str:
    """SM clock, power and temperature now: two runs are comparable when these are."""
    if device.type != "cuda":
        return "no GPU"
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip().replace("\n", "; ") or "unknown"


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """(p20, p50, p80)."""
    if len(times) < 3:
        return min(times), statistics.median(times), max(times)
    cuts = statistics.quantiles(times, n=10, method="inclusive")  # within what was seen, however few rounds
    return cuts[1], statistics.median(times), cuts[7]


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line per row."""
    names = [field.name for field in fields(Row) if field.name not in ("device", "commit")]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(getattr(row, name)) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def save(name: str, rows: Sequence[Row], missing: dict[str, str], state: str, folder: Path) -> Path:
    """Write <folder>/<name>-<device>-<commit>.{csv,md,png} and return the table's path."""
    folder.mkdir(parents=True, exist_ok=True)
    slug = "-".join([name, *rows[0].device.split(), rows[0].commit]).lower()
    stem = folder / "".join(c if c.isalnum() or c in "-." else "" for c in slug)
    with open(f"{stem}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    head = f"# {name} on {rows[0].device}, commit {rows[0].commit}, {datetime.date.today()}, torch {torch.__version__}"
    absent = "\n".join(f"- {who}: {why}" for who, why in missing.items())
    Path(f"{stem}.md").write_text(f"{head}\n\n{state}\n\n{table(rows)}\n\nNot measured:\n{absent or '- none'}\n")
    plot(rows, Path(f"{stem}.png"), head.lstrip("# "))
    return Path(f"{stem}.md")


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Median time over the shapes, one line per candidate, one panel per kind of call."""
    kinds = list(dict.fromkeys(row.what for row in rows))
    figure, axes = plt.subplots(1, len(kinds), figsize=(7 * len(kinds), 5), squeeze=False)
    for axis, kind in zip(axes[0], kinds):
        shapes = list(dict.fromkeys(row.shape for row in rows if row.what == kind))
        for candidate in dict.fromkeys(row.candidate for row in rows if row.what == kind):
            mine = {row.shape: row.p50_ms for row in rows if (row.what, row.candidate) == (kind, candidate)}
            places = [i for i, shape in enumerate(shapes) if mine.get(shape) is not None]
            axis.plot(places, [mine[shapes[i]] for i in places], marker="o", label=candidate)
        axis.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
        axis.set(yscale="log", ylabel="median ms", title=kind)
        axis.legend(fontsize="small")
    figure.suptitle(title, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
