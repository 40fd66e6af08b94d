"""An agent of a run is evaluated as it was trained: same prompts, fields and grader, unless others are asked for."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from job import run_here

from hacpo_mega.config import Prompting
from hacpo_mega.evaluation.keys import EvaluationTable, read_words
from hacpo_mega.evaluation.settings import ask, benchmarks_of, settings_for, worded


def given(*pairs: str) -> EvaluationTable:
    return read_words(["model", *pairs])[1]


def test_questions_that_make_no_sense_are_refused(tmp_path):
    file = tmp_path / "b.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2"}\n')
    with pytest.raises(ValueError, match="4 answers at temperature 0 are the same answer 4 times"):
        benchmarks_of(given("num_answers=4", "temperature=0"), [file])
    with pytest.raises(ValueError, match="give benchmark files, or suite=paper"):
        benchmarks_of(given(), [])
    with pytest.raises(ValueError, match=r"^suite: must be 'paper', found 'papers'"):
        given("suite=papers")
    with pytest.raises(ValueError, match="takes data=FOLDER, and neither"):
        benchmarks_of(given("suite=paper", f"data={tmp_path}"), [file])
    assert benchmarks_of(given("num_answers=2"), [file])[0].temperature == 1.0
    assert benchmarks_of(given(), [file])[0].temperature == 0.0


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
    model = tmp_path / "agents" / "a"
    trained = settings_for(model, [])
    time = "2024-02-29T23:59:58"
    assert trained.prompting == Prompting(True, {"enable_thinking": False}, None, "Q: {prompt}", time)
    assert worded(given("chat_template=false"), Prompting(True, time=time)) == Prompting()
    assert (trained.grader.kind, trained.reward.require_stop) == ("arithmetic", True)
    assert (trained.max_prompt_tokens, trained.max_answer_tokens) == (9, 21)
    wording = ("chat_template_kwargs.enable_thinking=true", "chat_template_kwargs.name=x y", "system_prompt=S")
    settings = ask(given(*wording, "max_answer_tokens=5", "seed=1"), model, [])
    assert settings.prompting == Prompting(True, {"enable_thinking": True, "name": "x y"}, "S", "Q: {prompt}", time)
    assert (settings.grader.kind, settings.max_answer_tokens, settings.max_prompt_tokens) == ("arithmetic", 5, 9)
    assert settings_for(tmp_path, []).reward.kind == "math"


def test_a_success_is_the_runs_unless_another_is_asked_for(tmp_path):
    """A grader of another kind gets nothing of it; final answers are voted on as the part reads them that decides."""
    parts = 'parts = { short = { kind = "exact" }, right = { kind = "arithmetic", weight = 4.0 } }'
    model = tmp_path / "agents" / "a"
    model.mkdir(parents=True)
    run = RUN.replace('{ kind = "arithmetic", require_stop = true }', f'{{ success = "right", {parts} }}')
    (tmp_path / "config.toml").write_text(run)
    trained = ask(given(), model, [])
    assert trained.rewarded().success == "right" == trained.record("w")["reward_success"]
    assert trained.voted == "arithmetic"
    other = ask(given("reward.success=0.5"), model, [])
    assert (other.rewarded().success, other.voted) == (0.5, "exact")
    assert ask(given("reward.kind=math"), model, []).rewarded().success is None
    with pytest.raises(ValueError, match=r"^reward\.success: 'rihgt' is no part of the reward; there are: short, righ"):
        ask(given("reward.success=rihgt"), model, [])
    with pytest.raises(ValueError, match=r"^reward\.success: needs the name of a part, or a number above 0, at most 1"):
        given("reward.success=2")


def test_an_agent_that_conversed_is_evaluated_in_conversations(tmp_path):
    """In its run's environment or another one; what a run names is code, which only a trusted run may bring."""
    model = tmp_path / "agents" / "a"
    model.mkdir(parents=True)
    own = tmp_path / "own.py"
    own.write_text("class Shop:\n    def reset(self, **row): pass\n")
    for environment, trust in (("calculator", False), (f"{own}:Shop", True)):
        table = f'conversation = {{ environment = "{environment}", max_turns = 3, turn_timeout_s = 5.0 }}\n[[agents]]'
        (tmp_path / "config.toml").write_text(RUN.replace("[[agents]]", table))
        found = ask(given(), model, [], trust=trust)
        assert (found.conversation.environment, found.longest_answer) == (environment, 63)
        assert found.record("w")["conversation"]["turn_timeout_s"] == 5.0 and "turn_tokens" not in found.record("w")
        other = ask(given("environment=number_game", "max_turns=2", "max_total_tokens=30"), model, [])
        assert (other.conversation.environment, other.longest_answer) == ("number_game", 30)
        # As long as those of the run's own evaluation, whose turns may be longer or shorter than those of training.
        for tokens, longest in ((7, 63), (40, 63), (70, 70)):
            longer = ask(given(f"max_answer_tokens={tokens}"), model, [], trust=trust)
            assert (longer.longest_answer, longer.record("w")["turn_tokens"]) == (longest, 21)
        # A turn of an evaluation may be longer than a conversation of training, as the player plays it.
        assert ask(given("max_total_tokens=12"), model, [], trust=trust).longest_answer == 21
        alone = ask(given("environment=none"), model, [])
        assert alone.longest_answer == 21 and "conversation" not in alone.record("w")
    with pytest.raises(ValueError, match=r"conversation\.environment = .*: their code is not run"):
        ask(given(), model, [])
    with pytest.raises(ValueError, match=r"^environment: .*unknown; known: calculator"):
        ask(given("environment=calculater"), model, [])
    with pytest.raises(ValueError, match=r"^max_turns: nothing reads it without environment="):
        ask(given("max_turns=2"), tmp_path, [])
    roles = '[[roles]]\nname = "x"\nagent = "a"\n[[roles]]\nname = "y"\nagent = "b"\n'
    second = '[[agents]]\nname = "b"\nmodel = "gone too"\n'
    (tmp_path / "config.toml").write_text(
        RUN.replace("[[agents]]", f'conversation = {{ environment = "relay" }}\n{roles}[[agents]]') + second
    )
    assert ask(given(), model, []).conversation.environment is None  # one of two who played together, now alone


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
    (benchmark,) = benchmarks_of(EvaluationTable(**fields), [folder / file], model)
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
        benchmarks_of(given("suite=paper", f"data={tmp_path}", "prompt_field=x"), [])


