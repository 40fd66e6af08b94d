"""Everything that the results of a grid show, as frozen records; table.py, page.py and evidence.json write it down.

Nothing here depends on when or in which order the runs were made, except what is named `seconds`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from hacpo_lab.experiments.comparison import CONFIDENCE, Difference, Ends, Summary, paired_difference, summarize
from hacpo_lab.experiments.grid import Cell, Grid
from hacpo_lab.experiments.order import Tuned, known_cells, num_cells, num_done, reported_cells, tuned
from hacpo_lab.experiments.result import GREEDY, SAMPLED, Result, window_sizes

ALL_AGENTS = "mean"  # key of the mean over agents, beside their names
SAMPLED_MEAN = "mean sampled"  # key of that mean for answers that are sampled as in training
# Metrics of a run under agent/<learner>/from/<source>/: the effects of a source's answers on the learner.
CROSS = ("grad_share", "grad_cosine", "inside", "ratio_mean", "weight_mean", "weight_ess", "positive_share")


@dataclass(frozen=True)
class Band:
    """A curve over the evaluated steps: mean over seeds, and one sample standard deviation (0 for one seed)."""

    mean: tuple[float, ...]
    sd: tuple[float, ...]


@dataclass(frozen=True)
class MethodEvidence:
    """A method in a regime. Accuracies are those at the end of a run, by agent and for ALL_AGENTS.

    They are on the test set, the mean over skills, where runs have answered it (then for SAMPLED_MEAN, too), else on
    the validation set.
    """

    tuned: Tuned | None
    seeds: tuple[int, ...]
    accuracy: Mapping[str, Summary]
    accuracy_by_skill: Mapping[str, Mapping[str, Summary]]
    difference: Mapping[str, Difference]
    """To the reference; empty for itself."""
    ablation: Mapping[str, Difference]
    """To the method whose learning rate it takes; empty for one that is tuned itself."""
    steps: tuple[int, ...]
    curves: Mapping[str, Band]
    """Accuracy on the validation set, by agent and for ALL_AGENTS."""
    generated_answers: tuple[float, ...]
    """The number of all agents' generated answers, at the steps, mean over seeds."""
    trained_answers: tuple[float, ...]
    """The same of answers trained on; empty when the runs did not count them."""
    updates: tuple[float, ...]
    """The same of optimizer updates."""
    seconds: tuple[float, ...]
    """At the steps, mean over seeds, without evaluations."""
    cross: Mapping[str, Mapping[str, float]]
    """By "<learner>/from/<source>": the metrics of CROSS, mean over steps and seeds. A metric that no run measured is
    absent; empty where nobody learns from others."""


@dataclass(frozen=True)
class WarmStarts:
    """The models that the runs of some seeds began from: the digest of every agent's model folder, by its name."""

    models: Mapping[str, str]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class RegimeEvidence:
    """A regime: what all its runs share, and what every method did in it."""

    commit: str | None
    machines: tuple[str, ...]
    held_out: str
    warm_starts: tuple[WarmStarts, ...]
    """The warm starts of the reported seeds; those of one seed are the same for every method."""
    agents: tuple[str, ...]
    start: Mapping[str, float]
    """Accuracy before training, by agent and for ALL_AGENTS: the mean over seeds, each once, whatever ran of it."""
    measure: str
    """The name of all accuracies of the regime: "accuracy", or "mean reward" where a reward lay between 0 and 1."""
    reference: str
    has_test_set: bool
    """Tells whether accuracies at the end are those of a test set that chose nothing."""
    confidence: float
    """Level of intervals of differences: corrected by Bonferroni for the methods compared where there is a test set."""
    methods: Mapping[str, MethodEvidence]


def evidence_of(grid: Grid, results: Mapping[Cell, Result]) -> dict[str, RegimeEvidence]:
    """By regime, those that have at least one reported run."""
    scores = {cell: result.score for cell, result in results.items()}
    found = {}
    for regime in grid.regimes:
        reported: dict[str, list[Result]] = {}
        for cell in reported_cells(grid, regime, scores):
            if cell in results:
                reported.setdefault(cell.method, []).append(results[cell])
        if reported:
            rates = {method: tuned(grid, regime, method, scores) for method in reported}
            tuned_as = {method: grid.tuned_as(method) for method in reported}
            found[regime] = regime_evidence(reported, grid.reference_method, rates, tuned_as)
    return found


