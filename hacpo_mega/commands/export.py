"""`hacpo-mega export`: writes an agent of a run as a Hugging Face folder of its own, with a model card.

The weights are those of the run's end, byte by byte, or of a checkpoint, as the run would have exported them there. The
folder appears whole or not at all, and never replaces another. Elsewhere: smaller number formats (quantize.py).
"""

import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from hacpo_mega.checkpoint.stored_agent import StoredAgent, chosen_agent, is_checkpoint, stored_agent
from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.config import AgentConfig, Config, config_of_run
from hacpo_mega.config.checks.tokenizer_checks import folder_ends
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.run.provenance import read_starts
from hacpo_mega.logbook.run.run_lock import is_gone, signature
from hacpo_mega.logbook.steps.held_out import HeldOut, are_accuracies, held_out
from hacpo_mega.megatron.checkpoint.stored_state import model_weights, stored_weights
from hacpo_mega.megatron.weights.hf_reader import FolderReader
from hacpo_mega.megatron.weights.hf_writer import (
    ADAPTER,
    copy_beside_weights,
    copy_files,
    finite,
    name_end,
    write_adapter,
    write_weights,
)
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.families import is_tied
from hacpo_mega.models.files.folder import copied_files, dtype_name, has_tower
from hacpo_mega.models.files.hub import HubModel
from hacpo_mega.models.files.links import require_inside, run_above
from hacpo_mega.models.files.visible import one_line, visible
from hacpo_mega.models.files.weight_files import INDEX, all_tensors, require_one_reading
from hacpo_mega.models.sharding.lora import adapter_sources
from hacpo_mega.models.sharding.segments import all_sources

CARD = "README.md"
PLAIN_NAME = re.compile(r"[A-Za-z0-9]+([_-][A-Za-z0-9]+)*")  # without meaning in Markdown
ENDS_CODE = re.compile("[`|<]")
LONGEST = 200  # characters of a name in the card
OWNER_FILE = ".draft"  # in an unfinished export: the process that writes it


@dataclass(frozen=True)
class TrainedAgent:
    """One agent of a run, with the run's data about it.

    folder       its Hugging Face folder; None if only a checkpoint has its weights: `stored`
    evaluated    its scores on held-out prompts, in the order of steps
    commit       of the source at the last start of the run
    """

    run_dir: Path
    folder: Path | None
    stored: StoredAgent | None
    config: Config
    agent: AgentConfig
    num_steps: int
    evaluated: tuple[HeldOut, ...]
    commit: str | None

    @property
    def file(self) -> Path:
        """The file of the run's configuration."""
        return self.run_dir / "config.toml" if self.stored is None else self.stored.file


def trained_agent(path: Path, name: str | None, *, trust: bool = False) -> TrainedAgent:
    """Reads a finished run, or one of its checkpoints. `name` may be None when the run has one agent.

    ValueError for a missing part, and for a link out of the run, or out of the model folder that a checkpoint names
    unless its maker is trusted.
    """
    run_dir, stored, folder, last = path, None, None, None
    if is_checkpoint(path):
        stored = stored_agent(path, name)
        if not trust:
            stored.require_own_model()
        run_dir, last = path.resolve().parent.parent, stored.checkpoint.step
        config, agent = stored.config, stored.agent
    else:
        config = config_of_run(path)
        agent = chosen_agent(config, name, path)
        folder = path / "agents" / agent.name
        require_inside(path, folder)
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} does not exist: a run writes it after its last step; finish the run first, or give one of "
                f"{path}/checkpoints"
            )
    metrics = run_dir / "metrics.jsonl"
    # A checkpoint gets the scores up to its step, and may lie outside a run.
    steps = read_metrics(metrics) if last is None or metrics.is_file() else {}
    scores = (held_out(of_step.values, agent.name) for step, of_step in steps.items() if last is None or step <= last)
    starts = read_starts(run_dir)
    return TrainedAgent(
        run_dir=run_dir,
        folder=folder,
        stored=stored,
        config=config,
        agent=agent,
        num_steps=max(steps, default=0) if last is None else last,
        evaluated=tuple(score for score in scores if score is not None),
        commit=starts[-1].get("commit") if starts else None,
    )


