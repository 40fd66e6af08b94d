"""Evaluation: statistics against enumeration, files that are continued, what is asked and how."""

import itertools
import json
import math
from pathlib import Path

import pytest
from job import run_here
from repository import SHARED
from tiny_models import make_model

from hacpo_mega.config import Prompting
from hacpo_mega.data.files import PromptRow
from hacpo_mega.evaluation.answers import Answer, AnswerFile, check_folder, claim, read_answers
from hacpo_mega.evaluation.benchmarks import (
    PAPER_SUITE,
    Benchmark,
    find_suite,
    load_suite,
    names_of,
    read_rows,
)
from hacpo_mega.evaluation.evaluate import Request, final_answer, request_seed
from hacpo_mega.evaluation.scores import (
    Answers,
    average,
    best,
    majority,
    mean_of_benchmarks,
    over_problems,
    pass_at,
)
from hacpo_mega.evaluation.settings import EvaluationSettings, ask, benchmarks_of, settings_for
from hacpo_mega.evaluation.table import judged, summarize, warnings_of
from hacpo_mega.grading.judge import Judge
from hacpo_mega.models.folder import check_positions
from hacpo_mega.models.weight_files import weights_fingerprint
from hacpo_mega.records import Stop

REAL = SHARED / "data"
CHARACTERS = tuple("0123456789+-*=,;s")


def answers(correct: str, votes: str | None = None) -> Answers:
    """One character per answer: correct is 1 or 0, a vote is any letter, and a dot is none."""
    texts = votes or "a" * len(correct)
    return Answers(tuple(c == "1" for c in correct), tuple(None if v == "." else v for v in texts))


@pytest.mark.parametrize("correct", ["0000", "1000", "0110", "10101", "111111", "0000001"])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(correct):
    for k in range(1, len(correct) + 1):
        drawn = list(itertools.combinations(correct, k))
        exact = sum("1" in subset for subset in drawn) / len(drawn)
        assert pass_at(k, answers(correct)) == pytest.approx(exact, abs=1e-12)
    assert pass_at(1, answers(correct)) == pytest.approx(average(answers(correct)))
    assert pass_at(len(correct), answers(correct)) == best(answers(correct))


def test_pass_at_k_needs_k_answers():
    with pytest.raises(ValueError, match="pass@5 needs at least 5 judged answers to a problem, found 4"):
        pass_at(5, answers("1010"))


@pytest.mark.parametrize(
    ("correct", "votes", "expected"),
    [
        ("110", "aab", 1.0),
        ("100", "abb", 0.0),
        ("100", "abc", 1 / 3),  # three candidates with a vote each
        ("1100", "abcc", 1 / 2),  # 1/2 and 0.5 are one candidate when both are correct
        ("1000", "a...", 1.0),  # no answer is no vote
        ("000", "...", 0.0),
        ("10", ".b", 1 / 2),  # correct without a text of its own
    ],
)
def test_majority(correct, votes, expected):
    assert majority(answers(correct, votes)) == pytest.approx(expected)


def test_the_interval_is_that_of_the_binomial():
    """Resampling 100 problems of which 30 are solved draws Binomial(100, 0.3): its quantiles are known."""
    estimate = over_problems([1.0] * 30 + [0.0] * 70, seed=3)
    cumulative = list(itertools.accumulate(math.comb(100, n) * 0.3**n * 0.7 ** (100 - n) for n in range(101)))
    low, high = (next(n for n, share in enumerate(cumulative) if share >= q) / 100 for q in (0.025, 0.975))
    assert estimate.value == pytest.approx(0.3)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=0.0101)  # one problem more or less
    assert over_problems([1.0] * 30 + [0.0] * 70, seed=3) == estimate
    assert over_problems([0.5], seed=3).low == over_problems([0.5], seed=3).high == 0.5
    assert math.isnan(over_problems([]).value)


