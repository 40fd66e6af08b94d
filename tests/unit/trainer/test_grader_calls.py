"""Graders are called as they ask to be, alone and in batches, and each answer answers for itself."""

import json
import math
import re
import sys

import pytest
from judged import questions

from hacpo_grading.judge import Judge
from hacpo_grading.texts.chat_messages import messages_text
from hacpo_grading.workers import guarded_workers
from hacpo_grading.workers.grader_calls import GraderCall
from hacpo_mega.config import RewardConfig
from hacpo_mega.config.user_code import named_function
from hacpo_mega.data.reading.files import PromptRow
from hacpo_mega.grading.reward_trial import try_reward
from hacpo_mega.grading.run_judge import judge_of
from hacpo_mega.records import Stop, Verdict

HERE = "tests.unit.trainer.reward_functions"


def judged(function: str, texts, golds=None, rows=(), **options):
    """Judgements and the report of answers to one prompt."""
    number = len(texts)
    with Judge(f"{HERE}:{function}", **options) as judge:
        found = judge.judge(
            questions(["p"] * number, golds or ["1"] * number, texts, [Stop.EOS] * number, rows, "qwen")
        )
        return found, judge.take_report()


def rewards(*arguments, **options) -> list[float]:
    """Only the numbers."""
    return [judgement.reward for judgement in judged(*arguments, **options)[0]]


ROWS = ['{"level": 0.5, "size": 1, "answer": "1"}', '{"size": 1, "tag": 2}']


@pytest.mark.parametrize(
    ("function", "texts", "rows", "expected"),
    [
        ("by_name", ["1", "2"], [ROWS[0]] * 2, [0.5, 0.0]),
        ("by_name_or_without", ["1", "1"], ROWS, [0.5, 0.5]),
        ("by_name_or_without", ["2", "2"], ROWS, [0.1, 0.2]),
        ("of_agent", ["qwen", "llama"], (), [1.0, 0.0]),
        ("rarest", ["1", "1", "3"], (), [0.5, 0.5, 1.0]),
        ("of_trl", ["1", "2", "1"], ['{"solution": "1"}'] * 2 + ['{"solution": ""}'], [1.0, 0.0, 0.0]),
        ("of_trl_chat", ["p", "q"], (), [1.0, 0.0]),
        ("of_trl_typing", ["p", "q"], (), [1.0, 0.0]),
        ("of_verl_batch", ["1", "2"], ('{"reward_model": {"ground_truth": "2"}}',) * 2, [0.0, 1.0]),
    ],
)
def test_a_grader_gets_what_its_parameters_are_called(function, texts, rows, expected):
    assert rewards(function, texts, rows=rows) == pytest.approx(expected, abs=1e-12)


def test_a_table_has_the_score_and_its_other_numbers_are_logged_by_name():
    row = json.dumps({"extra_info": {"split": 7}, "score": 0.0})
    (right, wrong), _ = judged("of_verl", ["1", "2"], rows=[row] * 2)
    assert right == (Verdict.CORRECT, 1.0, (("acc", 1.0), ("split", 7.0)))
    assert wrong == (Verdict.WRONG, 0.0, (("acc", 0.0), ("split", 7.0)))


def test_a_declared_range_becomes_0_to_1_and_what_leaves_it_is_no_reward():
    found, report = judged("in_lists", ["1", "2", "how many"], reward_range=(-1.0, 1.0))
    assert [judgement.reward for judgement in found[:2]] == [1.0, 0.0]
    assert math.isnan(found[2].reward)
    assert report.first_error == "the grader returned int 3, expected a number in [-1, 1] or None"


def test_a_batch_that_fails_is_called_again_for_each_answer_alone():
    found, report = judged("in_lists", ["1", "bad", "1"], reward_range=(-1.0, 1.0))
    assert [judgement.verdict for judgement in found] == [Verdict.CORRECT, Verdict.ERROR, Verdict.CORRECT]
    assert report.errors == {"ValueError: cannot read bad": 1}


def test_an_exit_costs_one_answer_of_a_batch():
    found, report = judged("in_lists", ["1", "exit", "1"], reward_range=(-1.0, 1.0))
    assert [judgement.reward for judgement in found] == [1.0, 0.0, 1.0]
    assert report.errors == {"SystemExit: 3": 1}