def as_table(grid: Grid, results: Mapping[Cell, Result]) -> dict[str, Any]:
    """Everything in one table for json.dumps: the grid, what it shows, what is missing, and every run whole."""
    scores = {cell: result.score for cell, result in results.items()}
    evidence = evidence_of(grid, results)
    return {
        "grid": grid.model_dump(mode="json", exclude={"results", "work_dir", "keep_runs"}),
        "num_runs": num_done(grid, scores),
        "num_missing": num_cells(grid, scores) - num_done(grid, scores),
        "regimes": {name: _jsonable(dataclasses.asdict(regime)) for name, regime in evidence.items()},
        "runs": [results[cell].model_dump(mode="json") for cell in known_cells(grid, scores) if cell in results],
    }


def regime_evidence(
    reported: Mapping[str, Sequence[Result]],
    reference: str,
    rates: Mapping[str, Tuned | None],
    tuned_as: Mapping[str, str],
) -> RegimeEvidence:
    """The evidence of a regime from its reported runs, by method.

    All runs need the same agents, those of one method the same evaluated steps.
    """
    every = [result for results in reported.values() for result in results]
    agents = every[0].agents
    has_test_set = all(result.final is not None for result in every)
    ends = {method: _ends(results, has_test_set) for method, results in reported.items()}
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(reported) - 1) if has_test_set else CONFIDENCE
    return RegimeEvidence(
        commit=every[0].commit,
        machines=tuple(sorted({f"{result.machine.cpu}, {result.machine.cores} cores" for result in every})),
        held_out=every[0].identity.held_out,
        warm_starts=_warm_starts(every),
        agents=agents,
        start={name: _start(every, name) for name in (*agents, ALL_AGENTS)},
        measure="mean reward" if any(result.curves.is_graded for result in every) else "accuracy",
        reference=reference,
        has_test_set=has_test_set,
        confidence=confidence,
        methods={
            method: _method(
                results,
                rates[method],
                ends[method],
                difference=_differences(reference, method, ends, confidence),
                ablation=_differences(tuned_as[method], method, ends, confidence),
            )
            for method, results in reported.items()
        },
    )


def _start(results: Sequence[Result], name: str) -> float:
    of_seed: dict[int, list[float]] = {}
    for result in results:
        of_seed.setdefault(result.seed, []).append(accuracy_of(result, name)[0])
    return fmean(fmean(accuracies) for accuracies in of_seed.values())


def _warm_starts(results: Sequence[Result]) -> tuple[WarmStarts, ...]:
    """In the order of their first seeds."""
    seeds_of: dict[tuple[tuple[str, str], ...], set[int]] = {}
    for result in sorted(results, key=lambda result: result.seed):
        seeds_of.setdefault(tuple(result.identity.models.items()), set()).add(result.seed)
    return tuple(WarmStarts(dict(models), tuple(sorted(seeds))) for models, seeds in seeds_of.items())


def _differences(
    base: str, method: str, ends: Mapping[str, Mapping[str, Ends]], confidence: float
) -> dict[str, Difference]:
    """A method minus `base`, by agent and for ALL_AGENTS; empty for a method and itself, and without a common seed."""
    if method == base or base not in ends:
        return {}
    differences = {name: paired_difference(own, ends[base][name], confidence) for name, own in ends[method].items()}
    return {name: difference for name, difference in differences.items() if difference is not None}


def _ends(results: Sequence[Result], has_test_set: bool) -> dict[str, Ends]:
    """The ends of a method's runs, by agent and for ALL_AGENTS, with a test set for SAMPLED_MEAN, too."""
    agents = results[0].agents
    names = {name: (name,) for name in agents} | {ALL_AGENTS: agents}
    if not has_test_set:
        return {name: Ends({result.seed: accuracy_of(result, name)[-1] for result in results}) for name in names}
    ends = {name: _test_set_ends(results, GREEDY, chosen) for name, chosen in names.items()}
    if all(result.final.sampled for result in results):
        ends[SAMPLED_MEAN] = _test_set_ends(results, SAMPLED, agents)
    return ends


