"""Alarms speak once, by name, and say what to do."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from repository import ROOT

from hacpo_grading.judge import JudgeReport
from hacpo_mega.algorithm import capability_ratios
from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.config import AlgorithmConfig, load_config
from hacpo_mega.logbook.step_report import StepReport
from hacpo_mega.logbook.steps.alarms import (
    MOST_ERRORS,
    AdvantageAlarm,
    EngineAlarm,
    GradNormAlarm,
    IdleAlarm,
    JudgeAlarm,
    MemoryLeakAlarm,
    OmegaAlarm,
    SharingAlarm,
    UnjudgedLimit,
)


def report(num_unjudged: int, error: str | None, num_errors: int | None = None) -> JudgeReport:
    """The report of 64 answers; the unjudged ones are those that failed, unless another number is given."""
    num_errors = num_unjudged if num_errors is None else num_errors
    return JudgeReport(64, 64, num_unjudged, 0, num_errors, errors={} if error is None else {error: num_errors})


def test_an_agent_without_reward_is_named_once_for_each_pair_it_breaks():
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
    assert list(alarm.warnings(report(0, None), "answers")) == []
    (line,) = alarm.warnings(report(64, "ValueError: no field 'gold'"), "held-out answers")
    assert line == "warning: 64 of 64 held-out answers unjudged; the grader's first error: ValueError: no field 'gold'"
    assert list(alarm.warnings(report(60, "ValueError: no field 'gold'"), "answers")) == []
    assert len(list(alarm.warnings(report(1, "returned str"), "answers"))) == 1


def test_errors_that_never_repeat_do_not_fill_the_checkpoints():
    """A server's, which name a request or a time: one more in every step of every cell."""
    alarm = JudgeAlarm()
    said = [list(alarm.warnings(report(1, f"request {step} failed"), "answers")) for step in range(1000)]
    assert all(said) and len(alarm.state_dict()["told"]) <= MOST_ERRORS


def test_answers_that_a_sound_grader_fails_on_are_not_called_unjudged():
    (line,) = JudgeAlarm().warnings(report(0, "MemoryError", num_errors=3), "answers")
    assert line == (
        "warning: 3 of 64 answers earn 0: the grader fails on them, not on their gold; "
        "the grader's first error: MemoryError"
    )


def test_a_grader_that_fails_three_steps_in_a_row_ends_the_run():
    limit = UnjudgedLimit(0.5)
    for num_unjudged in (33, 64, 32, 33, 64):  # 32 of 64 are not more than half: the row begins again
        limit.see(report(num_unjudged, "ValueError: no field"))
    with pytest.raises(RunStopped) as stop:
        limit.see(report(33, "ValueError: no field"))
    assert str(stop.value) == (
        "more than 50% of the answers (reward.max_unjudged_share) were left unjudged in 3 steps in a row; "
        "the grader's first error: ValueError: no field"
    )


def test_alarms_go_on_where_they_were_when_the_run_was_put_on_disk():
    """Every alarm after its state has been through JSON: what was said is not said again, and rows are counted on."""
    names, omega_NN = ("a", "b"), capability_ratios(torch.tensor([0.5, 1e-8], dtype=torch.float64), None)
    steps = {
        OmegaAlarm: lambda alarm: list(alarm.warnings(omega_NN)),
        JudgeAlarm: lambda alarm: list(alarm.warnings(report(64, "ValueError"), "answers")),
        EngineAlarm: lambda alarm: list(alarm.warnings([0.5, 1e-6])),
        GradNormAlarm: lambda alarm: list(alarm.warnings([math.inf, 1.0])),
        AdvantageAlarm: lambda alarm: list(alarm.warnings([1.0, 1e3], 1.0)),
    }
    sharing, later = SharingAlarm(("gemma", "moe")), SharingAlarm(("gemma", "moe"))
    lost = offered(0, None, too_long=20)
    assert [list(sharing.warnings(lost)) for _ in range(2)] == [[], []]
    later.load_state_dict(json.loads(json.dumps(sharing.state_dict())))
    assert list(later.warnings(lost)) == list(sharing.warnings(lost)) != []
    later.load_state_dict(json.loads(json.dumps(sharing.state_dict())))
    assert list(later.warnings(lost)) == []
    made = {OmegaAlarm: (names,), EngineAlarm: (names, [torch.float32] * 2), GradNormAlarm: (names,)}
    made[AdvantageAlarm] = (names, AlgorithmConfig(), 8)
    for kind, step in steps.items():
        before, after = kind(*made.get(kind, ())), kind(*made.get(kind, ()))
        assert step(before)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert step(after) == []
        assert step(before) == [] and after.state_dict() == before.state_dict()
    grown, limit = GradNormAlarm(names), UnjudgedLimit(0.5)
    grown.load_state_dict({"calm": [[1.0] * 4, []], "was_spike": [False, False]})
    assert len(list(grown.warnings([6.0, 6.0]))) == 1
    kept = grown.state_dict()
    assert list(grown.warnings([1.0, 1.0])) == []
    assert kept == {"calm": [[1.0] * 4, [6.0]], "was_spike": [True, False]}, "a copy: it may be written later"
    limit.load_state_dict({"num_steps": 2})
    with pytest.raises(RunStopped):
        limit.see(report(64, None))