def test_a_dead_worker_is_blamed_only_on_the_answer_that_ended_it():
    found, report = judged("in_lists", ["1"] * 5 + ["end"] + ["2"] * 5, reward_range=(-1.0, 1.0))
    assert [judgement.verdict for judgement in found].count(Verdict.ERROR) == 1 and found[5].verdict is Verdict.ERROR
    assert [judgement.reward for judgement in found] == [1.0] * 5 + [0.0] + [0.0] * 5
    assert report.errors == {"the worker died (exit status 3)": 1}


def test_too_few_rewards_leave_the_answers_unjudged():
    found, report = judged("too_few", ["1", "2"])
    assert [math.isnan(judgement.reward) for judgement in found] == [True, True]
    assert report.first_error == "the grader returned 1 rewards for 2 answers"


@pytest.mark.parametrize("function", ["one_at_a_time", "asking", "wrapped"])
def test_an_async_grader_has_one_event_loop_for_all_its_calls(function):
    """Beyond 64 answers, the most of one call: what waits for a lock of another loop fails."""
    texts = [f"{n % 2}".rjust(n) for n in range(80)]
    found, report = judged(function, texts, golds=texts)
    assert [judgement.reward for judgement in found] == [1.0] * 80 and not report.errors


@pytest.mark.nightly
def test_an_async_grader_waits_for_many_at_once_and_for_none_too_long():
    texts = ["1"] * 30 + ["hang", "end", "out of reach"]
    found, report = judged("awaited", texts, timeout_s=1.0)
    assert [judgement.verdict for judgement in found] == [Verdict.CORRECT] * 30 + [
        Verdict.TIMEOUT,
        Verdict.ERROR,
        Verdict.ERROR,
    ]
    assert found[30].reward == found[31].reward == 0.0 and math.isnan(found[32].reward)
    assert report.errors == {"the worker died (exit status 3)": 1, "Unjudged: nobody there": 1}


@pytest.mark.nightly
def test_an_async_grader_of_lists_has_the_time_of_all_its_answers(monkeypatch):
    """Five waits of .2 s in one call are more than the .4 s that one answer may sleep; one that hangs is found."""
    with monkeypatch.context() as patch:
        patch.setattr(guarded_workers, "WALL_FACTOR", 3.0)  # 5 x .6 + .3 s of wall time
        patch.setattr(guarded_workers, "WALL_GRACE_S", 0.3)
        assert rewards("awaited_in_a_list", [*"12345"], timeout_s=0.2) == [1 / 5] * 5
    (answered, hung), _ = judged("awaited_in_a_list", ["1", "hang"], timeout_s=0.2)
    assert (answered.reward, hung.reward, hung.verdict) == (1.0, 0.0, Verdict.TIMEOUT)


def test_trl_s_completions_are_messages_where_the_prompts_are():
    prompts = [messages_text([{"role": "user", "content": "p"}]), "p"]
    with Judge(f"{HERE}:of_trl_either") as judge:
        for prompt in prompts:
            found = judge.judge(questions([prompt] * 2, ["1"] * 2, ["p", "q"], [Stop.EOS] * 2))
            assert [judgement.reward for judgement in found] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("by_name", "by name, with answer, level, gold"),
        ("in_lists", "with lists, of answers, golds"),
        ("of_trl", "as TRL's, with completions as the prompts are and the row's fields"),
        ("of_trl_chat", "as TRL's, with completions as chat messages and the row's fields"),
        ("of_verl", "as verl's, with data_source, solution_str, ground_truth, extra_info"),
        ("awaited", "by name, with answer, gold, many awaited at once"),
    ],
)
def test_the_start_says_how_a_grader_is_called(function, said):
    assert str(GraderCall(f"{HERE}:{function}", {}).signature) == said


def test_a_field_that_no_row_has_is_named_before_training():
    with Judge(f"{HERE}:by_name") as judge:
        judge.require_fields(['{"level": 1.0}'])
        with pytest.raises(ValueError, match=r"asks for 'level', which is none of prompt, .* which has: size, answer"):
            judge.require_fields(['{"level": 1.0}', '{"size": 3, "answer": "1"}'])


PARTS = {
    "right": {"kind": "exact", "weight": 3.0},
    "level": {"kind": f"{HERE}:by_name", "options": {"bonus": 0.25}},
    "table": {"kind": f"{HERE}:of_verl"},
}