def test_another_grader_than_the_runs_does_not_get_its_options(own_run):
    assert settings_for(own_run, [], trust=True).reward.options == {"bonus": 0.5}
    for reward in ("math_any", "number"):
        assert settings_for(own_run, [], reward=reward).reward.options == {}


def test_a_refusal_of_a_runs_code_advises_only_what_helps(own_run):
    with pytest.raises(ValueError, match=r"reward\.kind = .*reward\.kind=FILE\.py:NAME .*--trust takes it"):
        settings_for(own_run, [])
    config = own_run.parents[1] / "config.toml"
    config.write_text(config.read_text() + "trust_remote_code = true\n")
    with pytest.raises(ValueError, match=r"trust_remote_code = true: .* own configuration\. --trust takes it"):
        settings_for(own_run, [], reward="math")


def test_a_model_is_served_without_the_grader_of_its_run(own_run):
    """It ends later, since the folder holds no model: reward.kind, which would help `eval`, is no key of `serve`."""
    done = run_here("serve", own_run)
    assert done.returncode == 2 and "own.py" not in done.stderr, done.stderr


def test_a_served_model_has_the_name_of_its_folder(own_run, monkeypatch):
    """Clients must give it; "." has none by itself."""
    names = []
    endpoint = SimpleNamespace(serve=lambda settings, name, **how: names.append(name))
    monkeypatch.setattr("hacpo_mega.commands.serve", endpoint, raising=False)
    monkeypatch.setattr("hacpo_mega.cli.evaluation.is_rank_of", lambda *how: True)
    monkeypatch.setattr("hacpo_mega.evaluation.settings.require_weights", lambda settings: None)
    monkeypatch.chdir(own_run)
    for model in (own_run, ".", f"../{own_run.name}/"):
        assert run_here("serve", model).returncode == 0
    assert names == [own_run.name] * 3


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["reward.kind=choise"], "reward.kind: 'choise' is unknown; known: math, math_any, "),
        (["reward.kind=number", "reward.options.tol=1"], "reward.options: 'number' has no option tol; its options are"),
        (["reward.kind=math", "reward.options=relative"], "reward.options: needs a table, found 'relative'"),
        (["--trust", "reward.options.bonsu=1"], "has no option bonsu; its parameters are: prompt, answer, gold, bonus"),
        (["reward.kind=OWN:Strict", "reward.options.limit=no"], "limit is no whole number"),
        (["reward.kind=program", "reward.options.cpu_s=0"], "option cpu_s (0) must be a whole number from 1"),
        (["num_answer=3"], "num_answer: unknown key; did you mean 'num_answers'?"),
        (["--foo"], "--foo: there is no such option; hacpo-mega eval --help lists options and keys"),
        (["--seed"], "--seed needs a value: write seed=VALUE"),
    ],
)
def test_a_bad_grader_or_option_ends_an_evaluation_before_models_load(own_run, tmp_path, arguments, says):
    arguments = [argument.replace("OWN", str(tmp_path / "own.py")) for argument in arguments]
    done = run_here("eval", own_run, tmp_path / "own.jsonl", "--out", tmp_path / "out", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert says in done.stderr and not (tmp_path / "out").exists()


def test_the_options_that_keys_were_before_are_read_for_one_release(tmp_path):
    """Each gives the same table as its key, and a line that says the key."""
    old = "--suite paper --data d -k 2 --temperature=0.5 --limit 3 --max-tokens 4 --no-chat-template --success 0.5"
    old += " --template-arg a=true --stop-text 5 --reward number --option rel_tol=.5 --judges 2 --prompt-field p --tp 2"
    new = "suite=paper data=d num_answers=2 temperature=0.5 limit=3 max_answer_tokens=4 chat_template=false tp=2"
    new += " reward.success=0.5 chat_template_kwargs.a=true stop_text='5' reward.kind=number reward.options.rel_tol=.5"
    new += " reward.num_workers=2 prompt_field=p"
    places, table, notices = read_words([*old.split()[:4], "model", "a.jsonl", *old.split()[4:]])
    assert table == given(*new.split())
    assert places == ["model", "a.jsonl"]
    assert notices[2] == "-k: write num_answers=2 instead; the option goes with the next release"
    (tmp_path / "seed=1").write_text("")
    assert read_words(["model", f"{tmp_path}/seed=1", "prompt_template={prompt}\\boxed{}"])[0][1:]
