"""The evidence as tables of text, for Markdown and the page of watch. Elsewhere: as HTML (page.py)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hacpo_lab.experiments.comparison import MIN_PAIRS, Difference
from hacpo_lab.experiments.evidence import ALL_AGENTS, SAMPLED_MEAN, MethodEvidence, RegimeEvidence, WarmStarts
from hacpo_lab.experiments.grid import Grid

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """A table with a title; `notes` explain it, one sentence each."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def of_watch(self, before: str = "") -> dict[str, Any]:
        """The table as the page of watch draws it; `before` stands in front of the title."""
        rows = [*map(list, self.rows)]
        return {"title": f"{before}{self.title}", "head": self.head, "rows": rows, "notes": self.notes}


def tables_of(regime: RegimeEvidence, grid: Grid | None = None) -> list[Table]:
    """Tables of accuracies, differences, effects of others' answers, and costs; with its grid, also of the tuning."""
    compared = {method: found.difference for method, found in regime.methods.items()}
    ablations = {method: found.ablation for method, found in regime.methods.items()}
    tables = [
        _accuracy(regime, grid),
        _differences(f"difference to {regime.reference}", regime, compared),
        _differences("ablations: difference to the method whose learning rate they take", regime, ablations),
        _skills(regime),
        _cross(regime),
        _cost(regime),
        *([_tuning(grid, regime)] if grid else []),
    ]
    return [table for table in tables if table.rows]


def facts_of(regime: RegimeEvidence) -> dict[str, str]:
    """The source, machines, prompts and models of a regime's runs."""
    commit = regime.commit or "unknown"
    return {
        "commit": commit.replace("+", " with local changes ").strip(),
        "machines": "; ".join(regime.machines),
        "held-out prompts": regime.held_out,
        "warm starts": "; ".join(_start_text(start) for start in regime.warm_starts),
    }


def _start_text(start: WarmStarts) -> str:
    """The digests of the model folders, and the seeds that began from them."""
    models = ", ".join(f"{name} {digest}" for name, digest in start.models.items())
    seeds = ", ".join(map(str, start.seeds))
    return f"{models} ({'seed' if len(start.seeds) == 1 else 'seeds'} {seeds})"


def summary_line(num_used: int, num_missing: int) -> str:
    """A sentence on how complete the tables are."""
    missing = f", {num_missing} of the grid are missing" if num_missing else ""
    return f"{num_used} runs{missing}."


def to_markdown(grid: Grid, evidence: dict[str, RegimeEvidence], num_used: int, num_missing: int) -> str:
    """All tables of all regimes."""
    lines = [summary_line(num_used, num_missing), ""]
    for name, regime in evidence.items():
        lines += [f"## {name}", ""]
        lines += [f"- {key}: {fact}" for key, fact in facts_of(regime).items()]
        for table in tables_of(regime, grid):
            lines += ["", markdown_of(table, f"{name}: ")]
        lines.append("")
    return "\n".join(lines)


def markdown_of(table: Table, before: str = "") -> str:
    """A table with its title, its rows and its notes; `before` stands in front of the title."""
    return "\n".join([f"### {before}{table.title}", "", *_markdown_rows(table), "", *table.notes])


