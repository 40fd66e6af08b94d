"""The server of `hacpo-mega watch`: nobody without the token, no page of another name, one line for bad input."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from watched_run import WatchedRun

from hacpo_mega.logbook.files.rollout_log import read_rollouts
from hacpo_mega.watch import views_of, watch
from hacpo_mega.watch.answers import Judges
from hacpo_mega.watch.runs import Runs
from hacpo_mega.watch.server import listen, make_app

TOKEN = "t0ken"
BASE = "http://127.0.0.1:8123"
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "\u2028\u2029\x00\x1b]52;c;x\x07",
    "'\"`;--&lt;&#x3c;%3Cscript%3E",
    "\ud800 lone",
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    found = WatchedRun(tmp_path_factory.mktemp("runs") / "run", num_steps=6)
    for step in range(1, 4):
        found.add_metrics(step)
        found.add_answers(step, HOSTILE, per_prompt=4)
    return found


@pytest.fixture(scope="module")
def app(run: WatchedRun) -> Iterator[ASGIApp]:
    runs = Runs([run.folder], print)
    for one in runs:
        while one.index.extend():
            pass
    with Judges() as judges:
        yield make_app(views_of(runs, judges), runs, TOKEN, 8123)


@pytest.fixture
def client(app: ASGIApp) -> TestClient:
    return TestClient(app, base_url=BASE)


def routes(client: TestClient) -> list[str]:
    (run,) = client.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    client.cookies.clear()
    base = f"/api/runs/{run['id']}"
    of_run = ("metrics", "metrics?names=agent/qwen/lr", "job", "verdicts", "answers", "export", "answers/1.0.0.qwen.0")
    of_all = ("runs", "catalogue", f"compare?runs={run['id']}", "events?after=0")
    return [*(f"/api/{one}" for one in of_all), *(f"{base}/{one}" for one in of_run)]


def test_every_route_needs_the_token_and_answers_with_it(client: TestClient) -> None:
    for path in [*routes(client), "/", "/page/app.js", "/nothing"]:
        for headers in (
            {},
            {"Authorization": "Bearer other"},
            {"Cookie": "hacpo_watch_8123=other"},
            {"Authorization": ""},
        ):
            refused = client.get(path, headers=headers)
            assert refused.status_code == 401 and set(refused.json()) == {"error"}
            assert "set-cookie" not in refused.headers
    for path in routes(client):
        found = client.get(path, headers={"Authorization": f"Bearer {TOKEN}"})
        assert found.status_code == 200, path
        for answer in (found, refused):
            policy = answer.headers["content-security-policy"]
            assert "default-src 'self'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert found.headers["content-type"].split(";")[0] in ("application/json", "application/x-ndjson")


def test_the_token_becomes_a_cookie_that_scripts_cannot_read(client: TestClient) -> None:
    given = client.get(f"/api/runs?token={TOKEN}").headers["set-cookie"]
    assert given.startswith(f"hacpo_watch_8123={TOKEN};") and "HttpOnly" in given and "SameSite=Strict" in given
    assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8123", "127.0.0.1.evil.example", "", "localhost.evil:1"]
)
def test_another_name_of_this_machine_sees_nothing(client: TestClient, host: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": host}
    assert client.get("/api/runs", headers=headers).status_code == 403
    assert client.get("/api/runs", headers=headers | {"Host": "localhost:9000"}).status_code == 200


def test_hostile_answers_come_back_as_data(client: TestClient, run: WatchedRun) -> None:
    client.headers["Authorization"] = f"Bearer {TOKEN}"
    base = routes(client)[-1].rpartition("/answers/")[0]
    expected = {a["text"] for p in read_rollouts(run.folder, 1) for a in p["answers"]}
    rows = client.get(f"{base}/answers").json()["rows"]
    found = {client.get(f"{base}/answers/{row['key']}").json()["text"] for row in rows}
    exported = client.get(f"{base}/export")
    lines = exported.content.split(b"\n")[:-1]
    assert found == {json.loads(line)["text"] for line in lines} == expected == set(HOSTILE)
    assert len(lines) == 18 and "attachment" in exported.headers["content-disposition"]


@pytest.mark.parametrize(
    "query",
    [
        *("metrics?after=-1&names=a", "metrics?after=x&names=a", f"metrics?names={'a,' * 201}", "answers?page=1e9"),
        *("answers?filter=[", "answers?filter=[]", 'answers?filter={"x":1}', "answers?sort=-secret", "answers/1.2"),
        *('answers?filter={"reward":[1e999,0]}', "answers?sort=step;drop table answers", 'export?filter={"regex":"("}'),
        *("answers?filter=" + "[" * 2000, "answers/9999999999999999999.0.0.qwen.0"),
    ],
)
def test_bad_requests_are_one_line(client: TestClient, query: str) -> None:
    client.headers["Authorization"] = f"Bearer {TOKEN}"
    base = routes(client)[-1].rpartition("/answers/")[0]
    refused = client.get(f"{base}/{query}")
    assert refused.status_code == 400 and "\n" not in refused.json()["error"]
    assert client.get("/api/runs/none/job").status_code == 400


@pytest.mark.parametrize("name", ["..%2findex.py", "%2e%2e%2fserver.py", "server.py", ".hidden.js", "a%00.js"])
def test_only_the_pages_files_are_served(client: TestClient, name: str) -> None:
    found = client.get(f"/page/{name}", headers={"Authorization": f"Bearer {TOKEN}"})
    assert found.status_code == 404 and b"import" not in found.content


def test_bad_folders_and_ports_are_one_line(run: WatchedRun, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[list[Path], int, str]] = [
            ([tmp_path / "empty"], 0, "holds no run"),
            ([run.folder, tmp_path / "none"], 0, "is no folder"),
            ([run.folder], port, f"port {port} cannot be had .Address already in use."),
            ([run.folder], 70_000, "port 70000 cannot be had"),
        ]
        for folders, number, says in cases:
            with pytest.raises(ValueError, match=says) as error:
                watch(folders, number, print)
            assert "\n" not in str(error.value)
    with listen(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.nightly
def test_a_run_is_followed_while_it_is_written(run: WatchedRun) -> None:
    """The command itself: the address, a step within two seconds, an end by Ctrl-C."""
    command = [sys.executable, "-m", "hacpo_mega.cli", "watch", str(run.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            address = re.search(r"127.0.0.1:(\d+)/\?token=(\S+)", process.stdout.readline())
            connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=60)

            def ask(path: str) -> Any:
                connection.request("GET", path, headers={"Authorization": f"Bearer {address[2]}"})
                return json.loads(connection.getresponse().read())

            seen = 0
            while (found := ask("/api/runs")[0])["last_step"] != 3 or found["note"]:
                seen = ask(f"/api/events?after={seen}")["seq"]
            seen = ask("/api/events?after=0")["seq"]
            run.add_metrics(4)
            run.add_answers(4, ["a new answer"])
            while ask("/api/runs")[0]["last_step"] != 4:
                changed = ask(f"/api/events?after={seen}")
                seen = changed["seq"]
                assert changed["changed"] == [found["id"]]
            connection.close()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stdout.read()
