"""The arithmetic of the benchmark: FLOPs against torch's own counter, busy and waiting by hand, what replays what."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT
from run_cases import CHARACTERS, agent_table, write_config
from tiny_models import make_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hacpo_lab.commands import bench as cli_bench
from hacpo_lab.throughput import memory_peak
from hacpo_lab.throughput.flops import forward_flops, phase_flops
from hacpo_lab.throughput.measure import AgentStep, MeasuredStep, measured_step, percentile
from hacpo_lab.throughput.memory_peak import take_peak
from hacpo_lab.throughput.scaling import scaling_blocks, scaling_rows
from hacpo_lab.throughput.schedules import load_schedule, schedules_of, with_and_without
from hacpo_lab.throughput.summary import summarize
from hacpo_lab.throughput.table import markdown, size_tables, to_csv, to_markdown
from hacpo_lab.throughput.workload import fixed, replayed
from hacpo_mega.cli.app import app
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config, load_config
from hacpo_mega.logbook.files.metrics import StepMetrics
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.public import public_architecture


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe", "mixtral"])
def test_forward_flops_are_those_that_torch_counts(tmp_path, family):
    make_model(tmp_path, family, vocab_size=50, tied=family == "qwen3", seed=1, num_layers=3, hidden_size=64,
               num_heads=4, num_kv_heads=2, head_dim=16 if family == "qwen2" else 32, ffn_size=96)  # fmt: skip
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager"
    )
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
    found = phase_flops(model, num_prompts_answered=4, num_scored=3, num_trained=2, length=10, trained_length=7)
    one, trained = forward_flops(model, 1, 10), forward_flops(model, 1, 7)
    assert found == pytest.approx({"roll_out": 4 * one, "score": 3 * one, "learn": 6 * trained})


def step_metrics() -> StepMetrics:
    """Agent a works 3 s and 1 s of exchange in which b, which works 1 s, has waited 2 s more."""
    values = {}
    for name in ("a", "b"):
        values |= {f"agent/{name}/{key}": value for key, value in
                   {"num_answers": 8.0, "answer_tokens_mean": 5.0, "num_trained_answers": 16.0,
                    "num_trained_tokens": 80.0, "prompt_tokens_mean": 3.0, "num_scored": 4.0}.items()}  # fmt: skip
    timing = {"time_unix_s": 0.0, "agent/a/cpu/learn_s": 0.8, "agent/a/cpu_highest/learn_s": 0.9,
              "agent/a/peak/learn_bytes": 64.0, "agent/a/sent/exchange/lane_bytes": 32.0,
              "agent/a/phase/roll_out_s": 2.0, "agent/a/phase/learn_s": 1.0,
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


def test_what_only_a_benchmark_counts_is_read_and_told():
    step, lighter = measured_step(5.0, step_metrics(), ["a", "b"]), step_metrics()
    lighter.timing.update({"agent/a/cpu/learn_s": 0.4, "agent/a/peak/learn_bytes": 60.0})
    assert (step.agents["a"].cpu_highest_s, step.agents["b"].cpu_s) == ({"learn": 0.9}, {})
    steps = [step, measured_step(5.0, lighter, ["a", "b"])]
    small = public_architecture("Qwen/Qwen3-1.7B")
    summary = summarize("hacpo", [steps], {"a": small, "b": small})
    rows = {tuple(row[:3]): row[5:] for row in csv.reader(io.StringIO(to_csv([summary])))}
    header = rows.pop(("schedule", "agent", "phase"))
    assert header == ["cpu_seconds", "peak_bytes", "lane", "cell", "row", "job", "tp", "pp", "engine"]
    # a mean of seconds, the highest of peaks; b has counted nothing
    assert rows["hacpo", "a", "learn"] == ["0.6", "64", *["0"] * 7]
    assert rows["hacpo", "a", "exchange"][2:4] == ["32", "0"]
    assert rows["hacpo", "b", "learn"] == ["", "", *["0"] * 7]
    text = to_markdown({"machine": "m"}, [summary])
    head = "### CPU seconds by phase\n\n| schedule | agent | learn |\n| --- | --- | --- |\n"
    assert f"{head}| hacpo | a | 0.600 |\n| hacpo | b | 0.000 |" in text
    assert "### KB sent by phase\n\n| schedule | agent | exchange/lane |" in text


def test_learning_counts_the_lengths_that_are_trained():
    """Own answers have 5 tokens, the trained ones 10, beside prompts of 3."""
    step, small = step_metrics(), public_architecture("Qwen/Qwen3-1.7B")
    step.values["agent/a/num_trained_tokens"] = 160.0
    found = summarize("hacpo", [[measured_step(5.0, step, ["a", "b"])]], {"a": small, "b": small}).agents
    assert found["a"].flops_per_s["learn"] == pytest.approx(3 * forward_flops(small, 16, 13))
    assert found["b"].flops_per_s["learn"] == pytest.approx(3 * forward_flops(small, 16, 8) / 0.5)


@pytest.mark.parametrize("command", ["bench", "chaos", "plan"])
def test_a_command_can_be_imported_before_the_command_line(command):
    subprocess.run([sys.executable, "-c", f"import hacpo_lab.commands.{command}"], check=True)


def test_the_actors_benchmark_runs(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3", tied=True)
    script = ROOT / "packages/hacpo_lab/benchmarks/actor_benchmark.py"
    sizes = ("--sequences", "3", "--tokens", "8", "--rounds", "1", "--kernels", "3")
    told = subprocess.run([sys.executable, script, folder, *sizes], capture_output=True, text=True, check=True).stdout
    assert re.search(r"^score: .* tokens/s, .*\nlearn: .* tokens/s, ", told) and "Self CPU time total" in told


def test_sampling_beside_other_phases_is_as_fast_as_it_was_there():
    """Half a second of waiting was left of two: the rate is that of two."""
    beside, alone = step_metrics(), step_metrics()
    beside.timing.update({"agent/a/phase/roll_out_s": 0.5, "agent/a/roll_out_hidden_s": 1.5})
    small = public_architecture("Qwen/Qwen3-1.7B")
    rates = [
        summarize("hacpo", [[measured_step(5.0, found, ["a", "b"])]], {"a": small, "b": small}).agents["a"].flops_per_s
        for found in (beside, alone)
    ]
    assert rates[0]["roll_out"] == rates[1]["roll_out"] > 0.0


def test_the_peak_is_that_since_the_last_call():
    take_peak()
    before = take_peak()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    del block
    assert take_peak() >= before + (60 << 20)
    assert take_peak() < before + (60 << 20)


def test_a_process_that_may_not_reset_its_peak_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_peak, "RESET", tmp_path / "no" / "clear_refs")
    assert take_peak() is None


def test_on_cuda_the_peak_is_that_of_torchs_allocator(monkeypatch):
    """A faked device: nothing may ask it for more than the allocator's own count, which is on the host."""
    told = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: told.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("synchronized"))
    assert (take_peak(), told) == (123, ["reset"])


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
        {"step": 1, "lane": 0, "prompt_index": p, "id": f"{p}", "skill": "", "prompt": "1+1=", "gold": "2", "answers": [
            {"agent": agent, "rollout": g, "text": "2", "num_tokens": num_tokens + n + g, "reward": float(g == 1),
             "verdict": "correct", "stop": "eos", "advantage": {}, "ratio": {}}
            for n, agent in enumerate(agents) for g in range(2)]}
        for p in range(config.training.prompts_per_step)
    ]  # fmt: skip
    (run_dir / "rollouts").mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "rollouts" / "step_000001.lane_0000.jsonl").write_text(text)
    return run_dir


