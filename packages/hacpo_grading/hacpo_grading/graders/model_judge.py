"""A language model behind an OpenAI-compatible server as the judge of an answer (kind "model").

    [reward]
    kind = "model"
    timeout_s = 60.0
    options = {url = "http://judge:8000/v1", model = "Qwen/Qwen3-32B", cache = "runs/judge_cache"}

The server is asked for a score between 0 and 1 at temperature 0, many answers at once; the last `Score: NUMBER` of its
reply, behind its thinking, is the reward. A reply without one, a reply that was cut, which may quote a score that it
would have rejected, and a server that is out of reach or overloaded after all attempts leave the answer unjudged: the
judge is at fault, and a 0 would bias the capability of the agent. So a server that is gone ends the run by
reward.max_unjudged_share, and no update uses answers without a score.
"""

import asyncio
import hashlib
import json
import os
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from hacpo_grading.graders.options import ATTEMPTS, MODEL_OPTIONS, REQUEST_S, WAIT_S, wrong_value
from hacpo_grading.texts.answer_text import after_thinking
from hacpo_grading.workers.grader_calls import Unjudged

TEMPLATE = """You grade an answer to a question. Compare it with the reference, not with your own opinion.

Question:
{prompt}

Reference answer:
{gold}

Answer to grade:
{answer}

Say in a sentence what is right or wrong. End with a line "Score: X", where X is 1 for a right answer, 0 for a wrong
one, or a number between."""
# A score in a reply, and its scale unless that is 1: "1/10" is no score.
SCALE = r"\s*(?:%|\(?(?:/|(?:out )?of)\s*(?!1(?:\.0*)?(?![.\d]))\d)|,\d"
SCORE = re.compile(rf"score[*_:=\s]{{1,8}}([-+.\d]*\d)({SCALE})?", re.IGNORECASE)
NUMBER = re.compile(r"[01](?:\.\d+)?|\.\d+")
FIELDS = re.compile(r"\{(prompt|answer|gold)\}")
FIRST_WAIT_S = 0.5
MOST_SHOWN = 200  # characters of a reply that an error quotes
MOST_REPLY_BYTES, MOST_AT_ONCE = 4 * 2**20, 2**16
MAX_SCORES = 2**17  # scores that a process remembers, 30 MB of them: a long run asks for millions
RESERVED = {"model", "messages", "max_tokens", "stream", "n"}  # of a request, by the judge itself
RETRIED = (408, 425, 429)  # and 500 and above: statuses after which another attempt may succeed


