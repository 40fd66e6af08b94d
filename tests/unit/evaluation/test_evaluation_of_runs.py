"""An agent of a run is evaluated as it was trained: same prompts, fields and grader, unless others are asked for."""

import json
from pathlib import Path

import pytest
from job import run_here

from hacpo_mega.config import Prompting
from hacpo_mega.evaluation.settings import Wording, ask, benchmarks_of, settings_for


def test_questions_that_make_no_sense_are_refused(tmp_path):
    file = tmp_path / "b.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2"}\n')
    with pytest.raises(ValueError, match="4 answers at temperature 0 are the same answer 4 times"):
        benchmarks_of([file], None, None, 4, 0.0, None)
    with pytest.raises(ValueError, match="give benchmark files, or --suite paper"):
        benchmarks_of([], None, None, 1, None, None)
    with pytest.raises(ValueError, match="'papers' is unknown"):
        benchmarks_of([], "papers", tmp_path, 1, None, None)
    with pytest.raises(ValueError, match="takes --data FOLDER, and neither"):
        benchmarks_of([file], "paper", tmp_path, 1, None, None)
    assert benchmarks_of([file], None, None, 2, None, None)[0].temperature == 1.0
    assert benchmarks_of([file], None, None, 1, None, None)[0].temperature == 0.0


RUN = """
run_dir = "r"
num_steps = 1
data = { generator = "arithmetic" }
reward = { kind = "arithmetic", require_stop = true }
rollout = { max_prompt_tokens = 9, max_answer_tokens = 21 }
[[agents]]
name = "a"
model = "gone"
chat_template = true
chat_template_kwargs = { enable_thinking = false }
chat_template_time = "2024-02-29T23:59:58"
prompt_template = "Q: {prompt}"
"""


def test_an_agent_of_a_run_is_asked_as_in_its_training(tmp_path):
    (tmp_path / "agents" / "a").mkdir(parents=True)
    (tmp_path / "config.toml").write_text(RUN)
    nothing = dict.fromkeys(("stop_text", "reward", "max_prompt_tokens"))
    model = tmp_path / "agents" / "a"
    trained = settings_for(model, [])
    time = "2024-02-29T23:59:58"
    assert trained.prompting == Prompting(True, {"enable_thinking": False}, None, "Q: {prompt}", time)
    assert Wording(chat_template=False).changed(Prompting(True, time=time)) == Prompting()
    assert (trained.reward, trained.require_stop) == ("arithmetic", True)
    assert (trained.max_prompt_tokens, trained.max_answer_tokens) == (9, 21)
    asked = nothing | {"max_answer_tokens": 5, "seed": 1, "is_suite": False}
    wording = Wording(template_args=["enable_thinking=true", "name=x y"], system_prompt="S")
    settings = ask(model, [], wording, **asked)
    assert settings.prompting == Prompting(True, {"enable_thinking": True, "name": "x y"}, "S", "Q: {prompt}", time)
    assert (settings.reward, settings.max_answer_tokens, settings.max_prompt_tokens) == ("arithmetic", 5, 9)
    assert settings_for(tmp_path, []).reward == "math"


def test_a_success_is_the_runs_unless_another_is_asked_for(tmp_path):
    """A grader of another kind gets nothing of it; final answers are voted on as the part reads them that decides."""
    parts = 'parts = { short = { kind = "exact" }, right = { kind = "arithmetic", weight = 4.0 } }'
    model, asked = (
        tmp_path / "agents" / "a",
        {"is_suite": False, "stop_text": None, "max_prompt_tokens": None, "seed": 0},
    )
    asked |= {"max_answer_tokens": None, "reward": None}
    model.mkdir(parents=True)
    run = RUN.replace('{ kind = "arithmetic", require_stop = true }', f'{{ success = "right", {parts} }}')
    (tmp_path / "config.toml").write_text(run)
    trained = ask(model, [], Wording(), **asked)
    assert trained.rewarded().success == "right" == trained.record("w")["reward_success"]
    assert trained.voted == "arithmetic"
    other = ask(model, [], Wording(), **asked, success="0.5")
    assert (other.rewarded().success, other.voted) == (0.5, "exact")
    assert ask(model, [], Wording(), **(asked | {"reward": "math"})).rewarded().success is None
    with pytest.raises(
        ValueError, match=r"^--success: 'rihgt' is no part of the reward; there are: short, right\. Nea"
    ):
        ask(model, [], Wording(), **asked, success="rihgt")
    with pytest.raises(
        ValueError, match=r"^--success: needs the name of a part, or a number above 0, at most 1, found 2"
    ):
        ask(tmp_path, [], Wording(), **asked, success="2")


