"""The pulls of methods on logged answers, against sums by hand."""

import json
from pathlib import Path

import pytest
import torch
from experiment_cases import make_grid
from job import run_here
from repository import ROOT
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_lab.experiments import screen as screen_module
from hacpo_lab.experiments.screen import ScreenedAnswers, pull_of, screen
from hacpo_mega.algorithm import Judged
from hacpo_mega.config import load_config


def algorithm_of(tmp_path: Path, *overrides: str):
    agents = [agent_table(tmp_path, name, "qwen3", CHARACTERS) for name in ("one", "two")]
    return load_config(write_config(tmp_path, agents), list(overrides)).algorithm


def test_the_pull_of_naive_is_the_sum_by_hand(tmp_path):
    """Two agents, two answers each, two prompts. Prompt 0: rewards 1 0 / 1 1, mean 3/4, deviation 1/2, A = .5 or -1.5.

    Learner 0's ratios to the other's answers are 1/2 and 2. Positive A: min(s A, clip(s) A), so weights 1/2 and 0 (2 is
    clipped). Its own answers have ratio 1: .5 pulls, -1.5 pushes. Prompt 1 has equal rewards, so it pulls nothing.
    """
    rewards_PNG = torch.tensor([[[1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    log_ratio_KPNG = torch.zeros(2, 2, 2, 2, dtype=torch.float64)
    log_ratio_KPNG[0, :, 1] = torch.tensor([0.5, 2.0]).log()
    judged = Judged(rewards_PNG, rewards_PNG == 1.0, torch.tensor([0.5, 0.5]), learner=0)
    step = ScreenedAnswers(judged, log_ratio_KPNG)
    found = pull_of([step, step], 0, algorithm_of(tmp_path, "algorithm.method='naive'"))
    assert found.prompts_P.tolist() == pytest.approx([0.5 * 0.5, 0.0] * 2, abs=1e-5)
    assert found.own_P.tolist() == pytest.approx([0.5 + 1.5, 0.0] * 2, abs=1e-5)
    assert found.cross == pytest.approx(2 * 0.25, abs=1e-5) and found.num_trained == 2 * 4


def run_folder(folder: Path) -> Path:
    """A run of one step whose two agents answered two prompts twice."""
    agents = [agent_table(folder, name, "qwen3", CHARACTERS) for name in ("one", "two")]
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(write_config(folder, agents).read_text())
    capability = {f"capability/{name}": 0.5 for name in ("one", "two")}
    line = {"step": 1, "values": capability, "timing": {}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    lines = []
    for p, rewards in enumerate(((1.0, 0.0, 1.0, 1.0), (1.0, 0.0, None, 0.0))):
        answers = [
            {
                **{"agent": ("one", "two")[n // 2], "rollout": n % 2, "text": "", "stop": "eos", "num_tokens": 1},
                **{"reward": reward, "verdict": "correct" if reward else "wrong", "mean_logprob": -1.0},
                **{"advantage": {}, "ratio": {"one": 0.9, "two": 0.8}, "not_trained": {}},
            }
            for n, reward in enumerate(rewards)
        ]
        prompt = {"step": 1, "lane": 0, "prompt_index": p, "id": str(p), "skill": "add", "prompt": "1+1=", "gold": "2"}
        lines.append(json.dumps(prompt | {"prompt_seen": {}, "answers": answers}))
    (folder / "rollouts/step_000001.lane_0000.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_table_for_each_learner_names_what_cannot_be_screened(tmp_path):
    run = run_folder(tmp_path / "run")
    methods = {
        "naive": {"set": ["algorithm.method=naive"]},
        "again": {"set": ["algorithm.method=hacpo", "algorithm.alpha=0.0", "algorithm.cross_clip=own",
                          "algorithm.capability_baseline=false", "algorithm.omega_in_loss=false"]},
        "sgt": {"set": ["algorithm.method=sgt"]},
        "value": {"set": ["algorithm.method=naive", f"algorithm.advantages={ROOT / 'configs/methods/value.py'}:value"]},
        "longer": {"set": ["rollout.max_answer_tokens=30"]},
    }  # fmt: skip
    regimes = {"skills": {"config": str(run / "config.toml")}}
    grid = make_grid(tmp_path, methods=methods, regimes=regimes, learning_rates=[1e-4], tuning_seeds=[])
    one, two = screen(grid, run, "naive")
    assert one.title == "one: pulls beside naive's" and two.title == "two: pulls beside naive's"
    rows = {row[0]: row for row in one.rows}
    assert rows["again"][1:4] == ("1.000", "1.00", "1.000") and rows["again"][-1] == "as the reference"
    assert rows["sgt"][-1] == rows["value"][-1] == "" and rows["longer"][-1] == "not screened"
    done = run_here("screen", tmp_path / "grid.toml", run, "--beside", "longer")
    assert done.returncode == 2
    assert "--beside 'longer' cannot be screened: rollout.max_answer_tokens=30 changes the answers" in done.stderr
    (run / "rollouts/step_000001.lane_0000.jsonl").unlink()
    with pytest.raises(ValueError, match="no step with answers and metrics"):
        screen(grid, run, "naive")


def test_screened_answers_have_the_number_of_their_step(tmp_path):
    """Advantages of one's own may change with the step: each is called with that of the run, not with the first."""
    run = run_folder(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text() + (run / "metrics.jsonl").read_text().replace('"step": 1', '"step": 2')
    (run / "metrics.jsonl").write_text(lines)
    logged = (run / "rollouts/step_000001.lane_0000.jsonl").read_text().replace('"step": 1', '"step": 2')
    (run / "rollouts/step_000002.lane_0000.jsonl").write_text(logged)
    _, steps = screen_module._read(run)
    last = load_config(run / "config.toml").num_steps
    assert [(found.judged.step, found.judged.num_steps) for found in steps] == [(1, last), (2, last)]
