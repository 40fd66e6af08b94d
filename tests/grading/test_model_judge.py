"""A judge behind a server: what it says is the reward, and what it does not say is learnt from by nobody."""

import contextlib
import gzip
import json
import math
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from judged import questions

from hacpo_grading.graders import model_judge
from hacpo_grading.graders.model_judge import ModelJudge, score_of
from hacpo_grading.judge import Judge
from hacpo_grading.judgement import Stop, Verdict
from hacpo_grading.workers import guarded_workers
from hacpo_grading.workers.grader_calls import Unjudged


class _Server(ThreadingHTTPServer):
    """Answers by what the question holds; counts, and knows how many were there at once."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.seen: list[str] = []
        self.keys: set[str | None] = set()
        self.open = self.most_open = 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["messages"][0]["content"]
        with self.server.lock:
            self.server.seen.append(text)
            self.server.keys.add(self.headers["Authorization"])
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)
            is_first = self.server.seen.count(text) == 1
        time.sleep(30.0 if "hang" in text else 0.2)
        with self.server.lock:
            self.server.open -= 1
        status = 503 if "busy at first" in text and is_first else 404 if "unknown" in text else 200
        if hostile := next((self.HOSTILE[word] for word in self.HOSTILE if word in text), None):
            return hostile(self)
        ended = "length" if "at length" in text else "stop"
        words = "I cannot say." if "nonsense" in text else f"Good. Score: {0.0 if 'wrong' in text else 1.0}"
        choice = {"message": {"content": words}, "finish_reason": ended}
        reply = {"choices": [choice]} if "no chat" not in text else {"detail": "no"}
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b" " * 2**16)

    def _drop_by_drop(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b" ")
                time.sleep(0.3)

    def _bomb(self) -> None:
        body = gzip.compress(b" " * 2**28)
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _elsewhere(self) -> None:
        self.send_response(307)
        self.send_header("Location", self.server.url + "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _deep(self) -> None:
        body = b"[" * 10**6
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    HOSTILE: ClassVar = {
        "endless": _endless,
        "drop by drop": _drop_by_drop,
        "bomb": _bomb,
        "elsewhere": _elsewhere,
        "deep": _deep,
    }

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server():
    with _Server() as server:
        yield server
        server.shutdown()


def judge_of(server, **options) -> Judge:
    """A judge that asks the server."""
    known = {
        "url": server.url,
        "model": "judge",
        "template": "{prompt} {gold} {answer}",
        "attempts": 2,
        "request_s": 2.0,
    }
    return Judge("model", options=known | options)


@pytest.mark.nightly
def test_many_are_asked_at_once_and_only_what_is_said_counts(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    texts = [f"answer {i}" for i in range(58)]
    texts += ["wrong", "busy at first", "nonsense", "unknown", "no chat", "hang"]
    with judge_of(server, api_key_env="JUDGE_KEY", cache=str(tmp_path)) as judge:
        found = judge.judge(questions(["p"] * 64, ["g"] * 64, texts, [Stop.EOS] * 64))
        errors = judge.take_report().errors
        again = judge.judge(questions(["p"] * 60, ["g"] * 60, texts[:60], [Stop.EOS] * 60))
    assert [judgement.reward for judgement in found[:60]] == [1.0] * 58 + [0.0, 1.0] == [j.reward for j in again]
    assert [judgement.verdict for judgement in found[60:]] == [Verdict.ERROR] * 4
    assert all(math.isnan(judgement.reward) for judgement in found[60:])
    assert server.most_open > 32 and server.keys == {"Bearer secret"}
    for part in ("no score from 0 to 1: 'I cannot say.'", "status 404", "no reply of a chat", "(TimeoutError"):
        assert sum(part in error for error in errors) == 1, (part, errors)
    assert server.seen.count("p g answer 0") == 1 and server.seen.count("p g busy at first") == 2
    asked = len(server.seen)
    with judge_of(server, cache=str(tmp_path)) as other:  # another rank, or a run that goes on
        assert [j.reward for j in other.judge(questions(["p"] * 59, ["g"] * 59, texts[:59], [Stop.EOS] * 59))] == [
            1.0
        ] * 58 + [0.0]
    assert len(server.seen) == asked


def test_a_judge_remembers_a_bounded_number_of_scores(monkeypatch):
    """A run of many steps asks for millions, and a grading process has 2 GiB."""
    monkeypatch.setattr(model_judge, "MAX_SCORES", 3)
    judge = ModelJudge("http://127.0.0.1:1/v1", "judge")
    for number in range(8):
        judge._store(str(number), 0.5, "")
        assert judge._cached(str(number)) == 0.5 and len(judge._scores) <= 3


@pytest.mark.nightly
def test_a_server_that_does_not_mean_well_leaves_answers_unjudged_in_time(server, monkeypatch):
    """Text without end, fast and slow, packed text of 256 MiB, another address, brackets a million deep."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    errors = {}
    # A limit that no other reply reaches on a crowded machine, and a short one for what never ends.
    for texts, request_s in ((["endless", "bomb", "elsewhere", "deep"], 60.0), (["drop by drop"], 1.0)):
        with judge_of(server, attempts=1, api_key_env="JUDGE_KEY", request_s=request_s) as judge:
            found = judge.judge(questions(["p"] * len(texts), ["g"] * len(texts), texts, [Stop.EOS] * len(texts)))
            errors |= judge.take_report().errors
        assert all(math.isnan(judgement.reward) for judgement in found)
    parts = ("more than 4,194,304 bytes", "gave no reply (TimeoutError", "status 307", "no reply of a chat")
    for part, number in zip(parts, (2, 1, 1, 1), strict=True):
        assert sum(count for error, count in errors.items() if part in error) == number, (part, errors)
    assert len(server.seen) == 5, "nobody followed it elsewhere, where the key would have gone"


