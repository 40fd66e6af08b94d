"""The watch page's view of `hacpo-mega experiment`: methods x seeds as mean and band, and differences within seeds.

Runs are read from evidence.json of a work folder, or from runs.jsonl and one JSON file per run of a results folder;
only reported ones count, not those that chose a learning rate. A difference is taken within a seed. Ends and intervals
are those of the experiment's own tables (experiments/comparison.py): of the test set where every run of a regime has
answered it, else of the last evaluation.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from hacpo_lab.experiments.comparison import CONFIDENCE, Ends, paired_difference, right_answers, summarize
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
from hacpo_mega.watch.studies import StudyKind

EVIDENCE, PACKED = "evidence.json", "runs.jsonl"
ONE_RUN = re.compile(r".+\.lr-.+\.seed-\d+\.json")
FIRST_BYTES = 1 << 20
HEX = re.compile(r"(?:[0-9a-f]{2})+")
ALL_AGENTS, SAMPLED = "mean of agents", "mean, sampled"
REFERENCES = ("gspo_x2", "gspo", "grpo")  # agents alone, with which results without their grid are compared first
NUMBERS, COUNTS = table_of(list_of(NUMBER)), table_of(list_of(COUNT))
FIELDS = {
    **{"regime": TEXT, "method": TEXT, "stage": TEXT, "learning_rate": NUMBER, "agents": list_of(TEXT)},
    **{"seed": Kind("a whole number", lambda value: type(value) is int and 0 <= value <= LARGEST)},
    **{"steps": list_of(COUNT), "seconds": list_of(NUMBER), "commit": TEXT.or_null, "curves": TABLE},
    "final": TABLE.or_null.if_given,
}
CURVES = {
    **{"accuracy": NUMBERS, "accuracy_by_skill": table_of(NUMBERS)},
    **dict.fromkeys(("generated_answers", "trained_answers", "updates"), COUNTS),
    "is_graded": Kind("true or false", lambda value: isinstance(value, bool)).if_given,
}
BITS = Kind("hexadecimal text", lambda value: isinstance(value, str) and bool(HEX.fullmatch(value)))
ANSWERS = table_of(table_of(BITS))
FINAL = {"prompts": TEXT, "num_prompts": table_of(COUNT), "greedy": ANSWERS, "sampled": ANSWERS}
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
    chosen = reference or next(name for name in (given, *REFERENCES, *sorted(methods)) if name in methods)
    if chosen not in methods:
        raise ValueError(f"no method {chosen!r} has a reported run: give one of {', '.join(methods)}")
    regimes = list(dict.fromkeys(run["regime"] for run in reported))
    charts, tables, notes = [], [], []
    for regime in regimes:
        own = [run for run in reported if run["regime"] == regime]
        by_method = {method: found for method in methods if (found := [run for run in own if run["method"] == method])}
        notes += _unlike(regime, by_method)
        has_test_set = _has_test_set(regime, own)
        measure = "mean reward" if any(run["curves"].get("is_graded") for run in own) else "accuracy"
        charts += _charts(
            regime, by_method, f"{measure.capitalize()} on {'validation' if has_test_set else 'held-out'}"
        )
        tables += _tables(regime, by_method, chosen, measure, has_test_set)
    commits = sorted({str(run["commit"])[:12] for run in reported})
    facts = {"reported runs": str(len(reported)), "tuning runs": str(len(runs) - len(reported))}
    facts |= {"commit": ", ".join(commits), "reference": chosen}
    return {"facts": facts, "methods": methods, "reference": chosen, "notes": notes, "charts": charts, "tables": tables}


def _is_in(folder: Path, names: Collection[str]) -> bool:
    """By the names of files, or the first line of runs.jsonl."""
    if EVIDENCE in names or any(map(ONE_RUN.fullmatch, names)):
        return True
    with suppress(OSError, ValueError), (folder / PACKED).open("rb") as file:
        return _wrong(parse_json(file.readline(FIRST_BYTES))) is None
    return False


KIND = StudyKind(_is_in, experiment)


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
    return _wrong_final(run["final"], set(run["agents"])) if run.get("final") else None


def _wrong_final(final: Mapping[str, Any], agents: set[str]) -> str | None:
    if why := wrong_field(final, FINAL, "final."):
        return why
    sizes = {skill: -(-number // 8) * 2 for skill, number in final["num_prompts"].items()}
    answered = [*final["greedy"].values(), *final["sampled"].values()]
    if not sizes or any({skill: len(bits) for skill, bits in skills.items()} != sizes for skills in answered):
        return "its final answers are not as many as its prompts"
    if final["greedy"].keys() != agents or final["sampled"].keys() not in (agents, set()):
        return "the agents of its final answers are others"
    return None


def _by_rate(runs: Runs) -> Runs:
    """The runs, where a method that a regime reports at several learning rates is one method for each."""
    rates: dict[tuple[str, str], set[float]] = {}
    for run in runs:
        rates.setdefault((run["regime"], run["method"]), set()).add(run["learning_rate"])
    several = {key for key, found in rates.items() if len(found) > 1}
    named = (f"{run['method']} at {run['learning_rate']:g}" for run in runs)
    return [run | ({"method": n} if (run["regime"], run["method"]) in several else {}) for n, run in zip(named, runs)]


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


def _charts(regime: str, by_method: Mapping[str, Runs], measured: str) -> Iterator[dict[str, Any]]:
    for name in reversed(_names(by_method)):  # their mean first
        lines = filter(None, (_line(method, runs, name) for method, runs in by_method.items()))
        yield {
            "title": f"{regime}: {name}",
            "note": f"{measured} prompts, mean over seeds.",
            "lines": [*lines],
        }


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


def _has_test_set(regime: str, runs: Runs) -> bool:
    """True if every run has answered the test set. ValueError where it was not the same for all."""
    finals = [run.get("final") for run in runs]
    if not all(finals):
        return False
    if len({(final["prompts"], *sorted(final["num_prompts"].items())) for final in finals if final}) > 1:
        raise ValueError(f"the runs of {regime} have answered different test sets: remove those of another version")
    return True


def _tables(
    regime: str, by_method: Mapping[str, Runs], reference: str, measure: str, has_test_set: bool
) -> Iterator[dict[str, Any]]:
    names = _names(by_method)
    if has_test_set and all(run["final"]["sampled"] for runs in by_method.values() for run in runs):
        names = [*names, SAMPLED]
    rates = {method: sorted({f"{run['learning_rate']:g}" for run in runs}) for method, runs in by_method.items()}
    ends = {method: {name: _ends(runs, name, has_test_set) for name in names} for method, runs in by_method.items()}
    rows = [
        [
            method,
            ", ".join(rates[method]),
            *(_mean_sd(ends[method][name].accuracy.values()) for name in names),
            str(len(runs)),
        ]
        for method, runs in by_method.items()
    ]
    measured = f"{measure.capitalize()} on the test set, each skill alike" if has_test_set else f"Held-out {measure}"
    note = f"{measured}, at the end of a run: mean over seeds ± sample standard deviation."
    head = ["method", "learning rate", *names, "seeds"]
    yield {"title": f"{regime}: {measure}", "head": head, "rows": rows, "notes": [note]}
    if reference in by_method:
        confidence = 1 - (1 - CONFIDENCE) / max(1, len(ends) - 1) if has_test_set else CONFIDENCE
        against = ends[reference]
        rows = [
            [method, *(str(paired_difference(found[name], against[name], confidence) or "–") for name in names)]
            for method, found in ends.items()
            if method != reference
        ]
        how = (
            f"{confidence:.1%} percentile bootstrap over seeds and prompts, 95 % for all {len(ends) - 1} methods"
            if has_test_set
            else "95 % percentile bootstrap of that mean, 10,000 resamples of seeds, too narrow with few"
        )
        note = f"Mean difference over the seeds that both have; [{how}]; in how many seeds it was positive."
        title = f"{regime}: difference to {reference}"
        yield {"title": title, "head": ["method", *names], "rows": rows, "notes": [note]}
    yield from _skills(f"{regime}: {measure} by skill", by_method, has_test_set)


def _skills(title: str, by_method: Mapping[str, Runs], has_test_set: bool) -> Iterator[dict[str, Any]]:
    tables = {method: [_by_skill(run, has_test_set) for run in runs] for method, runs in by_method.items()}
    columns = list(dict.fromkeys(column for found in tables.values() for of_run in found for column in of_run))
    rows = [
        [method, *(_mean_sd(of_run[column] for of_run in found if column in of_run) for column in columns)]
        for method, found in tables.items()
    ]
    if columns:
        head = ["method", *(f"{agent} {skill}" for agent, skill in columns)]
        yield {"title": title, "head": head, "rows": rows, "notes": []}


def _by_skill(run: Mapping[str, Any], has_test_set: bool) -> dict[tuple[str, str], float]:
    """The accuracies at the end by agent and skill."""
    if has_test_set:
        numbers, greedy = run["final"]["num_prompts"], run["final"]["greedy"]
        right = {
            (agent, skill): right_answers(greedy[agent][skill], numbers[skill]) for agent in greedy for skill in numbers
        }
        return {column: float(answers.mean()) for column, answers in right.items()}
    tables = run["curves"]["accuracy_by_skill"]
    return {(agent, skill): curve[-1] for agent in tables for skill, curve in tables[agent].items() if curve}


def _ends(runs: Runs, name: str, has_test_set: bool) -> Ends:
    """The ends of a method's runs, of an agent, as the agents' mean, or as that of sampled answers."""
    if not has_test_set:
        return Ends({run["seed"]: curve[-1] for run in runs if (curve := _curve(run, name)) is not None})
    by_seed = {}
    for run in runs:
        agents = run["agents"] if name in (ALL_AGENTS, SAMPLED) else [name]
        given = run["final"]["sampled" if name == SAMPLED else "greedy"]
        if given.keys() >= set(agents):
            numbers = run["final"]["num_prompts"].items()
            by_seed[run["seed"]] = [
                sum(right_answers(given[agent][skill], size) for agent in agents) / len(agents)
                for skill, size in numbers
            ]
    return Ends.of(by_seed)


def _mean_sd(values: Any) -> str:
    found = list(values)
    return str(summarize(found)) if found else "–"
