"""The HTTP server of `hacpo-mega watch`: on the loopback interface, for whoever has the token, and for nobody else.

Other users of the machine reach the port, too, and so does any page in the user's browser. So every request needs the
token (in the address at first, then in a cookie that scripts cannot read and other sites cannot send). It also needs a
Host header that names this machine, since an attacker may let a name of his own resolve to it (DNS rebinding). Answers
of models are data: the page's policy allows no script but the files that come with it. Elsewhere: the data (views.py,
answers.py).
"""

import asyncio
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hacpo_mega.watch.index import Gone
from hacpo_mega.watch.runs import Runs

PAGE = Path(__file__).parent / "page"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
POLL_S, LOOK_S = 20.0, 0.2  # seconds that a request waits for changes at most, and between two looks
MEDIA_TYPES = {
    **{".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"},
    **{".png": "image/png", ".json": "application/json", ".txt": "text/plain"},
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Download(NamedTuple):
    """A file that the browser saves: its name, and its lines."""

    name: str
    lines: Iterator[bytes]


View = Callable[[Request], Any]
Endpoint = Callable[[Request], Awaitable[Response]]


def listen(port: int) -> socket.socket:
    """A listening socket of the loopback interface; port 0: any free one. ValueError for a port that cannot be had."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"port {port} cannot be had ({why}): leave --port out for a free one, or give another"
        ) from error
    return listener


def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Answers requests until the process is told to end."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run(sockets=[listener])


def make_app(views: Mapping[str, View], runs: Runs, token: str, port: int) -> ASGIApp:
    """The application behind its guard: a JSON answer for every view, the page, and the changes of `runs`.

    views   by path, functions of a request that return something for json.dumps, or a Download
    """
    routes = [
        *(Route(path, _view_endpoint(view)) for path, view in views.items()),
        Route("/api/events", _events_endpoint(runs)),
        *(Route(path, _page_file) for path in ("/", "/page/{name}")),
    ]
    return Guard(Starlette(routes=routes), token, f"hacpo_watch_{port}")


class Guard:
    """Lets requests with the token through to an application, and answers all others with one line."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, by the protocol of ASGI."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        given = QueryParams(scope["query_string"]).get("token")
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        response = None
        if name not in HOSTS:
            response = _refusal(403, f"this server answers as {', '.join(HOSTS)} alone")
        elif not any(map(self._is_token, (given, bearer, Request(scope).cookies.get(self._cookie)))):
            response = _refusal(401, "the token is missing or another: open the address that hacpo-mega watch printed")

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                for header, value in HEADERS.items():
                    added[header] = value
                if response is None and self._is_token(given):
                    cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"
                    added.append("set-cookie", cookie)
            await send(message)

        await (response or self._app)(scope, receive, send_guarded)

    def _is_token(self, given: str | None) -> bool:
        return secrets.compare_digest((given or "").encode(errors="replace"), self._token.encode())


def _refusal(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status)


async def _page_file(request: Request) -> Response:
    """A file of the page, all of which come with the package."""
    name = request.path_params.get("name", "index.html")
    media_type = MEDIA_TYPES.get(f".{name.rpartition('.')[2]}")
    file = PAGE / name
    if media_type is None or "/" in name or name.startswith(".") or not file.is_file():
        return _refusal(404, "there is no such page")
    return Response(file.read_bytes(), media_type=media_type)


def _view_endpoint(view: View) -> Endpoint:
    """Answers with a view, in a thread, since it reads files; its ValueError is the answer to a bad request."""

    def answer(request: Request) -> Response:
        try:
            content, status = view(request), 200
        except Gone as error:
            content, status = {"error": str(error)}, 410
        except ValueError as error:
            content, status = {"error": str(error)}, 400
        if isinstance(content, Download):
            headers = {"Content-Disposition": f'attachment; filename="{content.name}"'}
            return StreamingResponse(content.lines, headers=headers, media_type="application/x-ndjson")
        # A lone surrogate in an answer has no UTF-8; its backslash form is the JSON escape of it.
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return Response(text.encode(errors="backslashreplace"), status, media_type="application/json")

    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(answer, request)

    return endpoint


def list_in(request: Request, key: str) -> list[str]:
    """The names in a parameter of a request, which are separated by commas."""
    return [name for name in request.query_params.get(key, "").split(",") if name]


def number_in(request: Request, key: str) -> int | None:
    """A parameter as a whole number, None without it. ValueError for anything else."""
    text = request.query_params.get(key)
    if text in (None, ""):
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ValueError(f"{key} is {text[:20]!r}, needs a whole number")
    return int(text)


def selection_in(request: Request) -> tuple[dict[str, Any], str]:
    """The selection of answers that a request asks for, and their order. ValueError for no JSON object."""
    text = request.query_params.get("filter") or "{}"
    try:
        selection = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"filter is no JSON: {error}") from error
    if not isinstance(selection, dict):
        raise ValueError("filter needs an object")
    return selection, request.query_params.get("sort") or "-step"


def _events_endpoint(runs: Runs) -> Endpoint:
    """Answers as soon as there are more changes than the parameter `after` (long polling), or after POLL_S."""

    async def endpoint(request: Request) -> Response:
        try:
            after = number_in(request, "after") or 0
        except ValueError as error:
            return _refusal(400, str(error))
        loop = asyncio.get_running_loop()
        end_s = loop.time() + POLL_S
        while not (changed := runs.changed_since(after)) and loop.time() < end_s:
            await asyncio.sleep(LOOK_S)
        return JSONResponse({"seq": runs.num_changes, "changed": changed})

    return endpoint
