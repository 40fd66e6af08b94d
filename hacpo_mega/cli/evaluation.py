"""`hacpo-mega eval` and `hacpo-mega serve`. Imports of what is heavy are inside functions, as in app.py."""

import os
import sys
from dataclasses import replace
from errno import ECONNREFUSED
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket
from typing import Annotated

import typer
from click import HelpFormatter

from hacpo_mega.cli.start import Trust, add_current_folder, fetch_missing, is_rank_of
from hacpo_mega.cluster.machine.environment import inside_a_job, prepare_environment, reads_first
from hacpo_mega.config.describe import describe_fields
from hacpo_mega.evaluation.keys import EvaluationReward, EvaluationTable, read_words
from hacpo_mega.models.files.hub import given_path, model_folder
from hacpo_mega.models.files.visible import say


class WithKeys(typer.core.TyperCommand):
    """A command whose help lists the keys of its table, too."""

    def format_epilog(self, ctx: typer.Context, formatter: HelpFormatter) -> None:
        with formatter.section("Keys"):
            formatter.write_dl([(field.key, field.sentence) for field in describe_fields(EvaluationTable)])


def evaluate_model(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL [FILE|KEY=VALUE]",
            help="A folder, ORG/NAME or RUN/checkpoints/step_N/NAME; benchmarks of any layout; keys.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of answers and evaluation.json; an old one is continued.")] = ...,
    trust: Trust = False,
) -> None:
    """Score a model on benchmarks: avg@k, best@k, pass@k, maj@k with intervals. Every answer is kept; resumable."""
    (name, *files), table, notices = read_words(words)
    for notice in notices if reads_first() else ():
        say(notice, file=sys.stderr)
    prepare_environment()  # before the import of torch, which reads its log levels then
    if trust:
        add_current_folder()
    from hacpo_mega.evaluation.answers import require_place
    from hacpo_mega.evaluation.settings import ask, benchmarks_of, require_judge, require_weights

    model = model_folder(given := given_path(name))
    settings = ask(table, model, benchmarks_of(table, list(map(Path, files)), model), trust=trust)
    if not inside_a_job():
        require_judge(settings)
        require_place(out)
        fetch_missing([given])  # last: after all cheap checks
        settings = replace(settings, model=model_folder(given))
    if reads_first():
        require_weights(settings)
    if not is_rank_of(table.tp * table.engines, "hacpo_mega.evaluation.evaluate"):
        return
    from hacpo_mega.evaluation.evaluate import evaluate
    from hacpo_mega.evaluation.table import print_table

    if evaluation := evaluate(settings, out, table.tp, table.engines, table.reward.num_workers):
        print_table(evaluation)


PROBE_S = 5.0  # limit of a connection to a socket file
# Keys of an evaluation that an endpoint reads, too.
SERVED = {"tp", "seed", "temperature", "max_prompt_tokens", "max_answer_tokens", "chat_template", "system_prompt"}
SERVED |= {"chat_template_kwargs"}


def serve(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL [KEY=VALUE]",
            help=f"A folder, ORG/NAME or RUN/checkpoints/step_N/NAME; keys of eval: {', '.join(sorted(SERVED))}.",
        ),
    ],
    socket: Annotated[Path | None, typer.Option(help="A socket file in place of a port of this machine.")] = None,
    trust: Trust = False,
) -> None:
    """Serve a model over HTTP as a run does to agent programs: OpenAI's chat route and vLLM's token route."""
    (name, *others), table, _ = read_words(words)
    if others or (unread := sorted(table.model_fields_set - SERVED)):
        refused = others[0] if others else unread[0]
        raise ValueError(f"{refused}: serve takes one model and the keys {', '.join(sorted(SERVED))}")
    prepare_environment()  # before the import of torch, which reads its log levels then
    from hacpo_mega.evaluation.settings import NO_ENVIRONMENT, ask, require_weights

    given = given_path(name)
    if not inside_a_job():
        if socket is not None:
            _require_free(socket)
        fetch_missing([given])
    # Nothing is judged or played here, so no trust is required for a run's code for it.
    unused = {"environment": NO_ENVIRONMENT, "reward": EvaluationReward(kind="exact")}
    settings = ask(table.model_copy(update=unused), model_folder(given), (), trust=trust)
    if reads_first():
        require_weights(settings)
    if not is_rank_of(table.tp, "hacpo_mega.commands.serve"):
        return
    from hacpo_mega.commands import serve as endpoint

    folder = Path(os.path.abspath(name))  # "." has no name
    endpoint.serve(settings, folder.name, tp=table.tp, socket=socket, temperature=table.temperature)


def _require_free(path: Path) -> None:
    """Removes a socket file that a killed endpoint has left. ValueError, one line, if none can be made there."""
    with Socket(AF_UNIX) as probe, Socket(AF_UNIX) as trial:
        probe.settimeout(PROBE_S)
        try:
            if path.is_socket() and probe.connect_ex(str(path)) == ECONNREFUSED:
                path.unlink()
            trial.bind(str(path))
        except OSError as error:
            raise ValueError(f"--socket {path}: {error.strerror or error}; give another name") from error
    path.unlink()
