"""The watch page's view of `hacpo-mega experiment`: methods x seeds as mean and band, and the experiment's own tables.

Runs are read from evidence.json of a work folder, or from runs.jsonl and one JSON file per run of a results folder;
only reported ones count, not those that chose a learning rate. A difference is taken within a seed.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hacpo_lab.experiments.evidence import MethodEvidence, RegimeEvidence, accuracy_of, regime_evidence
from hacpo_lab.experiments.order import Tuned
from hacpo_lab.experiments.result import PACKED, Result, parsed_result
from hacpo_lab.experiments.table import names_of, spoken, tables_of
from hacpo_mega.logbook.files.json_lines import TABLE, list_of, wrong_field
from hacpo_mega.models.files.documents import json_file
from hacpo_mega.models.files.links import require_inside
from hacpo_mega.watch.studies import StudyKind

EVIDENCE = "evidence.json"
ONE_RUN = re.compile(r".+\.lr-.+\.seed-\d+\.json")
FIRST_BYTES = 1 << 20
REFERENCES = ("gspo_x2", "gspo", "grpo")  # agents alone, with which results without their grid are compared first
AXES = ("steps", "seconds", "generated_answers", "trained_answers")
ByMethod = Mapping[str, Sequence[Result]]


def experiment(folder: Path, reference: str | None) -> dict[str, Any]:
    """Charts and tables of every regime.

    `reference` is a method: by default the grid's, else the first of REFERENCES, else the first by name.

    ValueError, one line, for a file that is no result, and for a method that did not run.
    """
    runs, given = _read(folder)
    reported = _by_rate([run for run in runs if run.stage == "reported"])
    if not reported:
        raise ValueError(f"{folder} has no reported run yet, {len(runs)} that choose a learning rate")
    methods = list(dict.fromkeys(run.method for run in reported))
    chosen = reference or next(name for name in (given, *REFERENCES, *sorted(methods)) if name in methods)
    if chosen not in methods:
        raise ValueError(f"no method {chosen!r} has a reported run: give one of {', '.join(methods)}")
    charts, tables, notes = [], [], []
    for regime in dict.fromkeys(run.regime for run in reported):
        own = [run for run in reported if run.regime == regime]
        _require_alike(regime, own)
        by_method = {method: found for method in methods if (found := [run for run in own if run.method == method])}
        for method, found in by_method.items():
            if len({run.steps for run in found}) > 1:
                by_method[method] = _at_shared_steps(found)
                notes.append(f"{regime}, {method}: seeds were evaluated at other steps; those in common are shown.")
        rates = {method: Tuned(found[0].learning_rate, {}) for method, found in by_method.items()}
        evidence = regime_evidence(by_method, chosen, rates, tuned_as={method: method for method in methods})
        charts += _charts(regime, by_method, evidence)
        tables += [table.of_watch(f"{regime}: ") for table in tables_of(evidence)]
    commits = sorted({str(run.commit)[:12] for run in reported})
    facts = {"reported runs": str(len(reported)), "tuning runs": str(len(runs) - len(reported))}
    facts |= {"commit": ", ".join(commits), "reference": chosen}
    return {"facts": facts, "methods": methods, "reference": chosen, "notes": notes, "charts": charts, "tables": tables}


def _is_in(folder: Path, names: Collection[str]) -> bool:
    """True by the names of files, or by the first line of runs.jsonl."""
    if EVIDENCE in names or any(map(ONE_RUN.fullmatch, names)):
        return True
    with suppress(OSError, ValueError), (folder / PACKED).open("rb") as file:
        return bool(parsed_result(file.readline(FIRST_BYTES), PACKED))
    return False


KIND = StudyKind(_is_in, experiment)


def _read(folder: Path) -> tuple[list[Result], str | None]:
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
        return [parsed_result(run, f"{path}, run {number}") for number, run in enumerate(content["runs"], 1)], given
    return list(_results(folder)), None


def _results(folder: Path) -> Iterator[Result]:
    """The runs of a results folder: the packed ones, then one per file; a line without its end is left out."""
    packed = folder / PACKED
    require_inside(folder, packed)
    with suppress(FileNotFoundError):
        for number, line in enumerate(packed.read_bytes().split(b"\n")[:-1], 1):
            yield parsed_result(line, f"{packed}:{number}")
    for path in sorted(folder.glob("*.lr-*.seed-*.json")):
        require_inside(folder, path)
        with suppress(FileNotFoundError):  # packed at this moment
            yield parsed_result(json_file(path), str(path))


def _by_rate(runs: Sequence[Result]) -> list[Result]:
    """The runs, where a method that a regime reports at several learning rates is one method for each."""
    rates: dict[tuple[str, str], set[float]] = {}
    for run in runs:
        rates.setdefault((run.regime, run.method), set()).add(run.learning_rate)
    several = {key for key, found in rates.items() if len(found) > 1}
    named = (f"{run.method} at {run.learning_rate:g}" for run in runs)
    return [
        run.model_copy(update={"method": name} if (run.regime, run.method) in several else {})
        for name, run in zip(named, runs)
    ]


def _require_alike(regime: str, runs: Sequence[Result]) -> None:
    """ValueError where runs of a regime have different agents, or different test sets."""
    test_sets = {(run.final.prompts, *sorted(run.final.num_prompts.items())) for run in runs if run.final}
    problems = {"have other agents": {run.agents for run in runs}, "have answered other test sets": test_sets}
    for problem, variants in problems.items():
        if len(variants) > 1:
            raise ValueError(f"the runs of {regime} {problem}: remove those of another version")


def _at_shared_steps(runs: Sequence[Result]) -> list[Result]:
    """The runs, as if they had been evaluated only at the steps that all of them have."""
    steps = tuple(sorted(set.intersection(*(set(run.steps) for run in runs))))
    if not steps:
        raise ValueError(f"the runs of {runs[0].regime}, {runs[0].method} have no evaluated step in common")
    found = []
    for run in runs:
        places = [run.steps.index(step) for step in steps]

        def at_steps(values: Any, places: Sequence[int] = places) -> Any:
            is_table = isinstance(values, Mapping)
            return {key: at_steps(inner) for key, inner in values.items()} if is_table else [values[n] for n in places]

        curves = {name: at_steps(value) for name, value in run.curves if isinstance(value, Mapping)}
        changes = {"steps": steps, "seconds": at_steps(run.seconds), "curves": run.curves.model_copy(update=curves)}
        found.append(run.model_copy(update=changes))
    return found


def _charts(regime: str, by_method: ByMethod, evidence: RegimeEvidence) -> Iterator[dict[str, Any]]:
    prompts = "validation" if evidence.has_test_set else "held-out"
    note = f"{evidence.measure.capitalize()} on {prompts} prompts, mean over seeds."
    for name in reversed(names_of(evidence)):  # their mean first
        lines = [_line(method, runs, evidence.methods[method], name) for method, runs in by_method.items()]
        yield {"title": f"{regime}: {spoken([name])[0]}", "note": note, "lines": lines}


def _line(method: str, runs: Sequence[Result], found: MethodEvidence, name: str) -> dict[str, Any]:
    """Mean and range over seeds."""
    columns = [*zip(*(accuracy_of(run, name) for run in runs))]
    low, high = ([end(column) for column in columns] if len(runs) > 1 else None for end in (min, max))
    axes = {axis: [*values] for axis in AXES if (values := getattr(found, axis))}
    label = f"{method}, {len(runs)} seed{'s' * (len(runs) > 1)}"
    return {"label": label, "x": axes, "y": [*found.curves[name].mean], "low": low, "high": high}
