"""One walk through a run, as its user takes it: train, be told to end, go on with another layout, export, report.

Two agents of two families and two tokenizers, tensor parallel 2 beside one cell, with a KL to the initial policy. The
tests judge what one run of three steps left behind.
"""

import gzip
import json
import math
import signal
from pathlib import Path

import pytest
import torch
from job import play_command, run_here, start_ranks, wait_for_ranks
from repository import ROOT
from run_cases import CHARACTERS, GRADER, PAIRS, agent_table, write_config
from safetensors.torch import load_file
from told_job import told_at_call
from transformers import AutoModelForCausalLM

from hacpo_mega.checkpoint.files import committed_steps, folder_of
from hacpo_mega.logbook.files.metrics import StepMetrics, read_metrics
from hacpo_mega.logbook.files.rollout_log import logged_steps, read_rollouts
from hacpo_mega.logbook.run.provenance import read_starts
from hacpo_mega.logbook.steps.start_parts import PARTS
from hacpo_mega.samples.tokenizers import load_tokenizer

NAMES = ("wide", "single")
NUM_RANKS = 3
OWN = ROOT / "tests" / "support" / "own_code.py"


@pytest.fixture(scope="module")
def walk(tmp_path_factory) -> Path:
    """The folder of a run that was told to end as its last rank began to learn in step 2, and went on with tp 1."""
    folder = tmp_path_factory.mktemp("walk")
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2),
        agent_table(folder, "single", "llama", CHARACTERS + PAIRS),
    ]
    config = write_config(
        folder,
        agents,
        num_steps=3,
        # its own metric and tracker, which a rank loads by their names
        algorithm={"delta": 0.9, "kl_coef": 0.01, "capability_metric": "positive_rate"},
        reward={"kind": f"{GRADER}:share_of_ones", "success": 0.1},
        training={"prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 256}
        | {"verify_weights_every": 1},
        checkpoint={"every_steps": 1, "keep_every": 1},
        logging={"trace": True, "trace_steps": [2], "rollout_tokens": True, "report": 1}
        | {"metrics": [f"{OWN}:{name}" for name in ("length_of", "fails", "threads")], "trackers": [f"{OWN}:Notes"]},
    )
    logs = folder / "logs"
    logs.mkdir()
    call = (NUM_RANKS - 1, signal.SIGUSR1, "learn", 3, "train", str(config))  # two updates a step
    ranks = start_ranks(NUM_RANKS, logs, told_at_call, *call)
    wait_for_ranks(ranks)
    said = [(logs / f"{rank}.err").read_text() for rank in range(NUM_RANKS)]
    assert [rank.exitcode for rank in ranks] == [75] * NUM_RANKS, said
    assert committed_steps(folder / "run") == [1, 2] == logged_steps(folder / "run")
    rest = folder / "rest"
    rest.mkdir()
    ranks = start_ranks(2, rest, play_command, "train", str(config), "agents.wide.tp=1")
    wait_for_ranks(ranks)
    assert [rank.exitcode for rank in ranks] == [0, 0], [(rest / f"{rank}.err").read_text() for rank in (0, 1)]
    return folder


@pytest.fixture(scope="module")
def steps(walk) -> dict[int, StepMetrics]:
    return read_metrics(walk / "run" / "metrics.jsonl")


def test_every_step_is_there_once(walk):
    run = walk / "run"
    lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 2, 3]
    assert committed_steps(run) == logged_steps(run) == [1, 2, 3]
    assert [start["steps_done"] for start in read_starts(run)] == [0, 2]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_keeps_the_laws(steps, step):
    """A first own ratio of exactly 1; engine and trainer apart by rounding; each omega the other's inverse."""
    values = steps[step].values
    for name, other in zip(NAMES, reversed(NAMES), strict=True):
        assert values[f"agent/{name}/num_answers"] == 32
        assert values[f"agent/{name}/self/first_ratio_error"] == 0.0
        assert 0 < values[f"agent/{name}/engine_gap_max"] < 1e-4
        assert values[f"agent/{name}/grad_norm"] > 0.0
        assert values[f"agent/{name}/kl"] > 0.0
        if step == 1:  # later a source may give nothing that moves a gradient
            shares = [values[f"agent/{name}/from/{other}/{where}"] for where in ("below", "inside", "above")]
            assert math.isclose(sum(shares), 1.0)
    assert math.isclose(values["omega/wide/single"] * values["omega/single/wide"], 1.0)