def test_a_small_benchmark_weighs_as_much_as_a_large_one():
    """The mean of two benchmarks with variances v of their means has variance (v1 + v2) / 4."""
    small, large = [1.0, 0.0, 0.0, 0.0] * 5, [1.0, 1.0, 1.0, 0.0] * 250
    estimate = mean_of_benchmarks([small, large], seed=1)
    assert estimate.value == pytest.approx((0.25 + 0.75) / 2)
    spread = math.sqrt((0.25 * 0.75 / 20 + 0.25 * 0.75 / 1000) / 4)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * spread, rel=0.1)


def answer(problem: str, rollout: int, verdict: str = "correct", **fields) -> Answer:
    reward = {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0}.get(verdict)
    table = {
        "id": problem,
        "rollout": rollout,
        "seed": 1,
        "prompt_seen": "p",
        "gold": "g",
        "text": "t",
        "vote": "v",
        "verdict": verdict,
        "reward": reward,
        "stop": "eos",
        "num_tokens": 4,
    }
    return Answer(**table | fields)


def test_an_unjudged_answer_counts_nowhere(tmp_path):
    benchmark = Benchmark("b", (PromptRow("x", "1", "1"), PromptRow("y", "2", "2"), PromptRow("z", "3", "3")), 3, 1.0)
    file = AnswerFile(tmp_path, "b", 0)
    file.append([answer("x", 2), answer("x", 0, "timeout"), answer("x", 1, "wrong", vote="w")])
    file.append([answer("y", i, "no_answer", vote=None, stop="length") for i in range(3)])
    file.append([answer("z", i, "error") for i in range(3)])
    file.close()
    evaluation = summarize({"model": "m"}, [benchmark], {"b": 4}, tmp_path, seed=0)
    (result,) = evaluation.benchmarks
    # x: one of two judged answers is right; y: none of three; z is left out
    assert result.scores["avg@3"].value == pytest.approx((1 / 2 + 0) / 2)
    assert result.scores["best@3"].value == pytest.approx((1 + 0) / 2)
    assert result.scores["maj@3"].value == pytest.approx((1 / 2 + 0) / 2)
    assert result.scores["pass@2"].value == pytest.approx((1 + 0) / 2)
    assert (result.num_unjudged, result.num_unscored, result.num_answers) == (4, 1, 9)
    assert (result.no_answer, result.cut) == (pytest.approx(3 / 9), pytest.approx(3 / 9))
    assert warnings_of(evaluation) == [
        "b: 4 problems dropped, longer than the prompt limit",
        "b: 4 of 9 answers are unjudged (a fault of the judge) and count nowhere; 1 problems are left out",
    ]


def test_a_time_out_of_the_answers_own_doing_counts_as_wrong_and_rewards_may_be_shares(tmp_path):
    benchmark = Benchmark("b", (PromptRow("x", "1", "1"), PromptRow("y", "2", "2")), 2, 1.0)
    file = AnswerFile(tmp_path, "b", 0)
    file.append([answer("x", 0), answer("x", 1, "timeout", reward=0.0, vote="w")])
    file.append([answer("y", 0, "wrong", reward=0.75), answer("y", 1, "error", reward=0.0, vote="w")])
    file.close()
    (result,) = summarize({"model": "m"}, [benchmark], {"b": 0}, tmp_path, seed=0).benchmarks
    assert result.scores["avg@2"].value == pytest.approx((1 / 2 + 0.75 / 2) / 2)
    assert result.scores["best@2"].value == pytest.approx((1 + 0.75) / 2)
    assert result.scores["maj@2"].value == pytest.approx((1 / 2 + 0) / 2)
    assert (result.num_unjudged, result.num_unscored) == (0, 0)


def test_answers_are_ordered_by_rollout_whoever_wrote_them():
    found = judged([answer("x", 1, "wrong", vote="b"), answer("x", 0, vote="a")])
    assert found == Answers((True, False), ("a", "b"))


