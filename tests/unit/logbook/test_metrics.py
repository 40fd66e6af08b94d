"""Metrics: what reduction computes over processes, what a run folder keeps, what a killed or resumed run leaves."""

import dataclasses
import io
import json
import math
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from run_cases import CHARACTERS, agent_table, write_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hacpo_grading.texts.chat_messages import messages_text
from hacpo_mega.cluster.groups.tree import gather_bytes
from hacpo_mega.config import load_config
from hacpo_mega.config.checks.checks import METRIC_WORDS
from hacpo_mega.jobs import from_python
from hacpo_mega.logbook.console import Console, StepLine, phase_seconds
from hacpo_mega.logbook.files import metrics as metrics_file
from hacpo_mega.logbook.files.metrics import Metrics, MetricsWriter, StepMetrics, read_metrics, reduce_payloads
from hacpo_mega.logbook.files.rollout_log import (
    AnswerNotes,
    AnswerTokens,
    RolloutLog,
    logged_steps,
    prompt_text,
    read_rollouts,
)
from hacpo_mega.logbook.steps.step_metrics import add_capability
from hacpo_mega.records import Conversation, Pool, Prompt, Rollout, Stop, Trajectory, Turn, Verdict


def alone(payload: bytes) -> list[bytes]:
    return [payload]


def rank_main(rank: int, world_size: int, store_file: str, folder: str) -> None:
    """A rank that adds its own share: rank r has r + 1 answers, all of reward 0.1 * (r + 1); rank 2 has none."""
    store = dist.FileStore(store_file, world_size)
    group = dist.ProcessGroupGloo(store, rank, world_size)
    metrics = Metrics("a" if rank < 2 else "b", lambda payload: gather_bytes(group, payload))
    if rank != 2:
        for _ in range(rank + 1):
            metrics.add("agent/a/reward_mean", 0.1 * (rank + 1), 1)
        metrics.add_weights("agent/a/from/b/weight", rank, rank**2, 1)
    metrics.count("agent/a/num_answers", rank + 1)
    metrics.gauge("capability/a", 0.1 + 0.2 + rank)
    metrics.highest("agent/a/ratio_max", math.nan if rank == 2 else rank)
    metrics.lowest("agent/a/ratio_min", rank)
    metrics.add("agent/a/unseen", 0.0, 0)
    reduced = metrics.reduce()
    assert metrics.reduce().values == {}, "reduce leaves an empty slate"
    (Path(folder) / f"{rank}.json").write_text(json.dumps(reduced.values))


@pytest.mark.nightly
def test_a_reduction_is_the_hand_calculation_and_equal_on_every_rank(tmp_path: Path) -> None:
    mp.spawn(rank_main, args=(4, str(tmp_path / "store"), str(tmp_path)), nprocs=4)
    results = [(tmp_path / f"{rank}.json").read_text() for rank in range(4)]
    assert len(set(results)) == 1
    values = json.loads(results[0])
    # 1 answer of .1, 2 of .2, 4 of .4: (0.1 + 0.4 + 1.6) / 7
    assert values.pop("agent/a/reward_mean") == pytest.approx(2.1 / 7, abs=1e-15)
    # weights 0, 1, 3: mean 4/3, effective share 16 / (3 * 10)
    assert values.pop("agent/a/from/b/weight_mean") == pytest.approx(4 / 3)
    assert values.pop("agent/a/from/b/weight_ess") == pytest.approx(16 / 30)
    assert math.isnan(values.pop("agent/a/ratio_max"))
    assert values == {"agent/a/num_answers": 10.0, "capability/a": 0.1 + 0.2, "agent/a/ratio_min": 0.0}


def test_mean_does_not_depend_on_the_order_of_ranks() -> None:
    numbers = [1e16, 1.0, -1e16, 3.0, 1e-3]
    payloads = []
    for number in numbers:
        metrics = Metrics("a", lambda payload: payloads.append(payload) or [])
        metrics.add("x", number, 1)
        metrics.reduce()
    assert reduce_payloads(payloads).values == reduce_payloads(payloads[::-1]).values == {"x": 4.001 / 5}