def _test_set_ends(results: Sequence[Result], sampling: str, agents: Sequence[str]) -> Ends:
    """The ends of runs on the test set, mean over some agents, skill by skill."""
    by_seed = {}
    for result in results:
        right = [result.final.right(sampling, agent) for agent in agents]
        by_seed[result.seed] = [sum(r[skill] for r in right) / len(right) for skill in result.final.num_prompts]
    return Ends.of(by_seed)


def _method(
    results: Sequence[Result],
    rate: Tuned | None,
    ends: Mapping[str, Ends],
    difference: Mapping[str, Difference],
    ablation: Mapping[str, Difference],
) -> MethodEvidence:
    first = results[0]
    agents, names = first.agents, (*first.agents, ALL_AGENTS)
    assert {result.steps for result in results} == {first.steps}, f"{first.cell.name}: others have other steps"
    return MethodEvidence(
        tuned=rate,
        seeds=tuple(result.seed for result in results),
        accuracy={name: summarize(list(found.accuracy.values())) for name, found in ends.items()},
        accuracy_by_skill={agent: _by_skill(results, agent, ends[agent]) for agent in agents},
        difference=difference,
        ablation=ablation,
        steps=first.steps,
        curves={name: _band([accuracy_of(result, name) for result in results]) for name in names},
        generated_answers=_over_agents([result.curves.generated_answers for result in results]),
        trained_answers=_over_agents([result.curves.trained_answers for result in results]),
        updates=_over_agents([result.curves.updates for result in results]),
        seconds=_columns_mean([result.seconds for result in results]),
        cross={
            f"{learner}/from/{source}": found
            for learner in agents
            for source in agents
            if (found := _cross(results, learner, source))
        },
    )


def _cross(results: Sequence[Result], learner: str, source: str) -> dict[str, float]:
    """The effect of a source's answers on a learner; empty for a pair that did not learn from each other."""
    names = {name: f"agent/{learner}/from/{source}/{name}" for name in CROSS}
    names |= {"omega": f"omega/{learner}/{source}", "own_positive_share": f"agent/{learner}/self/positive_share"}
    means = {}
    for name, metric in names.items():
        windows = (zip(window_sizes(r), r.diagnosis.values.get(metric, ())) for r in results)
        if weighted := [(value, size) for of_run in windows for size, value in of_run if value is not None]:
            values, sizes = zip(*weighted)
            means[name] = fmean(values, weights=sizes)
    return means if means.keys() & set(CROSS) else {}


def accuracy_of(result: Result, name: str) -> tuple[float, ...]:
    """A run's accuracies at its steps, of an agent or of ALL_AGENTS."""
    return result.mean_accuracy if name == ALL_AGENTS else result.curves.accuracy[name]


def _by_skill(results: Sequence[Result], agent: str, ends: Ends) -> dict[str, Summary]:
    first = results[0]
    if ends.answers is not None and first.final is not None:
        skills = list(first.final.num_prompts)
        return {
            skill: summarize([float(answers[place].mean()) for answers in ends.answers.values()])
            for place, skill in enumerate(skills)
        }
    # A run has no accuracy of a skill of which an evaluation judged no answer.
    tables = [result.curves.accuracy_by_skill.get(agent, {}) for result in results]
    skills = dict.fromkeys(skill for table in tables for skill in table)
    return {skill: summarize([table[skill][-1] for table in tables if skill in table]) for skill in skills}


def _band(curves: Sequence[Sequence[float]]) -> Band:
    sd = [stdev(column) if len(column) > 1 else 0.0 for column in zip(*curves, strict=True)]
    return Band(_columns_mean(curves), tuple(sd))


def _over_agents(counts: Sequence[Mapping[str, Sequence[int]]]) -> tuple[float, ...]:
    """The sum over agents, then the mean over runs; empty if a run has no counts."""
    if not all(counts):
        return ()
    return _columns_mean([[sum(column) for column in zip(*run.values(), strict=True)] for run in counts])


def _columns_mean(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
    return tuple(fmean(column) for column in zip(*rows, strict=True))


def _jsonable(value: Any) -> Any:
    """Plain values for JSON, whose keys are strings: a learning rate becomes its repr."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _jsonable(inside) for key, inside in value.items()}
    return [_jsonable(inside) for inside in value] if isinstance(value, list | tuple) else value
