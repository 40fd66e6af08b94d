"""The comparison of a finished run under faults with the undisturbed one, bit by bit, and a ledger of its answers.

Elsewhere: the check that every start resumed from the newest committed step, made at each start (campaign.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hacpo_mega.checkpoint.files import file_sha256, folder_of, read_checkpoint
from hacpo_mega.config import Config
from hacpo_mega.logbook.files.json_lines import json_lines
from hacpo_mega.logbook.files.metrics import METRICS_LINE, read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison.

    problems        a line for every difference; empty: the faults have changed nothing
    num_shards      files of weights, main weights and moments of the last checkpoint whose SHA-256 was compared
    num_files       exported files that were compared      num_values   metrics that were compared
    num_trained     answers trained by each learner, by its name, in the steps that count
    """

    problems: tuple[str, ...]
    num_shards: int
    num_files: int
    num_values: int
    num_trained: dict[str, int]


def compare(run_dir: Path, undisturbed: Path, config: Config) -> Verdict:
    """Compares a finished run with the undisturbed one, and the answers that it trained on with its log of answers."""
    shards, exported = _shards(run_dir, config.num_steps), _exported(run_dir)
    values, expected = (read_metrics(run / "metrics.jsonl") for run in (run_dir, undisturbed))
    problems = [
        *_differing(shards, _shards(undisturbed, config.num_steps), "shards of the last checkpoint"),
        *_differing(exported, _exported(undisturbed), "exported files"),
        *_differing(_flat(values), _flat(expected), "metrics"),
        *_answers(run_dir, undisturbed, config),
        *_lines(run_dir, config.num_steps),
    ]
    trained: dict[str, int] = {}
    for step in range(1, config.num_steps + 1):
        found = dict(_ledger(run_dir, step, config, problems))
        for learner, number in found.items():
            trained[learner] = trained.get(learner, 0) + number
            counted = values[step].values[f"agent/{learner}/num_trained_answers"]
            if number != counted:
                problems.append(f"step {step}: {learner} has trained {counted:g} answers, the log has {number} of them")
    return Verdict(tuple(problems), len(shards), len(exported), len(_flat(values)), trained)


def _shards(run_dir: Path, step: int) -> dict[str, str]:
    """SHA-256 of the shards of a checkpoint, from its record, against which every start checks the files."""
    files = read_checkpoint(folder_of(run_dir, step)).files
    return {path: file.sha256 for path, file in files.items() if path.endswith(".distcp")}


def _exported(run_dir: Path) -> dict[str, str]:
    files = (path for path in (run_dir / "agents").rglob("*") if path.is_file())
    return {path.relative_to(run_dir).as_posix(): file_sha256(path) for path in files}


def _flat(metrics: dict) -> dict[str, str]:
    """The repr of every value of every step: exact for a float, and NaN equals NaN."""
    return {f"step {n}: {name}": repr(value) for n, step in metrics.items() for name, value in step.values.items()}


def _differing(found: dict[str, str], expected: dict[str, str], what: str) -> Iterator[str]:
    different = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    if different:
        yield f"{len(different)} of {len(expected)} {what} differ from the undisturbed run's, first {different[0]}"


def _answers(run_dir: Path, undisturbed: Path, config: Config) -> Iterator[str]:
    steps = range(1, config.num_steps + 1)
    different = [step for step in steps if read_rollouts(run_dir, step) != read_rollouts(undisturbed, step)]
    if different:
        yield f"the logged answers of {len(different)} steps differ from the undisturbed run's, first {different[0]}"


def _lines(run_dir: Path, num_steps: int) -> Iterator[str]:
    steps = [line["step"] for _, _, line in json_lines(run_dir / "metrics.jsonl", METRICS_LINE)]
    if steps != list(range(num_steps + 1)):
        yield f"metrics.jsonl has not every step once and in order: {steps}"


def _ledger(run_dir: Path, step: int, config: Config, problems: list[str]) -> Iterator[tuple[str, int]]:
    """(learner, number of answers that it trained on) of a step; adds to `problems` where answers miss or repeat."""
    prompts = read_rollouts(run_dir, step)
    keys = [
        (line["prompt_index"], answer["agent"], answer["rollout"]) for line in prompts for answer in line["answers"]
    ]
    expected = config.training.prompts_per_step * config.answers_per_prompt * len(config.agents)
    if len(set(keys)) != len(keys) or len(keys) != expected:
        problems.append(f"step {step}: {len(keys)} answers are logged, {len(set(keys))} different ones, of {expected}")
    for agent in config.agents:
        yield agent.name, sum(agent.name in answer["ratio"] for line in prompts for answer in line["answers"])