def test_an_impossible_advantage_is_reported_once_with_its_cause():
    """Two agents, eight answers each: the bound is (1 + w) sqrt(16) w, for w = 1.5 that is 15."""
    paper = AdvantageAlarm(("a", "b"), AlgorithmConfig(uniform_group_is_zero=False), 8)
    assert list(paper.warnings([15.0, None], 1.5)) == []
    (line,) = paper.warnings([15.1, 7512.0], 40.0)
    assert line.startswith(
        "warning: b trains with an advantage of 7.51e+03, and rewards of 0 and 1 would make at most "
    )
    assert line.endswith("set algorithm.uniform_group_is_zero = true")
    assert [line.split()[1] for line in paper.warnings([15.1, 7512.0], 1.5)] == ["a"]
    named = AdvantageAlarm(("a",), AlgorithmConfig(method="gspo", advantages="mine.py:made"), 9, highest_weight=2.0)
    assert list(named.warnings([12.0], 1.0)) == []
    (line,) = named.warnings([12.1], 1.0)
    assert line.endswith("algorithm.advantages = 'mine.py:made' returned it")
    pulled = AdvantageAlarm(("a", "b"), AlgorithmConfig(method="sgt", transfer_weight=100.0), 8)
    assert list(pulled.warnings([100.0, 0.0], 1.0)) == []


def test_rewards_of_rounding_are_no_reward():
    alarm = IdleAlarm()
    lines = [line for _ in range(3) for line in alarm.warnings([1e-9, None], [4.0, None])]
    assert len(lines) == 1 and "no answer of any agent earned anything" in lines[0]


def offered(trained: int, inside: float | None = 1.0, **lost: int) -> dict[str, float]:
    """The counts of a step for moe's answers on their way to gemma."""
    pair = "agent/gemma/from/moe"
    counts = {"trained": trained, "answers": trained + sum(lost.values())} | lost
    band = {} if inside is None else {f"{pair}/inside": inside}
    return {f"{pair}/view/num_{name}": float(number) for name, number in counts.items()} | band


def unshared(*steps: dict[str, float]) -> list[list[str]]:
    alarm = SharingAlarm(("gemma", "moe"))
    return [list(alarm.warnings(step)) for step in steps]


def test_a_source_that_reaches_nobody_is_explained_in_the_third_step():
    lost = offered(0, None, undecodable=42, too_long=20, zero_advantage=2)
    said = unshared(lost, lost, lost, lost, lost)
    assert [len(lines) for lines in said] == [0, 0, 1, 0, 0]
    assert said[2] == [
        "warning: 0 of 192 of moe's answers reach gemma in 3 steps: 126 undecodable, 60 too long, 6 with advantage 0, "
        "unjudged or empty, which is no loss. gemma learns next to nothing from moe: look at moe's answers in "
        "rollouts/: it samples control tokens, or ids that are no text"
    ]


def test_answers_outside_the_band_count_as_left_out():
    (line,) = unshared(*[offered(64, 1 / 64)] * 3)[2]
    assert line.startswith("warning: 3 of 192 of moe's answers reach gemma in 3 steps: 189 outside the band. ")
    assert line.endswith("widen algorithm.delta")


def test_sharing_is_judged_by_usable_answers_and_in_a_row():
    """One of 20 usable answers is enough; answers with advantage 0 are neither shared nor lost."""
    bad, good = offered(0, None, too_long=20), offered(1, 1.0, too_long=19)
    idle = offered(0, None, zero_advantage=60, unjudged=4)
    assert unshared(*[good] * 9) == [[]] * 9
    assert unshared(*[idle] * 9) == [[]] * 9
    assert unshared(*[offered(2, 1.0, zero_advantage=998)] * 9) == [[]] * 9
    assert [len(lines) for lines in unshared(bad, bad, good, bad, bad, bad)] == [0, 0, 0, 0, 0, 1]
    assert [len(lines) for lines in unshared(bad, idle, bad, bad)] == [0, 0, 1, 0]
    few = offered(0, None, too_long=2, zero_advantage=62)
    assert [len(lines) for lines in unshared(*[few] * 5)] == [0, 0, 0, 1, 0], "six answers prove nothing, eight do"
    assert unshared({}, {"agent/gemma/reward_mean": 0.5}) == [[], []], "nothing is shared where a method does not"


