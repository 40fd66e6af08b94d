"""Models by their name on the Hub: what the cache has, what it lacks, what the Hub refuses. No test leaves the machine.

The Hub is a server on the loopback interface that answers as huggingface_hub's own client expects
(https://huggingface.co/docs/hub/api): repositories with files, and the headers of refusals.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from job import run_here
from repository import ROOT
from run_cases import CHARACTERS, TRAINING, agent_table, write_config

from hacpo_mega.commands import fetch_models
from hacpo_mega.config import Config, load_config
from hacpo_mega.models.files import hub
from hacpo_mega.models.files.hub import HubModel, model_folder, model_name, not_cached

pytestmark = pytest.mark.nightly

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    return Path(agent_table(folder, "tiny", "qwen3", CHARACTERS)["model"])


@pytest.fixture
def cache(tmp_path, monkeypatch, model) -> Path:
    """A cache with two commits of org/tiny: main is the new one, the tag v1 the old one."""
    folder = tmp_path / "cache"
    stored = folder / "models--org--tiny"
    for commit in (OLD, NEW):
        shutil.copytree(model, stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(NEW)
    (stored / "refs" / "v1").write_text(OLD)
    monkeypatch.setattr(hub, "CACHE", str(folder))
    return folder


def config_for(folder: Path, model: str, **overrides: str) -> Config:
    """The checked configuration of a run with one agent, whose model is given by `model`."""
    (folder / "run").mkdir(exist_ok=True, parents=True)
    agent = {"name": "a", "model": model, "optimizer": {"lr": 1e-3}}
    file = write_config(folder / "run", [agent], algorithm={"method": "gspo"})
    return load_config(file, [f"{key}={value}" for key, value in overrides.items()])


def test_a_name_stands_for_the_commit_that_the_cache_has(tmp_path, cache):
    snapshots = cache / "models--org--tiny" / "snapshots"
    for name, commit in {"org/tiny": NEW, "org/tiny@main": NEW, "org/tiny@v1": OLD, f"org/tiny@{OLD}": OLD}.items():
        config = config_for(tmp_path, name)
        assert config.agents[0].model == snapshots / commit
        written = config.model_dump(mode="json")["agents"][0]["model"]
        assert written == f"org/tiny@{commit}"
        assert Config.model_validate(config.model_dump(mode="json", exclude_none=True)) == config


def test_a_folder_of_that_name_comes_first(tmp_path, cache, model, monkeypatch):
    shutil.copytree(model, tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert config_for(tmp_path, "org/tiny").agents[0].model == Path("org/tiny")


@pytest.mark.parametrize("text", ["org", "a/b/c", "./a/b", "/a/b", "a/../b", "a/b@", "a b/c", "ä/b", "-a/b", "a/b@x y"])
def test_what_can_only_be_a_path_is_one(text):
    assert HubModel.parse(text) is None
    assert model_folder(Path(text)) == Path(text)


def test_only_a_snapshot_is_written_as_a_name(tmp_path):
    for folder in ("models--org--tiny/snapshots/main", f"org--tiny/snapshots/{NEW}", f"models--tiny/snapshots/{NEW}"):
        assert model_name(tmp_path / folder) == str(tmp_path / folder)


def test_a_model_that_the_cache_lacks_is_refused_with_the_command(tmp_path, cache):
    with pytest.raises(
        ValueError, match=r"agents\.a: model folder org/other has no config.*`hf download org/other` fetches it"
    ):
        config_for(tmp_path, "org/other")
    with pytest.raises(ValueError, match=r"`hf download org/tiny --revision v2` fetches it"):
        config_for(tmp_path, "org/tiny@v2")


def test_a_snapshot_with_a_missing_file_names_it_and_the_command(tmp_path, cache):
    snapshot = cache / "models--org--tiny" / "snapshots" / NEW
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors") as refusal:
        config_for(tmp_path, "org/tiny")
    lines = str(refusal.value).splitlines()
    assert lines[-1].endswith(f"org/tiny@{NEW} may be in the cache in part; `hf download org/tiny --revision {NEW}` "
                              "completes it")  # fmt: skip


@pytest.fixture
def beside(tmp_path, cache, model, monkeypatch) -> Path:
    """A current folder with a folder "org" that has one model, of the same name as an organisation of the cache."""
    shutil.copytree(model, tmp_path / "here" / "org" / "gemma")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_a_name_below_a_local_folder_is_never_one_of_the_hub(beside):
    """Otherwise the owner of an organisation "models" would serve weights to everybody who misspells a local model."""
    said = {
        "org/gema": "org/ has no gema; it has gemma (the Hub is not asked where org/ is a folder). Nearest: org/gemma",
        "org/tiny": "org/ has no tiny; it has gemma (the Hub is not asked where org/ is a folder)",
        "org/gema@v1": "org/ has no gema; it has gemma (the Hub is not asked where org/ is a folder). Nearest: "
        "org/gemma",
        "org/gemma@main": "org/gemma is a folder here, without revisions. Nearest: org/gemma",
    }
    for name, line in said.items():
        with pytest.raises(ValueError, match=r"agents\.a: ") as refusal:
            config_for(beside, name)
        assert str(refusal.value).endswith(f"agents.a: model folder {name} does not exist: {line}")
        assert not_cached(Path(name)) is None
    assert config_for(beside, f"org/tiny@{OLD}").agents[0].model.name == OLD  # a run that goes on


def test_the_address_of_a_page_on_the_hub_is_told_the_name_in_it(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    near = {
        "https://huggingface.co/org/tiny": "org/tiny",
        "http://hf.co/org/tiny": "org/tiny",
        "huggingface.co/org/tiny/tree/main": "org/tiny",
        "https://huggingface.co/org/tiny/blob/v1/config.json": "org/tiny@v1",
        "hf://org/tiny@v1": "org/tiny@v1",
    }
    for address, name in near.items():
        with pytest.raises(
            ValueError, match=r"or a name on the Hub, ORG/NAME or ORG/NAME@REVISION\. Nearest: "
        ) as said:
            config_for(tmp_path, address)
        assert str(said.value).endswith(f". Nearest: {name}")
    with pytest.raises(ValueError, match=r"or a name on the Hub, ORG/NAME or ORG/NAME@REVISION$"):
        config_for(tmp_path, "org/tiny/v1")


def test_a_path_that_says_it_is_one_is_never_a_name(tmp_path, cache, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("./org/tiny", "org/tiny/"):
        with pytest.raises(ValueError, match=f"model folder {tmp_path}/org/tiny does not exist; give a"):
            config_for(tmp_path, text)
    shutil.copytree(model, tmp_path / "org" / "tiny")
    for text in ("./org/tiny", "org/tiny/"):
        assert config_for(tmp_path, text).agents[0].model == Path("org/tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config_for(tmp_path, "~/org/tiny").agents[0].model == tmp_path / "org" / "tiny"


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"num_steps": "x"}, "num_steps: "),
        ({"data.files": "['tarin.jsonl']"}, "data.files: tarin.jsonl does not exist"),
        ({"data.files": "['rows.jsonl']"}, "rows.jsonl:1: "),
        ({"reward.kind": "mth"}, "did you mean 'math'?"),
        ({"agents.a.prompt_template": "nothing"}, "prompt_template"),
        ({"run_dir": "file/run"}, "run_dir: "),
        ({"agents.a.vllm.max_num_seq": "4"}, "did you mean 'max_num_seqs'?"),
    ],
)
@pytest.mark.parametrize("command", ["train", "slurm"])
def test_what_is_cheap_to_tell_is_told_before_a_download(tmp_path, cache, monkeypatch, command, wrong, said):
    monkeypatch.chdir(tmp_path)
    fetched = []
    monkeypatch.setattr(fetch_models, "_fetch", fetched.append)
    (tmp_path / "rows.jsonl").write_text("no row\n")
    (tmp_path / "good.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "file").write_text("")
    tables = {"data": {"files": ["good.jsonl"]}, "reward": {"kind": "math"}, "evaluation": {"every_steps": 0}}
    tables |= {"training": TRAINING | {"prompts_per_step": 1, "prompts_per_update": 1}}
    tables |= {"algorithm": {"method": "gspo"}, "run_dir": "run"}
    file = write_config(tmp_path, [{"name": "a", "model": "org/far"}], **tables)
    done = run_here(command, file, *(f"{key}={value}" for key, value in wrong.items()))
    assert (done.returncode, fetched) == (2, []) and said in done.stderr, done.stderr
    done = run_here(command, file)
    assert [str(one) for one in fetched] == ["org/far@main"], done.stderr


def test_an_evaluation_tells_what_is_cheap_before_a_download(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fetched = []
    monkeypatch.setattr(fetch_models, "_fetch", fetched.append)
    (tmp_path / "good.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    sound = {"file": "good.jsonl", "out": "out", "key": "reward.kind=math"}
    wrong = ({"file": "god.jsonl"}, {"out": "full"}, {"out": "good.jsonl"}, {"key": "reward.kind=mth"})
    keys = ("reward.options.x=1", "chat_template_kwargs=x", "prompt_template=@gone.txt")
    for given in (*wrong, *({"key": key} for key in keys), {}):
        asked = sound | given
        done = run_here("eval", "org/far", asked["file"], "--out", asked["out"], asked["key"])
        assert done.returncode == 2 and done.stderr.count("\n") == 1, (given, done.stderr)
        assert bool(fetched) == (given == {}), (given, done.stderr)
    assert done.stderr.startswith("model folder org/far has no config.json, and the Hugging Face cache has no model")


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub that a download asks: org/tiny is public, org/gated and org/gone refuse."""

    source: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if path.startswith(("/api/models/org/gated", "/org/gated")):
            return self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if path.startswith("/api/models/org/tiny/revision/"):
            if not path.endswith(("/main", NEW)):
                return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            files = [{"rfilename": file.name} for file in sorted(self.source.iterdir())]
            return self._answer(200, json.dumps({"id": "org/tiny", "sha": NEW, "siblings": files}).encode())
        if path.startswith("/api/models/org/tiny/tree/"):
            files = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _sha(file)}
                     for file in sorted(self.source.iterdir())]  # fmt: skip
            return self._answer(200, json.dumps(files).encode())
        if path.startswith(f"/org/tiny/resolve/{NEW}/"):
            file = self.source / path.rpartition("/")[2]
            return self._answer(200, file.read_bytes(), {"X-Repo-Commit": NEW, "ETag": f'"{_sha(file)}"'})
        return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


