"""A screening of a grid's methods on the logged answers of a run, without training: how much each prompt would count.

An answer with advantage A and weight w adds w A grad log-prob to its learner (d loss / d mean log-prob = -w A).
The pull of a prompt is the sum of w A over others' answers with A > 0: where all right answers to a prompt are one
text, sharing decides only how much each prompt counts. Two methods with the same pulls, up to a factor that Adam
removes, and the same weights of own answers learn the same: seeds to tell them apart would be wasted.

Ratios are those that the run has logged, of the update that trained an answer; an own answer that it did not train has
ratio 1. Others' answers without a ratio are left out for all methods. Capabilities by skill are those of one step. Not
here: training, and objectives of one's own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hacpo_kernels.reference import objective_from_mean
from torch import Tensor

from hacpo_lab.experiments.grid import Cell, Grid, config_of_cell
from hacpo_lab.experiments.table import NOTHING, Table
from hacpo_mega.algorithm.judged import Judged
from hacpo_mega.algorithm.learning import learning_of
from hacpo_mega.algorithm.methods import has_own_objective
from hacpo_mega.algorithm.objective import objective_bounds
from hacpo_mega.config import AlgorithmConfig, load_config
from hacpo_mega.logbook.files.metrics import StepMetrics, read_metrics
from hacpo_mega.logbook.files.rollout_log import logged_steps, read_rollouts
from hacpo_mega.rollout.exchange import text_hash

SAME = 0.95  # cosine above which a method's pulls are the reference's
OF_ALGORITHM = "algorithm."


@dataclass(frozen=True)
class ScreenedAnswers:
    """The judged answers of one step of a run.

    judged           what advantages are computed from, for any learner
    log_ratio_KPNG   of each learner k to each answer, nats per token, NaN where it is not known
    """

    judged: Judged
    log_ratio_KPNG: Tensor


@dataclass(frozen=True)
class Pull:
    """The effect of a method on one learner, per prompt and in sum.

    prompts_P    pull of others' answers to each prompt, over all steps      own_P   sum of |w A| over its own ones
    cross        sum of |w A| over others' answers        num_trained   answers that it trains on
    """

    prompts_P: Tensor
    own_P: Tensor
    cross: float
    num_trained: int


def screen(grid: Grid, run_dir: Path, reference: str, regime: str | None = None) -> list[Table]:
    """A table for each learner of a run: the pull of every method of a regime beside that of `reference`.

    A method is what it is in the grid, whatever the run has learnt by. ValueError for a run without answers, for an
    unknown regime, and for a reference that is no method of it or cannot be screened.
    """
    regime = regime or next(iter(grid.regimes))
    if regime not in grid.regimes:
        raise ValueError(f"--regime {regime!r} is none of the regimes: {', '.join(grid.regimes)}")
    if reference not in grid.methods_of(regime):
        raise ValueError(f"--beside {reference!r} is none of the methods: {', '.join(grid.methods_of(regime))}")
    names, steps = _read(run_dir)
    algorithms = {name: _algorithm(grid, regime, name) for name in grid.methods_of(regime)}
    if algorithms[reference] is None:
        raise ValueError(f"--beside {reference!r} cannot be screened: {_why_not(grid.methods[reference].set)}")
    tables = []
    for learner, agent in enumerate(names):
        pulls = {name: None if a is None else pull_of(steps, learner, a) for name, a in algorithms.items()}
        rows = tuple(_rows(pulls, reference))
        head = ("method", "pull: cosine", "pull: size", "own: cosine", "others' over own", "trained answers", "")
        tables.append(Table(f"{agent}: pulls beside {reference}'s", head, rows, _notes()))
    return tables


def pull_of(steps: Sequence[ScreenedAnswers], learner: int, algorithm: AlgorithmConfig) -> Pull:
    """Pull of a method on a learner by the answers of some steps, each in one update."""
    bounds = objective_bounds(algorithm)
    prompts, own, cross, num_trained = [], [], 0.0, 0
    for step in steps:
        learning = learning_of(replace(step.judged, learner=learner), algorithm)
        log_ratio_PNG = step.log_ratio_KPNG[learner]
        is_own_PNG = torch.zeros_like(learning.trains_PNG)
        is_own_PNG[:, learner] = True
        trains_PNG = learning.trains_PNG & ~log_ratio_PNG.isnan()
        advantages = learning.advantages_PNG[trains_PNG]
        source = torch.zeros_like(advantages)
        _, _, weights = objective_from_mean(
            log_ratio_PNG[trains_PNG], source, advantages, is_own_PNG[trains_PNG], bounds.low(0), bounds
        )
        pulls_PNG = torch.zeros_like(log_ratio_PNG)
        pulls_PNG[trains_PNG] = weights * advantages
        prompts.append(pulls_PNG.clamp(min=0.0).masked_fill(is_own_PNG, 0.0).sum(dim=(1, 2)))
        own.append(pulls_PNG[:, learner].abs().sum(dim=1))
        cross += float(pulls_PNG.abs().masked_fill(is_own_PNG, 0.0).sum())
        num_trained += int(trains_PNG.sum())
    return Pull(torch.cat(prompts), torch.cat(own), cross, num_trained)


def _algorithm(grid: Grid, regime: str, method: str) -> AlgorithmConfig | None:
    """The algorithm of a method in a regime; None where the method changes more, or its loss is its own."""
    if any(not override.startswith(OF_ALGORITHM) for override in grid.methods[method].set):
        return None
    cell = Cell(regime, method, grid.learning_rates[0], grid.seeds[0], "reported")
    algorithm = config_of_cell(grid, cell, grid.work_dir / cell.name).algorithm
    return None if has_own_objective(algorithm) or algorithm.method == "grpo" else algorithm


def _why_not(overrides: Sequence[str]) -> str:
    other = next((override for override in overrides if not override.startswith(OF_ALGORITHM)), None)
    return f"{other} changes the answers" if other else "its objective is no kernel's"


def _read(run_dir: Path) -> tuple[list[str], list[ScreenedAnswers]]:
    config, metrics = load_config(run_dir / "config.toml"), read_metrics(run_dir / "metrics.jsonl")
    names = [agent.name for agent in config.agents]
    steps = [
        _answers(read_rollouts(run_dir, step), names, metrics[step], (step, config.num_steps))
        for step in logged_steps(run_dir)
        if step in metrics
    ]
    if not steps:
        raise ValueError(f"{run_dir} has no step with answers and metrics: name the folder of a run that was kept")
    return names, steps


def _answers(
    prompts: Sequence[Mapping[str, Any]], names: Sequence[str], step: StepMetrics, when: tuple[int, int]
) -> ScreenedAnswers:
    """Answers of a step by its log and its metrics; `when` is its number, and the number of the last step."""
    most = max(answer["rollout"] for prompt in prompts for answer in prompt["answers"]) + 1
    shape = (len(prompts), len(names), most)
    rewards_PNG, successes_PNG = torch.full(shape, torch.nan, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    num_tokens_PNG, hash_PNG = torch.zeros((2, *shape), dtype=torch.int64)
    log_ratio_KPNG = torch.full((len(names), *shape), torch.nan, dtype=torch.float64)
    for p, prompt in enumerate(prompts):
        for answer in prompt["answers"]:
            place = p, names.index(answer["agent"]), answer["rollout"]
            log_ratio_KPNG[place[1]][place] = 0.0
            num_tokens_PNG[place], hash_PNG[place] = answer["num_tokens"], text_hash(answer["text"])
            if answer["reward"] is not None:
                rewards_PNG[place], successes_PNG[place] = answer["reward"], answer["verdict"] == "correct"
            for learner, ratio in answer["ratio"].items():
                if isinstance(ratio, float | int) and ratio > 0:
                    log_ratio_KPNG[names.index(learner)][place] = math.log(ratio)
    skills = tuple(sorted({prompt["skill"] for prompt in prompts}))
    skill_P = torch.tensor([skills.index(prompt["skill"]) for prompt in prompts])
    of_skill = [rewards_PNG[skill_P == number].transpose(0, 1).flatten(1) for number in range(len(skills))]
    judged = Judged(
        rewards_PNG,
        successes_PNG,
        torch.tensor([step.values[f"capability/{name}"] for name in names], dtype=torch.float64),
        0,
        *when,
        num_tokens_PNG=num_tokens_PNG,
        text_hash_PNG=hash_PNG,
        skill_names=skills,
        skill_P=skill_P,
        skill_capability_NS=torch.stack([rewards.nanmean(dim=1) for rewards in of_skill], dim=1),
        skill_judged_NS=torch.stack([(~rewards.isnan()).sum(dim=1).double() for rewards in of_skill], dim=1),
    )
    return ScreenedAnswers(judged, log_ratio_KPNG)


def _rows(pulls: Mapping[str, Pull | None], reference: str) -> Iterator[tuple[str, ...]]:
    base = pulls[reference]
    for name, pull in pulls.items():
        if pull is None:
            yield (name, *[NOTHING] * 5, "not screened")
            continue
        cosine, own = _cosine(pull.prompts_P, base.prompts_P), _cosine(pull.own_P, base.own_P)
        over_own = pull.cross / float(pull.own_P.sum()) if pull.own_P.sum() else float("nan")
        ratios = float(pull.prompts_P.sum() / base.prompts_P.sum()), pull.num_trained / max(1, base.num_trained)
        remark = "as the reference" if name != reference and min(cosine, own) >= SAME else ""
        yield (name, f"{cosine:.3f}", f"{ratios[0]:.2f}", f"{own:.3f}", f"{over_own:.2f}", f"{ratios[1]:.2f}", remark)


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def _notes() -> tuple[str, ...]:
    return (
        "Pull: of a prompt, the sum of w A over others' answers with A > 0. Own: the sum of |w A| over own answers. "
        "Cosines are over all prompts; size and trained answers are over the reference's.",
        f"Methods whose two cosines are {SAME} or more learn what the reference learns.",
    )