OWN = """
def digits(prompt, answer, gold, *, bonus=0.0):
    return bonus

class Strict:
    def __init__(self, limit=1):
        if not isinstance(limit, int):
            raise ValueError("limit is no whole number")

    def __call__(self, prompt, answer, gold):
        return 1.0
"""


@pytest.fixture
def own_run(tmp_path) -> Path:
    """RUN/agents/a of a run with fields, a grader and an option of its own, and a file of the same fields."""
    (tmp_path / "agents" / "a").mkdir(parents=True)
    (tmp_path / "agents" / "a" / "config.json").write_text("{}")
    (tmp_path / "own.py").write_text(OWN)
    own = f'{{ kind = "{tmp_path}/own.py:digits", options = {{ bonus = 0.5 }} }}'
    config = RUN.replace('{ kind = "arithmetic", require_stop = true }', own)
    fields = 'data = { files = ["x.jsonl"], prompt_field = "input", gold_field = "target" }'
    (tmp_path / "config.toml").write_text(config.replace('data = { generator = "arithmetic" }', fields))
    rows = [{"input": f"{i}+1", "target": f"{i + 1}", "answer": "?", "prompt": "?"} for i in range(3)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "public.jsonl").write_text('{"problem": "2+2", "answer": "4"}\n')
    return tmp_path / "agents" / "a"


def pairs(model: Path | None, file: str, folder: Path, **fields: str) -> list[tuple[str, str]]:
    (benchmark,) = benchmarks_of([folder / file], None, None, 1, None, None, model=model, **fields)
    return [(row.text, row.gold) for row in benchmark.rows]


def test_a_file_is_read_by_the_fields_of_the_run_or_by_those_given(own_run, tmp_path):
    own = [("0+1", "1"), ("1+1", "2"), ("2+1", "3")]
    assert pairs(own_run, "own.jsonl", tmp_path) == own  # although `prompt` and `answer` would be a known layout
    assert pairs(own_run, "public.jsonl", tmp_path) == [("2+2", "4")]
    assert pairs(None, "own.jsonl", tmp_path, prompt_field="input", gold_field="target") == own
    assert pairs(None, "own.jsonl", tmp_path, prompt_field="input")[0] == ("0+1", "?")
    assert pairs(own_run, "own.jsonl", tmp_path, gold_field="answer")[0] == ("0+1", "?")
    with pytest.raises(ValueError, match=r"public\.jsonl:1: field 'input' is missing \(the row has: answer, problem\)"):
        pairs(None, "public.jsonl", tmp_path, prompt_field="input")
    (tmp_path / "null.jsonl").write_text('{"input": "1", "target": null}\n')
    with pytest.raises(ValueError, match=r"field 'target' is null$"):
        pairs(own_run, "null.jsonl", tmp_path, gold_field="target")
    with pytest.raises(ValueError, match="has not 'input' and 'target', and fits no known layout"):
        pairs(own_run, "null.jsonl", tmp_path)
    with pytest.raises(ValueError, match="neither files nor fields"):
        benchmarks_of([], "paper", tmp_path, 1, None, None, prompt_field="x")


def test_another_grader_than_the_runs_does_not_get_its_options(own_run):
    assert settings_for(own_run, [], trust=True).reward_options == {"bonus": 0.5}
    for reward in ("math_any", "number"):
        assert settings_for(own_run, [], reward=reward).reward_options == {}


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--reward", "choise"], "--reward: 'choise' is unknown; known: math, math_any, "),
        (["--reward", "number", "--option", "tol=1"], "--option: 'number' has no option tol; its options are: rel_tol"),
        (["--reward", "math", "--option", "relative"], "option 'relative' of the judge has no value"),
        (["--trust", "--option", "bonsu=1"], "has no option bonsu; its parameters are: prompt, answer, gold, bonus; "),
        (["--reward", "OWN:Strict", "--option", "limit=no"], "limit is no whole number"),
        (["--reward", "program", "--option", "cpu_s=0"], "option cpu_s (0) must be a whole number from 1"),
    ],
)
def test_a_bad_grader_or_option_ends_an_evaluation_before_models_load(own_run, tmp_path, arguments, says):
    arguments = [argument.replace("OWN", str(tmp_path / "own.py")) for argument in arguments]
    done = run_here("eval", own_run, tmp_path / "own.jsonl", "--out", tmp_path / "out", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert says in done.stderr and not (tmp_path / "out").exists()
