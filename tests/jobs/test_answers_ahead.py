"""One step off: answers of the next step are written while this one learns, by the weights of before.

Two agents under hacpo, one of them, with experts whose routing it replays, in a cell of two ranks, each with an engine
of its own. Every step is put on disk, so that all weights between steps and all answers that were ready are there.
"""

import math
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forced_routing import Forced
from job import play_command, run_command, run_here, start_ranks, wait_for_ranks
from run_cases import CHARACTERS, PAIRS, agent_table, train, write_config
from safetensors.torch import load_file
from told_job import told_at_call
from transformers import AutoModelForCausalLM

from hacpo_mega.checkpoint.files import committed_steps, folder_of, read_checkpoint
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts
from hacpo_mega.logbook.run.provenance import read_starts
from hacpo_mega.rollout import wire
from hacpo_mega.rollout.ready_answers import ROW, SUFFIX
from hacpo_mega.samples.tokenizers import load_tokenizer

pytestmark = pytest.mark.nightly

NAMES = ("wide", "small")
NUM_RANKS, NUM_STEPS = 3, 4
TEMPERATURE = 0.8
APART = ("placement=apart", "agents.wide.rollout_gpus=2", "agents.small.rollout_gpus=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    agents = [
        agent_table(folder, "wide", "qwen3_moe", CHARACTERS, tp=2, engine_tp=1, router_replay=True),
        agent_table(folder, "small", "llama", CHARACTERS + PAIRS),
    ]
    rollout = {"rollouts_per_prompt": 4, "max_prompt_tokens": 8, "max_answer_tokens": 12, "temperature": TEMPERATURE}
    config = write_config(
        folder,
        agents,
        num_steps=NUM_STEPS,
        algorithm={"delta": 0.9},
        rollout=rollout | {"one_step_off": True},
        checkpoint={"every_steps": 1, "keep_last": NUM_STEPS},
    )
    train(config)
    return config


def play_disturbed(*arguments: str) -> None:
    """`hacpo-mega ARGUMENTS`, while a thread draws from every generator that the process has in common."""

    def draw() -> None:
        while True:
            random.random(), np.random.random(), torch.rand(3)
            time.sleep(0.001)

    threading.Thread(target=draw, daemon=True).start()
    play_command(*arguments)


@pytest.fixture(scope="module")
def resumed(undisturbed) -> Path:
    """The folder of the same run: told to end within step 2, killed after it, its generators disturbed, ended after
    step 3 as by num_steps, and continued."""
    run_dir = undisturbed.parent / "resumed"
    arguments = ("train", str(undisturbed), f"run_dir={run_dir}")
    starts = [
        (told_at_call, 2, signal.SIGTERM, "learner_view", 2, *arguments),
        (play_disturbed, *arguments, "checkpoint.asynchronous=false", "num_steps=3"),
    ]
    jobs = []
    for number, call in enumerate(starts):
        logs = undisturbed.parent / f"logs_{number}"
        logs.mkdir()
        jobs.append((logs, start_ranks(NUM_RANKS, logs, *call)))
        if number == 0:  # answers of step 2 were taken, those of step 3 were being written
            wait_for_ranks(jobs[0][1])
            said = [(logs / f"{rank}.err").read_text() for rank in range(NUM_RANKS)]
            assert [rank.exitcode for rank in jobs[0][1]] == [75] * NUM_RANKS, said
            assert not any("Traceback" in text for text in said), said
            assert committed_steps(run_dir) == [1]
    logs, ranks = jobs[1]
    while max(committed_steps(run_dir)) < 2:
        assert all(rank.is_alive() for rank in ranks), [log.read_text() for log in logs.glob("*.err")]
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
        rank.join()
    for steps in (3, NUM_STEPS):
        train(undisturbed, f"run_dir={run_dir}", f"num_steps={steps}")
    return run_dir


def test_a_run_that_was_told_to_end_and_killed_ends_with_the_same_bits(undisturbed, resumed):
    run = undisturbed.parent / "run"
    one, other = (read_metrics(folder / "metrics.jsonl") for folder in (run, resumed))
    assert one.keys() == other.keys() and len(one) == NUM_STEPS + 1
    for step, found in one.items():  # a last step is evaluated, too
        extra = other[step].values.keys() - found.values.keys()
        assert step == 3 or not extra, extra
        assert {key: other[step].values[key] for key in found.values} == found.values, step
    assert all(read_rollouts(resumed, step) == read_rollouts(run, step) for step in range(1, NUM_STEPS + 1))
    starts = [start["steps_done"] for start in read_starts(resumed)]
    assert starts[:2] == [0, 1] and starts[2:] in ([2, 3], [3]), "the kill may come late"
    for name in NAMES:
        first, second = (load_file(folder / "agents" / name / "model.safetensors") for folder in (run, resumed))
        assert all(torch.equal(first[tensor], second[tensor]) for tensor in first), name
    for step in (2, 3):
        one, other = (read_checkpoint(folder_of(folder, step)).files for folder in (run, resumed))
        answers = {path: file for path, file in one.items() if path.endswith("_answers")}
        assert len(answers) == len(NAMES)
        assert {path: other[path] for path in answers} == answers


@pytest.fixture(scope="module")
def apart(undisturbed) -> Path:
    """The folder of the same run with engines on ranks of their own: six ranks, two of which answer for one agent."""
    run_dir = undisturbed.parent / "apart"
    run_command(6, "train", undisturbed, f"run_dir={run_dir}", *APART)
    return run_dir