def test_a_half_written_line_is_dropped(tmp_path):
    file = AnswerFile(tmp_path, "b", 0)
    file.append([answer("x", 0), answer("x", 1, text="a\ud800b\n")])
    file.close()
    path = tmp_path / "answers" / "b.lane_0000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[0][:-7])
    assert sorted(read_answers(tmp_path, "b")) == [("x", 0), ("x", 1)]
    file = AnswerFile(tmp_path, "b", 0)
    file.append([answer("y", 0)])
    file.close()
    assert path.read_bytes().startswith(whole)
    found = read_answers(tmp_path, "b")
    assert sorted(found) == [("x", 0), ("x", 1), ("y", 0)]
    assert found["x", 1].text == "a\ud800b\n"
    path.write_bytes(whole + b"[]\n")
    with pytest.raises(ValueError, match=r"0000\.jsonl:3: not an answer"):
        read_answers(tmp_path, "b")


def test_another_evaluation_does_not_continue_here(tmp_path):
    settings = EvaluationSettings(Path("m"), (Benchmark("b", (PromptRow("x", "1", "1"),), 1, 0.0),)).record("f00d")
    check_folder(tmp_path / "new", settings)
    claim(tmp_path / "new", settings)
    check_folder(tmp_path / "new", settings | {"model": "elsewhere/m"})
    with pytest.raises(ValueError, match=r"other settings[^\n]*\n  seed: there 0, asked 7\n  weights: .*beef"):
        check_folder(tmp_path / "new", settings | {"seed": 7, "weights": "beef"})
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no evaluation"):
        check_folder(tmp_path, settings)


def test_settings_tell_apart_what_changes_an_answer():
    row = PromptRow("x", "1", "1")
    first = EvaluationSettings(Path("m"), (Benchmark("b", (row,), 1, 0.0),))
    other = EvaluationSettings(Path("m"), (Benchmark("b", (PromptRow("x", "1", "2"),), 1, 0.0),))
    assert first.record("f")["benchmarks"] != other.record("f")["benchmarks"]
    assert json.loads(json.dumps(first.record("f")))["prompting"]["chat_template"] is False


def test_weights_are_told_apart_by_content(tmp_path):
    size = {"num_layers": 1, "hidden_size": 32, "head_dim": 32, "num_heads": 1, "num_kv_heads": 1, "ffn_size": 32}
    folders = [make_model(tmp_path / str(i), "qwen3", seed=i % 2, **size) for i in range(3)]
    prints = [weights_fingerprint(folder) for folder in folders]
    assert prints[0] == prints[2] != prints[1]
    with pytest.raises(ValueError, match="lower one of them, for example --max-tokens 56"):
        check_positions(folders[0], 200, 100)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        check_positions(tmp_path, 1, 1)
    with pytest.raises(ValueError, match="holds no safetensors"):
        weights_fingerprint(tmp_path)


def test_a_seed_belongs_to_a_problem_and_not_to_its_place():
    rows = [PromptRow("x", "1", "1"), PromptRow("y", "2", "2")]
    seeds = {request_seed(seed, Request(row, i)) for seed in (0, 1) for row in rows for i in (0, 1)}
    assert len(seeds) == 8
    assert request_seed(0, Request(rows[0], 1)) == request_seed(0, Request(PromptRow("x", "other", "z"), 1))


def test_votes():
    assert final_answer("math", r"so \boxed{\dfrac{1}{2}} and not \boxed{ 7 }.") == "7"
    thought = r"<think>\boxed{3}</think>\boxed{ \frac{1}{2}}"
    assert final_answer("math", r"$\boxed{\dfrac{1}{2}}$") == final_answer("math", thought) == r"\frac{1}{2}"
    assert final_answer("math", "no box") is None
    assert final_answer("arithmetic", "1+1=2;2") == "2"
    assert final_answer("exact", "  seven ") == "seven"


def test_benchmarks_are_named_as_shortly_as_possible(tmp_path):
    assert names_of([Path("data/math500.jsonl"), Path("data/amc23.parquet")]) == ("math500", "amc23")
    assert names_of([Path("data/math500/test.jsonl")]) == ("math500_test",)
    assert names_of([Path("a/x.jsonl"), Path("b/x.jsonl")]) == ("a_x", "b_x")
    with pytest.raises(ValueError, match="given twice"):
        names_of([Path("a/x.jsonl"), Path("a/../a/x.jsonl")])


