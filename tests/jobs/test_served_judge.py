"""A judge that is served by vLLM itself, on this machine's CPU: what it says, what it does not, and what hangs."""

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from job import ENVIRONMENT, free_port
from judged import questions
from repository import ROOT
from tiny_models import make_model

from hacpo_grading.judge import Judge
from hacpo_mega.records import Judgement, Stop

pytestmark = pytest.mark.nightly

TOKENIZER = ROOT.parent / "shared/tokenizers/phi-3"  # with a chat template
EOS, NUM_REQUESTS = 32000, 64
# A random model answers one of these: a score, of which 2 to 7 are none, or "x" for as long as it may. 160
# letters before either keep every request open until the last request has come.
BEFORE, ENDLESS = "[a-z ]{160}", "x"
GUIDED = {
    "structured_outputs": {"regex": f"{BEFORE}(Score: [0-7]|{ENDLESS}+)"},
    "logit_bias": {str(EOS): -100},
}
TEMPLATE = "{prompt} {answer}"


@dataclass(frozen=True)
class Server:
    """A vLLM that serves a random model under the name "judge"."""

    root: str

    @property
    def num_open(self) -> float:
        """Requests that it computes or has waiting, by its own count."""
        lines = httpx.get(f"{self.root}/metrics", trust_env=False, timeout=60.0).text.splitlines()
        counted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(counted))

    def judge(self, texts: list[str], **options) -> tuple[list[Judgement], dict[str, int]]:
        """The verdicts of a judge that asks this server, and its errors."""
        given = {"url": f"{self.root}/v1", "model": "judge", "template": TEMPLATE, "attempts": 1} | options
        with Judge("model", options=given) as judge:
            found = judge.judge(questions(["p"] * len(texts), ["g"] * len(texts), texts, [Stop.EOS] * len(texts)))
            return found, dict(judge.take_report().errors)

    async def replies(self, texts: list[str], max_tokens: int) -> list[str]:
        """The beginnings of its replies to the same questions, by OpenAI's own client."""
        async with openai.AsyncOpenAI(base_url=f"{self.root}/v1", api_key="none", max_retries=0) as client:
            asked = [{"role": "user", "content": TEMPLATE.format(prompt="p", answer=text)} for text in texts]
            given = {"model": "judge", "temperature": 0.0, "max_tokens": max_tokens, "extra_body": GUIDED}
            calls = [client.chat.completions.create(messages=[message], **given) for message in asked]
            return [reply.choices[0].message.content for reply in await asyncio.gather(*calls)]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    if not TOKENIZER.is_dir():
        pytest.skip(f"{TOKENIZER} is not there, and vLLM's server refuses a tokenizer without letters")
    folder = make_model(tmp_path_factory.mktemp("judge"), "qwen3", vocab_size=32064, head_dim=32, max_positions=32768)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(folder), "--served-model-name", "judge", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-num-seqs", str(NUM_REQUESTS), "--max-model-len", "32768"]
    # a server of its own, so not the engine inside a rank
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
        yield Server(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60.0)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        with suppress(httpx.HTTPError):
            if httpx.get(url, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)


def test_of_64_requests_only_scores_count_and_hanging_ones_are_given_up(server):
    texts = [f"answer {i}" for i in range(NUM_REQUESTS)]
    began = time.monotonic()
    said = [reply.partition("Score: ")[2] for reply in asyncio.run(server.replies(texts, max_tokens=300))]
    # in which the replies that end had ended, beside those that would not; three times as long on a busier machine
    request_s = 10.0 + 3.0 * (time.monotonic() - began)
    scores = [float(digit) if digit in ("0", "1") else math.nan for digit in said]
    assert {"0", "1", "6", ""} <= set(said)  # the last: it would not end
    options = {"max_tokens": 30_000, "request_s": request_s, "extra_body": json.dumps(GUIDED)}
    most_open = 0.0
    with ThreadPoolExecutor(1) as pool:
        judging = pool.submit(server.judge, texts, **options)
        while not judging.done():
            most_open = max(most_open, server.num_open)
            time.sleep(0.05)
    found, errors = judging.result()
    assert [judgement.reward for judgement in found] == pytest.approx(scores, nan_ok=True)
    assert most_open >= 16  # by vLLM's own count between two of its steps; a quiet machine shows all 64
    hung = {error: number for error, number in errors.items() if "gave no reply (TimeoutError)" in error}
    nonsense = {error: number for error, number in errors.items() if "no score from 0 to 1" in error}
    assert list(hung.values()) == [said.count("")] and hung | nonsense == errors
    assert sum(nonsense.values()) == len(said) - said.count("") - said.count("0") - said.count("1")
    while server.num_open:  # nobody waits for them any more, and vLLM goes on with others
        time.sleep(0.1)


def test_a_model_that_nothing_holds_to_a_score_leaves_answers_unjudged(server):
    found, errors = server.judge(["a", "b"], max_tokens=16)
    assert all(math.isnan(judgement.reward) for judgement in found)
    assert len(errors) == 1 and all("the reply was cut: " in error for error in errors)
