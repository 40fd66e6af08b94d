"""Judging beside the engine: the same judgements, whatever has ended when, and no thread is left behind."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from judged import questions

from hacpo_grading.judge import Judge
from hacpo_mega.config import RewardConfig
from hacpo_mega.grading.run_judge import judge_of
from hacpo_mega.records import Conversation, Prompt, Rollout, Stop, Turn, Verdict
from hacpo_mega.trainer.rollout_judge import MAX_BATCH, RolloutJudge

PROMPTS = [Prompt(index, str(index), f"{index} + 1", str(index + 1)) for index in range(4)]


def rollouts(num_each: int) -> list[Rollout]:
    """Rollouts of every prompt, by turns right, wrong, without an answer, and right but cut."""
    texts = [
        lambda p: rf"\boxed{{{p + 1}}}",
        lambda p: rf"\boxed{{{p}}}",
        lambda p: "none",
        lambda p: rf"\boxed{{{p + 1}}}",
    ]
    stops = (Stop.EOS, Stop.EOS, Stop.EOS, Stop.CUT)
    return [
        Rollout(prompt.index, g, np.zeros(1, np.int32), texts[g % 4](prompt.index), stops[g % 4])
        for prompt in PROMPTS
        for g in range(num_each)
    ]


def judged_at_once(judge: Judge, asked: list[Rollout]):
    texts, stops = [rollout.text for rollout in asked], [rollout.stop for rollout in asked]
    prompts = [PROMPTS[rollout.prompt_index] for rollout in asked]
    return judge.judge(
        questions([prompt.text for prompt in prompts], [prompt.gold for prompt in prompts], texts, stops)
    )


@pytest.mark.nightly
def test_answers_that_end_in_any_order_are_judged_as_all_at_once():
    """More than one call of the judge takes, the last ones never announced; a cut answer has none with require_stop."""
    asked = rollouts(MAX_BATCH)
    for require_stop in (False, True):
        with Judge("math", require_stop=require_stop) as judge, RolloutJudge(judge, while_sampling=True) as beside:
            expected = judged_at_once(judge, asked)
            for place in np.random.default_rng(1).permutation(len(asked))[:-5]:
                rollout = asked[place]
                beside.on_answer(PROMPTS[rollout.prompt_index], rollout)
            assert beside.judge(PROMPTS, asked) == expected
            cut = expected[3]
            assert cut.verdict is (Verdict.NO_ANSWER if require_stop else Verdict.CORRECT)
            assert judge.counts.num_answers == 2 * len(asked), "none twice"
            assert beside.judge(PROMPTS, asked[:8]) == expected[:8], "the next step asks anew"


def test_two_places_of_a_step_are_two_groups_even_with_equal_prompts():
    """A grader that counts an answer among its group's: the first place says x twice, the second x and y."""
    prompts = [Prompt(place, "id", "1 + 1", "2") for place in (0, 3)]
    asked = [
        Rollout(place, g, np.zeros(1, np.int32), text, Stop.EOS)
        for place, texts in ((0, "xx"), (3, "xy"))
        for g, text in enumerate(texts)
    ]
    parts = {name: {"kind": "tests.unit.trainer.reward_functions:rarest"} for name in ("one", "other")}
    for reward in ({"kind": "tests.unit.trainer.reward_functions:rarest"}, {"parts": parts}):
        with judge_of(RewardConfig(**reward)) as judge, RolloutJudge(judge, while_sampling=False) as of_agent:
            assert [judgement.reward for judgement in of_agent.judge(prompts, asked)] == [0.5, 0.5, 1.0, 1.0]


def test_a_grader_of_this_process_judges_after_the_engine():
    with Judge("exact") as judge:
        assert RolloutJudge(judge, while_sampling=True).on_answer is None
    with Judge("math") as judge:
        assert RolloutJudge(judge, while_sampling=False).on_answer is None


def test_an_error_beside_the_engine_is_raised_when_judgements_are_taken():
    with Judge("math") as judge, RolloutJudge(judge, while_sampling=True) as beside:
        beside.on_answer(None, rollouts(1)[0])
        with pytest.raises(AttributeError):
            beside.judge(PROMPTS, rollouts(1))


