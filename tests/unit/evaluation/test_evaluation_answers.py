"""The file of an evaluation's answers: continued, never mixed with another's, and unjudged answers count nowhere."""

import json
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import make_model

from hacpo_mega.config import RewardConfig
from hacpo_mega.config.tables.schema import ConversationConfig
from hacpo_mega.data.reading.files import PromptRow
from hacpo_mega.evaluation import evaluate
from hacpo_mega.evaluation.answers import Answer, AnswerFile, check_folder, claim, read_answers
from hacpo_mega.evaluation.benchmarks import (
    Benchmark,
)
from hacpo_mega.evaluation.evaluate import WAIT_S, Request, batches_of, request_seed
from hacpo_mega.evaluation.settings import EvaluationSettings
from hacpo_mega.evaluation.table import (
    Answers,
    judged_answers,
    summarize,
)
from hacpo_mega.logbook.evaluation_file import warnings_of
from hacpo_mega.models.files.folder import check_positions
from hacpo_mega.models.files.weight_files import weights_fingerprint


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
        "b: 4 of 9 answers are unjudged (a fault of the judge) and count nowhere; 1 problems are left out; the "
        "same command judges again",
    ]


def test_a_time_out_counts_as_wrong_and_rewards_may_be_fractions(tmp_path):
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
    found = judged_answers([answer("x", 1, "wrong", vote="b"), answer("x", 0, vote="a")])
    assert found == Answers((1.0, 0.0), (True, False), ("a", "b"))


def test_a_cut_answer_that_must_end_by_itself_does_not_vote(tmp_path):
    """reward.require_stop: its text has the right number, its verdict says that it has no answer."""
    benchmark = Benchmark("b", (PromptRow("x", "1", "4"),), 3, 1.0)
    file = AnswerFile(tmp_path, "b", 0)
    file.append([answer("x", 0, vote="4"), *(answer("x", i, "no_answer", vote="4", stop="length") for i in (1, 2))])
    file.close()
    (result,) = summarize({"model": "m"}, [benchmark], {"b": 0}, tmp_path, seed=0).benchmarks
    assert (result.scores["maj@3"].value, result.no_answer) == (1.0, pytest.approx(2 / 3))


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
    for _ in range(2):
        with claim(tmp_path / "new", settings), pytest.raises(ValueError, match=r"--out .*new is being written by"):
            claim(tmp_path / "new", settings)  # two jobs of an array, one folder
    check_folder(tmp_path / "new", settings | {"model": "elsewhere/m"})
    with pytest.raises(ValueError, match=r"other settings[^\n]*\n  seed: there 0, asked 7\n  weights: .*beef"):
        check_folder(tmp_path / "new", settings | {"seed": 7, "weights": "beef"})
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no evaluation"):
        check_folder(tmp_path, settings)


@pytest.mark.parametrize("environment", [None, "mine.py:Play"])
def test_an_unjudged_answer_is_judged_by_the_next_start(environment, tmp_path, monkeypatch):
    """Without an engine, unless it is a conversation: that is played again, since the environment may have failed."""
    file = AnswerFile(tmp_path, "b", 3)
    file.append([answer("x", 0, "error", text="So it is 4"), answer("x", 1, "wrong", text="4")])
    file.close()
    talk = ConversationConfig(environment=environment)
    benchmark = Benchmark("b", (PromptRow("x", "1", "4"),), 2, 1.0)
    settings = EvaluationSettings(Path("m"), (benchmark,), reward=RewardConfig(kind="number"), conversation=talk)
    place = SimpleNamespace(coordinate=SimpleNamespace(global_rank=0), lane=0)
    place.barrier = place.enter_phase = lambda *_: None
    codec = SimpleNamespace(prompt_lengths=lambda rows, _: [1 for _ in rows], opened_thinking=lambda _: "")
    monkeypatch.setattr(evaluate, "engine_of", lambda *_: 1 / 0)
    with ExitStack() as stack, pytest.raises(ZeroDivisionError) if environment else nullcontext():
        evaluate._Run(settings, codec, tmp_path, place, 1, stack).answer_everything()
    found = read_answers(tmp_path, "b")
    assert [found["x", i].verdict for i in (0, 1)] == ["error" if environment else "correct", "wrong"]
    assert found["x", 0].text == "So it is 4"


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
    with pytest.raises(ValueError, match="lower one of them, for example max_answer_tokens=56"):
        check_positions(folders[0], 200, 100)
    with pytest.raises(ValueError, match=r"lower one of them, for example max_prompt_tokens=232$"):
        check_positions(folders[0], 1024, 24)
    with pytest.raises(ValueError, match=r"for example max_prompt_tokens=128 max_answer_tokens=128$"):
        check_positions(folders[0], 1024, 512)
    for fitting in ((200, 56), (232, 24), (128, 128)):
        check_positions(folders[0], *fitting)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        check_positions(tmp_path, 1, 1)
    with pytest.raises(ValueError, match="holds no safetensors"):
        weights_fingerprint(tmp_path)