def test_several_rewards_are_weighted_and_kept_by_name():
    row = json.dumps({"level": 1.0, "extra_info": {"split": 0}})
    with judge_of(RewardConfig(parts=PARTS)) as judge:
        right, wrong = judge.judge(questions(["p"] * 2, ["1"] * 2, ["1", "2"], [Stop.EOS] * 2, [row] * 2))
    assert (right.verdict, right.reward) == (Verdict.CORRECT, 1.0)
    assert (wrong.verdict, wrong.reward) == (Verdict.WRONG, pytest.approx(0.25 / 5.0, abs=1e-15))
    assert dict(wrong.parts) == {"right": 0.0, "level": 0.25, "table": 0.0, "table_acc": 0.0, "table_split": 0.0}


@pytest.mark.parametrize(
    ("success", "successes"),
    [
        (None, {"1.0"}),  # the whole reward
        ("right", {"1.0", "1"}),
        ("near", {"1.0", "1", "2"}),
        (1.0, {"1.0"}),
        (0.8, {"1.0", "1"}),
        (0.81, {"1.0"}),
        (0.2, {"1.0", "1", "2"}),
        (1e-12, {"1.0", "1", "2"}),
    ],
)
def test_a_success_is_what_the_reward_says_it_is(success, successes):
    """The verdict is correct exactly there; the reward is the same whatever a success is."""
    parts = {"right": {"kind": "number", "weight": 3.0}, "plain": {"kind": "exact"}}
    parts["near"] = {"kind": "number", "options": {"abs_tol": 1.5}}
    answers = ["1.0", "1", "2", "9", "none"]
    with judge_of(RewardConfig(parts=parts, success=success)) as judge:
        found = judge.judge(questions(["p"] * 5, ["1.0"] * 5, answers, [Stop.EOS] * 5))
    assert [one.reward for one in found] == pytest.approx([1.0, 4 / 5, 1 / 5, 0.0, 0.0], abs=1e-15)
    assert {answer for answer, one in zip(answers, found, strict=True) if one.is_success} == successes
    assert {one.verdict for one in found if not one.is_success} == {Verdict.WRONG}


def test_a_success_of_one_grader_has_a_least_reward():
    for success, wanted in ((None, [False, False, True]), (0.5, [False, True, True])):
        with judge_of(RewardConfig(kind=f"{HERE}:by_name", success=success)) as judge:
            rows = [json.dumps({"level": level}) for level in (0.0, 0.5, 1.0)]
            found = judge.judge(questions(["p"] * 3, ["1"] * 3, ["1"] * 3, [Stop.EOS] * 3, rows))
        assert [one.is_success for one in found] == wanted
        assert [one.reward for one in found] == [0.0, 0.5, 1.0]


def test_a_part_that_cannot_judge_is_named_and_leaves_the_answer_unjudged():
    with judge_of(RewardConfig(parts=PARTS)) as judge:
        (found,) = judge.judge(questions(["p"], ["1"], ["1"], [Stop.EOS], ['{"extra_info": {"split": 0}}']))
        report = judge.take_report()
    assert math.isnan(found.reward) and dict(found.parts)["right"] == 1.0
    assert report.num_unjudged == 1 and report.first_error.startswith("reward.parts.level: Unjudged: the grader asks")


def test_parts_take_the_place_of_one_kind():
    with pytest.raises(ValueError, match=r"reward\.parts takes the place of reward\.kind, options and range"):
        RewardConfig(kind="exact", parts=PARTS)
    with pytest.raises(ValueError, match="range needs its lower end first"):
        RewardConfig(range=(1.0, 0.0))


def trial_of(tmp_path, source: str, gold: str = "146", num_rows: int = 1, **reward):
    """The findings of a trial of a reward whose function is `own` in `source`, or that is given whole."""
    file = tmp_path / "rewards.py"
    file.write_text(source)
    config = RewardConfig(**reward) if reward else RewardConfig(kind=f"{file}:own", timeout_s=0.2)
    rows = [PromptRow(f"id{i}", "97 + 49", gold, row=json.dumps({"number": i})) for i in range(num_rows)]
    with judge_of(config) as judge:
        trial = try_reward(config, judge, rows, "qwen")
        assert judge.take_report().num_answers == 0, "the first step's report is of its own answers"
        return trial


REFUSED = [
    ("def own(answer): return 'yes'", r"the grader returned str 'yes', expected a number in \[0, 1\] or None"),
    ("def own(answer): return 'yes' if answer else 0.0", "the grader returned str 'yes'"),
    ("def own(answer): return 7", "the grader returned int 7"),
    ("def own(answer): return {'acc': 1.0}", 'the grader returned a table without "score"'),
    ("def own(answers): return [1.0]", "the grader returned 1 rewards for"),
    ("def own(completions, **kwargs): return ['right' for c in completions]", "the grader returned str 'right'"),
    ("async def own(answer): return [0.5]", "the grader returned list"),
    (
        "def compute_score(data_source, solution_str, ground_truth): return None, 1\nown = compute_score",
        "returned tuple",
    ),
    ("def own(answer): raise KeyError('level')", "KeyError: 'level'"),
]


