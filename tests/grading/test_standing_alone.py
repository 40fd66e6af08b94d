"""The package beside the product: its README's examples, its registry, what a worker loads, its former names."""

import importlib
import json
import math
import re
from contextlib import nullcontext

import numpy as np
import pytest
from judged import questions
from repository import ROOT

from hacpo_grading.graders.registry import GRADERS, find_grader, gives_parts, value_problem
from hacpo_grading.judge import Judge
from hacpo_grading.judgement import Stop
from hacpo_grading.workers.grader_calls import Unjudged
from hacpo_mega.config.user_code import grader_problem

README = ROOT / "packages" / "hacpo_grading" / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
RIGHT, WRONG, NONE = r"so \boxed{\frac{1}{2}}", r"so \boxed{3}", "no box"
# Packages whose import a worker must not wait for, unless its grader asks for them.
HEAVY = ("hacpo_mega.config", "pydantic", "torch", "transformers", "numpy", "sympy", "math_verify", "httpx")
# A file of the user's that says what its process has loaded, to a file beside it.
LOADED = """import json, pathlib, sys
def reward(answer):
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(sorted(sys.modules)))
    return 1.0
"""


@pytest.fixture(scope="module")
def examples():
    """The names that the README's examples bind, one after the other in one program."""
    names = {}
    for block in BLOCK.findall(README.read_text(encoding="utf-8")):
        exec(block, names)
    yield names
    names["judge"].close()


def test_the_readme_is_a_screen_and_names_every_grader():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60 and len(BLOCK.findall(text)) == 3
    assert [name for name in GRADERS if f"`{name}`" not in text] == []


def test_the_readmes_judge_says_what_stands_beside_it(examples):
    assert (examples["found"].verdict.name, examples["found"].reward) == ("CORRECT", 1.0)


@pytest.mark.parametrize("is_chat", [False, True])
def test_trl_can_call_the_readmes_reward(is_chat, examples):
    """GRPOTrainer gives prompts, completions, their ids and every column of the data set by name."""
    texts = [RIGHT, WRONG, NONE]
    completions = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
    prompts = [[{"role": "user", "content": "1/2?"}] if is_chat else "1/2?"] * 3
    given = {"completion_ids": [[1]] * 3, "answer": ["0.5"] * 3, "level": [1] * 3, "trainer_state": None}
    assert examples["reward"](prompts=prompts, completions=completions, **given) == [1.0, 0.0, 0.0]


def test_verl_can_call_the_readmes_score(examples):
    """Its reward managers give four arguments by name, and log the numbers beside "score"."""
    for text, score in ((RIGHT, 1.0), (WRONG, 0.0)):
        given = {"data_source": "gsm8k", "solution_str": text, "ground_truth": "0.5", "extra_info": {"index": 1}}
        assert examples["compute_score"](**given) == {"score": score, "unjudged": 0.0}


def test_what_the_judge_cannot_judge_is_no_zero_of_the_examples(examples, monkeypatch):
    """TRL leaves out a reward of None; verl logs how many scores are none."""
    with Judge("number") as judge:  # for which a gold has a number
        monkeypatch.setitem(examples, "judge", judge)
        assert examples["reward"](["?"], ["7"], ["seven"]) == [None]
        assert examples["compute_score"]("", "7", "seven") == {"score": 0.0, "unjudged": 1.0}


@pytest.mark.parametrize("gold", [72, 72.0, np.int64(72), np.float32(72.0)])
def test_a_gold_may_be_a_number(gold, examples):
    """As a column of numbers has it in a data set: it would leave every answer unjudged."""
    assert examples["reward"](["?"] * 3, [r"\boxed{72}", r"\boxed{73}", "72"], [gold] * 3) == [1.0, 0.0, 0.0]
    assert examples["compute_score"]("", r"\boxed{72}", gold) == {"score": 1.0, "unjudged": 0.0}


@pytest.mark.parametrize("gold", [None, True, math.nan])
def test_a_gold_that_is_none_leaves_its_answer_unjudged(gold, examples):
    assert examples["reward"](["?"], [r"\boxed{1}"], [gold]) == [None]


