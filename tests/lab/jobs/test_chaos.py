"""`hacpo-mega chaos`: a run under faults ends as the run in peace does, and whatever differs is found."""

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest
from job import play_command, start_ranks
from run_cases import CHARACTERS, PAIRS, agent_table, write_config

from hacpo_lab.chaos.campaign import Attempt, Campaign, ChaosError, _require_explained, opened_since
from hacpo_lab.chaos.faults import KINDS, Fault, draw_fault
from hacpo_lab.chaos.table import costs, write_table
from hacpo_lab.chaos.verdict import compare
from hacpo_lab.commands.ranks import train_rank
from hacpo_mega.config import load_config
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.run.provenance import read_starts, record_start

pytestmark = pytest.mark.nightly

SEED = 1944  # its first three faults: see test_faults_are_drawn_alike_from_a_seed
STEPS = 5


class ByEvents(Campaign):
    """Fault n strikes as soon as step n + 1 is logged: on any machine, all of them do."""

    def _next_fault(self, number: int, before: list[Attempt], *, is_running: bool) -> Fault:
        while self._on_disk()[1] <= number:
            time.sleep(0.02)
        return dataclasses.replace(super()._next_fault(number, before, is_running=is_running), moment_s=0.0)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Campaign:
    """A run that was struck by three faults, tensor parallel 2 beside a single rank, and its twin in peace.

    Both write the next step's answers meanwhile, with more threads than the server that their ranks are forked from.
    """
    folder = tmp_path_factory.mktemp("chaos")
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2, engine_tp=1),
        agent_table(folder, "narrow", "llama", CHARACTERS + PAIRS),
    ]
    rollout = {"rollouts_per_prompt": 4, "max_prompt_tokens": 8, "max_answer_tokens": 12, "one_step_off": True}
    tables = {"rollout": rollout, "checkpoint": {"every_steps": 1}}
    file = write_config(folder, agents, num_steps=STEPS, stall_s=120.0, **tables)
    config = load_config(file, [f"run_dir={folder / 'out' / 'run'}"])
    # The campaign forks its ranks in this process; a first rank waits for the server's imports: no fault takes them.
    start_ranks(1, folder, play_command, "--help")[0].join()
    found = ByEvents(config, folder / "out", 3, SEED, ("kill-one", "pause", "disk"), train_rank)
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "2"}):
        found.run_undisturbed(folder / "out" / "undisturbed")
        for _ in found.run_under_faults():
            pass
    return found


def test_a_run_under_faults_ends_with_the_bits_of_the_run_in_peace(campaign):
    attempts, run_dir = campaign.attempts(), campaign.config.run_dir
    verdict = compare(run_dir, campaign.out / "undisturbed", campaign.config)
    assert verdict.problems == ()
    assert verdict.num_shards == 3 and verdict.num_values > 100 and min(verdict.num_trained.values()) > 0
    assert attempts[-1].is_done and not any(attempt.is_done for attempt in attempts[:-1])
    struck = [fault.kind for attempt in attempts for fault, _ in attempt.struck]
    assert struck == ["pause", "disk", "kill-one"]
    text = write_table(campaign.out, attempts, run_dir, verdict)
    assert {start["threads"] for start in read_starts(run_dir)} == {2}
    assert "| pause | 1 | 0 | 0 |" in text and "Equal to the last bit." in text
    record = json.loads((campaign.out / "chaos.json").read_text())
    assert 0.0 < record["training_share"] < 1.0 and len(record["faults"]) == len(struck)


def test_a_step_records_the_memory_and_the_waits_of_its_ranks(campaign):
    """They are timing: the comparison above has passed over them."""
    timing = read_metrics(campaign.config.run_dir / "metrics.jsonl")[STEPS].timing
    for name in ("wide", "narrow"):
        assert 1e8 < timing[f"agent/{name}/rss_bytes"] < 1e11
        waits = {metric: seconds for metric, seconds in timing.items() if metric.startswith(f"agent/{name}/wait/")}
        assert {f"agent/{name}/wait/{phase}_s" for phase in ("exchange", "write")} <= waits.keys()
        assert all(seconds >= 0.0 for seconds in waits.values())


def test_a_campaign_that_is_over_starts_nothing(campaign):
    assert list(campaign.run_under_faults()) == []


def test_another_campaign_needs_another_folder(tmp_path):
    config = load_config(write_config(tmp_path, [agent_table(tmp_path, "wide", "qwen3", CHARACTERS)]))
    first = Campaign(config, tmp_path, 3, SEED, ("kill-one", "pause"), train_rank)
    dataclasses.replace(first, seed=1).require_same()
    first.require_same()  # nothing had begun
    (tmp_path / "undisturbed").mkdir()
    moved = config.model_copy(update={"run_dir": tmp_path / "elsewhere"})
    dataclasses.replace(first, config=moved).require_same()
    other = dataclasses.replace(first, config=config.model_copy(update={"seed": 5}), num_faults=4, kinds=("disk",))
    said = r"--faults was 3, is 4; --kinds was .*pause.*, is .*disk.*; seed was 1, is 5; give another --out$"
    with pytest.raises(ValueError, match=said):
        other.require_same()
    weights = config.agents[0].model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(ValueError, match=r"is of another campaign: inputs.agents.wide.model.the weights was"):
        first.require_same()
    (tmp_path / "campaign.json").unlink()
    with pytest.raises(ValueError, match=r"it lacks campaign.json; give another --out"):
        first.require_same()


