"""Three agents in one checkpoint: a run goes on from it bit for bit, and on other lanes with another tp by rounding.

Tensor parallel 2 beside single ranks, with a KL to the initial policy. A step is computed again from the run's files.
"""

import re
from pathlib import Path

import pytest
import torch
from job import run_command, run_here
from recomputed_step import RecomputedStep, read_state
from run_cases import CHARACTERS, PAIRS, agent_table, train, write_config
from safetensors.torch import load_file

from hacpo_mega.checkpoint.files import committed_steps, folder_of, read_checkpoint
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts

pytestmark = pytest.mark.nightly

NAMES = ("wide", "single", "third")
# So large an eps that a gradient of rounding alone moves nothing by its sign.
OPTIMIZER = {"lr": 0.1, "eps": 0.1, "weight_decay": 0.1, "clip_grad": 0.05}
# Rounding errors themselves, how samples are packed, and greedy answers of weights that Adam has moved by signs.
OF_A_LAYOUT = re.compile("engine_|num_microbatches|/eval/")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2, optimizer=OPTIMIZER),
        agent_table(folder, "single", "llama", CHARACTERS + PAIRS, optimizer=OPTIMIZER),
        agent_table(folder, "third", "qwen3", CHARACTERS + PAIRS, optimizer=OPTIMIZER),
    ]
    kept = {"checkpoint": {"every_steps": 1, "keep_every": 1}, "logging": {"rollout_tokens": True}}
    return write_config(folder, agents, algorithm={"kl_coef": 0.01, "delta": 0.5, "delta_step": 0.1}, **kept)


@pytest.fixture(scope="module")
def undisturbed(config) -> Path:
    """The folder of a run of two steps that was left in peace."""
    train(config)
    return config.parent / "run"


@pytest.fixture(scope="module")
def in_two(config) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """The folder of the same run, finished after one step and then asked for two; what it exported after the first.

    In the second step the agents take turns on shared devices (test_offload.py has two agents).
    """
    run_dir = config.parent / "in_two"
    train(config, f"run_dir={run_dir}", "num_steps=1")
    first = {name: load_file(run_dir / "agents" / name / "model.safetensors") for name in NAMES}
    train(config, f"run_dir={run_dir}", "placement=shared")
    return run_dir, first


def test_a_finished_run_goes_on_when_only_num_steps_is_changed(undisturbed, in_two):
    """And ends with every bit of all three agents as the undisturbed one."""
    run_dir, _ = in_two
    one, other = (read_checkpoint(folder_of(run, 2)) for run in (undisturbed, run_dir))
    shards = {path: file for path, file in one.files.items() if path.endswith(".distcp")}
    assert {path.split("/")[0] for path in shards} == set(NAMES) and len(shards) == 4
    assert {path: other.files[path] for path in shards} == shards
    assert (other.agents, other.capability) == (one.agents, one.capability)
    expected, found = (read_metrics(run / "metrics.jsonl") for run in (undisturbed, run_dir))
    assert list(found) == [0, 1, 2]
    assert found[2].values == expected[2].values
    assert read_rollouts(run_dir, 2) == read_rollouts(undisturbed, 2)
    assert any(value > 0.0 for name, value in found[2].values.items() if name.endswith("/kl"))


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_exported_as_the_run_would_have_been(name, undisturbed, in_two, tmp_path):
    done = run_here("export", folder_of(undisturbed, 1), "--agent", name, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), in_two[1][name]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[tensor], expected[tensor]) for tensor in expected)
    end = load_file(undisturbed / "agents" / name / "model.safetensors")
    assert not all(torch.equal(found[tensor], end[tensor]) for tensor in end)


@pytest.fixture(scope="module")
def recomputed(undisturbed) -> dict[str, RecomputedStep]:
    """The second step by the paper, and by rules that differ in one mechanism each."""
    others = {"no omega": {"omega_in_loss": False}, "no step": {"delta_step": 0.0}, "alpha 0": {"alpha": 0.0}}
    return {name: RecomputedStep(undisturbed, 2, **changes) for name, changes in {"paper": {}, **others}.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_what_an_outside_program_makes_of_the_runs_files(name, undisturbed, recomputed):
    """Up to the rounding of float32, some 1e-5 of a gradient; a rule that the run does not follow is off by 1e-2."""
    before, after = (read_state(folder_of(undisturbed, step) / name) for step in (1, 2))

    def error(step: RecomputedStep) -> float:
        """The largest relative error of the step's change of all weights, and of both moments."""
        found = step.after(NAMES.index(name))
        changes = ({n: t - before.weights[n] for n, t in end.weights.items()} for end in (found, after))
        return max(_apart(*changes), _apart(found.first, after.first), _apart(found.second, after.second))

    errors = {rules: error(step) for rules, step in recomputed.items()}
    assert errors.pop("paper") < 1e-4
    assert all(wrong > 1e-3 for wrong in errors.values()), errors


def _apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    one, other = (torch.cat([tensors[name].flatten() for name in expected]) for tensors in (found, expected))
    return float((one - other).norm() / other.norm())


def test_other_lanes_and_another_tp_go_on_by_rounding(config, undisturbed):
    """Six ranks take up what four have written, and do the same step."""
    run_dir = config.parent / "lanes"
    overrides = (f"run_dir={run_dir}", "lanes=2", "agents.wide.tp=1")
    run_command(6, "train", config, *overrides, "--from", folder_of(undisturbed, 1))
    assert committed_steps(run_dir) == [2]
    assert answers(run_dir) == answers(undisturbed)
    expected, found = (read_metrics(run / "metrics.jsonl")[2].values for run in (undisturbed, run_dir))
    assert found.keys() == expected.keys()
    for key in expected.keys() - {key for key in expected if OF_A_LAYOUT.search(key)}:
        assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7), key


def answers(run_dir: Path) -> dict[tuple, str]:
    """The texts of step 2 by prompt, agent and number; lanes log their prompts one after another."""
    prompts = read_rollouts(run_dir, 2)
    return {(p["id"], answer["agent"], answer["rollout"]): answer["text"] for p in prompts for answer in p["answers"]}
