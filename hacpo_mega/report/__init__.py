"""`hacpo-mega report RUN`: a run folder becomes `report.html`, PNG curves, and a short summary for machines."""

from pathlib import Path
from statistics import fmean
from typing import Any

from hacpo_mega.logbook.console import in_step_order, phase_seconds
from hacpo_mega.models.files.replacing import replace_file
from hacpo_mega.report.page import render_page
from hacpo_mega.report.plots import draw_pictures
from hacpo_mega.report.run import Run, accuracies, load_run, measure_of, phase_series


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` and `report/*.png` into the run folder; returns the page's path.

    The page refers to no other file and opens from disk. Raises ValueError when the folder is not that of a run.
    """
    run = load_run(Path(run_dir))
    folder = run.folder / "report"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink(missing_ok=True)  # another process may write one, too
    pictures = draw_pictures(run)
    for picture in pictures:
        replace_file(folder / f"{picture.stem}.png", picture.png)
    path = run.folder / "report.html"
    replace_file(path, render_page(run, pictures))
    return path


def summary(run_dir: Path) -> dict[str, Any]:
    """A summary of the run, ready for json.dumps; unknown values are None. Raises ValueError like `write_report`.

    An agent's held-out scores are accuracy_start and accuracy_end, or mean_reward_start and mean_reward_end where
    rewards are graded. `phase_s` is the mean over the training steps that have the phase, in seconds: for an agent
    those of its slowest rank, for the run those of its slowest agent.
    """
    run = load_run(Path(run_dir))
    agents = {name: _summarize(run, name) for name in run.agents}
    answers = [agent["num_answers"] for agent in agents.values() if agent["num_answers"] is not None]
    seconds: dict[str, list[float]] = {}
    for metrics in (metrics for step, metrics in run.steps.items() if step):
        for phase, value in phase_seconds(metrics).items():
            seconds.setdefault(phase, []).append(value)
    return {
        "run_dir": str(run.folder),
        "method": run.setting("algorithm", "method"),
        "seed": run.setting("seed"),
        "num_steps": run.num_steps,
        "num_answers": sum(answers) if answers else None,
        "phase_s": {phase: round(fmean(values), 6) for phase, values in seconds.items()},
        "agents": agents,
    }


def _summarize(run: Run, agent: str) -> dict[str, Any]:
    evaluated = accuracies(run, agent)
    measure = measure_of(evaluated).replace(" ", "_")
    answers = run.series(f"agent/{agent}/num_answers")
    rewards = run.series(f"agent/{agent}/reward_mean")
    seconds = phase_series(run, agent)
    by_phase = {phase: [s for step, s in seconds[phase].items() if step] for phase in in_step_order(seconds)}
    return {
        f"{measure}_start": evaluated[0].value if evaluated else None,
        f"{measure}_end": evaluated[-1].value if len(evaluated) > 1 else None,
        "num_steps": sum(1 for step in rewards.steps if step),
        "num_answers": int(sum(answers.values)) if answers else None,
        "phase_s": {phase: round(fmean(values), 6) for phase, values in by_phase.items() if values},
    }
