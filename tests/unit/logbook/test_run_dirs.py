"""Contents of a run's folder: only a run is moved away or written into, and nothing else is ever touched."""

import json
import os
import re
import resource
import shutil
import subprocess
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from repository import ROOT

from hacpo_mega.checkpoint.files import find_start
from hacpo_mega.cluster.machine.environment import has_tracker_login
from hacpo_mega.config import load_config
from hacpo_mega.config.checks.run_dirs import is_run
from hacpo_mega.logbook.files.metrics import require_readable_metrics
from hacpo_mega.logbook.files.rollout_log import logged_parts
from hacpo_mega.logbook.run.older_runs import move_aside
from hacpo_mega.logbook.run.provenance import read_starts, record_start, source_commit, threads_warning
from hacpo_mega.logbook.run.run_folder import RunFolder, missing_logs
from hacpo_mega.logbook.run.run_lock import RunLock

METRICS_LINE = '{"step": 1, "values": {}, "timing": {}}\n'


def refusals(run_dir: str | Path, *overrides: str) -> list[str]:
    """The complaints of `check` about a run's folder."""
    try:
        load_config(ROOT / "configs/quickstart.toml", [f"run_dir={json.dumps(str(run_dir))}", *overrides])
    except ValueError as error:
        return [line.partition(": ")[2] for line in str(error).splitlines()]
    return []


def make_run(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    if "starts.jsonl" in names:
        record_start(folder, 0, {})
    for name in set(names) - {"starts.jsonl"}:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(METRICS_LINE if name == "metrics.jsonl" else "seed = 1\n")
    return folder


def test_two_changed_sources_have_two_marks(tmp_path, monkeypatch):
    """By their differences; a Python file of the packages that git does not know is one, notes are none."""
    package = tmp_path / "hacpo_mega" / "logbook"
    package.mkdir(parents=True)
    monkeypatch.setattr("hacpo_mega.logbook.run.provenance.__file__", str(package / "provenance.py"))
    file, new = package / "known.py", package / "new.py"
    file.write_text("x = 1\n")
    (package / "provenance.py").write_text("")
    (tmp_path / "page.md").write_text("one")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *command], cwd=tmp_path, check=True)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "page.md").write_text("two")
    clean, marks = source_commit(), []
    for path, text in ((file, "x = 2\n"), (file, "x = 3\n"), (new, "y = 1\n"), (new, "y = 2\n")):
        path.write_text(text)
        marks.append(source_commit())
        assert source_commit() == marks[-1]
    assert len(set(marks)) == 4 and all(re.fullmatch(rf"{clean}\+[0-9a-f]{{8}}", mark) for mark in marks)
    new.unlink()
    assert source_commit() == marks[1]
    file.write_text("x = 1\n")
    assert source_commit() == clean and len(clean) == 40


def test_the_commit_of_a_project_around_the_package_is_not_its_own(tmp_path, monkeypatch):
    package = tmp_path / ".venv" / "hacpo_mega"
    package.mkdir(parents=True)
    (tmp_path / ".gitignore").write_text(".venv\n")
    (package / "provenance.py").write_text("")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "mine"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr("hacpo_mega.logbook.run.provenance.__file__", str(package / "provenance.py"))
    assert source_commit() is None


