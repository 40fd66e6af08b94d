"""The page's view of `hacpo-mega experiment`: methods x seeds as mean and band, and differences within seeds.

Runs are read from evidence.json of a work folder, or from runs.jsonl and one JSON file per run of a results folder;
only reported ones count, not those that chose a learning rate. A difference is taken within a seed. Its interval is
the one of the experiment's own tables: a percentile bootstrap of the mean over 10,000 resamples of seeds, from 3 on.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from hacpo_mega.logbook.files.json_lines import (
    COUNT,
    LARGEST,
    NUMBER,
    TABLE,
    TEXT,
    Kind,
    list_of,
    table_of,
    wrong_field,
)
from hacpo_mega.models.files.documents import json_file, parse_json
from hacpo_mega.models.files.links import require_inside

EVIDENCE, PACKED = "evidence.json", "runs.jsonl"
FIRST_BYTES = 1 << 20
MIN_PAIRS, NUM_RESAMPLES, SEED = 3, 10_000, 0
ENDS = (2.5, 97.5)  # percentiles of an interval
ALL_AGENTS = "mean of agents"
REFERENCES = ("gspo_x2", "gspo", "grpo")  # agents alone, with which results without their grid are compared first
NUMBERS, COUNTS = table_of(list_of(NUMBER)), table_of(list_of(COUNT))
FIELDS = {
    **{"regime": TEXT, "method": TEXT, "stage": TEXT, "learning_rate": NUMBER, "agents": list_of(TEXT)},
    **{"seed": Kind("a whole number", lambda value: type(value) is int and 0 <= value <= LARGEST)},
    **{"steps": list_of(COUNT), "seconds": list_of(NUMBER), "commit": TEXT.or_null, "curves": TABLE},
}
CURVES = {
    **{"accuracy": NUMBERS, "accuracy_by_skill": table_of(NUMBERS)},
    **dict.fromkeys(("generated_answers", "trained_answers", "updates"), COUNTS),
}
Runs = Sequence[Mapping[str, Any]]


def experiment(folder: Path, reference: str | None) -> dict[str, Any]:
    """Charts and tables of every regime.

    `reference` is a method: by default the grid's, else the first of REFERENCES, else the first by name.

    ValueError, one line, for a file that is no result, and for a method that did not run.
    """
    runs, given = _read(folder)
    reported = _by_rate([run for run in runs if run["stage"] == "reported"])
    if not reported:
        raise ValueError(f"{folder} has no reported run yet, {len(runs)} that choose a learning rate")
    methods = list(dict.fromkeys(run["method"] for run in reported))
    chosen = reference or given or next(name for name in (*REFERENCES, *sorted(methods)) if name in methods)
    if chosen not in methods:
        raise ValueError(f"no method {chosen!r} has a reported run: give one of {', '.join(methods)}")
    regimes = list(dict.fromkeys(run["regime"] for run in reported))
    charts, tables, notes = [], [], []
    for regime in regimes:
        own = [run for run in reported if run["regime"] == regime]
        by_method = {method: found for method in methods if (found := [run for run in own if run["method"] == method])}
        notes += _unlike(regime, by_method)
        charts += _charts(regime, by_method)
        tables += _tables(regime, by_method, chosen)
    commits = sorted({str(run["commit"])[:12] for run in reported})
    facts = {"reported runs": str(len(reported)), "tuning runs": str(len(runs) - len(reported))}
    facts |= {"commit": ", ".join(commits), "reference": chosen}
    return {"facts": facts, "methods": methods, "reference": chosen, "notes": notes, "charts": charts, "tables": tables}


def is_packed(path: Path) -> bool:
    """True if the first line of a runs.jsonl is a result of an experiment."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        return _wrong(parse_json(file.readline(FIRST_BYTES))) is None
    return False