def test_capability_is_the_share_of_successes_in_the_last_steps(walk, steps):
    """The logged answers' rewards by hand: a tenth of their characters are ones."""
    for name in NAMES:
        by_step = []
        for step in (1, 2, 3):
            found = [a for prompt in read_rollouts(walk / "run", step) for a in prompt["answers"] if a["agent"] == name]
            assert all((a["verdict"] == "correct") == (a["reward"] >= 0.1) for a in found)
            by_step.append(sum(a["reward"] >= 0.1 for a in found) / len(found))
            assert steps[step].values[f"capability/{name}"] == pytest.approx(sum(by_step) / step, rel=1e-12)
        assert max(by_step) > 0.0 and min(by_step) < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_the_run_goes_on_from_the_policy_that_was_stored(walk, name, tmp_path):
    """The policy that answers and is scored in step 3 is, by Hugging Face, the export of the checkpoint of step 2."""
    done = run_here("export", folder_of(walk / "run", 2), "--agent", name, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    num_compared = 0
    for prompt in read_rollouts(walk / "run", 3):
        asked = tokenizer(prompt["prompt"]).input_ids
        for answer in (answer for answer in prompt["answers"] if answer["agent"] == name and answer["mean_logprob"]):
            answered = tokenizer.convert_tokens_to_ids(answer["tokens"])
            with torch.no_grad():
                logits_TV = model(torch.tensor([asked + answered])).logits[0].double()
            logprobs_TV = logits_TV.log_softmax(-1)[len(asked) - 1 : -1]
            found = logprobs_TV[torch.arange(len(answered)), answered].mean().item()
            assert found == pytest.approx(answer["mean_logprob"], abs=1e-4)
            num_compared += 1
    assert num_compared > 8


@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_leaves_is_what_its_last_checkpoint_exports(walk, name, tmp_path):
    done = run_here("export", folder_of(walk / "run", 3), "--agent", name, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    folders = (tmp_path / "out", walk / "run" / "agents" / name, walk / name)
    exported, left, before = (load_file(folder / "model.safetensors") for folder in folders)
    assert exported.keys() == left.keys() == before.keys()
    assert all(torch.equal(exported[tensor], left[tensor]) for tensor in left)
    assert not any(torch.equal(left[tensor], before[tensor]) for tensor in left)


def test_own_numbers_and_trackers_see_every_answer(walk, steps):
    """The mean of a number over the answers of each agent, and a tracker that goes on with its run."""
    for name in NAMES:
        answers = [a for prompt in read_rollouts(walk / "run", 3) for a in prompt["answers"] if a["agent"] == name]
        mean = sum(len(answer["text"]) for answer in answers) / len(answers)
        assert steps[3].values[f"agent/{name}/own/length_of"] == pytest.approx(mean, rel=1e-12)
        assert f"agent/{name}/own/fails" not in steps[3].values
    notes = [json.loads(line) for line in (walk / "run" / "notes.jsonl").read_text().splitlines()]
    begins = [told["goes_on"] for step, told in notes if "begins" in told]
    assert begins == [False, True]
    (table,) = [told for step, told in notes if step == 3 and "table" in told]
    asked = read_rollouts(walk / "run", 3)[0]
    assert [row["answer"] for row in table["table"]] == [answer["text"] for answer in asked["answers"]]
    assert sorted(table["spread"]) == sorted(f"agent/{n}/{w}" for n in NAMES for w in ("rewards", "answer_tokens"))
    (numbers,) = [told for step, told in notes if step == 3 and "table" not in told]
    assert numbers["agent/wide/reward_mean"] == steps[3].values["agent/wide/reward_mean"]


def test_a_rank_has_few_threads_and_a_start_names_where_its_seconds_went(steps):
    """Threads that wait wake up all the same, a hundred times a second those of gloo."""
    for name in NAMES:
        assert 1 <= steps[3].values[f"agent/{name}/own/threads"] < 40
    for first in (steps[0], steps[3]):
        parts = {name: seconds for name, seconds in first.timing.items() if name.startswith("start/")}
        assert parts.keys() == {f"start/{part}_s" for part in (*PARTS, "processor")}
        assert all(seconds > 0.0 for seconds in parts.values())
    assert not any(name.startswith("start/") for step in (1, 2) for name in steps[step].timing)


def test_the_traced_step_and_the_report_are_there(walk, steps):
    run = walk / "run"
    trace = json.loads(gzip.decompress((run / "trace" / "step_000002.json.gz").read_bytes()))
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank in range(NUM_RANKS):
        mine = {event["name"] for event in drawn if event["tid"] == rank}
        assert {"roll_out", "exchange", "score", "learn", "forward and backward", "publish"} <= mine
    page = (run / "report.html").read_text(encoding="utf-8")  # by the run itself, its first rank alone
    assert [(walk / "rest" / f"{rank}.out").read_text().count("the report: ") for rank in (0, 1)] == [1, 0]
    assert "ratio 1.000" in page and "3 of 3 steps" in page
    assert (run / "report" / "timeline.png").is_file()
    short = json.loads(run_here("report", run, "--json").stdout)
    assert short["agents"]["wide"]["mean_reward_end"] == pytest.approx(steps[3].values["agent/wide/eval/reward_mean"])