def test_a_seed_belongs_to_a_problem_and_not_to_its_place():
    rows = [PromptRow("x", "1", "1"), PromptRow("y", "2", "2")]
    seeds = {request_seed(seed, Request(row, i)) for seed in (0, 1) for row in rows for i in (0, 1)}
    assert len(seeds) == 8
    assert request_seed(0, Request(rows[0], 1)) == request_seed(0, Request(PromptRow("x", "other", "z"), 1))


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_problem_that_a_grader_compares_is_whole_in_one_batch(lanes):
    """Else answers are dealt one by one, and no engine has two more than another."""
    rows = [PromptRow(str(i), str(i), "1") for i in range(40)]
    missing = [Request(row, i) for row in rows for i in range(30)][7:]  # the first problem has seven
    whole = [batch for lane in range(lanes) for batch in batches_of(missing, lane, lanes, by_problem=True)]
    assert sorted(Counter(request.row.id for batch in whole for request in set(batch)).values()) == [23] + [30] * 39
    assert sum(len({request.row.id for request in batch}) for batch in whole) == 40
    assert max(map(len, whole)) <= 512
    dealt = [batches_of(missing, lane, lanes, by_problem=False) for lane in range(lanes)]
    assert Counter(request for of_lane in dealt for batch in of_lane for request in batch) == Counter(missing)
    sizes = [sum(map(len, of_lane)) for of_lane in dealt]
    assert max(sizes) - min(sizes) <= 1 and all(len(batch) == 512 for of_lane in dealt for batch in of_lane[:-1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": "x"}, "reward is 'x', needs a number, or null"),
        ({"num_tokens": -1}, "num_tokens is -1, needs a whole"),
    ],
)
def test_an_answer_of_another_shape_is_named_by_line_and_field(change, said, tmp_path):
    file = AnswerFile(tmp_path, "b", 0)
    file.append([answer("x", 0), answer("x", 1, **change)])
    file.close()
    with pytest.raises(ValueError, match=rf"b\.lane_0000\.jsonl:2: not an answer of an evaluation: {said}"):
        read_answers(tmp_path, "b")


def test_an_engine_waits_for_its_judge_as_long_as_the_job(monkeypatch):
    """With turns the other ranks of an engine wait in its groups while the first one judges what was said."""
    monkeypatch.setattr(evaluate, "Engine", lambda spec: spec)
    monkeypatch.setattr(evaluate, "agents_per_device", lambda place: 1)
    monkeypatch.setattr(evaluate, "environment_of", lambda talk: None)
    settings = SimpleNamespace(
        stored=None, dtype="float32", conversation=None, folder=Path("model"), max_prompt_tokens=8, longest_answer=8,
        trust_remote_code=False, vllm={},
    )  # fmt: skip
    place = SimpleNamespace(rank_map=SimpleNamespace(agents=[SimpleNamespace(engine_tp=2)]))
    codec = SimpleNamespace(ends=SimpleNamespace(ids=(7,)))
    assert evaluate.engine_of(settings, codec, place).timeout_s == WAIT_S