def _read(folder: Path) -> tuple[Runs, str | None]:
    """All runs, and the grid's own reference where it is known."""
    path = folder / EVIDENCE
    require_inside(folder, path)
    if path.is_file():
        content = json_file(path)
        is_table = isinstance(content, dict) and not wrong_field(content, {"runs": list_of(TABLE), "grid": TABLE})
        if not is_table:
            raise ValueError(f"{path} is no evidence of an experiment: it has no runs; write it anew with --table-only")
        grid = content["grid"]
        given = grid.get("reference") or next(iter(grid.get("methods") or {}), None)
        return [_checked(run, f"{path}, run {number}") for number, run in enumerate(content["runs"], 1)], given
    return list(_results(folder)), None


def _results(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The runs of a results folder: the packed ones, then one per file; a line without its end is left out."""
    packed = folder / PACKED
    require_inside(folder, packed)
    with suppress(FileNotFoundError):
        for number, line in enumerate(packed.read_bytes().split(b"\n")[:-1], 1):
            yield _checked(parse_json(line), f"{packed}:{number}")
    for path in sorted(folder.glob("*.lr-*.seed-*.json")):
        require_inside(folder, path)
        with suppress(FileNotFoundError):  # packed at this moment
            yield _checked(json_file(path), str(path))


def _checked(run: Any, where: str) -> Mapping[str, Any]:
    if why := _wrong(run):
        raise ValueError(f"{where}: not the result of a run ({why}); remove it, and its run is made again")
    return run


def _wrong(run: Any) -> str | None:
    if not isinstance(run, dict):
        return "no table"
    if why := wrong_field(run, FIELDS) or wrong_field(run["curves"], CURVES, "curves."):
        return why
    lengths = {len(run["seconds"]), *(len(values) for values in run["curves"]["accuracy"].values())}
    if not run["steps"] or lengths != {len(run["steps"])}:
        return "its curves and its steps have other lengths"
    if not run["agents"] or set(run["agents"]) != run["curves"]["accuracy"].keys():
        return "its agents are not those of its curves"
    return None


def _by_rate(runs: Runs) -> Runs:
    """The runs, where a method that was reported at several learning rates is one method for each."""
    rates: dict[str, set[float]] = {}
    for run in runs:
        rates.setdefault(run["method"], set()).add(run["learning_rate"])
    return [
        run | ({"method": f"{run['method']} at {run['learning_rate']:g}"} if len(rates[run["method"]]) > 1 else {})
        for run in runs
    ]


def _unlike(regime: str, by_method: Mapping[str, Runs]) -> Iterator[str]:
    """Lines on methods whose runs were evaluated at other steps."""
    for method, runs in by_method.items():
        if len({tuple(run["steps"]) for run in runs}) > 1:
            yield f"{regime}, {method}: seeds were evaluated at other steps; curves show those in common."


def _names(by_method: Mapping[str, Runs]) -> list[str]:
    """The agents, and their mean unless there is only one."""
    agents = list(dict.fromkeys(agent for runs in by_method.values() for run in runs for agent in run["agents"]))
    return agents if len(agents) == 1 else [*agents, ALL_AGENTS]


def _curve(run: Mapping[str, Any], name: str) -> list[float] | None:
    """Accuracies at the run's steps, of an agent or as their mean; None if the run has no such agent."""
    curves = run["curves"]["accuracy"]
    return [fmean(column) for column in zip(*curves.values())] if name == ALL_AGENTS else curves.get(name)


def _charts(regime: str, by_method: Mapping[str, Runs]) -> Iterator[dict[str, Any]]:
    for name in reversed(_names(by_method)):  # their mean first
        lines = filter(None, (_line(method, runs, name) for method, runs in by_method.items()))
        yield {"title": f"{regime}: {name}", "note": "Held-out accuracy, mean over seeds.", "lines": [*lines]}


def _line(method: str, runs: Runs, name: str) -> dict[str, Any] | None:
    """Mean and range over seeds, at the steps that all of them have."""
    found = [(run, dict(zip(run["steps"], curve))) for run in runs if (curve := _curve(run, name)) is not None]
    steps = sorted(set.intersection(*(set(curve) for _, curve in found))) if found else []
    if not steps:
        return None
    columns = [[curve[step] for _, curve in found] for step in steps]
    low, high = ([end(column) for column in columns] if len(found) > 1 else None for end in (min, max))
    axes = {"steps": steps, "seconds": [fmean(_at(run, run["seconds"], step) for run, _ in found) for step in steps]}
    for kind in ("generated_answers", "trained_answers"):
        counts = [(run, [sum(column) for column in zip(*run["curves"][kind].values())]) for run, _ in found]
        if all(len(count) == len(run["steps"]) for run, count in counts):
            axes[kind] = [fmean(_at(run, count, step) for run, count in counts) for step in steps]
    label = f"{method}, {len(found)} seed{'s' * (len(found) > 1)}"
    return {"label": label, "x": axes, "y": [fmean(column) for column in columns], "low": low, "high": high}


def _at(run: Mapping[str, Any], values: Sequence[float], step: int) -> float:
    return values[run["steps"].index(step)]


def _tables(regime: str, by_method: Mapping[str, Runs], reference: str) -> Iterator[dict[str, Any]]:
    names = _names(by_method)
    rates = {method: sorted({f"{run['learning_rate']:g}" for run in runs}) for method, runs in by_method.items()}
    ends = {method: {name: _ends(runs, name) for name in names} for method, runs in by_method.items()}
    rows = [
        [method, ", ".join(rates[method]), *(_mean_sd(ends[method][name].values()) for name in names), str(len(runs))]
        for method, runs in by_method.items()
    ]
    note = "Held-out accuracy at the end of a run: mean over seeds ± sample standard deviation."
    head = ["method", "learning rate", *names, "seeds"]
    yield {"title": f"{regime}: accuracy", "head": head, "rows": rows, "notes": [note]}
    if reference in by_method:
        against = ends[reference]
        rows = [
            [method, *(_difference(found[name], against[name]) for name in names)]
            for method, found in ends.items()
            if method != reference
        ]
        note = (
            "Mean difference over the seeds that both have; [95 % percentile bootstrap of that mean, 10,000 resamples "
            "of seeds, too narrow with few]; in how many seeds it was positive."
        )
        title = f"{regime}: difference to {reference}"
        yield {"title": title, "head": ["method", *names], "rows": rows, "notes": [note]}
    yield from _skills(regime, by_method)


def _skills(regime: str, by_method: Mapping[str, Runs]) -> Iterator[dict[str, Any]]:
    tables = [run["curves"]["accuracy_by_skill"] for runs in by_method.values() for run in runs]
    columns = list(
        dict.fromkeys((agent, skill) for table in tables for agent, skills in table.items() for skill in skills)
    )
    rows = []
    for method, runs in by_method.items():
        of_skills = [run["curves"]["accuracy_by_skill"] for run in runs]
        found = ([table[a][s][-1] for table in of_skills if table.get(a, {}).get(s)] for a, s in columns)
        rows.append([method, *map(_mean_sd, found)])
    if columns:
        head = ["method", *(f"{agent} {skill}" for agent, skill in columns)]
        yield {"title": f"{regime}: accuracy by skill", "head": head, "rows": rows, "notes": []}


def _ends(runs: Runs, name: str) -> dict[int, float]:
    """The last accuracy of every seed."""
    return {run["seed"]: curve[-1] for run in runs if (curve := _curve(run, name)) is not None}


def _mean_sd(values: Any) -> str:
    found = list(values)
    if not found:
        return "–"
    return f"{fmean(found):.3f}" + (f" ± {stdev(found):.3f}" if len(found) > 1 else "")


def _difference(found: Mapping[int, float], against: Mapping[int, float]) -> str:
    seeds = sorted(found.keys() & against.keys())
    if not seeds:
        return "–"
    values = [found[seed] - against[seed] for seed in seeds]
    interval = ""
    if len(values) >= MIN_PAIRS:
        low, high = _interval(values)
        interval = f" [{low:+.3f}, {high:+.3f}]"
    return f"{fmean(values):+.3f}{interval} {sum(value > 0 for value in values)}/{len(values)}"


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the experiment's tables, by the draws of scipy.stats.bootstrap, which takes a second to load."""
    draws = np.random.default_rng(SEED).integers(0, len(values), (NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.asarray(values)[draws].mean(axis=1), ENDS)
    return float(low), float(high)