def test_leaving_ends_the_thread_while_answers_are_still_unclaimed():
    before = threading.active_count()
    with Judge("math") as judge, RolloutJudge(judge, while_sampling=True) as beside:
        for rollout in rollouts(8):
            beside.on_answer(PROMPTS[rollout.prompt_index], rollout)
    assert threading.active_count() == before


def test_thinking_that_a_prompt_opens_is_judged_with_its_answer():
    """The same verdicts as of an agent that writes its <think> by itself, beside the engine and after it."""
    ends = (r"so \boxed{{{}}}", r"so</think>\boxed{{{}}}")
    asked = [
        Rollout(prompt.index, g, np.zeros(1, np.int32), ends[g].format(prompt.gold), Stop.EOS)
        for prompt in PROMPTS
        for g in range(2)
    ]
    written = [replace(rollout, text="<think>" + rollout.text) for rollout in asked]
    with Judge("math") as judge:
        expected = judged_at_once(judge, written)
        assert [judgement.verdict for judgement in expected] == [Verdict.NO_ANSWER, Verdict.CORRECT] * len(PROMPTS)
        with RolloutJudge(judge, while_sampling=True, opened_thinking=lambda prompt: "<think>") as beside:
            for rollout in asked[:3]:
                beside.on_answer(PROMPTS[rollout.prompt_index], rollout)
            assert beside.judge(PROMPTS, asked) == expected
        # Turns of a conversation: the agent's own, another role's, and both without the thinking of the one before.
        own = Turn("assistant", r"7</think>\boxed{1}", 1, Stop.EOS, opened="<think>")
        others = Turn("user", own.content, 0, Stop.EOS, "solver", "<think>")
        last = (own, others, replace(own, content="7"), replace(others, content=r"\boxed{1}", opened=""))
        told = [
            Rollout(0, g, np.zeros(talk.num_tokens, np.int32), talk.answer.content, Stop.EOS, conversation=talk)
            for g, talk in enumerate(Conversation((own, turn)) for turn in last)
        ]
        with RolloutJudge(judge, while_sampling=False, opened_thinking=lambda prompt: "<think>") as of_agent:
            verdicts = [judgement.verdict for judgement in of_agent.judge(PROMPTS, told)]
        assert verdicts == [Verdict.CORRECT, Verdict.CORRECT, Verdict.NO_ANSWER, Verdict.CORRECT]


def test_conversations_that_an_environment_leaves_unjudged_are_reported():
    """Beside answers of a grader's; a role that was not reached is nobody's failure."""
    turn, lost = Turn("assistant", "7", 1, Stop.EOS), {"failed": 1, "timeouts": 0, "environment_ms": 3}
    talks = [
        Conversation((turn,), reward=0.5),
        Conversation((turn,), reward=5.0),
        Conversation((turn,), counts=lost | {"respond": 1}),
        Conversation((turn,), counts=lost | {"unencodable": 1}),
        Conversation((turn,), counts={"silent": 1}),
        Conversation((turn,)),
    ]
    asked = [Rollout(0, g, np.zeros(1, np.int32), "7", Stop.EOS, conversation=talk) for g, talk in enumerate(talks)]
    with Judge("math") as judge:
        of_agent = RolloutJudge(judge, while_sampling=False, last_error=lambda: "respond: no shelf")
        rewards = [judgement.reward for judgement in of_agent.judge(PROMPTS, asked)]
        report = of_agent.take_report()
    np.testing.assert_array_equal(rewards, [0.5, np.nan, np.nan, np.nan, np.nan, 0.0])
    assert (report.num_answers, report.num_unjudged) == (6, 3)
    assert report.first_error == "the environment's reward lies outside reward.range"
    assert report.errors.keys() - {report.first_error} == {
        "a conversation failed (respond: no shelf)", "a conversation failed (unencodable)"
    }  # fmt: skip
    assert of_agent.take_report().num_answers == 0, "each is told once"
