"""A run folder that somebody else has made: nothing in it is waited for, and no file of the user's leaves with it."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import tomli_w
from job import run_here
from run_cases import CHARACTERS
from safetensors.torch import load_file
from tiny_models import make_model
from written_run import write_run

from hacpo_mega.checkpoint.files import (
    RECORD,
    AgentState,
    Checkpoint,
    FileState,
    file_sha256,
    find_start,
    model_digests,
    plain,
    read_checkpoint,
)
from hacpo_mega.config import Config
from hacpo_mega.config.load import load_unchecked
from hacpo_mega.evaluation.answers import require_place
from hacpo_mega.evaluation.settings import require_weights, settings_for
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts
from hacpo_mega.logbook.run.provenance import read_starts
from hacpo_mega.megatron.checkpoint.stored_state import WEIGHT, Part, stored_name, write_parts
from hacpo_mega.samples.tokenizers import make_tokenizer

pytestmark = pytest.mark.nightly

READERS = {
    "starts.jsonl": read_starts,
    "metrics.jsonl": lambda run: read_metrics(run / "metrics.jsonl"),
    "rollouts/step_000001.lane_0.jsonl": lambda run: read_rollouts(run, 1),
    "checkpoints/step_000001/step.json": lambda run: read_checkpoint(run / "checkpoints" / "step_000001"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_and_a_device_are_not_read(name, tmp_path):
    """A pipe would be waited for, and /dev/zero fills the memory: these tests would not end."""
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(file)
        with pytest.raises(ValueError, match=r"is a pipe or a device, not a file") as refused:
            READERS[name](tmp_path)
        assert str(file) in str(refused.value) and "\n" not in str(refused.value)
        file.unlink()


SECRET = "-----BEGIN PRIVATE KEY-----"
STEP = "checkpoints/step_000001"
KINDS = ("absolute", "relative", "a link to a link")
# Folders of a run that no command reads.
LEFT = ("notes", "tensorboard")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one agent, with a checkpoint whose model folder lies in the run, and a graded evaluation."""
    run = tmp_path_factory.mktemp("stranger") / "run"
    write_run(run, ("a",), num_steps=1, evaluate_every=1)
    base = make_model(run / "base", "qwen3", hidden_size=32, ffn_size=32, vocab_size=len(CHARACTERS) + 2)
    make_tokenizer(base, CHARACTERS)
    (base / "LICENSE").write_text("free")
    shutil.copytree(base, run / "agents" / "a")
    for name, text in (
        ("starts.jsonl", '{"time_unix_s": 1, "commit": "c", "packages": {}}\n'),
        ("evaluations/e/answers/b.lane_0000.jsonl", '{"prompt": "0+1=", "answer": "1", "gold": "1", "pred": "1"}\n'),
        ("notes/mine.txt", "free"),
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    (run / "report").mkdir()
    write_step(run, run)
    return run


def write_step(run: Path, said: Path) -> None:
    """Writes config.toml and the checkpoint of a run that will be called `said`."""
    agent = {"name": "a", "model": str(said / "base")}
    table = {"run_dir": str(said), "num_steps": 1, "agents": [agent], "data": {"generator": "arithmetic"}}
    (run / "config.toml").write_text(tomli_w.dumps(table))
    weights = load_file(run / "base" / "model.safetensors")
    parts = {stored_name(WEIGHT, name): [Part(tuple(w.shape), (0,) * w.dim(), w)] for name, w in weights.items()}
    shutil.rmtree(run / STEP, ignore_errors=True)
    (run / STEP / "a").mkdir(parents=True)
    write_parts(parts, run / STEP / "a")
    config = Config.model_validate(table)
    here = replace_models(config, run / "base")
    files = {f"a/{file.name}": file for file in (run / STEP / "a").iterdir()}
    states = {name: FileState(file.stat().st_size, file_sha256(file)) for name, file in files.items()}
    agents = {"a": AgentState(1, 1, "float32", 0, [{}])}
    record = Checkpoint(run / STEP, 1, plain(config), {}, model_digests(here), {}, None, agents, states)
    (run / STEP / RECORD).write_text(record.text())


def replace_models(config: Config, folder: Path) -> Config:
    return config.model_copy(update={"agents": [config.agents[0].model_copy(update={"model": folder})]})


def evaluate(model: Path) -> CompletedProcess:
    """Reads of a model what `eval` reads before it starts an engine."""
    return as_command(lambda: require_weights(settings_for(model, ())))


def begin_from(run: Path) -> CompletedProcess:
    """Reads what `train --from` looks at before a rank starts."""
    table = {"run_dir": f"{run}.new", "num_steps": 1, "agents": [{"name": "a", "model": str(run / "base")}]}
    config = Config.model_validate(table | {"data": {"generator": "arithmetic"}})
    return as_command(lambda: find_start(config, branch=run / STEP, accept=["agents.a.model"]))


def as_command(function: Callable[[], object]) -> CompletedProcess:
    try:
        function()
    except ValueError as error:
        return CompletedProcess("", 2, "", f"{error}\n")
    return CompletedProcess("", 0, "", "")


def commands(run: Path, out: Path, name: str = "") -> Iterator[Callable[[], CompletedProcess]]:
    """Every command that reads a run of somebody else's; what they write goes to `out` or into the run.

    Slow commands are left out unless `name` is a path that they read, or empty.
    """
    yield partial(run_here, "export", run, "--out", out / "agent")
    yield partial(run_here, "export", run / STEP, "--agent", "a", "--out", out / "step")
    yield partial(run_here, "report", run, "--json")
    yield partial(evaluate, run / "agents" / "a")
    yield partial(evaluate, run / STEP / "a")
    yield partial(begin_from, run)
    yield partial(as_command, partial(load_unchecked, run / "config.toml"))  # of check, plan, doctor, train
    answers = run / "evaluations/e/answers/b.lane_0000.jsonl"
    yield partial(run_here, "data", "inspect", answers)
    if name in ("evaluations/e/answers/b.lane_0000.jsonl", ""):
        yield partial(run_here, "grade", answers, "--reward", "exact", "--workers", "1", "--out", out / "grades")
    if name in ("report", ""):
        yield partial(run_here, "report", run)


def everything(*folders: Path) -> bytes:
    """The contents of all files of folders, their links not followed."""
    files = [Path(place) / name for top in folders for place, _, names in os.walk(top) for name in names]
    return b"".join(file.read_bytes() for file in files if not file.is_symlink())


def link(kind: str, place: Path, target: Path) -> None:
    if kind == "relative":
        place.symlink_to(os.path.relpath(target, place.parent))
    elif kind == "a link to a link":
        (target.parent / "between").unlink(missing_ok=True)
        (target.parent / "between").symlink_to(target)
        place.symlink_to(target.parent / "between")
    else:
        place.symlink_to(target)


def test_no_command_follows_a_link_out_of_a_run(stranger: Path, tmp_path: Path) -> None:
    """Every file and folder in turn: a link to what it was, which would do, and to a secret."""
    names = sorted(str(path.relative_to(stranger)) for path in stranger.rglob("*"))
    kinds = {(KINDS[number % len(KINDS)], (stranger / name).is_dir()) for number, name in enumerate(names)}
    assert len(names) > 25 and len(kinds) == 2 * len(KINDS), "each kind of link in place of a file and of a folder"
    for number, name in enumerate(names):
        place, elsewhere, kind = stranger / name, tmp_path / "elsewhere", KINDS[number % len(KINDS)]
        place.rename(elsewhere)
        link(kind, place, elsewhere)
        done = [command() for command in commands(stranger, tmp_path / f"{number}", name)]
        refused = [one for one in done if "leads out of" in one.stderr]
        assert bool(refused) != name.startswith(LEFT), (name, done)
        assert all(one.returncode == 2 and one.stderr.count("\n") == 1 for one in refused), refused
        place.unlink()
        secret = tmp_path / "secret"
        shutil.copytree(elsewhere, secret) if elsewhere.is_dir() else secret.touch()
        for file in [secret, *secret.rglob("*")]:
            if file.is_file():
                file.write_text(f'{{"{SECRET}": "{SECRET}"}}\n')
        link(kind, place, secret)
        out = tmp_path / f"again{number}"
        said = [one.stdout + one.stderr for command in commands(stranger, out, name) for one in [command()]]
        assert SECRET not in "".join(said) and SECRET.encode() not in everything(stranger, out), name
        place.unlink()
        shutil.rmtree(secret) if secret.is_dir() else secret.unlink()
        elsewhere.rename(place)
        (stranger / "report.html").unlink(missing_ok=True)


def test_links_within_a_run_and_to_it_are_followed(stranger: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stranger, tmp_path / "disk" / "run")
    write_step(run, run)
    for name in ("agents/a/LICENSE", "base", "rollouts/step_000001.lane_0000.jsonl", "evaluations"):
        (run / name).rename(run / "notes" / Path(name).name)
        (run / name).symlink_to(os.path.relpath(run / "notes" / Path(name).name, (run / name).parent))
    (tmp_path / "run").symlink_to("disk/run")
    (tmp_path / "best").symlink_to(tmp_path / "run" / STEP)
    (tmp_path / "out").mkdir()
    for command in commands(tmp_path / "run", tmp_path / "out"):
        done = command()
        assert (done.returncode, done.stderr) == (0, ""), done
    assert (tmp_path / "out/agent/LICENSE").read_text() == "free"
    done = run_here("export", tmp_path / "best", "--agent", "a", "--out", tmp_path / "out" / "best")
    assert (done.returncode, done.stderr) == (0, "")


def test_links_out_of_a_model_folder_that_a_step_names_need_trust(stranger: Path, tmp_path: Path) -> None:
    """A snapshot of the Hub is made of links, and leads to blobs of its own model; another folder may be anybody's."""
    snapshot = tmp_path / "models--org--m" / "snapshots" / ("0" * 40)
    blobs = tmp_path / "models--org--m" / "blobs"
    for model, files in ((tmp_path / "model", tmp_path / "files"), (snapshot, blobs)):
        run = shutil.copytree(stranger, tmp_path / f"run_{model.name}")
        files.mkdir(parents=True)
        model.mkdir(parents=True)
        for file in (run / "base").iterdir():
            shutil.copyfile(file, files / file.name)
            (model / file.name).symlink_to(os.path.relpath(files / file.name, model))
        write_step(run, run)
        record = read_checkpoint(run / STEP)
        table = record.config | {"agents": [record.config["agents"][0] | {"model": str(model)}]}
        (run / STEP / RECORD).write_text(replace(record, config=table).text())
        ask = ["export", run / STEP, "--agent", "a", "--out"]
        done = run_here(*ask, tmp_path / "out" / model.name)
        if model is snapshot:
            assert (done.returncode, done.stderr) == (0, "")
            (blobs / "LICENSE").unlink()
            (blobs / "LICENSE").symlink_to(tmp_path / "files" / "LICENSE")
            done = run_here(*ask, tmp_path / "out" / "other")
        assert done.returncode == 2 and done.stderr.startswith(f"{model}/"), done
        assert "leads out of" in done.stderr and "--trust" in done.stderr
        assert run_here(*ask, tmp_path / "out" / f"{model.name}_trusted", "--trust").returncode == 0
        assert (tmp_path / "out" / f"{model.name}_trusted" / "LICENSE").read_text() == "free"


def test_an_evaluation_writes_through_no_link_of_a_run(stranger: Path, tmp_path: Path) -> None:
    out = shutil.copytree(stranger, tmp_path / "run") / "evaluations" / "e"
    require_place(out.parent / "new")
    (out / "settings.json").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"settings\.json leads out of"):
        require_place(out)