class ModelJudge:
    """An async grader; one object serves one grading process, with as many requests at once as it is given answers.

    url           of the server's API, ending in /v1
    model         the name that the server knows it by
    template      text with {prompt}, {gold} and {answer}; an @FILE that holds it
    max_tokens    of the reply
    attempts      how often a request is made before the answer stays unjudged
    request_s     seconds of one attempt
    api_key_env   environment variable that holds the key; none: no key is sent
    cache         folder of replies by content: the same question is asked once by all ranks and runs that share it
    extra_body    more fields of every request, as JSON text: what a server knows beyond the standard
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str = TEMPLATE,
        max_tokens: int = 512,
        attempts: int = ATTEMPTS,
        request_s: float = REQUEST_S,
        api_key_env: str = "",
        cache: str = "",
        extra_body: str = "",
    ) -> None:
        """ValueError for an option that cannot be used; the server is not asked yet."""
        numbers = {"max_tokens": max_tokens, "attempts": attempts, "request_s": request_s}
        if problem := wrong_value(MODEL_OPTIONS, {"url": url, **numbers}):
            raise ValueError(problem)
        if template.startswith("@"):
            template = Path(template[1:]).read_text(encoding="utf-8")
        if missing := {"prompt", "answer"} - set(FIELDS.findall(template)):
            raise ValueError(f"template does not hold {', '.join(f'{{{name}}}' for name in sorted(missing))}")
        headers = {}
        if api_key_env:
            if not (key := os.environ.get(api_key_env)):
                raise ValueError(f"api_key_env: the environment variable {api_key_env} is not set")
            headers = {"Authorization": f"Bearer {key}"}
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model, self._template, self._max_tokens = model, template, max_tokens
        self._attempts, self._request_s, self._headers = attempts, request_s, headers
        self._cache = Path(cache) if cache else None
        self._scores: dict[str, float] = {}
        self._tls = httpx.create_ssl_context(trust_env=False)  # once: 64 of them take seconds
        self._extra_body = _fields_of(extra_body) if extra_body else {}

    async def __call__(self, prompt: str, answer: str, gold: str) -> float:
        """The score of an answer. Unjudged where the server gives none."""
        texts = {"prompt": prompt, "answer": answer, "gold": gold}
        content = FIELDS.sub(lambda field: texts[field[1]], self._template)  # in one pass: an answer may hold braces
        request = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": self._max_tokens,
            **self._extra_body,
        }
        key = hashlib.sha256(json.dumps([self._url, request]).encode()).hexdigest()
        if (score := self._cached(key)) is None:
            reply = await self._reply(request)
            score = score_of(reply)
            self._store(key, score, reply)
        return score

    async def _reply(self, request: dict) -> str:
        problem = ""
        # trust_env: a proxy or a .netrc of this machine is not where the user said that answers go
        settings = {"timeout": self._request_s, "headers": self._headers, "verify": self._tls, "trust_env": False}
        async with httpx.AsyncClient(**settings) as client:
            for attempt in range(self._attempts):
                if attempt:  # at random times, or all requests would come again at once
                    await asyncio.sleep(min(WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempt, 99)) * random.uniform(0.5, 1.0))
                try:
                    status, text = await asyncio.wait_for(self._response(client, request), self._request_s)
                except (httpx.HTTPError, TimeoutError) as error:
                    problem = f"{type(error).__name__} {error}".strip()
                    continue
                if status == httpx.codes.OK:
                    return _content(text)
                problem = f"status {status}: {text[:MOST_SHOWN]}"
                if status < 500 and status not in RETRIED:
                    break
        raise Unjudged(f"{self._url} gave no reply ({problem})")

    async def _response(self, client: httpx.AsyncClient, request: dict) -> tuple[int, str]:
        """Status and text of one attempt. Unjudged for more text than a reply has: no server is read without end."""
        async with client.stream("POST", self._url, json=request) as response:
            content = b""
            async for part in response.aiter_bytes(MOST_AT_ONCE):  # unpacked, where it was packed
                content += part
                if len(content) > MOST_REPLY_BYTES:
                    raise Unjudged(f"{self._url} replied with more than {MOST_REPLY_BYTES:,} bytes")
            return response.status_code, content.decode(errors="replace")

    def _cached(self, key: str) -> float | None:
        if self._cache is not None and key not in self._scores:
            with suppress(OSError, ValueError, KeyError, TypeError):  # none, or half written by a disk that was full
                score = json.loads((self._cache / f"{key}.json").read_text())["score"]
                if isinstance(score, float) and 0.0 <= score <= 1.0:
                    self._remember(key, score)
        return self._scores.get(key)

    def _remember(self, key: str, score: float) -> None:
        if len(self._scores) >= MAX_SCORES:
            self._scores.clear()
        self._scores[key] = score

    def _store(self, key: str, score: float, reply: str) -> None:
        self._remember(key, score)
        if self._cache is not None:
            with suppress(OSError):  # then the server is asked again next time
                self._cache.mkdir(parents=True, exist_ok=True)
                part = self._cache / f"{key}.{os.getpid()}.{random.randrange(2**32):08x}.part"
                with part.open("x") as file:  # never through a link that somebody has put there
                    file.write(json.dumps({"score": score, "reply": reply}))
                part.replace(self._cache / f"{key}.json")


def score_of(reply: str) -> float:
    """The last "Score: NUMBER" of a reply, behind its thinking. Unjudged where that is none from 0 to 1."""
    number, scale = (SCORE.findall(after_thinking(reply)) or [("", "")])[-1]
    if scale or not NUMBER.fullmatch(number) or float(number) > 1.0:
        raise Unjudged(f"the reply has no score from 0 to 1: {reply[-MOST_SHOWN:]!r}")
    return float(number)


def _fields_of(extra_body: str) -> dict[str, Any]:
    """The fields that JSON text adds to a request. ValueError for no object, and for what the judge itself decides."""
    try:
        found = json.loads(extra_body)
    except ValueError as error:
        raise ValueError(f"extra_body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"extra_body must be a JSON object of request fields, found {extra_body[:MOST_SHOWN]!r}")
    if decided := sorted(found.keys() & RESERVED):
        raise ValueError(f"extra_body has {', '.join(decided)}, which the judge decides or has an option for")
    return found


def _content(text: str) -> str:
    try:
        choice = json.loads(text)["choices"][0]
        content, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        content, is_cut = None, False
    if is_cut:
        raise Unjudged("the reply was cut: raise option max_tokens, or have the model think less by extra_body")
    if not isinstance(content, str):
        raise Unjudged(f"this is no reply of a chat completion: {text[:MOST_SHOWN]!r}")
    return content
