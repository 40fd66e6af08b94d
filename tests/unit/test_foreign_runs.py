"""A run folder that somebody else has made: nothing in it is waited for, and no file of the user's leaves with it."""

import json
import os

import pytest

from hacpo_mega.checkpoint.files import read_checkpoint
from hacpo_mega.commands.export import trained_agent
from hacpo_mega.logbook.metrics import read_metrics
from hacpo_mega.logbook.provenance import read_starts
from hacpo_mega.logbook.rollout_log import read_rollouts

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


def test_an_export_takes_no_file_from_elsewhere_with_it(tmp_path):
    """The run's owner would get it back with the model."""
    secret, run = tmp_path / "secret", tmp_path / "run"
    secret.write_text("mine")
    agent = run / "agents" / "a"
    agent.mkdir(parents=True)
    (agent / "config.json").write_text(json.dumps({}))
    (run / "metrics.jsonl").write_text("")
    tables = '[[agents]]\nname = "a"\nmodel = "m"\n[data]\ngenerator = "arithmetic"\n'
    (run / "config.toml").write_text(f'run_dir = "run"\nnum_steps = 1\n{tables}')
    assert trained_agent(run, "a").folder == agent
    (agent / "README.md").symlink_to("config.json")  # within the folder it may
    assert trained_agent(run, "a").folder == agent
    (agent / "notes").symlink_to(secret)
    with pytest.raises(ValueError, match=r"agents/a/notes leads out of its folder, to .*/secret"):
        trained_agent(run, "a")