def test_engines_on_their_own_ranks_change_no_bit_and_may_be_removed(undisturbed, apart):
    """Nor does its checkpoint know: jobs/test_apart_faults.py goes the other way."""
    run, back = undisturbed.parent / "run", undisturbed.parent / "back"
    run_command(NUM_RANKS, "train", undisturbed, f"run_dir={back}", "--from", folder_of(apart, 2))
    for other, first in ((apart, 0), (back, 3)):
        one, two = (read_metrics(folder / "metrics.jsonl") for folder in (run, other))
        for step in range(first, NUM_STEPS + 1):
            assert two[step].values == one[step].values
            assert step == 0 or read_rollouts(other, step) == read_rollouts(run, step)
        for name in NAMES:
            weights, same = (load_file(folder / "agents" / name / "model.safetensors") for folder in (run, other))
            assert all(torch.equal(weights[tensor], same[tensor]) for tensor in weights), name
    one, two = (read_checkpoint(folder_of(folder, 2)).files for folder in (run, apart))
    assert one.keys() == two.keys()
    assert all(two[path] == file for path, file in one.items() if path.endswith((SUFFIX, ".distcp")))
    timing = read_metrics(apart / "metrics.jsonl")[1].timing
    assert all(f"agent/{name}/roll_out_hidden_s" in timing for name in NAMES)


def test_only_the_first_step_is_not_stale_and_engines_are_not_compared(undisturbed):
    steps = read_metrics(undisturbed.parent / "run" / "metrics.jsonl")
    for step in range(1, NUM_STEPS + 1):
        values, timing = steps[step].values, steps[step].timing
        for name in NAMES:
            assert values[f"agent/{name}/staleness_steps"] == (0.0 if step == 1 else 1.0)
            assert f"agent/{name}/roll_out_hidden_s" in timing  # the last step, too, since checkpoints are kept
            assert f"agent/{name}/asleep_bytes" not in timing
            assert math.isfinite(values[f"agent/{name}/from/{NAMES[name == 'wide']}/ratio_mean"])
        assert not any("engine_" in key or "first_ratio_error" in key for key in values)


@pytest.fixture(scope="module")
def between(undisturbed) -> dict[tuple[str, int], tuple[AutoModelForCausalLM, Forced | None]]:
    """Every agent as Hugging Face's model after 0, 1, 2 and 3 steps, and who forces its routers."""
    folder, models = undisturbed.parent, {}
    for name in NAMES:
        models[name, 0] = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for step in range(1, NUM_STEPS):
            out = folder / f"{name}_{step}"
            export = run_here("export", folder_of(folder / "run", step), "--agent", name, "--out", out)
            assert export.returncode == 0, export.stderr
            models[name, step] = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    return {key: (model, Forced(model) if key[0] == "wide" else None) for key, model in models.items()}


@torch.no_grad()
def logprobs(model: AutoModelForCausalLM, forced: Forced | None, routing, prompt, answer) -> np.ndarray:
    """Log-probs of the answer's tokens by Hugging Face's model, at the run's temperature, sent as the engine sent."""
    if forced is not None:
        forced.routing = routing
    logits_TV = model(torch.tensor([[*prompt, *answer]])).logits[0].double() / TEMPERATURE
    rows_TV = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows_TV[torch.arange(len(answer)), torch.tensor(answer)].numpy()


@pytest.mark.parametrize("name", NAMES)
def test_answers_and_ratios_are_of_the_weights_before_the_last_update(name, undisturbed, between):
    """Answers ready after step t were written while step t learnt, by the weights published after step t - 1."""
    run = undisturbed.parent / "run"
    tokenizer = load_tokenizer(undisturbed.parent / name)
    num_ratios = 0
    for step in range(1, NUM_STEPS):
        (file,) = (folder_of(run, step) / name).glob("__*_answers")
        table = wire.decode(file.read_bytes(), ROW, str(file))
        assert (table.routing is not None) == (name == "wide")
        routing = table.routing or [None] * len(table.rows)
        prompts = {line["prompt_index"]: line for line in read_rollouts(run, step + 1)}
        assert len(table.rows) == 4 * len(prompts) == 32
        gap_to_newer = 0.0
        for row, ids, given, sent in zip(table.rows, table.tokens, table.logprobs, routing, strict=True):
            line = prompts[row["prompt_index"]]
            (logged,) = [a for a in line["answers"] if (a["agent"], a["rollout"]) == (name, row["rollout_index"])]
            prompt, answer = tokenizer(line["prompt"]).input_ids, ids.tolist()
            assert sent is None or (len(sent) == len(prompt + answer) - 1 and (sent < 4).all())
            written, learning = (logprobs(*between[name, of], sent, prompt, answer) for of in (step - 1, step))
            np.testing.assert_allclose(given, written, atol=1e-4, rtol=0)
            gap_to_newer = max(gap_to_newer, np.abs(given - learning).max())
            assert logged["num_tokens"] == len(answer)
            if logged["mean_logprob"] is not None:
                assert logged["mean_logprob"] == pytest.approx(given.mean(), abs=1e-5)
            # the first update of the next step, of 4 prompts, is one of the weights after this step
            if line["prompt_index"] < 4 and name in logged["ratio"]:
                expected = math.exp(learning.mean() - written.mean())
                assert logged["ratio"][name] == pytest.approx(expected, rel=1e-3)
                num_ratios += 1
        assert gap_to_newer > 0.05, "the newer weights would have said the same"
    assert num_ratios > 4