def export_copy(agent: TrainedAgent, out: Path, dtype: str | None = None, *, text_only: bool = False) -> None:
    """Writes the agent, every file as in the run's own export, with a model card; adapters are merged.

    An agent of a checkpoint can have another `dtype`. With `text_only`, only the text model of an image checkpoint.
    ValueError for `text_only` of a text model, if `out` exists, for a folder that has been changed, and for a
    checkpoint that is damaged or removed meanwhile.
    """
    if text_only and not has_tower(_model_folder(agent)):
        raise ValueError(f"{agent.agent.name} is a text model: export it without --text-only")
    with draft_of(out) as draft:
        if agent.stored is None and text_only:
            _write_text_model(agent.folder, draft)
            card = model_card(agent, "of the text model alone, byte-equal to the run's")
        elif agent.stored is None:
            copy_files(_model_files(agent.folder), agent.folder, draft)
            card = model_card(agent)
        else:
            write_stored(agent.stored, draft, dtype, text_only=text_only)
            in_dtype = "" if dtype is None else f", in {dtype}"
            card = model_card(agent, f"of the checkpoint {_name(agent.stored.checkpoint.folder.name)}{in_dtype}")
        (draft / CARD).write_text(card, encoding="utf-8")


def _model_folder(agent: TrainedAgent) -> Path:
    """The folder whose config.json describes the agent's model."""
    return agent.folder if agent.stored is None else agent.stored.agent.model


def _write_text_model(folder: Path, out: Path) -> None:
    """Fills `out` with the text model of an image checkpoint, in the type that its config.json names."""
    require_one_reading(folder, tied=is_tied(folder))
    dtype, sources = getattr(torch, dtype_name(folder)), tuple(all_sources(Architecture.from_folder(folder)))
    copy_beside_weights(folder, out, dtype, text_only=True)
    with ExitStack() as stack:
        reader = FolderReader(folder, stack)
        tensors = ((source.name, reader.read(source, 0, source.shape[0], dim=0)) for source in sources)
        write_weights(finite(tensors, dtype, out), sources, out, dtype)


def _model_files(folder: Path) -> list[Path]:
    """The files of a run's own export, without others that were put beside them. ValueError for ambiguous weights."""
    require_one_reading(folder, tied=is_tied(folder))
    weights = {folder / tensor.file for tensor in all_tensors(folder).values()}
    described = [folder / name for name in ("config.json", INDEX) if (folder / name).is_file()]
    return [*sorted(weights), *described, *copied_files(folder)]


def export_adapter(agent: TrainedAgent, out: Path, dtype: str | None = None) -> None:
    """Writes the agent's adapters alone, as peft loads them on top of the model that the run began with.

    `dtype` as in `export_copy`. ValueError for an agent without adapters, and as `export_copy`.
    """
    if agent.agent.lora is None:
        raise ValueError(
            f"{agent.agent.name} has no adapter: all its weights were trained (agents.{agent.agent.name}.lora is not "
            "given). Export it without --adapter"
        )
    with draft_of(out) as draft:
        if agent.stored is None:
            shutil.copytree(agent.folder / ADAPTER, draft, dirs_exist_ok=True, copy_function=shutil.copyfile)
        else:
            _write_stored_adapter(agent.stored, draft, dtype)
        (draft / CARD).write_text(model_card(agent, "adapters of LoRA, in peft's format"), encoding="utf-8")


def _write_stored_adapter(stored: StoredAgent, folder: Path, asked: str | None) -> None:
    base, architecture = stored.agent.model, Architecture.from_folder(stored.agent.model)
    lora, dtype = stored.agent.adapters(architecture), getattr(torch, asked or stored.dtype)
    with stored.being_read():
        stored.require_unaltered()
        tensors = stored_weights(stored.folder, adapter_sources(architecture, lora), dtype)
        try:
            write_adapter(dict(finite(tensors, dtype, folder)), lora, base, folder)
        except RunStopped as stop:
            raise ValueError(str(stop)) from stop


