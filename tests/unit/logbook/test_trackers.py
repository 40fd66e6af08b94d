"""Trackers: the numbers of every step, one run however often it is started, and no error that stops the training."""

import importlib.util
import math
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from repository import ROOT, SOURCES
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.cli import app as cli
from hacpo_mega.config import Config, load_config
from hacpo_mega.logbook.files.metrics import StepMetrics
from hacpo_mega.logbook.files.trackers import TrackedRun, Trackers, _start_tracker, identifier

STEPS = {1: StepMetrics({"agent/a/reward_mean": 0.25}, {"agent/a/phase/learn_s": 1.5}), 2: StepMetrics({"x": 2.0}, {})}


class Tracker(ModuleType):
    """A tracker's package as far as it is called: it remembers, and fails from a given call of `log` on."""

    def __init__(self, fails_from: float = math.inf) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.num_finished, self._fails_from = 0, fails_from

    def init(self, **how: Any) -> None:
        self.begun.append(how)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))
        if len(self.logged) >= self._fails_from:
            raise ConnectionError("no route to host\nand a page of advice")

    def finish(self) -> None:
        self.num_finished += 1


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run that asks for wandb, which is said to be there; the test says what it does."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("json" if name == "wandb" else name))
    (tmp_path / "run").mkdir()
    logging = {"trackers": ["wandb"], "project": "pairs"}
    return load_config(write_config(tmp_path, [agent_table(tmp_path, "a", "qwen3", CHARACTERS)], logging=logging))


def track(config: Config, said: list[str], *, goes_on: bool, quiet: bool = False) -> None:
    with Trackers(config, said.append, goes_on=goes_on, quiet=quiet) as trackers:
        for step, metrics in STEPS.items():
            trackers.log(step, metrics)


