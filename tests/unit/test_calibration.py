"""`hacpo-mega plan --measure`: what was measured beside what was planned, on measurements made up by hand."""

import re
from pathlib import Path

import pytest
from plan_cases import CLUSTER, write_cluster, write_small_job
from typer.testing import CliRunner

from hacpo_mega.cli import plan as cli_plan
from hacpo_mega.cli.app import app
from hacpo_mega.config.load import load_unchecked
from hacpo_mega.lab.planning.calibration import COMPARED
from hacpo_mega.lab.planning.cluster_file import load_cluster
from hacpo_mega.lab.planning.configuration import load_planned
from hacpo_mega.lab.planning.plan import make_plan
from hacpo_mega.lab.planning.work import Lengths, work_of
from hacpo_mega.lab.throughput import schedules
from hacpo_mega.lab.throughput.measure import AgentStep, MeasuredStep

MIB = 2.0**20


def command(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, ValueError | SystemExit), result.exception
    return f"{result.output}{result.exception or ''}"


def step(cpu_s: float, peak: float) -> MeasuredStep:
    """Every phase takes a rank `cpu_s`; 8 answers of 16 tokens to prompts of 8, 16 trained."""
    seconds = {**dict.fromkeys(COMPARED, cpu_s), "write": cpu_s, "capability": cpu_s, "wait": cpu_s}
    peaks = {"start": 100 * MIB, "learn": peak}
    agent = AgentStep({}, 0.0, 8.0, 8 * 16.0, 16.0, 16 * 16.0, 8.0, 8.0, cpu_highest_s=seconds, peak_bytes=peaks)
    return MeasuredStep(9.0, {"a": agent, "b": agent})


@pytest.fixture
def job(tmp_path) -> tuple[Path, Path]:
    return write_small_job(tmp_path), write_cluster(tmp_path)


def test_planned_and_measured_stand_side_by_side(tmp_path, job, monkeypatch):
    """The small job's roll-out is planned as in tests/unit/test_plan_by_hand.py, 0.828 s."""
    asked = []

    def measured(run):
        asked.extend(run.blocks)
        return {block.name: [[step(0.2, 120 * MIB)], [step(0.4, 140 * MIB)]] for block in run.blocks}

    monkeypatch.setattr(cli_plan, "run_blocks", measured)
    # its models are nowhere
    monkeypatch.setattr(schedules, "load_config", lambda file, given: load_unchecked(file, tuple(given)))
    found = command(job[0], "--cluster", job[1], "--measure", tmp_path / "out", "--layout", "", "--layout",
                    "lanes=2 agents.b.tp=2")  # fmt: skip
    assert [block.name for block in asked] == ["as it is", "lanes=2 agents.b.tp=2"]
    rows = {tuple(line.split(" | ")[:2]): line.split(" | ")[2:] for line in found.splitlines() if "%)" in line}
    assert len(rows) == 4
    cluster = load_cluster(job[1])
    work = dict.fromkeys(("a", "b"), work_of(load_planned(job[0], (), cluster).config, Lengths(8, 16)))
    first = rows["| as it is", "a"]
    assert first[0] == "0.828 / 0.300 (+176%)"
    assert first[COMPARED.index("other")].split(" / ")[1].startswith("0.600 ")  # with what is written
    # the highest peak above what a rank had before its models; a process takes 140 MiB beside its tensors
    planned, measured_mib = re.match(r"(\d+) / (\d+) \(", first[len(COMPARED)]).groups()
    whole = make_plan(load_planned(job[0], (), cluster), work, cluster)
    assert int(measured_mib) == 40
    assert 140 < int(planned) < 140 + whole.agents[0].budget.peak / MIB
    assert "| roll_out | " in found and "| 100% |" in found  # rounds are apart by a factor of 2
    assert (tmp_path / "out/calibration.md").read_text() in found


def test_bad_input_of_measure_is_one_line(tmp_path, job):
    config, cluster = job
    (tmp_path / "gpus").mkdir()
    on_gpus = write_cluster(tmp_path / "gpus", {**CLUSTER, "processor": "cuda"})
    assert "give a cluster with processor = 'cpu'" in command(config, "--cluster", on_gpus, "--measure", tmp_path)
    (tmp_path / "file").write_text("")
    found = command(config, "--cluster", cluster, "--measure", tmp_path / "file" / "out")
    assert "no folder can be made there" in found and len(found.splitlines()) == 1
    found = command(config, "--cluster", cluster, "--measure", tmp_path, "--layout", "lanse=2")
    assert "lanse: unknown key; did you mean 'lanes'?" in found and len(found.splitlines()) == 1
    found = command(config, "--cluster", cluster, "--measure", tmp_path, "--json", tmp_path / "plan.json")
    assert "leave --prompt-tokens, --from, --json and --trace out" in found
    assert "give it with --measure" in command(config, "--cluster", cluster, "--layout", "lanes=2")
