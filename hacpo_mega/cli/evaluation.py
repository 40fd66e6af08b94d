"""`hacpo-mega eval`. Imports of what is heavy are inside functions, as in app.py."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hacpo_grading.registry import GRADERS
from hacpo_mega.cli.start import Trust, fetch_missing, is_one_of
from hacpo_mega.cluster.machine.environment import inside_a_job, prepare_environment, reads_first
from hacpo_mega.models.files.hub import given_path, model_folder


def evaluate_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, ORG/NAME, RUN/checkpoints/step_N/NAME.")],
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Benchmarks of any layout.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of answers and evaluation.json; an old one is continued.")] = ...,
    suite: Annotated[str | None, typer.Option(help="'paper': its seven benchmarks, found in --data.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with a suite's files.")] = None,
    samples: Annotated[int, typer.Option("--samples", "-k", min=1, help="Answers per problem.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; 0 for one answer, else 1.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems of each benchmark.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longer prompts are dropped, counted.")] = None,
    chat_template: Annotated[bool | None, typer.Option("--chat-template/--no-chat-template", help="Apply it.")] = None,
    template_arg: Annotated[list[str] | None, typer.Option(help="KEY=VALUE, such as enable_thinking=false.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="The system message of the chat template.")] = None,
    prompt_template: Annotated[str | None, typer.Option(help="Text with {prompt}, or @FILE that holds it.")] = None,
    stop_text: Annotated[str | None, typer.Option(help="Judge an answer only up to this text.")] = None,
    reward: Annotated[str | None, typer.Option(help=f"{', '.join(GRADERS)}, or file.py:function.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of the judge, such as rel_tol=0.01.")] = None,
    success: Annotated[str | None, typer.Option(help="A part's name, or the least reward of a success.")] = None,
    prompt_field: Annotated[str | None, typer.Option(help="Field of a row with the prompt, in every FILE.")] = None,
    gold_field: Annotated[str | None, typer.Option(help="Field of a row with the gold answer.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampled answers.")] = 0,
    trust: Trust = False,
    tp: Annotated[int, typer.Option(min=1, help="Processes of one engine.")] = 1,
    engines: Annotated[int, typer.Option(min=1, help="Engines that share the problems.")] = 1,
    judges: Annotated[int, typer.Option(min=1, help="Grading processes of each engine.")] = 1,
) -> None:
    """Score a model on benchmarks: avg@k, best@k, pass@k, maj@k with intervals. Every answer is kept; resumable."""
    prepare_environment()  # torch reads how loud it may be when it is imported
    from hacpo_mega.evaluation.answers import require_place
    from hacpo_mega.evaluation.settings import Wording, ask, benchmarks_of, require_judge, require_weights

    given, fields = given_path(model), {"prompt_field": prompt_field, "gold_field": gold_field}
    settings = ask(
        model_folder(given),
        benchmarks_of(files or [], suite, data, samples, temperature, limit, model=model_folder(given), **fields),
        Wording(chat_template, template_arg or [], system_prompt, prompt_template),
        is_suite=suite is not None,
        stop_text=stop_text,
        reward=reward,
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_tokens,
        seed=seed,
        options=option or [],
        success=success,
        trust=trust,
    )
    if not inside_a_job():
        require_judge(settings)
        require_place(out)
        fetch_missing([given])  # last: after all cheap checks
        settings = replace(settings, model=model_folder(given))
    if reads_first():
        require_weights(settings)
    if not is_one_of(tp * engines, "hacpo_mega.evaluation.evaluate"):
        return
    from hacpo_mega.evaluation.evaluate import evaluate
    from hacpo_mega.evaluation.table import print_table

    if evaluation := evaluate(settings, out, tp, engines, judges):
        print_table(evaluation)