@pytest.mark.parametrize(("source", "says"), REFUSED)
def test_a_reward_that_training_would_refuse_is_refused_before_it(tmp_path, source, says):
    assert re.search(says, trial_of(tmp_path, source).refusal)


JUDGED = [
    ("def own(answer, gold): return float(answer == gold)", "it earns 1 (correct), an empty answer 0 (wrong)"),
    ("def own(answer, gold): return float('boxed{146}' in answer)", "it earns 1 (correct), an empty answer 0 (wrong)"),
    ("def own(answer, gold): return .5 * answer.endswith('</answer>')", "it earns 0.5 (wrong), an empty answer 0"),
    ("def own(answer, agent): return {'score': float(agent == 'qwen' and answer > ''), 'x': 2}",
     "it earns 1 (correct, x 2), an empty answer 0 (wrong, x 2)"),
    ("def own(completions, **kwargs): return [1.0 * (c > '') for c in completions]", "it earns 1 (correct), an empty"),
    ("async def own(answer): return len(answer) / 400", "it earns 0.05 (wrong), an empty answer 0 (wrong)"),
    ("def own(answer, group): return 1 / len(group) if answer else 0", "it earns 1 (correct), an empty answer 0"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "shown"), JUDGED)
def test_a_reward_is_tried_on_the_gold_in_the_forms_that_people_ask_for(tmp_path, source, shown):
    trial = trial_of(tmp_path, source)
    assert (trial.refusal, trial.warnings) == (None, ())
    assert str(trial).startswith(shown)


WARNED = [
    ("def own(answer, gold): return None", "earns 0 (no answer) and an empty answer 0 (no answer)"),
    ("def own(answer): return 1 - len(answer) / 4000", "earns 0.9992 (wrong) and an empty answer 1 (correct)"),
    ("def own(answer, gold): return float(answer[0] == gold[0])", "fails on 1 of 6 answers tried: IndexError: string"),
    ("from hacpo_mega.grading.grader_calls import Unjudged\ndef own(answer): raise Unjudged('no server')",
     "fails on 6 of 6 answers tried: Unjudged: no server"),
    ("def own(data_source, solution_str, ground_truth): return float(solution_str == ground_truth)",
     'asks for data_source and gets "": the first prompt\'s row has no such field'),
]  # fmt: skip


@pytest.mark.parametrize(("source", "says"), WARNED)
def test_a_reward_that_teaches_nothing_or_fails_at_times_is_warned_of(tmp_path, source, says):
    trial = trial_of(tmp_path, source)
    assert trial.refusal is None
    (warning,) = trial.warnings
    assert says in warning


OF_DAPO = "Solve it. The last line of your response should be of the form Answer: $Answer (without quotes)."


@pytest.mark.parametrize(
    ("kind", "prompt", "says"),
    [
        ("math", OF_DAPO, ["asks for the form 'Answer: 146', which earns 0 (no answer), no more than an empty answer"]),
        ("math_any", OF_DAPO, []),
        ("number", OF_DAPO, []),
        ("exact", OF_DAPO, ["asks for the form 'Answer: 146', which earns 0 (wrong)"]),
        ("exact", "Output the final answer after ####.", ["asks for the form '#### 146', which earns 0"]),
        ("math", OF_DAPO + r" Put it in \boxed{}.", []),
        ("math", "Think, then write <answer>.</answer>", ["asks for the form '<answer>146</answer>', which earns 0"]),
        ("math", "Question: 1+1\nAnswer: 2\n\nQuestion: 97+49\nAnswer:", []),
        ("math", "#### Problem\n97 + 49", []),
        ("program", OF_DAPO, []),
    ],
)
def test_a_reward_that_does_not_read_what_the_prompt_asks_for_is_warned_of(kind, prompt, says):
    gold = '[{"stdin": "", "stdout": "146"}]' if kind == "program" else "146"
    options = {"isolated": False} if kind == "program" else {}
    config = RewardConfig(kind=kind, options=options)
    with judge_of(config) as judge:
        trial = try_reward(config, judge, [PromptRow("id", prompt, gold)], "qwen")
    assert trial.refusal is None
    assert len(trial.warnings) == len(says) and all(map(str.__contains__, trial.warnings, says)), trial.warnings


