"""The arithmetic of the benchmark: FLOPs against torch's own counter, busy and waiting by hand, what replays what."""

import json
from pathlib import Path

import pytest
import torch
from run_cases import CHARACTERS, agent_table, write_config
from tiny_models import make_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from hacpo_mega.config import Config, load_config
from hacpo_mega.logbook.metrics import StepMetrics
from hacpo_mega.models.architecture import Architecture
from hacpo_mega.throughput.flops import forward_flops, phase_flops
from hacpo_mega.throughput.measure import measured_step, percentile
from hacpo_mega.throughput.schedules import load_schedule, schedules_of
from hacpo_mega.throughput.workload import fixed, replayed


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_forward_flops_are_those_that_torch_counts(tmp_path, family):
    make_model(tmp_path, family, vocab_size=50, tied=family == "qwen3", seed=1, num_layers=3, hidden_size=64,
               num_heads=4, num_kv_heads=2, head_dim=16 if family == "qwen2" else 32, ffn_size=96)  # fmt: skip
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model, length = Architecture.from_folder(tmp_path), 20
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reference(torch.arange(2 * length).reshape(2, length) % 50)
    # Eager attention multiplies the upper triangle, too, and counts a rotary outer product of 2 per position and pair.
    triangle = 2 * 2.0 * model.num_layers * model.num_heads * model.head_dim * length**2
    rotary = 2 * length * (model.head_dim // 2)
    assert counter.get_total_flops() - triangle == pytest.approx(forward_flops(model, 2, length), abs=2 * rotary)


def test_learning_needs_three_forwards(tmp_path):
    make_model(tmp_path, "llama", vocab_size=50, tied=False, seed=1, num_layers=1, hidden_size=64, num_heads=2,
               num_kv_heads=2, head_dim=32, ffn_size=96)  # fmt: skip
    model = Architecture.from_folder(tmp_path)
    found = phase_flops(model, num_prompts_answered=4, num_scored=3, num_trained=2, length=10)
    one = forward_flops(model, 1, 10)
    assert found == pytest.approx({"roll_out": 4 * one, "score": 3 * one, "learn": 6 * one})


def step_metrics() -> StepMetrics:
    """Agent a works 3 s and 1 s of exchange in which b, which works 1 s, has waited 2 s more."""
    values = {}
    for name in ("a", "b"):
        values |= {f"agent/{name}/{key}": value for key, value in
                   {"num_answers": 8.0, "answer_tokens_mean": 5.0, "num_trained_answers": 16.0,
                    "num_trained_tokens": 80.0, "prompt_tokens_mean": 3.0}.items()}  # fmt: skip
    timing = {"time_unix_s": 0.0, "agent/a/phase/roll_out_s": 2.0, "agent/a/phase/learn_s": 1.0,
              "agent/a/phase/exchange_s": 1.0, "agent/b/phase/roll_out_s": 0.5, "agent/b/phase/learn_s": 0.5,
              "agent/b/phase/exchange_s": 3.0, "agent/b/phase_mean/learn_s": 0.5,
              "agent/b/phase/wait_s": 1.0}  # fmt: skip
    return StepMetrics(values, timing)


def test_who_comes_first_to_the_exchange_waits_in_it():
    step = measured_step(5.0, step_metrics(), ["a", "b"])
    assert (step.agents["a"].busy_s, step.agents["b"].busy_s) == (4.0, 2.0)
    assert step.one_after_the_other_s == 6.0
    assert step.agents["b"].phases_s == {"roll_out": 0.5, "exchange": 3.0, "learn": 0.5, "wait": 1.0}
    assert step.agents["a"].tokens == 40.0


def test_percentiles_lie_between_neighbours():
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0], 0.95) == 1.0


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    agents = [agent_table(folder, "one", "qwen3", CHARACTERS), agent_table(folder, "two", "llama", CHARACTERS)]
    return write_config(folder, agents)


def record(run_dir: Path, config: Config, agents: tuple[str, ...] = ("one", "two"), num_tokens: int = 3) -> Path:
    """The rollout log of a step, as a run writes it; answer g of agent n has n + g more tokens, only g = 1 is right."""
    lines = [
        {"prompt_index": p, "answers": [
            {"agent": agent, "rollout": g, "num_tokens": num_tokens + n + g, "reward": float(g == 1)}
            for n, agent in enumerate(agents) for g in range(2)]}
        for p in range(config.training.prompts_per_step)
    ]  # fmt: skip
    (run_dir / "rollouts").mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "rollouts" / "step_000001.lane_0000.jsonl").write_text(text)
    return run_dir


def test_a_replay_has_the_recorded_lengths_and_takes_them_again_for_more_answers(tmp_path, config_file):
    config = load_config(config_file)
    workload = replayed(config, record(tmp_path, config))
    assert [workload.answer("two", 5, 0, g) for g in range(4)] == [(4, 0.0), (5, 1.0), (4, 0.0), (5, 1.0)]
    assert fixed(config, None).answer("one", 0, 0, 3) == (6, 1.0)


def test_what_cannot_be_replayed_is_said_in_a_line(tmp_path, config_file):
    config = load_config(config_file)
    three = record(tmp_path / "three", config, agents=("one", "two", "three"))
    with pytest.raises(ValueError, match=r"recorded 3 agents \(one, three, two\), the configuration has 2"):
        replayed(config, three)
    with pytest.raises(ValueError, match=r"no rollouts are there"):
        replayed(config, tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"give rollout.max_answer_tokens=22"):
        replayed(config, record(tmp_path / "long", config, num_tokens=20))
    few = load_config(config_file, ["training.prompts_per_step=4"])
    with pytest.raises(ValueError, match=r"step 1 has 4 prompts, .* is 8: give training.prompts_per_step=4"):
        replayed(config, record(tmp_path / "few", few))
    with pytest.raises(ValueError, match=r"--answer-tokens \(13\) must be 1 to .* \(12\)"):
        fixed(config, 13)


def test_all_schedules_have_as_many_answers_in_an_update(tmp_path, config_file):
    config = load_config(config_file)
    schedules = schedules_of(config)
    assert [schedule.name for schedule in schedules] == ["hacpo", "gspo_x2", "gspo"]
    loaded = [load_schedule(config_file, (), schedule, tmp_path, 3) for schedule in schedules]
    sources = (2, 1, 1)  # whose answers an update has
    in_update = [c.prompts_per_update * c.answers_per_prompt * n for c, n in zip(loaded, sources)]
    assert in_update == [32, 32, 32]
    assert [c.training.prompts_per_step * c.answers_per_prompt * n for c, n in zip(loaded, sources)] == [64, 64, 32]
    assert all(c.num_steps > 3 and not c.checkpoint.every_steps for c in loaded)


def test_agents_that_share_nothing_are_not_compared(config_file):
    with pytest.raises(ValueError, match=r"found algorithm.method=gspo with 2 agents"):
        schedules_of(load_config(config_file, ["algorithm.method=gspo"]))
