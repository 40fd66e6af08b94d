"""Updates skipped in a row end a run, and what they were made of is on disk, where strict JSON can be read."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hacpo_kernels import objective_from_mean

from hacpo_mega.agent.policy_loss import BatchReport
from hacpo_mega.algorithm import objective_bounds
from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.logbook.steps.skipped_updates import SkippedUpdates
from hacpo_mega.records import Sample, UpdateStats


def sample(rollout: int, advantage: float = 1.0, source_logprob: float = -1.0) -> Sample:
    prompt, answer = np.array([3, 4], np.int32), np.array([5, 6, 7], np.int32)
    numbers = {"advantage": advantage, "source_logprob": source_logprob, "length": 3.0}
    return Sample(prompt, answer, 3, source=1, is_self=False, prompt_index=7, rollout_index=rollout, **numbers)


def stats_of(samples: list[Sample], *, skipped: bool, loss: float = math.nan) -> UpdateStats:
    source_B = torch.tensor([s.source_logprob for s in samples], dtype=torch.float64)
    advantage_B = torch.tensor([s.advantage for s in samples], dtype=torch.float64)
    _, _, terms = objective_from_mean(
        torch.full_like(source_B, -1.0), source_B, advantage_B, torch.zeros(len(samples), dtype=torch.bool),
        update_index=0, bounds=objective_bounds(AlgorithmConfig()),
    )  # fmt: skip
    key_B3 = torch.tensor([[s.prompt_index, s.source, s.rollout_index] for s in samples])
    numbers = dict.fromkeys(("lr", "num_microbatches", "num_tokens", "num_trained"), 1)
    report = BatchReport(key_B3, terms, torch.zeros(2))
    return UpdateStats((report,), loss=loss, grad_norm=math.inf, skipped=skipped, num_samples=len(samples), **numbers)


GOOD, BAD = [sample(0), sample(1)], [sample(0), sample(1, source_logprob=math.nan), sample(2, advantage=math.inf)]


@pytest.fixture
def watch(tmp_path) -> SkippedUpdates:
    """Ends a run at the third skipped update in a row, in the only process of its agent, whose cell is number 2."""
    return SkippedUpdates(3, tmp_path / "logs", "qwen", 2, lambda ids: " ".join(map(str, ids)), lambda payload: None)


def test_skips_are_counted_on_when_a_run_goes_on(watch, tmp_path):
    """The samples in the file are those of this start."""
    watch.go_on(2)
    watch.see(5, 0, GOOD, stats_of(GOOD, skipped=False))
    assert watch.num_in_row == 0
    watch.go_on(2)
    with pytest.raises(RunStopped, match="the last 3 updates in a row"):
        watch.see(5, 1, GOOD, stats_of(GOOD, skipped=True))
    (file,) = (tmp_path / "logs").iterdir()
    assert [update["update"] for update in json.loads(file.read_text())["updates"]] == [2]


def test_no_folder_takes_the_place_of_a_run_that_has_gone(tmp_path, capsys):
    watch = SkippedUpdates(1, tmp_path / "run" / "logs", "qwen", 0, str, lambda payload: None)
    with pytest.raises(RunStopped, match="the last 1 updates in a row"):
        watch.see(1, 0, GOOD, stats_of(GOOD, skipped=True))
    assert list(tmp_path.iterdir()) == [] and "is not written: No such file" in capsys.readouterr().err


def test_only_skips_in_a_row_end_the_run(watch, tmp_path):
    for update, skipped in enumerate((True, True, False, True, True, False)):
        watch.see(4, update, GOOD, stats_of(GOOD, skipped=skipped))
    assert not (tmp_path / "logs").exists()
    watch.see(4, 6, GOOD, stats_of(GOOD, skipped=True))
    watch.see(5, 0, GOOD, stats_of(GOOD, skipped=True))
    text = (
        r"^qwen: the last 3 updates in a row were skipped .*, up to update 2 of step 5: loss nan, gradient norm inf\. "
    )
    with pytest.raises(
        RunStopped, match=text + rf"Their samples are in {tmp_path}/logs/qwen\.cell_\*\.skipped_updates\.json$"
    ):
        watch.see(5, 1, GOOD, stats_of(GOOD, skipped=True))


def test_an_answer_without_a_trained_token_is_in_no_record(watch):
    """No micro-batch has it (an answer of EOS alone with eos_in_loss off), so no report says anything of it."""
    empty = replace(sample(5), num_trained=0)
    record = watch._record(1, 0, [*GOOD, empty], stats_of(GOOD, skipped=True))
    assert [s["rollout"] for s in record["samples"]] == [0, 1]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_broken_samples_are_written_or_all_samples_if_none_is_broken(watch, tmp_path):
    watch.see(1, 0, BAD, stats_of(BAD, skipped=True))
    watch.see(1, 1, GOOD, stats_of(GOOD, skipped=True, loss=-math.inf))
    with pytest.raises(RunStopped):
        watch.see(2, 0, BAD[1:], stats_of(BAD[1:], skipped=True))
    (file,) = (tmp_path / "logs").iterdir()
    found = json.loads(file.read_text(), parse_constant=refuse)
    assert (file.name, found["agent"], found["cell"]) == ("qwen.cell_2.skipped_updates.json", "qwen", 2)
    first, second, third = found["updates"]
    assert [(u["step"], u["update"], u["num_samples"]) for u in (first, second, third)] == [
        (1, 1, 3),
        (1, 2, 2),
        (2, 1, 2),
    ]
    assert [[s["rollout"] for s in u["samples"]] for u in (first, second, third)] == [[1, 2], [0, 1], [1, 2]]
    assert (second["loss"], second["grad_norm"]) == ("-inf", "inf")
    assert first["samples"][0] == {
        "prompt_index": 7, "source": 1, "rollout": 1, "advantage": 1.0, "source_logprob": "nan", "ratio": "nan",
        "num_trained": 3, "prompt_ids": [3, 4], "answer_ids": [5, 6, 7], "text": "5 6 7",
    }  # fmt: skip
    assert first["samples"][1]["advantage"] == "inf"
    assert second["samples"][0]["ratio"] == 1.0, "log-probs are -1 on both sides"