def test_choices_that_the_first_prompt_lacks_are_warned_of():
    row, config = json.dumps({"answer": "B", "options": ["4", "\\frac12"]}), RewardConfig(kind="choice")
    asked = "Half of one? A) 4"
    for prompt in (asked, messages_text([{"role": "user", "content": asked}])):
        with judge_of(config) as judge:
            (warning,) = try_reward(config, judge, [PromptRow("id", prompt, "B", row=row)], "qwen").warnings
        assert warning.startswith("warning: field 'options' of the first prompt's row is not in the prompt")
    shown = PromptRow("id", messages_text([{"role": "user", "content": f"{asked} B) \\frac12"}]), "B", row=row)
    with judge_of(config) as judge:
        assert try_reward(config, judge, [shown], "qwen").warnings == ()


def test_a_grader_that_fails_on_one_row_alone_is_tried_on_others(tmp_path):
    source = "def own(answer, number): return 1 / number"
    assert "ZeroDivisionError" in trial_of(tmp_path, source).refusal
    assert trial_of(tmp_path, source, num_rows=2).refusal is None


@pytest.mark.nightly
def test_a_right_program_with_many_cases_has_the_wall_time_of_all(monkeypatch):
    """On a busy machine: the workers' own limit is for one run."""
    monkeypatch.setattr(guarded_workers, "WALL_FACTOR", 0.0)
    monkeypatch.setattr(guarded_workers, "WALL_GRACE_S", 0.3)
    gold = json.dumps([{"stdin": "", "stdout": "1"}] * 3)
    answer = "```python\nimport time\ntime.sleep(0.2)\nprint(1)\n```"
    with Judge("program", options={"isolated": False}) as judge:
        (found,) = judge.judge(questions(["p"], [gold], [answer], [Stop.EOS]))
    assert (found.verdict, found.reward) == (Verdict.CORRECT, 1.0)


def test_built_in_graders_and_parts_are_tried_in_their_own_answer_format(tmp_path):
    parts = {"right": {"kind": "math", "weight": 0.8}, "short": {"kind": f"{tmp_path}/rewards.py:own", "weight": 0.2}}
    trial = trial_of(tmp_path, "def own(answer): return 1 - len(answer) / 100", parts=parts)
    assert trial.warnings == () and trial.gold.reward == pytest.approx(0.8 + 0.2 * (1 - 11 / 100))  # \boxed{146}
    assert str(trial).endswith(", an empty answer 0.2 (wrong, right 0, short 1)")
    cases = json.dumps([{"stdin": "1 2\r\n", "stdout": "3\n"}, {"stdin": "", "stdout": "none"}])
    trial = trial_of(tmp_path, "", cases, kind="program", options={"isolated": False})
    assert (str(trial), trial.warnings) == ("it earns 1 (correct), an empty answer 0 (no answer)", ())
    for kind, gold in (("choice", "C"), ("json", '{"a": 1}'), ("number", "-3.5"), ("arithmetic", "12"), ("exact", "x")):
        assert str(trial_of(tmp_path, "", gold, kind=kind)).startswith("it earns 1 (correct), an empty answer 0 (no")


def test_a_reward_file_named_like_a_library_shadows_nothing(tmp_path):
    """Its helper, too, is called like one: `json` stays Python's, and `my_helper` is what lies beside."""
    (tmp_path / "math.py").write_text(
        "import statistics\nfrom my_helper import as_float\n"
        "def own(answer, gold):\n    import late_helper\n    return as_float(statistics.mean([answer == gold]))\n"
    )
    (tmp_path / "my_helper.py").write_text("import json\ndef as_float(x):\n    return json.loads(str(float(x)))\n")
    (tmp_path / "late_helper.py").write_text("")
    (tmp_path / "json.py").write_text("raise ImportError('not this one')\n")
    before = list(sys.path)
    with Judge(f"{tmp_path}/math.py:own") as judge:
        found = judge.judge(questions(["p"] * 2, ["1"] * 2, ["1", "2"], [Stop.EOS] * 2))
        assert [judgement.reward for judgement in found] == [1.0, 0.0], judge.take_report()
    assert named_function(f"{tmp_path}/math.py:own")("1", "1") == 1.0
    assert sys.modules["math"] is math and sys.path == [*before, str(tmp_path)]
    sys.path.pop()
    del sys.modules["my_helper"], sys.modules["late_helper"]