def test_a_record_says_what_its_grader_is():
    for name, grader in GRADERS.items():
        assert grader.name == name == find_grader(name).name
        assert set(grader.needed) | ({grader.graded_by} - {""}) <= grader.options.keys()
    assert find_grader("mine.py:reward").is_own and gives_parts("mine.py:reward", {})
    assert [name for name in GRADERS if gives_parts(name, {})] == ["model"]
    assert gives_parts("program", {"graded": True}) and not gives_parts("program", {"graded": False})
    assert value_problem("model", {"url": "http://a"}) == "'model' needs model (a text that is not empty)"
    assert value_problem("number", {"rel_tol": 2.0}) == "option rel_tol (2.0) must be a number from 0, below 1"
    with pytest.raises(ValueError, match=r"reward kind 'maths' is unknown; known: math, math_any, "):
        find_grader("maths")


@pytest.mark.parametrize("name", sorted(GRADERS.keys() - {"math_any", "model"}))
def test_a_gold_earns_the_full_reward_by_its_record(name, examples):
    """A grader's record is enough to make a right answer of a gold."""
    gold = {"choice": "B", "json": '{"a": [1]}', "program": '[{"stdin": "", "stdout": "7"}]'}.get(name, "7")
    grader = GRADERS[name]
    answer = (grader.solution or grader.gold_as_answer)(gold)
    options = {"isolated": False} if name == "program" else {}
    with nullcontext(examples["judge"]) if name == "math" else Judge(name, options=options) as judge:
        (found,) = judge.judge(questions(["1+6="], [gold], [answer], [Stop.EOS]))
    assert (found.verdict.name, found.reward) == ("CORRECT", 1.0)


@pytest.mark.parametrize("first", ["", "from hacpo_mega.grading.grader_calls import Unjudged\n"])
def test_a_worker_loads_no_more_than_its_grader_asks_for(first, tmp_path):
    (tmp_path / "mine.py").write_text(first + LOADED)
    with Judge(f"{tmp_path / 'mine.py'}:reward") as judge:
        assert judge.judge(questions([""], ["1"], ["1"], [Stop.EOS]))[0].is_success
    loaded = json.loads((tmp_path / "mine.json").read_text())
    assert [name for name in loaded if name.startswith(HEAVY)] == []
    parts = ("judgement", *(f"workers.{part}" for part in ("grader_calls", "grader_signature", "grading_worker")))
    if not first:
        ours = [name for name in loaded if name.startswith(("hacpo_grading", "hacpo_mega"))]
        assert ours == [
            f"hacpo_grading.{part}" for part in ("judgement", "texts.chat_messages", *parts[1:], "workers.own_file")
        ]


@pytest.mark.parametrize(
    "place", ["graders.graders", "graders.math_grader", "math_grader", "number", "graders", "judge"]
)
def test_modules_have_their_former_names_too(place):
    former = importlib.import_module(f"hacpo_mega.grading.{place}")
    folder = "graders." if place in ("math_grader", "number") else ""
    assert former is importlib.import_module(f"hacpo_grading.{folder}{place}")
    assert former.__spec__.name == former.__name__


def test_graders_of_users_find_what_they_have_imported_so_far(tmp_path):
    """In a process of their own, by every documented import; `check` finds kinds by their former names, too."""
    code = (
        "from hacpo_mega.grading.graders.number import Number\n"
        "from hacpo_mega.grading.graders import arithmetic, exact, length_penalised, requiring_format\n"
        "from hacpo_mega.grading.grader_calls import Unjudged\nfrom hacpo_mega.grading.judge import Judge\n"
        "from hacpo_mega.grading.reward_trial import try_reward\n"
        "import hacpo_grading.workers.grader_calls as new\nassert new.Unjudged is Unjudged\n"
    )
    (tmp_path / "mine.py").write_text(code + "def reward(answer, gold):\n    return Number()('', answer, gold)\n")
    for kind in (f"{tmp_path / 'mine.py'}:reward", "hacpo_mega.grading.graders.graders:exact"):
        with Judge(kind) as judge:
            (found,) = judge.judge(questions([""], [RIGHT], [RIGHT], [Stop.EOS]))
        assert grader_problem(kind) is None and found.is_success
    problem = grader_problem("hacpo_mega.grading.math_grader:boxd")
    assert problem.endswith("math_grader.py has no function 'boxd'; did you mean 'boxed'?")
    assert "there is no module" in grader_problem("hacpo_mega.grading.no_such:boxed")


def test_unjudged_is_one_class_under_both_names():
    assert importlib.import_module("hacpo_mega.grading.grader_calls").Unjudged is Unjudged