def test_a_repeated_problem_counts_as_often_as_it_is_there(tmp_path):
    file = tmp_path / "b.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2"}\n' * 2 + '{"prompt": "1+2", "answer": "3"}\n')
    ids = [row.id for row in read_rows(file)]
    assert ids[1] == f"{ids[0]}#2" and len(set(ids)) == 3
    file.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+1"\n')
    with pytest.raises(ValueError, match=r"b\.jsonl:2: invalid JSON"):
        read_rows(file)


def test_a_suite_names_all_files_that_are_missing(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text("")
    (tmp_path / "amc23.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="lacks 5 of 7 benchmarks") as error:
        find_suite(PAPER_SUITE, tmp_path)
    assert "gsm8k" not in str(error.value) and "olympiadbench: none of" in str(error.value)


def test_physical_quantities_of_minerva_may_be_rounded_and_no_other_benchmark():
    tolerances = {entry.name: entry.relative for entry in PAPER_SUITE if entry.relative}
    assert tolerances == {"minerva_math": 1e-5}
    answers = [r"\boxed{4.50003 \times 10^{33}}", r"\boxed{4.501e33}"]
    with Judge("math", options={"relative": tolerances["minerva_math"]}) as tolerant, Judge("math") as exact:
        asked = (["?"] * 2, ["4.5e33"] * 2, answers, [Stop.EOS] * 2)
        assert [judgement.reward for judgement in tolerant.judge(*asked)] == [1.0, 0.0]
        assert [judgement.reward for judgement in exact.judge(*asked)] == [0.0, 0.0]


def test_the_suite_is_the_papers():
    by_score = {entry.name: (entry.headline, entry.num_answers) for entry in PAPER_SUITE}
    assert by_score.pop("aime25") == ("best", 30)
    assert set(by_score.values()) == {("avg", 1)} and len(by_score) == 6


@pytest.mark.skipif(not REAL.is_dir(), reason=f"the public benchmarks are not in {REAL}")
def test_the_suite_reads_the_public_files():
    sizes = {benchmark.name: len(benchmark.rows) for benchmark in load_suite(PAPER_SUITE, REAL)}
    assert sizes == {
        "math500": 500,
        "math": 5000,
        "gsm8k": 1319,
        "aime25": 30,
        "amc23": 40,
        "minerva_math": 272,
        "olympiadbench": 675,
    }


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
prompt_template = "Q: {prompt}"
"""


def test_an_agent_of_a_run_is_asked_as_in_its_training(tmp_path):
    (tmp_path / "agents" / "a").mkdir(parents=True)
    (tmp_path / "config.toml").write_text(RUN)
    nothing = dict.fromkeys(
        ("chat_template", "system_prompt", "prompt_template", "stop_text", "reward", "max_prompt_tokens")
    )
    model = tmp_path / "agents" / "a"
    trained = settings_for(model, [])
    assert trained.prompting == Prompting(True, {"enable_thinking": False}, None, "Q: {prompt}")
    assert (trained.reward, trained.require_stop) == ("arithmetic", True)
    assert (trained.max_prompt_tokens, trained.max_answer_tokens) == (9, 21)
    asked = nothing | {"max_answer_tokens": 5, "seed": 1, "is_suite": False, "system_prompt": "S"}
    settings = ask(model, [], template_args=["enable_thinking=true", "name=x y"], **asked)
    assert settings.prompting == Prompting(True, {"enable_thinking": True, "name": "x y"}, "S", "Q: {prompt}")
    assert (settings.reward, settings.max_answer_tokens, settings.max_prompt_tokens) == ("arithmetic", 5, 9)
    assert settings_for(tmp_path, []).reward == "math"


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


def test_a_file_is_read_by_the_fields_of_the_run_or_those_that_are_asked_for(own_run, tmp_path):
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
def test_a_bad_grader_or_option_ends_an_evaluation_before_a_model_is_loaded(own_run, tmp_path, arguments, says):
    arguments = [argument.replace("OWN", str(tmp_path / "own.py")) for argument in arguments]
    done = run_here("eval", own_run, tmp_path / "own.jsonl", "--out", tmp_path / "out", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert says in done.stderr and not (tmp_path / "out").exists()