FOREIGN = {
    "a thesis": {"thesis.tex": "years"},
    "a thesis in a folder": {"chapters/one.tex": "years"},
    "a hidden file": {".netrc": "secret"},
    "another program's configuration": {"config.toml": "seed = 1\n"},
    "files of these names of another program": {
        "config.toml": "seed = 1\n",
        "metrics.jsonl": '{"loss": 1.0}\n',
        "starts.jsonl": "[1, 2]\n",
    },
    "lines of ours without a configuration": {"metrics.jsonl": METRICS_LINE, "thesis.tex": "years"},
    "a first line without an end": {"config.toml": "", "metrics.jsonl": "{" * 100_000},
    "another trainer's checkpoint": {"checkpoints/checkpoint-5/step.json": "{}"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_of_something_else_is_refused_and_not_moved(files, tmp_path):
    folder = tmp_path / "mine"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (line,) = refusals(folder)
    assert line.startswith(f"run_dir: {folder} holds ") and f"Nearest: run_dir = '{folder}/run'" in line
    assert not is_run(folder)
    with pytest.raises(ValueError, match=r"is no run by its config\.toml and starts\.jsonl or metrics\.jsonl"):
        move_aside(folder)
    assert {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()} == files
    assert refusals(folder / "run") == []


def test_steps_of_another_trainer_are_no_run_to_displace(tmp_path):
    """They look like ours by name, so that `check` lets them pass; the start does not."""
    (tmp_path / "run/checkpoints/step_000005").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step_000005/step.json").write_text('{"format": 2}')
    config = load_config(ROOT / "configs/quickstart.toml", [f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match="holds checkpoints, and is no run by its "):
        find_start(config, fresh=True)


@pytest.mark.parametrize(
    "names", [("config.toml", "starts.jsonl"), ("config.toml", "metrics.jsonl", "notes.txt"), ("starts.jsonl",)]
)
def test_a_run_is_moved_whole_and_the_next_free_number_is_taken(names, tmp_path):
    run = make_run(tmp_path / "run", *names)
    (tmp_path / "run.1").symlink_to("nowhere")
    assert refusals(run) == []
    before = sorted(path.name for path in run.iterdir())
    assert move_aside(run) == tmp_path / "run.2"
    assert sorted(path.name for path in (tmp_path / "run.2").iterdir()) == before and not run.exists()


def test_a_link_goes_on_leading_to_the_run(tmp_path):
    run = make_run(tmp_path / "disk/run", "config.toml", "starts.jsonl")
    (tmp_path / "link").symlink_to(run)
    assert refusals(tmp_path / "link") == []
    assert move_aside(tmp_path / "link") == tmp_path / "disk/run.1"
    assert (tmp_path / "link").is_symlink() and os.readlink(tmp_path / "link") == str(run)


def test_nothing_and_what_a_job_or_mkfs_has_made_is_nothing(tmp_path):
    for name in ("logs/attempt_1", "slurm", "lost+found"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run/.lock").write_text("")
    assert refusals(tmp_path / "run") == refusals(tmp_path / "new" / "run") == []
    assert move_aside(tmp_path / "run") is None


@pytest.mark.parametrize("run_dir", ["/proc/x", "/sys/fs/x", "/proc/self/fd"])
def test_a_file_system_that_keeps_nothing_is_refused(run_dir):
    (line,) = refusals(run_dir)
    assert line.startswith(f"run_dir: {run_dir} ")


def test_a_link_that_leads_nowhere_is_a_new_folder_and_a_circle_is_refused(tmp_path):
    (tmp_path / "new").symlink_to(tmp_path / "disk/run")
    (tmp_path / "circle").symlink_to("back")
    (tmp_path / "back").symlink_to("circle")
    assert refusals(tmp_path / "new") == []
    (line,) = refusals(tmp_path / "circle")
    assert line.startswith(f"run_dir: {tmp_path}/circle is a link that leads in a circle")


@pytest.mark.parametrize("path", ["a\nb", "a\x1b[2Jb", "\x7f", "a\u202eb", "~nobody_of_this_name/x"])
def test_a_path_that_no_line_can_show_is_refused(path):
    (line,) = refusals(path)
    assert line.startswith("run_dir: needs ") and line.isprintable()


def test_a_tilde_is_the_users_home_wherever_a_configuration_names_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(ROOT / "configs/quickstart.toml", ["run_dir=~/x", "agents.qwen.model=~/m"])
    assert (config.run_dir, config.agents[0].model) == (tmp_path / "x", tmp_path / "m")


def test_a_user_without_a_home_is_asked_for_none(tmp_path, monkeypatch):
    """A container's, with no HOME and no line in /etc/passwd."""
    for name in ("HOME", "NETRC", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2_000_000_000)
    assert refusals(tmp_path / "run") == [] and not has_tracker_login()


def test_a_mount_point_and_a_home_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (line,) = refusals("~")
    assert line.startswith(f"run_dir: {tmp_path} is your home, and ")
    kept, folder = make_run(tmp_path / "kept", "config.toml", "starts.jsonl"), tmp_path / "mount point"
    folder.mkdir()
    if shutil.which("mount") is None or subprocess.run(["mount", "--bind", kept, folder], check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        (line,) = refusals(folder)
        assert line.startswith(f"run_dir: {folder} is a mount point, ") and f"'{folder}/run'" in line
        with pytest.raises(ValueError, match=r"cannot be moved to .*mount point\.1 \(Device or resource busy"):
            move_aside(folder)
        assert is_run(kept)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("number, is_fine", [(200, True), (201, False), (255, False)])
def test_a_name_leaves_room_for_what_is_named_after_it(number, is_fine, tmp_path):
    says = f"a name of {number} bytes is too long for the run's files. Nearest: at most 200 bytes"
    assert refusals(tmp_path / ("r" * number)) == ([] if is_fine else [f"run_dir: {says}"])
    model = [f"agents.llama.model={tmp_path / 'none'}", f"agents.llama.name={'a' * number}"]
    found = [line for line in refusals(tmp_path / "run", *model) if "a name of" in line]
    assert found == ([] if is_fine else [f"agents.{'a' * number}: {says}"])


def test_a_path_leaves_room_for_what_lies_below_it(tmp_path):
    deep = tmp_path
    while len(str(deep)) < 3300:
        deep /= "d" * 200
    deep /= "e" * 100
    most, more = (deep / ("f" * (number - len(str(deep)) - 1)) for number in (3600, 3601))
    assert len(str(most)) == 3600 and refusals(most) == []
    (line,) = refusals(more)
    assert line == "run_dir: a path of 3601 bytes is too long for the run's files. Nearest: at most 3600 bytes"


GARBAGE = [
    b"garbage",
    b"\xff\xfeg\x00a",
    b"\x00e\x00e",
    b"[1]",
    b'{"step": 2}',
    b'{"step": "x", "values": 1}',
    b"{" * 9999,
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_line_of_metrics_that_is_none_is_named_before_a_run_goes_on(garbage, tmp_path):
    lines = [METRICS_LINE.encode(), garbage + b"\n", METRICS_LINE.encode()]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a line of metrics \(") as error:
        require_readable_metrics(tmp_path)
    assert "\n" not in str(error.value) and "Take the line out, or move the file away" in str(error.value)
    (tmp_path / "metrics.jsonl").write_bytes(lines[0] + garbage)  # torn, as a killed job leaves it
    require_readable_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    require_readable_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl cannot be read \(Is a directory\)"):
        require_readable_metrics(tmp_path)


def test_a_start_that_is_none_is_named(tmp_path):
    record_start(tmp_path, 0, {})
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write("\x00garbage\n")
    with pytest.raises(ValueError, match=r"starts\.jsonl, line 2: not a start of the run"):
        read_starts(tmp_path)


def test_a_start_on_a_full_disk_spoils_no_file_of_the_run(tmp_path):
    """The seam is the limit on the size of files: as a full disk, it takes a part of what is written."""
    config = load_config(ROOT / "configs/quickstart.toml", [f"run_dir={tmp_path / 'run'}"])
    place = SimpleNamespace(
        share_in_job=lambda token: token, is_leader=False, coordinate="rank 0", barrier=lambda: None
    )
    starts, file = tmp_path / "run/starts.jsonl", tmp_path / "run/config.toml"
    with RunLock(config.run_dir) as lock:
        RunFolder(config, place, lock)
        before = file.read_bytes(), starts.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for most in (len(before[1]) + 9, len(before[0]) - 9):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            try:
                with pytest.raises(OSError, match="File too large"):
                    RunFolder(config, place, lock, 1, goes_on=True)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert file.read_bytes() == before[0] and starts.read_bytes().startswith(before[1])
        RunFolder(config, place, lock, 1, goes_on=True)
    assert [start["steps_done"] for start in read_starts(config.run_dir)] == [0, 1, 1]


def test_another_number_of_threads_than_at_the_last_start_is_said(tmp_path, monkeypatch):
    assert list(threads_warning(tmp_path)) == [], "no start"
    for before, now, said in (("1", "1", None), ("1", "2", "OMP_NUM_THREADS was 1, is 2"), ("", "2", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", before)
        record_start(tmp_path, 0, {})
        monkeypatch.setenv("OMP_NUM_THREADS", now)
        assert [line.partition(":")[0] for line in threads_warning(tmp_path)] == ([said] if said else [])
    for foreign in ('{"steps_done": 0}', '{"threads": "1"}', '{"threads": [1]}', "garbage"):
        with (tmp_path / "starts.jsonl").open("a") as file:
            file.write(foreign + "\n")
        assert list(threads_warning(tmp_path)) == []


def test_a_copy_of_logged_answers_is_no_answer_of_the_run(tmp_path):
    """An editor's or a cloud's, which ended every start."""
    (tmp_path / "rollouts").mkdir()
    for name in ("step_000001.lane_0000", "step_000001.lane_0000 (copy 1)", "step_000002.lane_0.0"):
        (tmp_path / "rollouts" / f"{name}.jsonl").touch()
    assert logged_parts(tmp_path) == {1: {0}}


def test_logs_that_have_vanished_are_said(tmp_path):
    record_start(tmp_path, 2, {})  # a branch: the steps before are another run's
    (tmp_path / "rollouts").mkdir()
    for step in (3, 4, 5, 6, 7):
        for lane in (0, 1):
            (tmp_path / f"rollouts/step_{step:06d}.lane_{lane:04d}.jsonl").write_text("")
    lines = [json.dumps({"step": step, "values": {}, "timing": {}}) + "\n" for step in (2, 3, 4, 5, 6, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert list(missing_logs(tmp_path, 7)) == []
    for part in (*(tmp_path / "rollouts").glob("step_000004.*"), tmp_path / "rollouts/step_000006.lane_0000.jsonl"):
        part.unlink()
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2] + lines[5:]))
    metrics, answers = missing_logs(tmp_path, 7)
    assert metrics.startswith(f"warning: {tmp_path}/metrics.jsonl has no line of steps 4-6, which ")
    assert answers.startswith(f"warning: {tmp_path}/rollouts lacks answers of steps 4, 6, which ")
    (tmp_path / "metrics.jsonl").unlink()
    shutil.rmtree(tmp_path / "rollouts")
    assert ["steps 3-7" in line for line in missing_logs(tmp_path, 7)] == [True, True]


def test_a_start_holds_one_line_of_a_long_run_at_a_time(tmp_path):
    """The file of 20,000 steps has 136 MB; all of them as Python's numbers had 640."""
    numbers = {f"agent/a/{n}": 1.0 for n in range(500)}
    line = json.dumps({"step": 1, "values": numbers, "timing": {}}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(line * 500)
    tracemalloc.start()
    require_readable_metrics(tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50 * len(line)
