"""What is in data files, in words: counts, lengths under each agent's tokenizer, defects, repetitions, overlap.

The text is for a person at a terminal; `Findings.is_sound` is for an exit status. Not here: reading (datasets.py)
and what counts as the same problem (dataset_checks.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacpo_mega.data.dataset_checks import PromptEncoder, overlap, prompt_lengths, repetitions
from hacpo_mega.data.datasets import Dataset, read_dataset

NUM_SHOWN = 5


@dataclass(frozen=True)
class Findings:
    """Lines to print. Not sound: rows that cannot be read, one problem with two gold answers, evaluation trained on."""

    lines: tuple[str, ...]
    is_sound: bool


def inspect_dataset(path: Path, encoders: Mapping[str, PromptEncoder], max_prompt_tokens: int) -> Findings:
    """One file: rows, layout, subjects and levels, prompt lengths for each named encoder, defects and repetitions."""
    found = read_dataset(path)
    lines = [f"{path}: {len(found.problems)} problems, layout {found.layout or 'unknown'}"]
    lines += _groups(found)
    for name, encoder in encoders.items():
        lines.append(_lengths(found, name, encoder, max_prompt_tokens))
    repeated = repetitions(found.problems)
    contradictions = [repetition for repetition in repeated if not repetition.agrees]
    lines += _shown("cannot be used", found.defects)
    lines += _shown("repeated with another gold answer", contradictions)
    lines += _shown("repeated", [repetition for repetition in repeated if repetition.agrees])
    return Findings(tuple(lines), is_sound=not found.defects and not contradictions)


def inspect_overlap(training: Sequence[Path], evaluation: Sequence[Path]) -> Findings:
    """Evaluation problems that are also in the training files, per evaluation file."""
    trained = [problem for path in training for problem in read_dataset(path).problems]
    lines, leaked = [], 0
    for path in evaluation:
        common = overlap(trained, read_dataset(path).problems)
        leaked += len(common)
        lines += _shown(f"of {path} also in the training data", common) or [f"none of {path} in the training data"]
    return Findings(tuple(lines), is_sound=leaked == 0)


def _groups(found: Dataset) -> list[str]:
    lines = []
    for title, values in (
        ("subjects", [p.subject for p in found.problems]),
        ("levels", [p.level for p in found.problems]),
    ):
        counts = Counter(value for value in values if value)
        if counts:
            most = ", ".join(f"{value} {count}" for value, count in counts.most_common(10))
            lines.append(f"  {title}: {most}{', ...' if len(counts) > 10 else ''}")
    return lines


def _lengths(found: Dataset, name: str, encoder: PromptEncoder, max_prompt_tokens: int) -> str:
    if not found.problems:
        return f"  {name}: no prompts to measure"
    lengths = prompt_lengths(found.problems, encoder, max_prompt_tokens)
    return (
        f"  {name}: prompt tokens median {lengths.median}, 99 % {lengths.percentile_99}, longest {lengths.longest}; "
        f"{lengths.num_over_limit} over {max_prompt_tokens}"
    )


def _shown(what: str, items: Sequence[object]) -> list[str]:
    if not items:
        return []
    more = [f"    ... and {len(items) - NUM_SHOWN} more"] if len(items) > NUM_SHOWN else []
    return [f"  {len(items)} {what}:", *(f"    {item}" for item in items[:NUM_SHOWN]), *more]