@contextmanager
def as_folder(agent: TrainedAgent, out: Path) -> Iterator[TrainedAgent]:
    """The agent with a Hugging Face folder; for an image checkpoint the folder has only the text model.

    A folder made for this lies beside `out` and is removed when the block ends.
    """
    text_only = has_tower(_model_folder(agent))
    if agent.stored is None and not text_only:
        yield agent
        return
    folder = _new_draft(out)
    try:
        if agent.stored is None:
            _write_text_model(agent.folder, folder)
        else:
            write_stored(agent.stored, folder, text_only=text_only)
        yield replace(agent, folder=folder)
    finally:
        _remove(folder)


def write_stored(stored: StoredAgent, folder: Path, asked: str | None = None, *, text_only: bool = False) -> None:
    """Fills a folder with a checkpoint's agent, bit by bit as its run would have exported it there.

    `asked` is another type than the run's; in float32 the weights are the optimizer's main weights, or adapters merged
    in float32. Reads one tensor at a time, once `require_unaltered` has checked every byte of the state. ValueError if
    a byte differs, a file is missing, or a weight is not finite.
    """
    dtype, base = getattr(torch, asked or stored.dtype), stored.agent.model
    architecture = Architecture.from_folder(base)
    sources, lora = tuple(all_sources(architecture)), stored.agent.adapters(architecture)
    with stored.being_read():
        stored.require_unaltered()
        copy_beside_weights(base, folder, dtype, text_only=text_only)
        name_end(folder, folder_ends(stored.agent)[0].added)
        tensors = finite(model_weights(stored.folder, base, lora, dtype), dtype, folder)
        try:
            write_weights(tensors, sources, folder, dtype, base=None if text_only else base)
        except RunStopped as stop:
            raise ValueError(str(stop)) from stop


@contextmanager
def draft_of(out: Path) -> Iterator[Path]:
    """A folder beside `out` that gets its name if the block succeeds. ValueError if `out` exists or cannot be made."""
    if os.path.lexists(out):
        raise ValueError(f"{out} exists: give a new folder for the export")
    if (run := run_above(Path(os.path.realpath(out)))) is not None:
        raise ValueError(f"{out} lies in the run {run}, which holds what its job wrote alone: give a folder elsewhere")
    draft = _new_draft(out)
    try:
        yield draft
        (draft / OWNER_FILE).unlink(missing_ok=True)
        if os.path.lexists(out):
            raise ValueError(f"{out} exists by now: give a new folder for the export")
        draft.rename(out)
    except (OSError, SafetensorError) as error:
        _remove(draft)
        reason = error.args[0][0][-1] if isinstance(error, shutil.Error) else error  # of the first file that failed
        raise ValueError(f"{out} is not written: {reason}. Make room, or give another folder") from error
    except BaseException:
        _remove(draft)
        raise


