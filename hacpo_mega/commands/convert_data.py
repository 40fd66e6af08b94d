"""`hacpo-mega data convert`: writes files of any public layout as one JSON Lines file for a run, each problem once.

Elsewhere: the readers (datasets.py) and what counts as the same problem (dataset_checks.py).
"""

from collections.abc import Sequence
from pathlib import Path

from hacpo_mega.commands.inspect_data import Findings, listed, read_all, read_evaluation
from hacpo_mega.data.dataset_checks import contradictions, deduplicated, without_overlap
from hacpo_mega.data.datasets import LAYOUTS, NO_LAYOUT, layouts_of, write_dataset
from hacpo_mega.data.reading.files import describe, refuse_overwriting

NUM_SHOWN = 20


def convert(
    files: Sequence[Path],
    out: Path,
    evaluation_files: Sequence[Path],
    prompt_field: str | None = None,
    gold_field: str | None = None,
    *,
    skip_bad: bool = False,
) -> Findings:
    """Writes the problems of `files` to `out`, each once, without problems that `evaluation_files` have.

    Files have a public layout. If `prompt_field` or `gold_field` is given they hold prompts (texts or chat messages)
    and golds in these two columns; `evaluation_files` may have either form. Problems whose golds contradict each other
    are left out and listed. So are, with `skip_bad`, rows of `files` that cannot be read. The findings are then not
    sound. ValueError, with `out` as it was, for a file that does not exist or is `out` itself, and for other bad rows.
    """
    refuse_overwriting(out, [*files, *evaluation_files])
    fields = (prompt_field or "prompt", gold_field or "answer") if prompt_field or gold_field else None
    datasets = read_all(files, layouts_of(*fields, only=True) if fields else LAYOUTS)
    evaluation = read_evaluation(evaluation_files, layouts_of(*fields, only=False) if fields else LAYOUTS)
    bad = [defect for dataset in datasets for defect in dataset.defects]
    bad_evaluation = [defect for dataset in evaluation for defect in dataset.defects]
    if bad_evaluation or (bad and not skip_bad):
        columns = "; --prompt-field and --gold-field name other columns" if NO_LAYOUT in describe(bad) else ""
        remedy = "" if bad_evaluation else f"{columns}; --skip-bad leaves these rows out"
        raise ValueError(f"{describe([*bad, *bad_evaluation])}\n{out} not written{remedy}")
    problems = [problem for dataset in datasets for problem in dataset.problems]
    disputed = contradictions(problems)
    once = deduplicated(problems)
    kept = without_overlap(once, [problem for dataset in evaluation for problem in dataset.problems])
    if not kept:
        raise ValueError(f"{describe(bad)}\nnone of {len(problems)} problems is left; {out} not written".strip())
    write_dataset(kept, out, fields or ())
    # a disputed problem counts once, however many golds it has
    num_disputed = len({id(repetition.first) for repetition in disputed})
    num_repeated = len(problems) - len(once) - num_disputed
    left_out = f"{num_repeated} repetitions and {len(once) - len(kept)} evaluation problems left out"
    lines = [f"{out}: {len(kept)} problems; {left_out}"]
    if disputed:
        lines.append(f"  {num_disputed} problems with contradicting gold answers left out too:")
        lines += listed(disputed, NUM_SHOWN)
    if bad:
        lines.append(f"  {len(bad)} rows that cannot be read left out too:")
        lines += [f"    {line}" for line in describe(bad).splitlines()]
    return Findings(tuple(lines), is_sound=not (disputed or bad))