def _sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def server(model) -> Iterator[str]:
    handler = type("ThisHub", (Hub,), {"source": model, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


FETCH = """
import sys
from pathlib import Path
from hacpo_mega.commands.fetch_models import fetch_models
from hacpo_mega.models.files.hub import model_folder, model_name
for name in map(Path, sys.argv[1:]):
    try:
        fetch_models([name])
        print(model_name(model_folder(name)))
    except ValueError as error:
        print(f"ValueError: {error}")
"""


def fetch(home: Path, *names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Fetches as `train` does before its ranks start, in a process that reads HF_HOME and HF_ENDPOINT at its start."""
    settings = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    return subprocess.run([sys.executable, "-c", FETCH, *names], env=settings, capture_output=True, text=True, cwd=ROOT)


def test_a_public_model_is_downloaded_once(tmp_path, server, model):
    done = fetch(tmp_path, "org/tiny", HF_ENDPOINT=server)
    assert done.stdout.splitlines()[-1] == f"org/tiny@{NEW}", done.stderr[-2000:]
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / NEW
    assert {file.name: _sha(file) for file in snapshot.iterdir()} == {file.name: _sha(file) for file in model.iterdir()}
    again = fetch(tmp_path, "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")  # asks nobody
    assert again.stdout.splitlines() == [f"org/tiny@{NEW}"]


REFUSED = {
    "org/gated": "org/gated is gated: accept its terms at",
    "org/gone": "org/gone is neither a folder here nor a model on",
    "org/tiny@v9": "org/tiny has no revision 'v9'",
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory, server) -> dict[str, str]:
    """The error's line by name; one process asks for all of them."""
    done = fetch(tmp_path_factory.mktemp("refused"), *REFUSED, HF_ENDPOINT=server)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ValueError: ")]
    return dict(zip(REFUSED, lines, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hub_refuses_is_one_line(refusals, name):
    assert refusals[name].startswith(f"ValueError: {REFUSED[name]}")


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_without_a_network_the_command_for_another_machine_is_said(tmp_path, environment):
    done = fetch(tmp_path, "org/tiny", **environment)
    last = done.stdout.splitlines()[-1]
    assert "cannot be downloaded" in last and "`hf download org/tiny`, with the same HF_HOME" in last
