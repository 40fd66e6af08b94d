"""Commands on a machine that is not as it should be: no folder, no room, less memory allowed."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.cli import evaluation
from hacpo_mega.models.files.chat_template import MEMORY_BYTES

pytestmark = pytest.mark.nightly

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def config_file(tmp_path) -> Path:
    agent = agent_table(tmp_path, "a", "qwen3", CHARACTERS, chat_template=True)
    (Path(agent["model"]) / "chat_template.jinja").write_text(TEMPLATE)
    return write_config(tmp_path, [agent], algorithm={"method": "gspo"})


def check(config_file: Path, *shell: str, out: object = subprocess.PIPE) -> subprocess.CompletedProcess:
    """`hacpo-mega check` from a shell that has done `shell` before."""
    steps = " && ".join([*shell, f"exec {sys.executable} -m hacpo_mega.cli check {config_file}"])
    return subprocess.run(["bash", "-c", steps], stdout=out, stderr=subprocess.PIPE, text=True, timeout=120)


def test_a_folder_that_is_gone_and_a_full_disk_are_a_line(config_file, tmp_path):
    (tmp_path / "gone").mkdir()
    done = check(config_file, f"cd {tmp_path}/gone", "rmdir ../gone")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "the current folder does not exist any more: change to one that does\n"
    with open("/dev/full", "w") as full:
        done = check(config_file, out=full)
    assert done.returncode == 1
    assert done.stderr == "what this command prints cannot be written: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed, config_file):
    """A daemon or a cron job has none; a file that took the number of one would get what is printed."""
    done = check(config_file, f"exec {closed}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_encoding_that_lacks_a_sign_shows_its_number(tmp_path):
    (tmp_path / "數.jsonl").write_text('{"prompt": "1", "answer": ""}\n', encoding="utf-8")
    command = [sys.executable, "-m", "hacpo_mega.cli", "data", "inspect", str(tmp_path / "數.jsonl")]
    variables = os.environ | {"PYTHONIOENCODING": "iso8859-1"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"{tmp_path}/\\u6578.jsonl:1: field 'answer' is empty" in done.stdout


def test_a_socket_that_was_left_is_made_anew_and_any_other_name_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "prepare_environment", lambda: None)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "left"))
        listener.listen()
        with pytest.raises(ValueError, match=r"--socket .*/left: Address already in use; give another name"):
            evaluation.serve(["none"], socket=tmp_path / "left")
    with pytest.raises(ValueError, match="model folder none does not exist"):
        evaluation.serve(["none"], socket=tmp_path / "left")
    assert not (tmp_path / "left").exists()
    (tmp_path / "text").write_text("mine")
    for name, why in (
        ("a/b", "No such file"),
        ("x" * 99, ".*too long"),
        ("x" * 999, ".*too long"),
        ("text", "Address already"),
    ):
        with pytest.raises(ValueError, match=f"--socket .*/{name}: {why}"):
            evaluation.serve(["none"], socket=tmp_path / name)
    assert (tmp_path / "text").read_text() == "mine"


def test_a_login_node_with_little_memory_blames_no_template(config_file):
    """A limit that an administrator has set can only be lowered."""
    allowed = MEMORY_BYTES // 2  # enough for check itself
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY and hard < allowed:
        pytest.skip(f"this machine allows {hard} bytes")
    done = check(config_file, f"ulimit -v {allowed >> 10}")
    assert (done.returncode, done.stderr) == (0, "")
