"""Sentences and intervals of a report, from metrics written by hand."""

import math
from pathlib import Path

from hacpo_mega.logbook.files.metrics import MetricsWriter, StepMetrics
from hacpo_mega.report.run import accuracies, load_run
from hacpo_mega.report.verdicts import verdicts


def test_a_gain_over_fewer_prompts_is_not_one_of_the_pairs(tmp_path: Path) -> None:
    """600 prompts at .5, then 100 of them, which rose from .3 to .4: the difference shown is of all and of these."""
    gain = {"held_out_gain": 0.1, "held_out_gain_square": 0.12, "num_held_out_pairs": 100.0}
    rows = {"accuracy": 0.5, "num_evaluated": 600.0}, {"accuracy": 0.4, "num_evaluated": 100.0, **gain}
    with MetricsWriter(tmp_path) as writer:
        for step, row in enumerate(rows):
            writer.write(step, StepMetrics({f"agent/a/{name}": value for name, value in row.items()}, {}))
    first, later = accuracies(load_run(tmp_path), "a")
    assert not first.is_paired(later)
    low, high = first.gain_interval(later)
    assert low < -0.1 < high


def test_verdicts_count_waits_in_every_phase_and_no_number_that_is_none(tmp_path: Path) -> None:
    """Agents meet in the exchange of answers: there the quick one waits 8 s of a step of 10."""
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 9):
            odd = math.nan if step == 5 else 0.6
            values = {f"agent/{agent}/num_answers": 8.0 for agent in ("quick", "slow")}
            values |= {f"agent/quick/from/slow/{name}": odd for name in ("grad_cosine", "inside")}
            waits = {"quick": {"load": 99.0, "exchange": 8.0, "wait": 0.1}, "slow": {"exchange": 0.1, "wait": 0.2}}
            timing = {f"agent/{a}/wait/{phase}_s": s for a, own in waits.items() for phase, s in own.items()}
            writer.write(step, StepMetrics(values, timing | {"agent/quick/step_s": 10.0, "agent/slow/step_s": 10.0}))
    found = {one["chart"]: one["text"] for one in verdicts(load_run(tmp_path))}
    assert found["phases"] == "quick waits 78% of a step for slow"
    assert "(cosine +0.60)" in found["cosine"] and found["bands"].startswith("60% of slow's answers")