def test_a_replay_has_the_recorded_lengths_and_repeats_them_when_short(tmp_path, config_file):
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
    broken = record(tmp_path / "broken", config)
    (broken / "rollouts" / "step_000001.lane_0000.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"line 1: not a logged prompt"):
        replayed(config, broken)
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
    assert [schedule.name for schedule in schedules] == ["hacpo", "in turns", "gspo_x2", "gspo"]
    loaded = [load_schedule(config_file, (), schedule, tmp_path, 3) for schedule in schedules]
    sources = (2, 2, 1, 1)  # whose answers an update has
    in_update = [c.prompts_per_update * c.answers_per_prompt * n for c, n in zip(loaded, sources)]
    assert in_update == [32, 32, 32, 32]
    assert [c.training.prompts_per_step * c.answers_per_prompt * n for c, n in zip(loaded, sources)] == [64, 64, 64, 32]
    assert all(c.num_steps > 3 and not c.checkpoint.every_steps for c in loaded)


def test_in_turns_every_agent_has_the_devices_of_all(tmp_path, config_file):
    """An agent of tp 2 takes 4 of 6 devices in 2 cells, not 3 cells, among which 4 prompts cannot be shared."""
    for overrides, cells in (([], (2, 2)), (["agents.two.tp=2"], (2, 1)), (["agents.two.tp=4", "lanes=2"], (2, 1))):
        schedule = schedules_of(load_config(config_file, overrides))[1]
        found = load_schedule(config_file, overrides, schedule, tmp_path, 3)
        assert found.placement == "shared"
        assert tuple(agent.cells_per_lane for agent in found.agents) == cells, overrides
    assert [s.name for s in schedules_of(load_config(config_file, ["placement=shared"]))] == [
        "hacpo",
        "gspo_x2",
        "gspo",
    ]


def test_waiting_for_a_turn_is_not_told_as_work():
    small = public_architecture("Qwen/Qwen3-1.7B")
    steps = [measured_step(5.0, step_metrics(), ["a", "b"])]
    summary = summarize("in turns", [steps], {"a": small, "b": small}, takes_turns=True)
    assert (summary.together, summary.agents["a"].idle_share, summary.wall_s) == (None, None, 5.0)
    assert "| in turns | 5.00 | 5.00 | 5.00 | 5.00 | 1.00 |  |" in to_markdown({"machine": "m"}, [summary])


def test_prompts_that_nobody_learns_from_lie_evenly_among_the_others(config_file):
    config = load_config(config_file)
    mixed, unmixed = with_and_without(config, fixed(config, 4), 0.25)
    assert (mixed.name, unmixed.name, mixed.config) == ("hacpo", "hacpo, 25% unmixed", unmixed.config)
    rewards = [[unmixed.workload.answer("one", 0, prompt, g)[1] for g in range(4)] for prompt in range(8)]
    assert [sum(group) for group in rewards] == [2, 2, 2, 0, 2, 2, 2, 0]
    assert all(mixed.workload.answer("two", 1, prompt, 1) == (4, 1.0) for prompt in range(8))


def test_a_lane_has_the_same_work_in_every_size(config_file):
    config = load_config(config_file, ["agents.two.tp=2"])
    blocks = scaling_blocks(config, fixed(config, None))
    sizes = [(len(block.config.agents), block.config.lanes) for block in blocks]
    assert sizes == [(2, 1), (2, 2), (2, 4), (1, 1), (3, 1)]
    for block, (num_agents, lanes) in zip(blocks, sizes):
        training = block.config.training
        assert (training.prompts_per_step, training.prompts_per_update) == (8 * lanes, 4 * lanes)
        assert [agent.name for agent in block.config.agents] == ["one", "two", "one_2"][:num_agents]
        assert block.config.updates_per_step == config.updates_per_step
    assert RankMap.of(blocks[2].config).world_size == 12


def test_what_scaling_tells_is_of_a_rank_a_leader_and_a_core_second(config_file):
    """Two lanes; one has 2 ranks, two has 4. A rank of one works 3 s, a rank of two 1."""
    config = load_config(config_file, ["agents.two.tp=2"])
    block = next(block for block in scaling_blocks(config, fixed(config, None)) if block.config.lanes == 2)
    did = {
        "one": ({"exchange": 2.0, "learn": 1.0}, {"exchange/lane": 40.0, "exchange/row": 6.0}),
        "two": ({"learn": 1.0}, {"write/job": 7.0, "publish/engine": 400.0}),
    }
    agents = {
        name: AgentStep({}, 0.0, 8.0, 8.0, 50.0, 8.0, 3.0, 8.0, cpu_s=cpu_s, sent_bytes=sent)
        for name, (cpu_s, sent) in did.items()
    }
    (row,) = scaling_rows([block], {block.name: [[MeasuredStep(9.0, agents)]]})
    assert row["trained_per_core_s"] == 100.0 / (2 * 3.0 + 4 * 1.0)
    assert (row["lane_bytes"], row["capability_bytes"], row["metrics_bytes"]) == (20.0, 3.0, 7.0)
    assert (row["cpu_s"]["exchange"], row["cpu_s"]["learn"], row["cpu_s"]["roll_out"]) == (2.0, 1.0, 0.0)
    assert "| 2 | 2 | 6 | 10.0 |" in markdown({"machine": "m"}, size_tables([row]))


BAD_BENCHES = (
    (["--unmixed", "0.05"], "--unmixed (0.05) of training.prompts_per_step (8) is 0 prompts"),
    (["--unmixed", "1"], "--unmixed (1) of training.prompts_per_step (8) is 8 prompts"),
    (["--unmixed", "0.5", "--scaling"], "give one of them"),
    (["--scaling", "algorithm.method=naive"], "Nearest: algorithm.method=hacpo"),
    (["--answer-tokens", "13"], "--answer-tokens (13) must be 1 to rollout.max_answer_tokens (12)"),
    (["--replay", "RUN", "--answer-tokens", "3"], "--replay has its own lengths: leave --answer-tokens out"),
    (["--replay", "RUN", "--scaling"], "--replay has the prompts and rewards of its run"),
    (["--replay", "RUN", "training.prompts_per_step=4"], "step 1 has 8 prompts, training.prompts_per_step is 4"),
    (["lanse=2"], "lanse: unknown key; did you mean 'lanes'?"),
    (["algorithm.method=gspo"], "give two agents and a method such as hacpo"),
    (["--out", "FILE/bench"], "no folder can be made there (Not a directory); give another"),
)


@pytest.mark.parametrize(("arguments", "line"), BAD_BENCHES, ids=[line[:30] for _, line in BAD_BENCHES])
def test_a_bad_benchmark_is_one_line_before_anything_starts(tmp_path, config_file, monkeypatch, arguments, line):
    monkeypatch.setattr(cli_bench, "run_blocks", lambda run: pytest.fail("it started"))
    (tmp_path / "file").write_text("")
    run = record(tmp_path / "run", load_config(config_file))
    told = [word.replace("RUN", str(run)).replace("FILE", str(tmp_path / "file")) for word in arguments]
    result = CliRunner().invoke(app, ["bench", str(config_file), "--out", str(tmp_path / "out"), *told])
    assert isinstance(result.exception, ValueError), result.output
    assert line in str(result.exception) and len(str(result.exception).splitlines()) == 1


def test_turns_that_a_configuration_rules_out_are_skipped_with_a_reason(tmp_path, config_file, monkeypatch):
    """An engine that answers while its actor learns cannot take turns."""
    started = []
    monkeypatch.setattr(cli_bench, "run_blocks", lambda run: started.extend(run.blocks) or {})
    asked = ["bench", str(config_file), "--out", str(tmp_path / "out"), "rollout.one_step_off=true"]
    output = CliRunner().invoke(app, asked).output
    assert [block.name for block in started] == ["hacpo", "gspo_x2", "gspo"]
    assert output.startswith("left out: under in turns: ") and "with placement = 'shared' nothing of an agent" in output


def test_a_benchmark_is_not_started_inside_a_job(config_file, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["bench", str(config_file)])
    assert "call it outside torchrun and srun" in str(result.exception)


def test_agents_that_share_nothing_are_not_compared(config_file):
    with pytest.raises(ValueError, match=r"found algorithm.method=gspo with 2 agents"):
        schedules_of(load_config(config_file, ["algorithm.method=gspo"]))