def test_a_share_of_one_never_ends_a_run():
    limit = UnjudgedLimit(1.0)
    for _ in range(9):
        limit.see(report(64, "ValueError"))


def said(alarm: EngineAlarm, *gaps: float | None) -> list[int]:
    """The steps, from 0, in which an alarm of one agent speaks."""
    return [step for step, gap in enumerate(gaps) if list(alarm.warnings([gap]))]


def test_stale_weights_after_sleep_are_named_once_with_what_was_before():
    """TRL issue 5312: .015 becomes .201. The other agent is fine."""
    alarm = EngineAlarm(("fine", "stale"), [torch.bfloat16] * 2)
    for gap in (0.013, 0.016, 0.015):
        assert list(alarm.warnings([0.014, gap])) == []
    (line,) = alarm.warnings([0.014, 0.201])
    start = "warning: engine and trainer of stale differ by 0.201 nats per token, after 0.015, the median of 3 steps; "
    assert line.startswith(start + "allowed are 0.06. ")
    assert list(alarm.warnings([0.014, 0.22])) == []


def test_a_jump_is_above_the_floor_and_above_four_medians():
    assert said(EngineAlarm(("a",), (torch.bfloat16,)), 0.01, 0.01, 0.01, 0.0499) == []  # rounding of bf16
    assert said(EngineAlarm(("a",), (torch.bfloat16,)), 0.02, 0.03, 0.04, 0.1199) == []  # 4 x .03 is above the floor
    assert said(EngineAlarm(("a",), (torch.bfloat16,)), 0.02, 0.03, 0.04, 0.1201) == [3]
    assert said(EngineAlarm(("a",), (torch.float32,)), 1e-6, 1e-6, 9.9e-4) == []
    assert said(EngineAlarm(("a",), (torch.float32,)), 1e-6, 1e-6, 1.1e-3) == [2]


def test_an_agent_is_held_to_the_rounding_of_its_own_dtype():
    """Rank 0 watches all agents: that it trains one in float32 makes no alarm of what bf16 rounds for another."""
    config = load_config(ROOT / "configs/quickstart.toml", ["agents.llama.dtype=bfloat16"])
    place = SimpleNamespace(device=torch.device("cpu"))
    alarm = StepReport(None, None, place, config, None, None)._engine_alarm
    (line,) = alarm.warnings([0.02, 0.02])
    assert "of qwen differ" in line and "allowed are 0.001" in line
    (line,) = alarm.warnings([1e-6, 0.2])
    assert "of llama differ" in line


def test_a_gap_that_is_there_from_the_start_is_said_in_the_first_step():
    alarm = EngineAlarm(("a",), (torch.float32,))
    (line,) = alarm.warnings([0.4])
    assert "differ by 0.4 nats per token, from the first step; allowed are 0.001" in line
    assert list(alarm.warnings([0.4])) == []


@pytest.mark.parametrize("broken", [0.2, math.nan])
def test_every_jump_is_said_once_and_does_not_become_what_is_usual(broken):
    long = [broken] * 40
    assert said(EngineAlarm(("a",), (torch.bfloat16,)), 0.01, *long, 0.01, *long) == [1, 42]


def test_the_usual_gap_may_grow_slowly_and_steps_without_one_are_skipped():
    slowly = [0.01 * 1.05**step for step in range(60)]
    assert slowly[-1] > 0.15
    assert said(EngineAlarm(("a",), (torch.bfloat16,)), *slowly) == []
    assert said(EngineAlarm(("a",), (torch.bfloat16,)), None, 0.01, None, 0.3, None, 0.3) == [3]


def spikes(*norms: float | None) -> list[int]:
    """The steps, from 0, in which the alarm of one agent speaks."""
    alarm = GradNormAlarm(("a",))
    return [step for step, norm in enumerate(norms) if list(alarm.warnings([norm]))]