@pytest.mark.parametrize(
    "harm, found",
    [
        ("value", "1 of "),
        ("line", "metrics.jsonl has not every step once and in order: [0, 1, 2, 3, 4, 5, 5]"),
        ("weights", "1 of 10 exported files differ"),
        ("answer", "step 2: 65 answers are logged, 64 different ones, of 64"),
    ],
)
def test_whatever_differs_is_found(campaign, tmp_path, harm, found):
    run = Path(shutil.copytree(campaign.config.run_dir, tmp_path / "run"))
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    if harm == "value":
        line = json.loads(metrics[2])
        line["values"]["agent/wide/grad_norm"] *= 1 + 2**-52
        metrics[2] = json.dumps(line)
    if harm == "line":
        metrics.append(metrics[-1])
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in metrics))
    if harm == "weights":
        weights = run / "agents" / "narrow" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    if harm == "answer":
        answers = run / "rollouts" / "step_000002.lane_0000.jsonl"
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        lines[0]["answers"].append(lines[0]["answers"][0])
        answers.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    problems = compare(run, campaign.out / "undisturbed", campaign.config).problems
    assert any(problem.startswith(found) for problem in problems), problems


def test_a_fault_comes_early_in_a_run_that_is_faster_than_planned(campaign, tmp_path):
    """It is due in 11 days. After 2 of 5 steps, or one after the newest on disk, later faults need what is left."""
    config = campaign.config.model_copy(update={"run_dir": tmp_path})
    fast = dataclasses.replace(campaign, config=config)
    for committed in (0, 3):
        lines = [{"step": n, "values": {}, "timing": {"time_unix_s": 10.0 + n}} for n in range(max(committed, 1) + 2)]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (tmp_path / f"checkpoints/step_{committed:06d}").mkdir(parents=True)
        assert not fast._await_moment(Fault(0, "kill-one", 1e6, None, (0,)), [], launched=5.0)


def fault(kind: str) -> Fault:
    return Fault(0, kind, 1.0, None, (0,))


def attempt(**values: object) -> Attempt:
    plain = {"launched": 0.0, "opened": 5.0, "resumed": 2, "ended": 9.0, "statuses": (1, -9), "struck": ()}
    return Attempt(**plain | {"last_step": 4, "committed": 3, "phase": "learn", "unnoticed": False} | values)


@pytest.mark.parametrize(
    "committed, now, said",
    [
        (3, {"resumed": 2, "struck": ((fault("kill-one"), 8.0),)}, "step 3 was committed, but the run"),
        (2, {"struck": ()}, "the run failed, exit statuses .1, -9., and no fault struck"),
        (2, {"struck": ((fault("pause"), 8.0),)}, "a pause must not end it"),
        (2, {"struck": ((fault("kill-one"), 8.0),), "statuses": (2, 2)}, "the run was refused"),
    ],
)
def test_what_no_fault_explains_ends_the_campaign(tmp_path, committed, now, said):
    with pytest.raises(ChaosError, match=said):
        _require_explained(attempt(**now), committed, tmp_path)


def test_a_start_is_seen_though_the_run_has_moved_aside_what_was_before(tmp_path):
    """A run that was struck before its first checkpoint begins anew, in a new folder with one start in it."""
    run, launched = tmp_path / "run", []
    for number in range(3):
        launched.append(time.time())
        time.sleep(0.01)
        run.mkdir(exist_ok=True)
        record_start(run, number, {})
        assert opened_since(run, launched[-1])[1] == number
        if number == 0:
            run.rename(tmp_path / "run.1")
    assert opened_since(run, launched[1])[1] == 1, "the first of several"
    assert opened_since(run, time.time() + 1.0) == opened_since(tmp_path / "none", 0.0) == (None, None)


def test_a_fault_costs_the_steps_since_the_checkpoint_and_the_recovery():
    kill = (fault("kill-one"), 8.0)
    starts = [
        attempt(struck=((fault("pause"), 6.0), kill), last_step=4, committed=3),
        attempt(opened=None, resumed=None, struck=((fault("kill-all"), 12.0),), last_step=4, committed=3),
        attempt(opened=20.0, statuses=(0, 0)),
    ]
    found = [(cost.kind, cost.lost_steps, cost.recovery_s) for cost in costs(starts)]
    assert found == [("pause", 0, None), ("kill-one", 1, 12.0), ("kill-all", 0, 8.0)]


def test_faults_are_drawn_alike_from_a_seed_and_evenly_over_the_window():
    pace = {"world_size": 4, "window_s": 10.0, "step_s": 1.0, "stall_s": 30.0}
    assert [draw_fault(n, SEED, ("kill-one", "pause", "disk"), **pace).kind for n in range(3)] == [
        *("pause", "disk", "kill-one")
    ]
    drawn = [draw_fault(n, 1, KINDS, **pace) for n in range(4000)]
    assert drawn == [draw_fault(n, 1, KINDS, **pace) for n in range(4000)]
    quarters = [sum(q <= fault.moment_s / 2.5 < q + 1 for fault in drawn) for q in range(4)]
    assert sum(quarters) == 4000 and all(abs(number - 1000) < 150 for number in quarters)
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert all(fault.lasts_s <= 15.0 for fault in drawn if fault.kind == "pause")
    assert all(fault.ranks == (0, 1, 2, 3) for fault in drawn if fault.kind in ("kill-all", "disk", "term"))
