"""Alarms speak once, by name, and say what to do."""

import torch

from hacpo_mega.algorithm import capability_ratios
from hacpo_mega.logbook.alarms import JudgeAlarm, OmegaAlarm


def test_an_agent_without_a_reward_is_named_once_for_every_pair_that_it_breaks():
    alarm = OmegaAlarm(("strong", "weak", "fair"))
    fine = capability_ratios(torch.tensor([0.5, 0.06, 0.4]), None)
    assert list(alarm.warnings(fine)) == []
    broken = capability_ratios(torch.tensor([0.5, 1e-8, 0.4], dtype=torch.float64), None)
    lines = list(alarm.warnings(broken))
    assert [line.partition(" is ")[0] for line in lines] == [
        "warning: omega(strong, weak)",
        "warning: omega(weak, strong)",
        "warning: omega(weak, fair)",
        "warning: omega(fair, weak)",
    ]
    assert "is 5e+07, outside [0.1, 10]" in lines[0]
    assert "Set algorithm.omega_clip = [0.1, 10]" in lines[0]
    assert list(alarm.warnings(broken)) == []


def test_a_clipped_omega_raises_no_alarm():
    clipped = capability_ratios(torch.tensor([0.5, 1e-8], dtype=torch.float64), (0.1, 10.0))
    assert list(OmegaAlarm(("a", "b")).warnings(clipped)) == []


def test_a_grader_that_fails_is_quoted_once_and_another_error_again():
    alarm = JudgeAlarm()
    assert list(alarm.warnings(0, 64, None)) == []
    (line,) = alarm.warnings(64, 64, "ValueError: no field 'gold'")
    assert line == "warning: 64 of 64 answers unjudged; the grader's first error: ValueError: no field 'gold'"
    assert list(alarm.warnings(60, 64, "ValueError: no field 'gold'")) == []
    assert len(list(alarm.warnings(1, 64, "returned str"))) == 1