def test_a_gradient_that_leaps_is_named_with_what_was_usual():
    alarm = GradNormAlarm(("calm", "wild"))
    for norm in (0.5, 0.4, 0.6, 0.5):
        assert list(alarm.warnings([0.5, norm])) == []
    (line,) = alarm.warnings([2.5, 5.0])
    start = "warning: the gradient norm of wild is 5, 10 times the median of 4 steps. "
    assert line.startswith(start) and line.endswith("lower agents.wild.optimizer.lr")


def test_a_spike_exceeds_five_medians_of_four_steps_and_is_reported_once():
    assert spikes(1, 1, 1, 100) == []
    assert spikes(1, 1, 1, 1, 5.0) == []
    assert spikes(1, 1, 1, 1, 5.1, 50, 500, 1, 6) == [4, 8]
    assert spikes(1, 1, 0, None, 0, 1, 1, 5.1) == [7], "steps that trained nothing are not what is usual"
    assert spikes(*([1] * 4), *([100] * 40), 1, 6) == [4, 45], "a spike does not become what is usual"


def test_a_gradient_that_is_not_finite_is_said_at_once_and_once():
    assert spikes(math.nan, math.nan, 1, math.inf) == [0, 3]
    (line,) = GradNormAlarm(("a",)).warnings([math.nan])
    assert line == "warning: the gradient norm of a is nan: such updates are skipped and change no weight"


GIB = 1 << 30


def residues(*gib: float | None) -> list[int]:
    """The steps, from 0, in which the alarm of one agent speaks."""
    alarm = MemoryLeakAlarm(("a",))
    return [step for step, held in enumerate(gib) if list(alarm.warnings([None if held is None else held * GIB]))]


def test_an_engine_that_keeps_more_memory_is_named_with_its_earlier_peak():
    alarm = MemoryLeakAlarm(("tidy", "leaky"))
    for held in (9.5, 10.0, 9.8, 9.9, 10.5, 11.0):
        assert list(alarm.warnings([4.0 * GIB, held * GIB])) == []
    (line,) = alarm.warnings([4.0 * GIB, 11.25 * GIB])
    start = "warning: 11.25 GiB are held while the engine of leaky sleeps, after at most 10.00 before: "
    assert line.startswith(start) and "asleep_bytes" in line


def test_what_is_held_may_settle_in_four_steps_and_grow_by_less_than_a_gib():
    assert residues(1, 5, 9, 20) == [], "moments and buffers are made in the first steps"
    assert residues(1, 1, 1, 2, 3.0, 3.0) == []
    assert residues(*[1.0] * 4, None, None, 2.01) == [6]


def test_every_further_gib_is_said_once():
    slowly = [1 + step / 8 for step in range(40)]
    assert residues(*slowly) == [12, 21, 30, 39]
    assert residues(1, 1, 1, 1, 3, 3, 3, 1, 3, 4, 4.1) == [4, 10]


def test_idle_first_steps_are_reported_once_and_only_if_all_are_idle():
    nobody, equal, later, good = IdleAlarm(), IdleAlarm(), IdleAlarm(), IdleAlarm()
    said = [list(nobody.warnings([0.0, 0.0], [0.0, 0.0])) for _ in range(5)]
    assert [len(lines) for lines in said] == [0, 0, 1, 0, 0] and "earned anything in 3 steps" in said[2][0]
    said = [list(equal.warnings([1.0, 0.0], [0.0, 0.0])) for _ in range(5)]
    assert [len(lines) for lines in said] == [0, 0, 1, 0, 0] and "earned the same in 3 steps" in said[2][0]
    rewards = [0.0, 0.0, 0.5, 0.0, 0.0, 0.0]
    assert not [line for reward in rewards for line in later.warnings([reward], [reward])], "it is about the beginning"
    assert not [line for _ in range(5) for line in good.warnings([None, 0.1], [None, 3.0])]


def test_the_reason_for_teaching_nothing_is_the_one_that_holds():
    """By what each start has: nobody is judged, a function of the user's says 0, one answer is no group, equal ones."""
    unjudged, own, alone = IdleAlarm(), IdleAlarm(4, "mine.py:zero"), IdleAlarm(1)
    for alarm, rewards, says in (
        (unjudged, [None, None], "no answer of any agent was judged in 3 steps"),
        (own, [0.5, 0.5], "mine.py:zero gave every answer the advantage 0 in 3 steps"),
        (alone, [0.5, 0.5], "an agent's only answer to a prompt has none to be measured against"),
        (IdleAlarm(4), [0.5, 0.5], "all answers to a prompt earned the same in 3 steps"),
    ):
        (line,) = [line for _ in range(5) for line in alarm.warnings(rewards, [0.0, 0.0])]
        assert line.startswith("warning: ") and says in line
