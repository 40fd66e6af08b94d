"""`hacpo-mega export`: an agent of a run leaves it as a Hugging Face folder of its own, with a model card.

The weights are copied byte by byte: what was trained is what is served. Smaller number formats are quantize.py's.
A folder appears whole or not at all, and never over another one.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hacpo_mega.config import AgentConfig, Config, config_of_run
from hacpo_mega.logbook.metrics import read_metrics
from hacpo_mega.logbook.provenance import read_starts

CARD = "README.md"


@dataclass(frozen=True)
class TrainedAgent:
    """One agent of a finished run: its exported folder, and what the run knows of it.

    accuracy_start, accuracy_end   held-out greedy accuracy before and after training; None where it was not measured
    commit                         of the source that made the last start of the run
    """

    run_dir: Path
    folder: Path
    config: Config
    agent: AgentConfig
    num_steps: int
    accuracy_start: float | None
    accuracy_end: float | None
    commit: str | None


def trained_agent(run_dir: Path, name: str | None) -> TrainedAgent:
    """Reads a run folder. `name` may be None when the run has one agent. ValueError for what is not there."""
    config = config_of_run(run_dir)
    names = [agent.name for agent in config.agents]
    if name is None and len(names) > 1:
        raise ValueError(f"{run_dir} trained {', '.join(names)}: say which one with --agent")
    name = name or names[0]
    if name not in names:
        raise ValueError(f"{run_dir} has no agent {name!r}; there are: {', '.join(names)}")
    folder = run_dir / "agents" / name
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} does not exist: a run writes it after its last step; finish the run first")
    steps = read_metrics(run_dir / "metrics.jsonl")
    measured = [
        m.values[f"agent/{name}/accuracy"] for _, m in sorted(steps.items()) if f"agent/{name}/accuracy" in m.values
    ]
    starts = read_starts(run_dir)
    return TrainedAgent(
        run_dir,
        folder,
        config,
        config.agents[names.index(name)],
        max(steps, default=0),
        measured[0] if measured else None,
        measured[-1] if len(measured) > 1 else None,
        starts[-1]["commit"] if starts else None,
    )


def export_copy(agent: TrainedAgent, out: Path) -> None:
    """Writes the agent as it is, every file byte-equal, and its model card. ValueError when `out` exists."""
    with draft_of(out) as draft:
        shutil.copytree(agent.folder, draft, dirs_exist_ok=True)
        (draft / CARD).write_text(model_card(agent), encoding="utf-8")


@contextmanager
def draft_of(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name when the block ends well. ValueError when `out` exists."""
    if out.exists():
        raise ValueError(f"{out} exists: give a new folder for the export")
    draft = out.with_name(f"{out.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    draft.rename(out)


def model_card(agent: TrainedAgent, weights: str = "as trained, byte-equal to the run's") -> str:
    """The README of an exported model: where it comes from, how it was trained, what it scored, what `weights` are."""
    partners = [other.name for other in agent.config.agents if other.name != agent.agent.name]
    algorithm = agent.config.algorithm
    shared = partners if algorithm.shares_answers else []
    base = agent.agent.model.name
    head = {"base_model": base, "library_name": "transformers", "pipeline_tag": "text-generation"}
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
        "---",
        f"# {agent.agent.name}",
        "",
        f"`{base}` after {agent.num_steps} steps of {algorithm.method.upper()} (arXiv 2603.02604)"
        + (f", learning from its own answers and those of {', '.join(shared)}." if shared else " on its own answers."),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _facts(agent, weights)),
        "",
        "## Use",
        "",
        "```",
        "vllm serve FOLDER",
        "```",
        "",
        *_wording(agent.agent),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _facts(agent: TrainedAgent, weights: str) -> Iterator[tuple[str, str]]:
    config, algorithm = agent.config, agent.config.algorithm
    yield "run", f"`{agent.run_dir.resolve().name}`"
    yield "commit", f"`{agent.commit}`" if agent.commit else "not known"
    yield "weights", weights
    yield "held-out accuracy at the start", _accuracy(agent.accuracy_start)
    yield "held-out accuracy at the end", _accuracy(agent.accuracy_end)
    yield "training data", ", ".join(f"`{file.name}`" for file in config.data.files) or f"{config.data.generator}, made"
    yield "reward", f"`{config.reward.kind}`"
    yield "method", f"{algorithm.method}, preset {algorithm.preset}"
    if algorithm.method == "hacpo":
        yield "advantage of others' answers", f"by the baseline of their {algorithm.cross_baseline}"
        yield "alpha, delta, delta_step", f"{algorithm.alpha:g}, {algorithm.delta:g}, {algorithm.delta_step:g}"
    yield "own clip", f"{algorithm.eps_low:g} below, {algorithm.eps_high:g} above"
    yield "learning rate", f"{agent.agent.optimizer.lr:g}, {agent.agent.optimizer.schedule}"
    yield "prompts per step, per update", f"{config.training.prompts_per_step}, {config.prompts_per_update}"
    yield "answers per prompt", f"{config.answers_per_prompt} at temperature {config.rollout.temperature:g}"
    yield "longest prompt, answer", f"{config.rollout.max_prompt_tokens}, {config.rollout.max_answer_tokens} tokens"
    yield "seed", str(config.seed)


def _accuracy(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def _wording(agent: AgentConfig) -> Iterator[str]:
    """How the model was asked: a served model answers as trained only when it is asked in the same way."""
    prompting = agent.prompting
    where = "in its chat template" if prompting.chat_template else "on plain text, without a chat template"
    yield f"It was trained {where}."
    if prompting.template_kwargs:
        yield f"Arguments of the template: `{json.dumps(dict(prompting.template_kwargs))}`."
    for what, text in (("System prompt", prompting.system_prompt), ("Prompt", prompting.prompt_template)):
        if text is not None:
            yield from ("", f"{what}:", "", "```", text, "```")