def _new_draft(out: Path) -> Path:
    """Makes a draft folder beside `out` and removes those of killed exports. ValueError if it cannot be made."""
    name = f".{out.name}.{secrets.token_hex(8)}.partial"
    draft = out.with_name(name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for old in out.parent.glob(f".{glob.escape(out.name)}.*.partial"):
            owner = old / OWNER_FILE
            if owner.is_file() and is_gone(owner.read_text(encoding="utf-8", errors="replace")):
                _remove(old)
        draft.mkdir()
        (draft / OWNER_FILE).write_text(signature(name), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{out} cannot be made ({error.strerror}): give a folder that you may write") from error
    return draft


def _remove(draft: Path) -> None:
    """Removes a draft; if the disk refuses, the next export to the same name removes it."""
    shutil.rmtree(draft, ignore_errors=True)


def model_card(agent: TrainedAgent, weights: str = "as trained, byte-equal to the run's") -> str:
    """The README of an exported model: origin, training, scores, and `weights`, a text on their kind."""
    partners = [other.name for other in agent.config.agents if other.name != agent.agent.name]
    algorithm = agent.config.algorithm
    shared = partners if algorithm.shares_answers else []
    hub = HubModel.of_snapshot(agent.agent.model)
    base = visible(agent.agent.model.name if hub is None else hub.repo)
    head = {"base_model": base, "library_name": "transformers", "pipeline_tag": "text-generation"}
    both = f"its own answers and those of {', '.join(map(_name, shared))}"
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
        "---",
        f"# {_name(agent.agent.name)}",
        "",
        f"{_code(base)} after {agent.num_steps} steps of {algorithm.method.upper()} (arXiv 2603.02604)"
        + (f", learning from {both}." if shared else " on its own answers."),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _card_rows(agent, weights)),
        "",
        "## Use",
        "",
        "```",
        "vllm serve FOLDER",
        "```",
        "",
        *_prompt_format(agent.agent),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _card_rows(agent: TrainedAgent, weights: str) -> Iterator[tuple[str, str]]:
    config, algorithm = agent.config, agent.config.algorithm
    yield "run", _code(agent.run_dir.resolve().name)
    yield "commit", _code(agent.commit) if agent.commit else "not known"
    yield "weights", weights
    yield from _scores(agent.evaluated, config.reward.may_be_graded)
    yield "training data", ", ".join(_code(file.name) for file in config.data.files) or f"{config.data.generator}, made"
    yield "reward", ", ".join(_code(_without_folder(grader.kind)) for grader in config.reward.graders.values())
    yield "method", f"{algorithm.method}, preset {algorithm.preset}"
    if algorithm.method == "hacpo":
        yield "advantage of others' answers", f"by the baseline of their {algorithm.cross_baseline}"
        yield "alpha, delta, delta_step", f"{algorithm.alpha:g}, {algorithm.delta:g}, {algorithm.delta_step:g}"
    yield "own clip", f"{algorithm.eps_low:g} below, {algorithm.eps_high:g} above"
    if (lora := agent.agent.lora) is not None:
        targets = lora.targets if isinstance(lora.targets, str) else ", ".join(map(_name, lora.targets))
        yield "adapters", f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {targets}"
    yield "learning rate", f"{agent.agent.optimizer.lr:g}, {agent.agent.optimizer.schedule}"
    yield "prompts per step, per update", f"{config.training.prompts_per_step}, {config.prompts_per_update}"
    yield "answers per prompt", f"{config.answers_per_prompt} at temperature {config.rollout.temperature:g}"
    yield "longest prompt, answer", f"{config.rollout.max_prompt_tokens}, {config.rollout.max_answer_tokens} tokens"
    yield "seed", str(config.seed)


def _scores(evaluated: Sequence[HeldOut], may_be_graded: bool) -> Iterator[tuple[str, str]]:
    """Scores on held-out prompts before and after training, by a name that fits the rewards."""
    is_accuracy = are_accuracies(evaluated) if evaluated else not may_be_graded
    measure = "accuracy" if is_accuracy else "mean reward"
    yield f"held-out {measure} at the start", f"{evaluated[0].value:.4f}" if evaluated else "not measured"
    yield f"held-out {measure} at the end", f"{evaluated[-1].value:.4f}" if len(evaluated) > 1 else "not measured"


def _prompt_format(agent: AgentConfig) -> Iterator[str]:
    """Lines on the prompt format: the model answers as trained only if it is prompted in the same way."""
    prompting = agent.prompting
    where = "in its chat template" if prompting.chat_template else "on plain text, without a chat template"
    yield f"It was trained {where}."
    if prompting.template_kwargs:
        yield f"Arguments of the template: {_code(json.dumps(dict(prompting.template_kwargs)))}."
    if prompting.time is not None:
        yield f"The template's clock (`strftime_now`) stood at {_code(prompting.time)} UTC."
    for title, text in (("System prompt", prompting.system_prompt), ("Prompt", prompting.prompt_template)):
        if text is not None:
            yield from ("", f"{title}:", "", *_block(text))


def _name(text: str) -> str:
    """A name in a sentence, as code if it could have a meaning in Markdown."""
    return text if PLAIN_NAME.fullmatch(text) else _code(text)


def _code(text: str) -> str:
    """A text as a code span, in a sentence or a table, with all characters escaped that could end it."""
    escaped = ENDS_CODE.sub(lambda match: f"\\x{ord(match[0]):02x}", one_line(text)).strip()
    return f"`{escaped[:LONGEST] or ' '}`"


def _block(text: str) -> list[str]:
    """The lines of a block of code, with a fence longer than any in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, visible(text), fence]


def _without_folder(kind: str) -> str:
    """A grader's kind, of a file without its path on this machine."""
    module, colon, function = kind.rpartition(":")
    return f"{Path(module).name}{colon}{function}"