def test_shares_have_one_denominator_although_no_rank_saw_every_part() -> None:
    """Two of 64 answers on one rank, none of 64 on the other: 2 of 128, not the 2 of 64 of the rank that saw them."""
    payloads: list[bytes] = []
    for numbers in ({"correct": 40, "wrong": 22, "error": 2}, {"correct": 60, "wrong": 4}):
        metrics = Metrics("a", lambda payload: payloads.append(payload) or [])
        metrics.shares("agent/a/verdict", numbers)
        metrics.reduce()
    values = reduce_payloads(payloads).values
    assert values == {
        "agent/a/verdict/correct": 100 / 128,
        "agent/a/verdict/error": 2 / 128,
        "agent/a/verdict/wrong": 26 / 128,
    }


def test_phase_seconds_are_the_slowest_rank_and_the_mean() -> None:
    payloads: list[bytes] = []
    shown: list[str] = []
    for seconds in (1.0, 3.0):
        metrics = Metrics("qwen", lambda payload: payloads.append(payload) or [], shown.append)
        with metrics.time("learn"):
            pass
        metrics._accumulate("seconds", "agent/qwen/phase/learn_s", seconds)
        metrics.reduce()
    reduced = reduce_payloads(payloads)
    assert reduced.values == {} and shown == ["learn", "learn"]
    assert reduced.timing["agent/qwen/phase/learn_s"] == pytest.approx(3.0, abs=0.01)
    assert reduced.timing["agent/qwen/phase_mean/learn_s"] == pytest.approx(2.0, abs=0.01)


def test_names_of_the_users_make_no_number_a_timing(tmp_path: Path) -> None:
    """An agent, a reward's part, a metric and a skill may end as durations and sizes do; so may lines of before."""
    metrics, third = Metrics("b_s", alone), torch.tensor([0.5, 1 / 3], dtype=torch.float64)
    add_capability(metrics, ["a", "b_s"], third, torch.tensor([[1.0, 1.5], [2 / 3, 1.0]]))
    named = [f"agent/b_s/{tail}" for tail in ("own/words_s", "reward/answer_bytes", "accuracy/two_mfu")]
    for name in named:
        metrics.add(name, 1.0, 3)
    named += ["capability/b_s", "omega/a/b_s"]
    metrics.add("agent/b_s/judge_hidden_s", 2.0, 1)
    with MetricsWriter(tmp_path) as writer:
        found = metrics.reduce()
        writer.write(1, found)
        before = {name: round(found.values[name], 6) for name in named}
        writer.write(2, StepMetrics({}, found.timing | before))
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert steps[1].values.keys() >= {*named} and steps[1].values["capability/b_s"] == 1 / 3
    assert steps[2].values == before
    for step in steps.values():
        assert step.timing.keys() == {*found.timing, "time_unix_s"} >= {"agent/b_s/judge_hidden_s"}


def test_a_phase_that_raises_is_still_timed() -> None:
    metrics = Metrics("a", alone)
    with pytest.raises(KeyError), metrics.time("judge"):
        raise KeyError("judge")
    assert "agent/a/phase/judge_s" in metrics.reduce().timing


def step_of(**values: float) -> StepMetrics:
    return StepMetrics(values, {"agent/a/phase/learn_s": 1.25})


def test_a_run_reads_back_exactly_and_two_equal_runs_differ_only_in_timing(tmp_path: Path) -> None:
    values = {"third": 1 / 3, "broken": math.nan, "high": math.inf, "low": -math.inf, "tiny": 5e-324}
    for run, seconds in (("one", 1.0), ("two", 2.0)):
        with MetricsWriter(tmp_path / run) as writer:
            writer.write(0, StepMetrics({"accuracy": 0.5}, {}))
            writer.write(1, StepMetrics(values, {"agent/a/phase/learn_s": seconds}))
    one, two = (read_metrics(tmp_path / run / "metrics.jsonl") for run in ("one", "two"))
    assert list(one) == [0, 1]
    assert math.isnan(one[1].values.pop("broken")) and math.isnan(two[1].values.pop("broken"))
    del values["broken"]
    assert one[1].values == two[1].values == values
    assert one[1].timing["agent/a/phase/learn_s"] == 1.0 and two[1].timing["agent/a/phase/learn_s"] == 2.0


