"""FLOP/s of a known device and tokens of all GPUs a second, by hand; what observers count of answers."""

from types import SimpleNamespace

import pytest
import torch
from repository import ROOT
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import load_config
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.flops import matrix_parameters
from hacpo_mega.records import Prompt, Verdict
from hacpo_mega.trainer.build import rate_observers
from hacpo_mega.trainer.observers import Rates, UserMetrics, peak_flops


def test_a_peak_is_claimed_of_known_devices_in_half_precision_alone(monkeypatch):
    gpu = torch.device("cuda", 0)
    for name, peak in (("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(gpu, torch.bfloat16) == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops(gpu, torch.float32) is None and peak_flops(torch.device("cpu"), torch.bfloat16) is None


@pytest.mark.parametrize("share_prompts", [True, False])
def test_rates_are_flops_over_the_peak_and_tokens_over_gpu_seconds(tmp_path, monkeypatch, share_prompts):
    """A cell of 2 x 2 ranks learns 4 s in two updates of a step of 16 s, on a job of 6 GPUs of 1 MFLOP/s."""
    clock = iter([0.0, 10.0, 12.0, 15.0, 20.0, 21.0, 26.0])
    monkeypatch.setattr("hacpo_mega.trainer.observers.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    table = agent_table(tmp_path, "a", "qwen3", CHARACTERS, tp=2, pp=2)
    config = load_config(write_config(tmp_path, [table]))
    rank_map, first = RankMap.of(config), SimpleNamespace(global_rank=0)
    place = SimpleNamespace(is_leader=True, coordinate=first, rank_map=rank_map, agent=0)
    rates, metrics = Rates(config.agents[0], place, 1e6, 6, share_prompts=share_prompts), Metrics("a", lambda p: [p])
    rates.joins(None, metrics)
    rates.before_training(1)
    update = [SimpleNamespace(prompt_index=4, prompt_ids=range(3), answer_ids=range(n)) for n in (5, 7)]
    for m in range(2):
        rates.before_update(1, m, update)
        rates.after_update(1, m, update, None)
    answers = [SimpleNamespace(rollout=SimpleNamespace(token_ids=range(n))) for n in (5, 7)]
    rates.before_writing(1, SimpleNamespace(trajectories=answers))
    model = Architecture.from_folder(tmp_path / "a")
    tokens, pairs = (3 + 5 + 7, 8**2 + 10**2 - 3**2) if share_prompts else (8 + 10, 8**2 + 10**2)
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * pairs
    flops = 2 * 3 * (2 * matrix_parameters(model) * tokens + attention)
    found = metrics.reduce().timing
    assert found["rate/learn_mfu"] == pytest.approx(flops / ((3 + 1) * 4 * 1e6), rel=1e-12)
    assert found["agent/a/learn_mfu"] == found["rate/learn_mfu"]
    assert found["rate/answer_tokens_per_gpu_s"] == pytest.approx(12 / (16 * 6))


@pytest.mark.parametrize("shares", [True, False])
def test_prompts_are_shared_in_a_rate_where_the_actor_shares_them(tmp_path, monkeypatch, shares):
    monkeypatch.setattr("hacpo_mega.trainer.build.peak_flops", lambda device, dtype: 1e12)
    monkeypatch.setattr("hacpo_mega.trainer.build.num_gpus", lambda place: 1)
    config = load_config(write_config(tmp_path, [agent_table(tmp_path, "a", "qwen3", CHARACTERS)]))
    place = SimpleNamespace(
        **{"device": torch.device("cuda"), "gather_job": lambda payload: [payload], "agent": 0, "is_leader": True},
        **{"coordinate": SimpleNamespace(global_rank=0), "rank_map": RankMap.of(config)},
    )
    agent = SimpleNamespace(actor=SimpleNamespace(shares_prompts=shares))
    (rates,) = rate_observers(config, agent, SimpleNamespace(place=place, dtype=torch.bfloat16))
    update = [SimpleNamespace(prompt_index=4, prompt_ids=range(3), answer_ids=range(n)) for n in (5, 7)]
    apart = sum(rates._flops([sample]) for sample in update)
    assert (rates._flops(update) < apart) == shares and config.training.share_prompts


def test_a_metric_with_further_parameters_counts():
    """A function for several callers, with *numbers and **others, gets what its other parameters name."""
    observer = UserMetrics([f"{ROOT}/tests/support/own_code.py:words_of"])
    metrics = Metrics("a", lambda payload: [payload])
    observer.joins(SimpleNamespace(place=SimpleNamespace(is_leader=True), name="a"), metrics)
    answer = SimpleNamespace(
        rollout=SimpleNamespace(prompt_index=0, text="a b", token_ids=[1, 2]), verdict=Verdict.CORRECT, reward=1.0
    )
    pool = SimpleNamespace(prompts=[Prompt(0, "id", "1+1=", "2")])
    observer.before_writing(1, SimpleNamespace(pool=pool, trajectories=[answer]))
    assert metrics.reduce().values == {"agent/a/own/words_of": 2.0}
