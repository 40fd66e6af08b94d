"""The commands that read files and train nothing: `hacpo-mega data inspect | convert`, `hacpo-mega grade`.

Imports nothing heavy at the top, as cli/app.py.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo_mega.cli.start import add_current_folder
from hacpo_mega.config.user_code import parse_options
from hacpo_mega.models.files.visible import say

if TYPE_CHECKING:
    from hacpo_mega.commands.inspect_data import Findings

data_app = typer.Typer(no_args_is_help=True, help="Read public mathematics data of any layout.")


@data_app.command()
def inspect(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files, archives or folders of any layout.")],
    model: Annotated[list[Path] | None, typer.Option(help="A model folder: lengths under its tokenizer.")] = None,
    against: Annotated[list[Path] | None, typer.Option(help="An evaluation set that must not be in them.")] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are counted.")] = 1024,
    golds: Annotated[bool, typer.Option("--golds", help="Grade every gold answer against itself.")] = False,
) -> None:
    """Counts, lengths, bad rows with line numbers, repetitions, overlap. Exit 1 if they make results wrong."""
    from hacpo_grading.judge import Judge
    from hacpo_mega.commands.inspect_data import inspect as inspect_files

    with Judge("math", num_workers=2) if golds else nullcontext() as judge:
        _print_findings(*inspect_files(files, model or [], against or [], max_prompt_tokens, judge))


@data_app.command()
def convert(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files, archives or folders of any layout.")],
    out: Annotated[Path, typer.Option(help="The JSON Lines file to write, for data.files of a run.")],
    without: Annotated[list[Path] | None, typer.Option(help="An evaluation set whose problems are left out.")] = None,
    prompt_field: Annotated[
        str | None, typer.Option(help="The prompts' column, texts or messages; others stay.")
    ] = None,
    gold_field: Annotated[str | None, typer.Option(help="The golds' column, with --prompt-field.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out and list rows that cannot be read.")] = False,
) -> None:
    """Write files of any public layout, or of the columns named, as one JSON Lines file, each problem once."""
    from hacpo_mega.commands.convert_data import convert as convert_files

    _print_findings(convert_files(files, out, without or [], prompt_field, gold_field, skip_bad=skip_bad))


def grade(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON Lines or Parquet with gold and pred, or of eval.")],
    out: Annotated[Path, typer.Option(help="File of verdicts, a line per answer, in order.")],
    reward: Annotated[str, typer.Option(help="math, number, choice, json, program, ..., or module:function.")] = "math",
    workers: Annotated[int, typer.Option(min=1, help="Grading processes.")] = 2,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="CPU seconds of one judgement.")] = 5.0,
    start_timeout_s: Annotated[float, typer.Option(min=1.0, help="Seconds to load a grader of yours.")] = 120.0,
    option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of the judge, such as rel_tol=0.01.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Write the reason of each verdict.")] = False,
    pred_field: Annotated[str | None, typer.Option(help="Field with the answer: pred, in eval's files text.")] = None,
    gold_field: Annotated[str, typer.Option(help="Field with the gold answer.")] = "gold",
) -> None:
    """Judge answers from any source: correct, wrong, no answer, time-out and error are five different verdicts."""
    from hacpo_grading.judge import Judge
    from hacpo_mega.commands.grade import grade as grade_answers

    options = parse_options(option or [])
    add_current_folder()
    with Judge(reward, workers, timeout_s, options=options, start_timeout_s=start_timeout_s) as judge:
        _print_findings(grade_answers(file, out, judge, explain, pred_field, gold_field))


def _print_findings(*all_findings: "Findings") -> None:
    """Prints the lines of all; exit code 1 unless all are sound."""
    say("\n".join(line for findings in all_findings for line in findings.lines))
    if not all(findings.is_sound for findings in all_findings):
        raise typer.Exit(1)
