"""`hacpo-mega watch RUN ...`: a page on the loopback interface that follows runs from their folders alone."""

import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from starlette.requests import Request

from hacpo_mega.report.catalogue import catalogue
from hacpo_mega.watch.answers import Judges, exported, one_answer, page_of_answers
from hacpo_mega.watch.runs import Runs, Watched
from hacpo_mega.watch.server import Download, View, list_in, listen, make_app, number_in, selection_in, serve
from hacpo_mega.watch.views import VerdictViews, comparison, curves, job, run_list, study, study_list


def watch(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Shows runs until the process is interrupted; `say` gets the lines for the user, the page's address first.

    port   of the loopback interface; 0: a free one

    ValueError, one line, for a folder that holds no run, and for a port that cannot be bound.
    """
    runs = Runs(folders, say)
    token = secrets.token_urlsafe(24)
    with listen(port) as listener, Judges() as judges:
        port = listener.getsockname()[1]
        say(f"http://127.0.0.1:{port}/?token={token}")
        say(f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then the same address")
        ends = threading.Event()
        follower = threading.Thread(target=runs.follow, args=(ends,), name="watch", daemon=True)
        follower.start()
        with suppress(KeyboardInterrupt):
            serve(make_app(views_of(runs, judges), runs, token, port), listener)
        ends.set()
        follower.join(5.0)


def views_of(runs: Runs, judges: Judges) -> Mapping[str, View]:
    """The functions that answer the page's requests for data, by path."""
    verdicts, base = VerdictViews(), "/api/runs/{run}"

    def run(request: Request) -> Watched:
        return runs[request.path_params["run"]]

    return {
        "/api/catalogue": lambda _: catalogue(),
        "/api/runs": lambda _: run_list(runs),
        "/api/studies": lambda _: study_list(runs),
        "/api/studies/{study}": lambda request: study(runs, request.path_params["study"]).content(
            request.query_params.get("reference") or None
        ),
        "/api/studies/{study}/answers": lambda request: study(runs, request.path_params["study"]).answers(
            *(request.query_params.get(key, "") for key in ("benchmark", "verdict", "text")),
            number_in(request, "page") or 0,
        ),
        "/api/compare": lambda request: comparison([runs[name] for name in list_in(request, "runs")]),
        f"{base}/metrics": lambda request: curves(
            run(request),
            list_in(request, "names"),
            *(number_in(request, key) for key in ("after", "generation")),
            number_in(request, "every") or 1,
        ),
        f"{base}/job": lambda request: job(run(request)),
        f"{base}/verdicts": lambda request: verdicts.of(run(request)),
        f"{base}/answers": lambda request: page_of_answers(
            run(request).index, *selection_in(request), number_in(request, "page") or 0
        ),
        f"{base}/answers/{{key:path}}": lambda request: one_answer(
            run(request).index, request.path_params["key"], judges, run(request).config.get("reward")
        ),
        f"{base}/export": lambda request: Download(
            f"answers.{run(request).id}.jsonl", exported(run(request).index, *selection_in(request))
        ),
    }