def test_slow_and_cut_replies_leave_answers_unjudged(server, monkeypatch):
    """The gold was judged before: an answer whose worker is ended would have earned 0 for a slow server.

    The last score of a reply that was cut may be one that the judge was about to reject.
    """
    monkeypatch.setattr(guarded_workers, "WALL_FACTOR", 0.0)
    monkeypatch.setattr(guarded_workers, "WALL_GRACE_S", 0.5)
    with judge_of(server, request_s=0.4) as judge:
        sound, slow = judge.judge(questions(["p"] * 2, ["g"] * 2, ["g", "drop by drop"], [Stop.EOS] * 2))
        error = judge.take_report().first_error
        (cut,) = judge.judge(questions(["p"], ["g"], ["at length"], [Stop.EOS]))
        said = judge.take_report().first_error
    assert sound.reward == 1.0 and math.isnan(slow.reward) and "gave no reply (TimeoutError" in error
    assert math.isnan(cut.reward) and "the reply was cut: raise option max_tokens" in said


def test_a_server_that_is_not_there_leaves_all_unjudged():
    options = {"url": "http://127.0.0.1:9/v1", "model": "judge", "attempts": 1}
    with Judge("model", options=options) as judge:
        found = judge.judge(questions(["p"] * 2, ["g"] * 2, ["a", "b"], [Stop.EOS] * 2))
        assert all(math.isnan(judgement.reward) for judgement in found)
        assert "http://127.0.0.1:9/v1/chat/completions gave no reply (ConnectError" in judge.take_report().first_error


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 1", 1.0),
        ("Score: 0.5\n", 0.5),
        ("**Score:** 0", 0.0),
        ("score 1, no: Score: .25", 0.25),
        ("SCORE = 1.0.", 1.0),
        ("Score: 0.5/1.", 0.5),
        ("<think>\nIf it were so, Score: 1.\n</think>\nIt is not. Score: 0", 0.0),
    ],
)
def test_the_last_score_of_a_reply_counts(reply, score):
    assert score_of(reply) == score


@pytest.mark.parametrize(
    "reply",
    [
        *("", "1", "Score: 10", "Score: 1.5", "Score: 7", "Score: -1", "the score is high", "Score: 0.5.5"),
        *("Score: 1/10", "Score: 1 out of 5", "Score: 1%", "Score: 0-1", "Score: 1 (of 10)", "Score: 0,5"),
        "Score: 1 is for a right answer. Score: 8",
        "<think>\nIf it were so, Score: 1. But",
    ],
)
def test_what_is_no_score_is_not_taken_for_one(reply):
    with pytest.raises(Unjudged):
        score_of(reply)


def test_a_template_is_utf_8_whatever_the_locale(tmp_path):
    """Under one such as zh_CN.GBK the judge would be asked something else."""
    (tmp_path / "template").write_text("Aufgabe \u00fc: {prompt} {answer}", encoding="utf-8")
    code = "import sys; from hacpo_grading.graders.model_judge import ModelJudge\n"
    code += "print(ascii(ModelJudge('http://judge/v1', 'm', sys.argv[1])._template))"
    variables = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, f"@{tmp_path}/template"],
        capture_output=True,
        text=True,
        env=variables,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("'Aufgabe \\xfc: {prompt} {answer}'\n", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "judge:8000"}, "must be an address that begins with http:// or https://"),
        ({"template": "{prompt}"}, "template does not hold {answer}"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "the environment variable NOT_SET_ANYWHERE is not set"),
        ({"attempts": 0}, "must be a whole number from 1"),
        ({"extra_body": "top_p=1"}, "extra_body is no JSON: Expecting value"),
        ({"extra_body": "[1]"}, "must be a JSON object of request fields, found '\\[1\\]'"),
        ({"extra_body": '{"n": 4, "model": "m"}'}, "extra_body has model, n, which the judge decides"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said.replace("{", r"\{")):
        ModelJudge(**({"url": "http://judge/v1", "model": "m"} | options))
