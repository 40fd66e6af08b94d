"""`hacpo-mega data inspect`: counts, prompt lengths under tokenizers, bad rows, repetitions, overlap, golds.

The text is for a person at a terminal; `Findings.is_sound` is for an exit status. Elsewhere: reading (datasets.py)
and what counts as the same problem (dataset_checks.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacpo_grading.judge import Judge
from hacpo_grading.judgement import Asked
from hacpo_mega.data.dataset_checks import overlap, repetitions
from hacpo_mega.data.datasets import LAYOUTS, Dataset, Layout, Problem, read_dataset
from hacpo_mega.data.reading.row_values import quoted
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer

NUM_SHOWN = 5


@dataclass(frozen=True)
class Findings:
    """Lines to print. Not sound: unreadable rows, contradicting golds, golds that fail, evaluation trained on."""

    lines: tuple[str, ...]
    is_sound: bool


def inspect(
    files: Sequence[Path],
    models: Sequence[Path],
    evaluation_files: Sequence[Path],
    max_prompt_tokens: int,
    judge: Judge | None,
) -> list[Findings]:
    """Findings about every file, about overlap with `evaluation_files`, and with a judge about the gold answers.

    ValueError for a file that does not exist or an evaluation file without a problem.
    """
    datasets, evaluation = read_all(files), read_evaluation(evaluation_files)
    names = Counter(model.name for model in models)
    labels = [model.name if names[model.name] == 1 and model.name else str(model) for model in models]
    codecs = {label: TextCodec(load_tokenizer(model)) for label, model in zip(labels, models)}
    findings = [inspect_dataset(dataset, codecs, max_prompt_tokens) for dataset in datasets]
    problems = [problem for dataset in datasets for problem in dataset.problems]
    if evaluation:
        findings.append(inspect_overlap(problems, evaluation))
    if judge is not None:
        findings.append(check_golds(problems, judge))
    return findings


def read_all(files: Sequence[Path], layouts: Mapping[str, Layout] = LAYOUTS) -> list[Dataset]:
    """The files as datasets. ValueError for those that do not exist, a line each."""
    if missing := [f"{file}: does not exist" for file in files if not file.exists()]:
        raise ValueError("\n".join(missing))
    return [read_dataset(file, layouts) for file in files]


def read_evaluation(files: Sequence[Path], layouts: Mapping[str, Layout] = LAYOUTS) -> list[Dataset]:
    """Evaluation files as datasets. ValueError also for one without problems: no overlap would be found with it."""
    datasets = read_all(files, layouts)
    if empty := [str(dataset.defects[0]) for dataset in datasets if not dataset.problems]:
        raise ValueError("\n".join(empty))
    return datasets


def inspect_dataset(dataset: Dataset, codecs: Mapping[str, TextCodec], max_prompt_tokens: int) -> Findings:
    """One file: rows, layout, subjects and levels, prompt lengths for each named codec, defects and repetitions."""
    lines = [f"{dataset.path}: {len(dataset.problems)} problems, layout {dataset.layout or 'unknown'}"]
    lines += _groups(dataset)
    lines += [_lengths(dataset, name, codec, max_prompt_tokens) for name, codec in codecs.items()]
    repeated = repetitions(dataset.problems)
    contradictions = [repetition for repetition in repeated if not repetition.agrees]
    lines += _counted("cannot be used", dataset.defects)
    lines += _counted("repeated with another gold answer", contradictions)
    lines += _counted("repeated", [repetition for repetition in repeated if repetition.agrees])
    return Findings(tuple(lines), is_sound=not dataset.defects and not contradictions)


def inspect_overlap(training: Sequence[Problem], evaluation: Sequence[Dataset]) -> Findings:
    """Evaluation problems that are also among the training problems, per evaluation file, and rows unfit to compare."""
    lines, is_sound = [], True
    for dataset in evaluation:
        common = overlap(training, dataset.problems)
        kinds = Counter(repetition.kind for repetition in common)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines += _counted(f"of {len(dataset.problems)} of {dataset.path} also in the training data ({counts})", common)
        lines += [] if common else [f"none of {dataset.path} in the training data"]
        lines += _counted(f"of {dataset.path} cannot be compared", dataset.defects)
        is_sound &= not common and not dataset.defects
    return Findings(tuple(lines), is_sound)


def check_golds(problems: Sequence[Problem], judge: Judge) -> Findings:
    """Grades every gold answer against itself: where it fails no answer to the problem could be right."""
    judgements = judge.judge([Asked(one.prompt, f"\\boxed{{{one.gold}}}", one.gold) for one in problems])
    pairs = zip(problems, judgements, strict=True)
    bad = [problem for problem, judgement in pairs if not judgement.is_success]
    lines = [f"{len(problems) - len(bad)} of {len(problems)} gold answers are correct against themselves"]
    lines += listed([f"{problem.source}:{problem.line} {quoted(problem.gold)}" for problem in bad])
    return Findings(tuple(lines), is_sound=not bad)


def _groups(dataset: Dataset) -> list[str]:
    """Lines on the most frequent subjects and levels."""
    lines = []
    subjects = [problem.subject for problem in dataset.problems]
    levels = [problem.level for problem in dataset.problems]
    for title, values in (("subjects", subjects), ("levels", levels)):
        counts = Counter(value for value in values if value)
        if counts:
            most = ", ".join(f"{value} {count}" for value, count in counts.most_common(10))
            lines.append(f"  {title}: {most}{', ...' if len(counts) > 10 else ''}")
    return lines


def _lengths(dataset: Dataset, name: str, codec: TextCodec, max_prompt_tokens: int) -> str:
    """A line on the prompts' tokens. ValueError for a character without a token."""
    lengths = sorted(codec.prompt_lengths([problem.prompt for problem in dataset.problems]))
    if not lengths:
        return f"  {name}: no prompts to measure"
    return (
        f"  {name}: prompt tokens median {lengths[len(lengths) // 2]}, 99 % {lengths[(len(lengths) * 99) // 100]}, "
        f"longest {lengths[-1]}; {sum(length > max_prompt_tokens for length in lengths)} over {max_prompt_tokens}"
    )


def _counted(description: str, items: Sequence[object]) -> list[str]:
    return [f"  {len(items)} {description}:", *listed(items)] if items else []


def listed(items: Sequence[object], most: int = NUM_SHOWN) -> list[str]:
    """A line for each of the first items, and the number of the others."""
    more = [f"    ... and {len(items) - most} more"] if len(items) > most else []
    return [*(f"    {item}" for item in items[:most]), *more]