def _markdown_rows(table: Table) -> Iterator[str]:
    for cells in (table.head, ("---",) * len(table.head), *table.rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _accuracy(regime: RegimeEvidence, grid: Grid | None) -> Table:
    names = _accuracy_names(regime)
    starts = (_number(regime.start[name]) if name in regime.start else NOTHING for name in names)
    rows = [("(start)", "", *starts, "", *([""] if grid else []))]
    for method, found in regime.methods.items():
        accuracies = (str(found.accuracy[name]) for name in names)
        about = [grid.methods[method].about] if grid else []
        rows.append((method, _rate(found), *accuracies, str(len(found.seeds)), *about))
    notes = [
        f"{regime.measure.capitalize()} on the test set, each skill alike, at the end of a run, greedy unless it says "
        "sampled (start: on the validation set): mean over seeds ± sample standard deviation."
        if regime.has_test_set
        else f"Held-out {regime.measure} at the end of a run: mean over seeds ± sample standard deviation."
    ]
    if len(regime.warm_starts) > 1:
        notes.append(
            f"The seeds began from {len(regime.warm_starts)} sets of warm starts, so methods that ran on other seeds "
            "are to be compared by the differences below, which are taken within a seed."
        )
    notes += [
        f"{method}: {found.tuned.learning_rate:g} is the {found.tuned.edge} rate that was tried; a better one may lie "
        "beyond."
        for method, found in regime.methods.items()
        if grid and found.tuned and found.tuned.edge and grid.methods[method].learning_rate_of is None
    ]
    head = ("method", "learning rate", *spoken(names), "seeds", *(["what it is"] if grid else []))
    return Table(regime.measure, head, tuple(rows), tuple(notes))


def _differences(title: str, regime: RegimeEvidence, by_method: Mapping[str, Mapping[str, Difference]]) -> Table:
    names = _accuracy_names(regime)
    compared = {method: found for method, found in by_method.items() if found}
    rows = [
        (method, *(str(found.get(name, NOTHING)) for name in names), str(found[ALL_AGENTS].n))
        for method, found in compared.items()
    ]
    how = (
        f"[{regime.confidence:.1%} percentile bootstrap interval of that mean, 2,000 resamples of seeds and prompts: "
        f"95 % for all {len(regime.methods) - 1} methods together]"
        if regime.has_test_set
        else "[95 % percentile bootstrap interval of that mean, 10,000 resamples of seeds]"
    )
    notes = [f"Mean difference over the seeds that both have; {how}; in how many seeds it was positive."]
    if any(found[ALL_AGENTS].interval is None for found in compared.values()):
        notes.append(f"Fewer than {MIN_PAIRS} common seeds: no interval is given.")
    return Table(title, ("method", *spoken(names), "common seeds"), tuple(rows), tuple(notes))


def _skills(regime: RegimeEvidence) -> Table:
    columns = {
        (agent, skill): None
        for found in regime.methods.values()
        for agent, skills in found.accuracy_by_skill.items()
        for skill in skills
    }
    rows = [
        (method, *(str(found.accuracy_by_skill[agent].get(skill, NOTHING)) for agent, skill in columns))
        for method, found in regime.methods.items()
    ]
    notes = [
        f"{method}, {agent} {skill}: without the {len(found.seeds) - n} runs of which an evaluation judged no answer."
        for method, found in regime.methods.items()
        for agent, skill in columns
        if (n := getattr(found.accuracy_by_skill[agent].get(skill), "n", 0)) < len(found.seeds)
    ]
    head = ("method", *(f"{agent} {skill}" for agent, skill in columns))
    return Table(f"{regime.measure} by skill", head, tuple(rows) if columns else (), tuple(notes))


def _cross(regime: RegimeEvidence) -> Table:
    columns = {
        "grad_share": "share of gradient",
        "grad_cosine": "cosine to own",
        "inside": "in the band",
        "ratio_mean": "ratio",
        "weight_mean": "weight",
        "weight_ess": "effective share",
        "positive_share": "positive",
        "own_positive_share": "positive, own",
        "omega": "omega",
    }
    rows = []
    for method, evidence in regime.methods.items():
        for pair, found in evidence.cross.items():
            cells = (_number(found[key]) if key in found else NOTHING for key in columns)
            rows.append((method, pair.replace("/from/", " from "), *cells))
    notes = (
        "Means over the steps and seeds of the reported runs; docs/guide/methods.md says what each is. Gradients of "
        "own and of others' answers are measured every `training.diagnose_every` steps.",
        "Positive is how much of the pull comes from answers with a positive advantage.",
        "A band or an omega that a method does not use is counted all the same.",
    )
    head = ("method", "learner from source", *columns.values())
    return Table("what others' answers did", head, tuple(rows), notes)


def _cost(regime: RegimeEvidence) -> Table:
    rows = []
    for method, found in regime.methods.items():
        counts = (_count(column) for column in (found.generated_answers, found.trained_answers, found.updates))
        rows.append((method, *counts, f"{found.seconds[-1]:.0f}"))
    notes = (
        "All agents together, at the end of a run. An answer counts as trained once for every agent that learned from "
        "it. Seconds are those of training, without evaluations and start.",
    )
    head = ("method", "answers generated", "answers trained on", "updates", "seconds")
    return Table("cost of a run", head, tuple(rows), notes)


def _tuning(grid: Grid, regime: RegimeEvidence) -> Table:
    tried = {rate for found in regime.methods.values() if found.tuned for rate in found.tuned.mean_scores}
    rates = sorted(tried)
    rows = []
    for method, found in regime.methods.items():
        if grid.methods[method].learning_rate_of is None and found.tuned:
            scores = found.tuned.mean_scores
            cells = {rate: f"{score:.3f}" for rate, score in scores.items()}
            if cells:
                cells[found.tuned.learning_rate] = f"**{cells[found.tuned.learning_rate]}**"
            rows.append((method, *(cells.get(rate, NOTHING) for rate in rates)))
    seeds, measure = ", ".join(map(str, grid.tuning_seeds)), regime.measure.removeprefix("mean ")
    where = " on the validation set" if regime.has_test_set else ""
    notes = (
        f"Mean {measure} of all agents at the end of a run{where}, over the tuning seeds {seeds}, none of which is "
        "reported; bold is the rate that was taken.",
    )
    head = ("method", *(f"{rate:g}" for rate in rates))
    return Table("tuning of the learning rate", head, tuple(rows) if rates else (), notes)


def names_of(regime: RegimeEvidence) -> tuple[str, ...]:
    """The agents, and their mean unless there is only one."""
    return regime.agents if len(regime.agents) == 1 else (*regime.agents, ALL_AGENTS)


def _accuracy_names(regime: RegimeEvidence) -> tuple[str, ...]:
    """The keys of all accuracies at the end of a run."""
    has_sampled = any(SAMPLED_MEAN in found.accuracy for found in regime.methods.values())
    return (*names_of(regime), SAMPLED_MEAN) if has_sampled else names_of(regime)


def spoken(names: Sequence[str]) -> list[str]:
    """Names of agents and of their means for people."""
    means = {ALL_AGENTS: "mean of agents", SAMPLED_MEAN: "mean, sampled"}
    return [means.get(name, name) for name in names]


def _rate(found: MethodEvidence) -> str:
    return f"{found.tuned.learning_rate:g}" if found.tuned else NOTHING


def _count(values: Sequence[float]) -> str:
    return f"{values[-1]:,.0f}" if values else NOTHING


def _number(value: float) -> str:
    return f"{value:.3f}"
