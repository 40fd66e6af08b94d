"""`hacpo-mega data inspect | convert` and `hacpo-mega grade`: findings about files that a result may rest on.

Not here: the readers, checks and graders themselves (data/).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hacpo_mega.commands.grade import grade_file
from hacpo_mega.commands.inspect_data import Findings, inspect_dataset, inspect_overlap
from hacpo_mega.data.dataset_checks import deduplicated, without_overlap
from hacpo_mega.data.datasets import Problem, read_dataset, write_dataset
from hacpo_mega.data.files import describe
from hacpo_mega.grading.judge import Judge
from hacpo_mega.records import Stop, Verdict
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer

NUM_SHOWN = 5


def inspect(
    files: Sequence[Path],
    models: Sequence[Path],
    evaluation_files: Sequence[Path],
    max_prompt_tokens: int,
    judge: Judge | None,
) -> Iterator[Findings]:
    """Findings about every file, about overlap with `evaluation_files`, and with a judge about the gold answers."""
    codecs = {model.name: TextCodec(load_tokenizer(model)) for model in models}
    for file in files:
        yield inspect_dataset(file, codecs, max_prompt_tokens)
    if evaluation_files:
        yield inspect_overlap(files, evaluation_files)
    if judge is not None:
        yield check_golds([problem for file in files for problem in read_dataset(file).problems], judge)


def check_golds(problems: Sequence[Problem], judge: Judge) -> Findings:
    """Every gold answer graded against itself: one that is not correct earns nobody a reward."""
    golds = [problem.gold for problem in problems]
    answers = [f"\\boxed{{{gold}}}" for gold in golds]
    judgements = judge.judge([problem.prompt for problem in problems], golds, answers, [Stop.EOS] * len(golds))
    pairs = zip(problems, judgements, strict=True)
    bad = [problem for problem, judgement in pairs if judgement.verdict is not Verdict.CORRECT]
    lines = [f"{len(golds) - len(bad)} of {len(golds)} gold answers are correct against themselves"]
    lines += [f"    {problem.source}:{problem.line} {problem.gold!r}" for problem in bad[:NUM_SHOWN]]
    lines += [f"    ... and {len(bad) - NUM_SHOWN} more"] if len(bad) > NUM_SHOWN else []
    return Findings(tuple(lines), is_sound=not bad)


def convert(files: Sequence[Path], out: Path, evaluation_files: Sequence[Path]) -> Findings:
    """Writes files of any layout as one JSON Lines file, each problem once and none of `evaluation_files`.

    Rows that cannot be read are named and keep the file from being written.
    """
    datasets = [read_dataset(file) for file in files]
    defects = [defect for dataset in datasets for defect in dataset.defects]
    if defects:
        return Findings((describe(defects), f"{out} not written"), is_sound=False)
    problems = [problem for dataset in datasets for problem in dataset.problems]
    evaluation = [problem for file in evaluation_files for problem in read_dataset(file).problems]
    once = deduplicated(problems)
    kept = without_overlap(once, evaluation)
    write_dataset(kept, out)
    left_out = f"{len(problems) - len(once)} repetitions and {len(once) - len(kept)} evaluation problems left out"
    return Findings((f"{out}: {len(kept)} problems; {left_out}",), is_sound=True)


def grade(file: Path, out: Path, judge: Judge, is_explained: bool = False) -> Findings:
    """Grades a file of answers; how many got which verdict, how fast, and which rows could not be read."""
    graded = grade_file(file, out, judge, is_explained=is_explained)
    counts = [f"{verdict.name.lower()}: {graded.num_by_verdict[verdict]}" for verdict in sorted(graded.num_by_verdict)]
    lines = [*counts, f"{graded.speed}; one verdict per line in {out}"]
    lines += [graded.unjudged] if graded.unjudged else []
    lines += [describe(graded.problems)] if graded.problems else []
    return Findings(tuple(lines), is_sound=not graded.problems and not graded.unjudged)