def test_a_tracker_gets_every_number_of_every_step(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, said = Tracker(), []
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    track(config, said, goes_on=False)
    assert tracker.logged == [(1, {"agent/a/reward_mean": 0.25, "agent/a/phase/learn_s": 1.5}), (2, {"x": 2.0})]
    assert tracker.num_finished == 1 and said == []
    assert tracker.begun[0]["project"] == "pairs" and tracker.begun[0]["config"]["num_steps"] == config.num_steps


def test_a_resumed_run_goes_on_and_a_new_one_does_not(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    for goes_on in (False, True, False):
        track(config, [], goes_on=goes_on)
    first, resumed, fresh = (begun["id"] for begun in tracker.begun)
    assert first == resumed != fresh
    assert first.startswith("run-") and all(begun["resume"] == "allow" for begun in tracker.begun)


def test_a_run_folder_of_any_name_has_an_id_that_trackers_take(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb refuses `: ; , # ? / '` and blanks around an id, others all but ASCII letters and digits; ends differ."""
    monkeypatch.setitem(sys.modules, "wandb", tracker := Tracker())
    names = ["lr=1e-6 #2: try?", "it's; a,b", " é漢 ", "x" * 200, "plain-1.2_b"]
    for name in names:
        folder = config.run_dir.with_name(name)
        folder.mkdir()
        track(config.model_copy(update={"run_dir": folder}), [], goes_on=False)
    ids = [begun["id"] for begun in tracker.begun]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{9,128}", id_) for id_ in ids) and len(set(ids)) == len(ids)
    assert ids[-1] == tracker.begun[-1]["name"], "what trackers take stays as it was"
    assert identifier(f"{'x' * 200}-12ab", signs="")[-50:].endswith("x12ab") and identifier("é1-_", signs="") == "1"


def test_a_step_costs_mlflow_the_answers_of_that_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log_table downloads the table of all steps before, adds the rows and uploads the whole."""
    mlflow, written = MagicMock(), {}
    mlflow.log_table.side_effect = lambda table, file: pytest.fail(f"{file} is read and written in every step")
    mlflow.log_dict.side_effect = lambda table, file: written.update({file: table})
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    tracker = _start_tracker("mlflow", TrackedRun("pairs", "run-abcd1234", False, tmp_path, {}))
    assert written.pop("config.json") == {}
    for step, reward in ((1, 1.0), (2, math.nan)):
        tracker.show(step, ("answer", "reward"), [[f"of {step}", reward]], {})
    columns = ["answer", "reward"]
    assert written == {
        "answers/step_000001.json": {"columns": columns, "data": [["of 1", 1.0]]},
        "answers/step_000002.json": {"columns": columns, "data": [["of 2", None]]},
    }


def test_other_ranks_begin_nothing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", tracker := Tracker())
    track(config, [], goes_on=False, quiet=True)
    assert tracker.begun == [] and not (config.run_dir / "tracked_as").exists()


def test_a_tracker_that_fails_is_complained_of_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, said = Tracker(fails_from=1), []
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    track(config, said, goes_on=False)
    assert len(tracker.logged) == 2, "it may recover"
    (line,) = said
    assert line.startswith("wandb failed (ConnectionError: no route to host); ") and "training goes on" in line


def test_a_tracker_that_cannot_begin_is_left_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as a package that breaks on import
    said: list[str] = []
    track(config, said, goes_on=False)
    assert len(said) == 1 and said[0].startswith("wandb failed (ModuleNotFoundError: ")


def test_an_error_of_the_run_does_not_wait_for_a_tracker(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", tracker := Tracker())
    with pytest.raises(KeyError), Trackers(config, print, goes_on=False):
        raise KeyError("loss")
    assert tracker.num_finished == 0


def test_an_absent_tracker_is_one_line_before_anything_is_loaded(tmp_path, monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    file = write_config(tmp_path, [agent_table(tmp_path, "a", "qwen3", CHARACTERS)])
    says = f"{file}: logging.trackers: 'wandb' is not installed here; `pip install wandb`, or leave it out"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        load_config(file, ['logging.trackers=["wandb"]'])


@pytest.mark.parametrize(
    "settings, netrc, is_told",
    [
        ({}, None, True),
        ({"WANDB_MODE": "online"}, "machine example.org login u password p", True),
        ({}, "machine api.wandb.ai login user password key", False),
        ({"WANDB_BASE_URL": "https://wandb.here:8080/"}, "machine wandb.here login user password key", False),
        ({"WANDB_BASE_URL": "https://wandb.here:8080/"}, "machine api.wandb.ai login user password key", True),
        ({}, "no netrc at all", True),
        ({"WANDB_API_KEY": "key"}, None, False),
        ({"WANDB_MODE": "offline"}, None, False),
    ],
)
def test_check_says_that_wandb_would_ask_for_a_login(config, tmp_path, monkeypatch, capsys, settings, netrc, is_told):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**settings, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    if netrc is not None:
        (tmp_path / ".netrc").write_text(netrc)
    monkeypatch.setattr(sys, "argv", ["hacpo-mega", "check", str(tmp_path / "run.toml")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().out
    assert not end.value.code and ("wandb has no login" in said) == is_told


def test_a_run_of_one_step_traces_it(config, tmp_path) -> None:
    chosen = {"logging.trace=true": (2,), "logging.trace=false": (), "logging.trace_steps=[1,2]": ()}
    for override, steps in chosen.items():
        assert load_config(tmp_path / "run.toml", [override]).traced_steps == steps
    assert load_config(tmp_path / "run.toml", ["logging.trace=true", "num_steps=1"]).traced_steps == (1,)


WITH_A_PACKAGE = """
import sys
from pathlib import Path
from hacpo_mega.logbook.files.trackers import TrackedRun, Trackers, _start_tracker

here, package = Path(sys.argv[1]), sys.argv[2]
for goes_on in (False, True):
    run = TrackedRun("pairs", "run-abcd1234", goes_on, here / "run", {"seed": 1, "agents": [{"name": "a"}]})
    tracker = _start_tracker(package, run)
    tracker.log(1 + goes_on, {"agent/a/reward_mean": 0.25})
    rows = [["1+1=", "2", 1.0], ["2+2=", "a needle", 0.5]]
    tracker.show(1 + goes_on, ("prompt", "answer", "reward"), rows, {"agent/a/rewards": [0.0, 1.0, 0.5]})
    tracker.finish()
"""
OFFLINE = {
    "wandb": {"WANDB_MODE": "offline"},
    "trackio": {"TRACKIO_DIR": "tracked"},
    "swanlab": {"SWANLAB_MODE": "offline"},
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///tracked.db"},
    "comet_ml": {"COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": "comet", "COMET_API_KEY": "none"},
}


@pytest.mark.parametrize("package", OFFLINE)
def test_a_package_takes_numbers_tables_and_histograms(tmp_path: Path, package: str) -> None:
    """Each by its own code, without a network, and again when the run goes on."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    (tmp_path / "run").mkdir()
    paths = os.pathsep.join([*map(str, SOURCES), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | OFFLINE[package] | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-c", WITH_A_PACKAGE, str(tmp_path), package]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    packed = [zipfile.ZipFile(path).read(name) for path in files if path.suffix == ".zip" for name in _names(path)]
    assert any(b"needle" in content for content in (*packed, *(path.read_bytes() for path in files)))


def _names(path: Path) -> list[str]:
    return zipfile.ZipFile(path).namelist()


WITH_TRACKIO = """
import sys
from hacpo_mega.config import load_config
from hacpo_mega.logbook.files.metrics import StepMetrics
from hacpo_mega.logbook.files.trackers import Trackers, identifier
from trackio.sqlite_storage import SQLiteStorage

config = load_config(sys.argv[1])
for goes_on, step in ((False, 1), (True, 2)):
    with Trackers(config, sys.exit, goes_on=goes_on) as trackers:
        trackers.log(step, StepMetrics({"agent/a/reward_mean": step / 4}, {"agent/a/phase/learn_s": 1.5}))
(run,) = SQLiteStorage.get_runs("pairs")
rows = SQLiteStorage.get_logs("pairs", run)
print([(row["step"], row["agent/a/reward_mean"], row["agent/a/phase/learn_s"]) for row in rows])
"""


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed: pip install trackio")
def test_trackio_has_one_run_with_both_steps_after_a_resumption(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    logging = {"trackers": ["trackio"], "project": "pairs"}
    file = write_config(tmp_path, [agent_table(tmp_path, "a", "qwen3", CHARACTERS)], logging=logging)
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "tracked"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", WITH_TRACKIO, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "[(1, 0.25, 1.5), (2, 0.5, 1.5)]"