def test_metrics_are_strict_json_on_whole_lines(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, StepMetrics({"x": math.nan}, {}))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    assert json.loads(text, parse_constant=refuse)["values"] == {"x": "nan"}


def test_a_torn_last_line_is_skipped_and_an_earlier_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, step_of(x=1.0))
        writer.write(2, step_of(x=2.0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert list(read_metrics(path)) == [1]
    path.write_bytes(whole.replace(b'"values"', b'"valves"', 1))
    with pytest.raises(ValueError, match=r"line 1: not a line of metrics"):
        read_metrics(path)


def test_a_resumed_run_repeats_its_steps_and_keeps_what_it_dropped(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(5):
            writer.write(step, step_of(x=float(step)))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "val')
    with MetricsWriter(tmp_path, steps_done=2) as writer:
        writer.write(3, step_of(x=30.0))
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert {step: metrics.values["x"] for step, metrics in steps.items()} == {0: 0.0, 1: 1.0, 2: 2.0, 3: 30.0}
    dropped = read_metrics(tmp_path / "metrics.dropped.jsonl")
    assert {step: metrics.values["x"] for step, metrics in dropped.items()} == {3: 3.0, 4: 4.0}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_tensorboard_has_every_number_when_write_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(3, step_of(x=0.5))
    events = EventAccumulator(str(tmp_path / "tensorboard"))  # while the writer is still open
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [(3, 0.5)]
    assert [event.value for event in events.Scalars("agent/a/phase/learn_s")] == [1.25]
    writer.close()


def test_importing_metrics_and_console_needs_neither_torch_nor_tensorflow() -> None:
    code = "import sys\nfrom hacpo_mega.logbook import console\nfrom hacpo_mega.logbook.files import metrics\n"
    code += "print({'torch', 'tensorflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STEP = StepMetrics(
    {
        "agent/llama/reward_mean": 0.51,
        "agent/qwen/from/gemma/inside": 0.5,
        "agent/qwen/from/gemma/ratio_mean": 0.8,
        "agent/qwen/from/llama/inside": 0.76,
        "agent/qwen/from/llama/ratio_mean": 0.94,
        "agent/qwen/reward_mean": 0.4204,
    },
    {
        "agent/llama/phase/learn_s": 1.4,
        "agent/qwen/phase/evaluate_s": 2.0,
        "agent/qwen/phase/learn_s": 1.1,
        "agent/qwen/phase/roll_out_s": 0.5,
        "agent/qwen/phase_mean/learn_s": 1.0,
    },
)


@pytest.mark.parametrize("forced", [False, True])  # as Jupyter does, and some that build in the cloud
def test_console_prints_one_plain_line_per_step_into_a_log(monkeypatch, forced) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1" if forced else "")
    log = io.StringIO()
    with Console(40, file=log) as console:
        console.phase("learn")
        console.step(12, STEP)
    assert log.getvalue() == (
        "step 12/40 | llama reward .510 | qwen reward .420 ratio .870 in-band 63%"
        " | roll out 0.5 learn 1.4 evaluate 2.0 s\n"
    )


def long_step(names: list[str]) -> StepMetrics:
    """A step in which every agent has every number that a line may show, two phases of 3 % and three long ones."""
    values, timing = {}, {}
    for name in names:
        prefix = f"agent/{name}"
        values |= {f"{prefix}/{key}": 0.5 for key in ("reward_mean", "accuracy", "num_unjudged", "from/x/ratio_mean")}
        values |= {f"{prefix}/from/x/inside": 0.7, f"{prefix}/num_answers": 1000.0, f"{prefix}/answer_tokens_mean": 9.0}
        timing |= {f"{prefix}/phase/{phase}_s": s for phase, s in (("roll_out", 3.0), ("score", 0.3), ("learn", 5.0))}
        timing |= {f"{prefix}/phase/{phase}_s": s for phase, s in (("publish", 1.0), ("write", 0.3), ("other", 0.4))}
        timing[f"{prefix}/step_s"] = 10.0
    return StepMetrics(values, timing)


def test_a_step_is_one_line_of_120_columns_with_agents_in_given_order() -> None:
    (line,) = StepLine(["b"]).of("step 1/9", long_step(["b"]))
    assert line == (
        "step 1/9 | b reward .500 accuracy .500 unjudged 0% ratio .500"
        " | roll out 3.0 learn 5.0 publish 1.0 of 10.0 s | 900 tok/s"
    )
    for names in (["qwen", "llama"], ["llama", "qwen", "mistral"], ["agent_4", "agent_3", "agent_2", "agent_1"]):
        *_, line = StepLine(names).of("step 1000/4000", long_step(sorted(names)), END)
        assert len(line) <= 120 and line.endswith(" | 1:23:45 left | safe 990")
        assert [part.split()[0] for part in line.split(" | ")[1 : 1 + len(names)]] == names
        assert line.count(".500") >= 2 * len(names), "reward and held-out, both"


END = {"left": "1:23:45 left", "safe": "safe 990"}


def some_step(reward: float, **more: float) -> StepMetrics:
    """A step of three agents, each offered 64 answers by one other, of which 61 would teach and 2 do."""
    values = {}
    for name, source in zip(("gemma", "moe", "mistral"), ("moe", "gemma", "moe")):
        pair = f"agent/{name}/from/{source}"
        values |= {f"agent/{name}/reward_mean": reward, f"{pair}/inside": 0.5}
        values |= {f"{pair}/view/num_{what}": n for what, n in FATES.items()}
        values |= {f"agent/{name}/{key}": value for key, value in more.items()}
    return StepMetrics(values, {})


FATES = {"answers": 64.0, "trained": 4.0, "zero_advantage": 3.0, "too_long": 20.0, "undecodable": 37.0}


def test_three_agents_fit_80_columns_and_every_number_keeps_its_place() -> None:
    steps = [some_step(0.25), some_step(1.0, accuracy=0.5), some_step(-0.05)]
    layout = StepLine(("gemma", "moe", "mistral"), width=80)
    lines = [line for step in steps for line in layout.of("step  1/25", step, END)]
    assert lines == [
        "from here on the numbers of each agent are: reward, shared",
        "step  1/25 | gemma .250 3% | moe .250 3% | mistral .250 3% | safe 990",
        "from here on the numbers of each agent are: reward, held-out, shared",
        "step  1/25 | gemma 1.000 .500 3% | moe 1.000 .500 3% | mistral 1.000 .500 3%",
        "step  1/25 | gemma -.050      3% | moe -.050      3% | mistral -.050      3%",
    ]


def test_a_number_that_a_step_has_not_leaves_its_place_blank() -> None:
    layout = StepLine(("b",))
    first, second, third = (*some_lines(layout, accuracy=0.5), *some_lines(layout), *some_lines(layout, accuracy=1.0))
    assert first == "step 1/9 | b reward .500 accuracy .500 | 1:23:45 left | safe 990"
    assert second == "step 1/9 | b reward .500               | 1:23:45 left | safe 990"
    assert third == "step 1/9 | b reward .500 accuracy 1.000 | 1:23:45 left | safe 990", "wider once, then in its place"


def some_lines(layout: StepLine, **more: float) -> list[str]:
    values = {"agent/b/reward_mean": 0.5} | {f"agent/b/{name}": value for name, value in more.items()}
    return layout.of("step 1/9", StepMetrics(values, {}), END)


def test_a_line_that_stays_too_long_is_broken_between_agents() -> None:
    names = [f"a_rather_long_name_{n}" for n in range(6)]
    values = {f"agent/{name}/reward_mean": 0.5 for name in names}
    lines = StepLine(names, width=80).of("step 1/9", StepMetrics(values, {}))[1:]
    assert all(len(line) <= 80 for line in lines) and len(lines) == 3
    assert " | ".join(line.strip(" |") for line in lines).split(" | ")[1:] == [f"{name} .500" for name in names]


def test_a_step_says_how_gpus_are_used_where_they_are_known() -> None:
    timing = {"agent/b/step_s": 10.0, "rate/learn_mfu": 0.384, "rate/answer_tokens_per_gpu_s": 1410.4}
    (line,) = StepLine(["b"]).of("step 1/9", StepMetrics({"agent/b/reward_mean": 0.5}, timing))
    assert line == "step 1/9 | b reward .500 | MFU 38% 1,410 tok/s/GPU"


def test_console_says_how_long_it_takes_at_the_pace_of_the_last_steps(monkeypatch) -> None:
    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr("hacpo_mega.logbook.console.time.monotonic", lambda: next(clock))
    log = io.StringIO()
    with Console(40, 10, file=log) as console:
        for step in (11, 12, 40):
            console.step(step, StepMetrics({}, {}))
    assert log.getvalue().splitlines() == ["step 11/40", "step 12/40 | 0:04:40 left", "step 40/40"]


def test_a_mean_of_graded_rewards_is_not_called_an_accuracy() -> None:
    mean, square = "agent/a/eval/reward_mean", "agent/a/eval/reward_square"
    values = {mean: 0.5, square: 0.25}
    assert StepLine().of("step 1/2", StepMetrics(values, {})) == ["step 1/2 | a held-out .500"]
    values[square] = 0.5
    assert StepLine().of("step 1/2", StepMetrics(values, {})) == ["step 1/2 | a accuracy .500"]
    values[mean] = values[square] = 0.0
    assert StepLine().of("step 1/2", StepMetrics(values, {})) == ["step 1/2 | a held-out .000"]
    values = {"agent/a/accuracy": 0.0}
    assert StepLine().of("step 1/2", StepMetrics(values, {})) == ["step 1/2 | a accuracy .000"]


def test_console_says_which_step_a_crash_would_return_to() -> None:
    log = io.StringIO()
    with Console(40, 10, file=log) as console:
        console.step(12, StepMetrics({}, {}), safe_step=10)
    assert log.getvalue() == "step 12/40 | safe 10\n"


def test_console_shows_the_phase_on_a_terminal() -> None:
    terminal = Terminal()
    with Console(40, file=terminal) as console:
        console.phase("roll_out")
        console.step(1, STEP)
        console.phase("publish")
    assert "publish" in terminal.getvalue() and "\x1b[" in terminal.getvalue()
    assert "step 1/40  | llama" in terminal.getvalue()


def test_bars_leave_a_terminal_before_the_last_words_of_a_process() -> None:
    terminal = Terminal()
    with Console(40, file=terminal) as console:
        console.phase("roll_out")
        killer = threading.Thread(target=console.clear)  # as a signal is heard: in another thread
        killer.start()
        killer.join()
        said = terminal.getvalue()
        assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l"), "the cursor is back"
        assert said.endswith("\x1b[1A\x1b[2K"), "and both bars are erased"


def test_a_terminal_gets_lines_that_are_broken_between_words(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    Console(40, file=terminal).say("warning: the prompts are too easy for every agent /a/path/of-a-folder/that/is/long")
    assert terminal.getvalue().splitlines() == [
        "warning: the prompts are too", "easy for every agent", "/a/path/of-a-folder/that/is/long",
    ]  # fmt: skip


def test_phase_seconds_take_the_slowest_agent_in_the_order_of_a_step() -> None:
    assert list(phase_seconds(STEP).items()) == [("roll_out", 0.5), ("learn", 1.4), ("evaluate", 2.0)]


# every character at which str.splitlines cuts
CUTS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
TEXTS = ("plain", f"two\nlines {CUTS} and separators", "lone \ud800 surrogate", "漢字 </script>")


def test_no_agent_may_have_the_name_of_a_part_of_metric_names() -> None:
    """Parts below agent/NAME, as the list of names in metrics.py has them: a reader finds phases by /phase/."""
    text = re.sub(r"agent/<name>/|agent/<learner>/", "\n", metrics_file.__doc__.partition("Every rank adds")[0])
    parts = {part for line in text.splitlines() for part in re.findall(r"(?:^|, |\d )([a-z_]+)/[a-z<]", line)}
    assert parts - {"capability", "omega", "rate", "start"} <= METRIC_WORDS, parts


def small_pool() -> Pool:
    """One prompt, two agents, two answers each; the first is a conversation, the last one could not be judged."""
    talk = Conversation(
        (Turn("assistant", TEXTS[0], 3, Stop.EOS, opened="<think>"),),
        counts={"failed": 1, "play": 1, "environment_ms": 9},
    )
    verdicts = ((Verdict.CORRECT, 1.0), (Verdict.WRONG, 0.0), (Verdict.CORRECT, 1.0), (Verdict.TIMEOUT, math.nan))
    ids = np.arange(3, dtype=np.int32)
    flat = [
        Trajectory(
            i // 2,
            Rollout(4, i % 2, ids, TEXTS[i], Stop.EOS, conversation=None if i else talk),
            verdict,
            reward,
            -0.5,
            3,
        )
        for i, (verdict, reward) in enumerate(verdicts)
    ]
    return Pool((Prompt(4, "id-4", "1+1=", "2", "add"),), (((flat[0], flat[1]), (flat[2], flat[3])),))


SEEN = (["1+1="], ["*be brief*1+1="])  # of the first agent the prompt as it is, of the second with its template


def leader_main(rank: int, store_file: str, folder: str) -> None:
    """Two leaders of a lane, one per agent: each knows its own advantages, and ratios of one answer."""
    group = dist.ProcessGroupGloo(dist.FileStore(store_file, 2), rank, 2)
    log = RolloutLog(Path(folder), 3, ("a", "b"), rank, lambda payload: gather_bytes(group, payload), writes=rank == 0)
    ratios, lost = {(4, 1 - rank, 0): 0.9 + rank, (4, rank, 0): math.nan}, {(4, 1 - rank, 1): "too_long"}
    notes = AnswerNotes(ratios, tuple(SEEN[rank]), not_trained=lost)
    log.write(12, small_pool(), torch.arange(4.0).reshape(1, 2, 2) + 10 * rank, notes)


@pytest.mark.nightly
def test_rollouts_of_a_lane_hold_every_learners_numbers(tmp_path: Path) -> None:
    mp.spawn(leader_main, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000012.lane_0003.jsonl"]
    assert logged_steps(tmp_path) == [12]
    (prompt,) = read_rollouts(tmp_path, 12)
    assert (prompt["prompt"], prompt["gold"], prompt["skill"], prompt["lane"]) == ("1+1=", "2", "add", 3)
    assert prompt["prompt_seen"] == {"b": "*be brief*1+1="}
    answers = prompt["answers"]
    assert [answer["text"] for answer in answers] == list(TEXTS)
    assert [(answer["agent"], answer["rollout"]) for answer in answers] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [answer["reward"] for answer in answers] == [1.0, 0.0, 1.0, None]
    assert answers[3]["verdict"] == "timeout"
    assert [answer["advantage"] for answer in answers] == [{"a": float(i), "b": 10.0 + i} for i in range(4)]
    known = [answer["ratio"] for answer in answers]
    assert known == [{"b": pytest.approx(1.9)}, {}, {"a": pytest.approx(0.9)}, {}]
    assert [answer["not_trained"] for answer in answers] == [{}, {"b": "too_long"}, {}, {"a": "too_long"}]


def test_a_chat_is_logged_as_its_messages_and_tokens_with_their_ids(tmp_path: Path) -> None:
    """Nothing in the log is JSON inside JSON, and the text that stood for the prompt comes back to the letter."""
    chat = [{"role": "system", "content": 'Be "brief".'}, {"role": "user", "content": "1+1=\n\u2028?"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    texts = [messages_text(chat), messages_text(chat, tools), "plain", '[{"role":"user"}]']
    pool, log = small_pool(), RolloutLog(tmp_path, 0, ("a", "b"), 0, alone, writes=True)
    for step, text in enumerate(texts, start=1):
        (prompt,) = pool.prompts
        asked = Pool((dataclasses.replace(prompt, text=text),), pool.trajectories_PNG)
        tokens = AnswerTokens(4, 1, (7, 300), ("a", "\ufffd"), None, None)
        log.write(step, asked, torch.zeros(1, 2, 2), AnswerNotes({}, (text,), ((5, 6, 7),), (tokens,)))
    lines = [read_rollouts(tmp_path, step)[0] for step in range(1, 5)]
    assert [line["prompt"] for line in lines] == [chat, chat, *texts[2:]]
    assert [line.get("tools") for line in lines] == [None, tools, None, None]
    assert [prompt_text(line) for line in lines] == texts
    assert prompt_text({"prompt": texts[0]}) == texts[0], "as older runs have it"
    assert lines[0]["prompt_token_ids"] == {"a": [5, 6, 7]}
    (turn,) = lines[0]["answers"][0]["turns"]
    assert (turn["opened"], turn["content"]) == ("<think>", "plain"), "what the prompt has opened, and the rest"
    assert lines[0]["answers"][0]["counts"] == {"failed": 1, "play": 1} and "counts" not in lines[0]["answers"][1]
    assert lines[0]["answers"][1]["token_ids"] == [7, 300] and "token_ids" not in lines[0]["answers"][0]


def test_a_resumed_lane_drops_rollouts_it_will_write_again(tmp_path: Path) -> None:
    pool, advantages_PNG = small_pool(), torch.zeros(1, 2, 2)
    for lane in range(3):
        log = RolloutLog(tmp_path, lane, ("a", "b"), 0, alone, writes=True)
        for step in (1, 2, 3):
            log.write(step, pool, advantages_PNG, AnswerNotes({}, ("1+1=",)))
    # the same run goes on from step 2 with two lanes only: nothing of the third may be left after step 2
    for lane in range(2):
        RolloutLog(tmp_path, lane, ("a", "b"), 0, alone, writes=True, steps_done=2)
    assert logged_steps(tmp_path) == [1, 2]
    assert len(read_rollouts(tmp_path, 2)) == 3


def test_callbacks_get_every_line_separator_and_bad_files_end_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks of `hacpo_mega.train` are played by a function: it writes what they would, one file damaged."""
    prompt = Prompt(4, "id", f"1{CUTS}=", f"2{CUTS}", row=json.dumps({"level": CUTS}))
    pool, advantages_PNG = replace(small_pool(), prompts=(prompt,)), torch.zeros(1, 2, 2)

    def ranks(_words: list[str], _world_size: int, look: Callable[[], None]) -> int:
        log, metrics = (
            RolloutLog(tmp_path / "run", 0, ("a", "b"), 0, alone, writes=True),
            MetricsWriter(tmp_path / "run"),
        )
        for step in (1, 2, 3):
            log.write(step, pool, advantages_PNG, AnswerNotes({}, (prompt.text,)))
            if step == 2:
                logged = tmp_path / "run/rollouts/step_000002.lane_0000.jsonl"
                logged.write_bytes(logged.read_bytes()[9:])
            metrics.write(step, StepMetrics({"x": 1.0}, {}))
            look()
        return 0

    agents = [agent_table(tmp_path, "a", "qwen3", CHARACTERS), agent_table(tmp_path, "b", "llama", CHARACTERS)]
    config, shown = load_config(write_config(tmp_path, agents, num_steps=3)), {}
    monkeypatch.setattr(from_python, "run_on_this_machine", ranks)
    capfd.readouterr()
    assert from_python.train(config, on_answers=shown.__setitem__).is_finished
    assert list(shown) == [1, 3]
    (line,) = shown[3]
    assert (line["prompt"], line["gold"], line["row"]) == (prompt.text, prompt.gold, {"level": CUTS})
    assert [answer["text"] for answer in line["answers"]] == list(TEXTS)
    (said,) = capfd.readouterr().err.splitlines()
    assert "on_answers is not shown a step" in said and "step_000002" in said and "training goes on" in said

    def complain(_step: int, _answers: object) -> None:
        raise LookupError("enough")

    shutil.rmtree(tmp_path / "run")
    with pytest.raises(LookupError, match="enough"):
        from_python.train(config, on_answers=complain)
