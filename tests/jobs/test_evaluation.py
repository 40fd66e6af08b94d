"""Whole evaluations as a user starts them: one that is killed and goes on, and the paper's suite."""

import json
import shutil
import time
from datetime import datetime
from pathlib import Path

import pytest
from job import play_command, run_command, start_command, start_ranks
from repository import SHARED
from tiny_models import make_model

from hacpo_mega.evaluation.answers import read_answers
from hacpo_mega.evaluation.benchmarks import read_rows
from hacpo_mega.samples.tokenizers import make_tokenizer

REAL = SHARED / "data"
CHARACTERS = (*"0123456789+-*=,;s", "<think>")

# Whole evaluations: half of the answers of a random model are "correct" for this grader, so every score is in between.
GRADER = '''
def grade(answer, gold, agent, group):
    """An answer is right when it has, behind the prompt's <think>, an even number of characters, none when empty."""
    opened, text = answer[:7], answer[7:]
    assert opened == "<think>" and agent == "model"
    assert len(group) == 30 and answer in group and {other[:7] for other in group} == {opened}
    return None if not text else float(len(text) % 2 == 0)
'''


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    size = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
    make_model(folder / "model", "qwen3", vocab_size=len(CHARACTERS) + 2, tied=True, **size)
    tokenizer = make_tokenizer(folder / "model", CHARACTERS)
    clock = "{{ strftime_now('%s') }}"
    tokenizer.chat_template = clock + "{% for m in messages %}s{{ m.content }};{% endfor %}=<think>"
    tokenizer.save_pretrained(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text()) | {"eos_token_id": 1}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    rows = [{"prompt": f"{i}+{2 * i}", "answer": str(3 * i)} for i in range(50)]
    (folder / "fifty.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grader.py").write_text(GRADER)
    return folder


def asked(folder: Path, *options: str) -> list[str]:
    """`hacpo-mega eval` of the random model on 50 problems, 30 answers each."""
    command = ["eval", str(folder / "model"), str(folder / "fifty.jsonl"), "--out", str(folder / "out")]
    command += ["num_answers=30", f"reward.kind={folder / 'grader.py'}:grade", "max_answer_tokens=20"]
    return [*command, "max_prompt_tokens=19", "chat_template=true", *options]


def answer_lines(folder: Path) -> list[bytes]:
    files = sorted((folder / "out" / "answers").glob("fifty.lane_*.jsonl"))
    return [line for file in files for line in file.read_bytes().splitlines(keepends=True)]


@pytest.mark.nightly
def test_a_killed_evaluation_goes_on_where_it_stopped(random_model, tmp_path):
    # A rank by itself, as srun would start it: a killed launcher leaves its ranks alive for a second.
    (rank,) = start_ranks(1, tmp_path, play_command, *asked(random_model))
    while rank.is_alive() and not answer_lines(random_model):
        time.sleep(0.01)
    assert rank.is_alive(), (tmp_path / "0.err").read_text()
    rank.kill()
    rank.join()
    before = [line for line in answer_lines(random_model) if line.endswith(b"\n")][:-5]
    assert 0 < len(before) < 1500
    (file,) = (random_model / "out" / "answers").iterdir()
    file.write_bytes(b"".join(before))  # a problem has 25 answers, which the other 5 are judged beside

    process = start_command(*asked(random_model, "engines=2"))
    table, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    lines = answer_lines(random_model)
    assert set(before) <= set(lines) and len(lines) == 1500
    records = [json.loads(line) for line in lines]
    assert len({(record["id"], record["rollout"]) for record in records}) == 1500
    time_utc = json.loads((random_model / "out" / "settings.json").read_text())["prompting"]["time"]
    at = int(datetime.fromisoformat(f"{time_utc}+00:00").timestamp())  # that of its first start
    assert {record["prompt_seen"] for record in records} == {f"{at}s{i}+{2 * i};=<think>" for i in range(50)}
    check_scores(json.loads((random_model / "out" / "evaluation.json").read_text()), records, table)

    # Everything is answered: no engine starts, and the result is the same.
    result = json.loads((random_model / "out" / "evaluation.json").read_text())["benchmarks"]
    (random_model / "out" / "evaluation.json").unlink()
    run_command(1, *asked(random_model))
    assert answer_lines(random_model) == lines
    assert json.loads((random_model / "out" / "evaluation.json").read_text())["benchmarks"] == result

    (refused,) = start_ranks(1, tmp_path, play_command, *asked(random_model, "--seed", "3"))
    refused.join()
    assert refused.exitcode == 2 and "seed: there 0, asked 3" in (tmp_path / "0.err").read_text()


def check_scores(evaluation: dict, records: list[dict], table: str) -> None:
    """The scores, computed once more from the lines on disk."""
    correct: dict[str, list[bool]] = {}
    for record in records:
        assert record["verdict"] == (
            "no_answer" if not record["text"] else ["correct", "wrong"][len(record["text"]) % 2]
        )
        correct.setdefault(record["id"], []).append(record["verdict"] == "correct")
    (result,) = evaluation["benchmarks"]
    share = sum(sum(group) / 30 for group in correct.values()) / 50
    assert 0.1 < share < 0.9
    assert result["scores"]["avg@30"]["value"] == pytest.approx(share)
    assert result["scores"]["best@30"]["value"] == pytest.approx(sum(map(any, correct.values())) / 50)
    assert result["scores"]["avg@30"]["low"] < share < result["scores"]["avg@30"]["high"]
    assert set(result["scores"]) == {"avg@30", "best@30", "maj@30", "pass@2", "pass@4", "pass@8", "pass@16"}
    assert (result["num_answers"], result["num_unjudged"], result["num_dropped"]) == (1500, 0, 0)
    assert f"avg@30 {share:.4f}" in table


@pytest.mark.nightly
@pytest.mark.skipif(not REAL.is_dir() or not (REAL.parent / "tokenizers").is_dir(), reason="no public files here")
def test_the_papers_suite_from_public_files(tmp_path):
    """Real problems in a real tokenizer. Sixty seeded answers to long prompts do not fit one batch of the engine."""
    size = {"num_layers": 1, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
    model = make_model(tmp_path / "model", "qwen3", vocab_size=50304, max_positions=2048, **size)
    for file in (REAL.parent / "tokenizers" / "gpt-2").iterdir():
        shutil.copy(file, model)
    wording = r"{prompt} Please answer within \boxed{}."
    command = ["eval", model, "--out", tmp_path / "out", "suite=paper", f"data={REAL}", "limit=2"]
    run_command(1, *command, "max_answer_tokens=16", f"prompt_template={wording}")
    evaluation = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    found = {result["name"]: (result["headline"], result["num_answers"]) for result in evaluation["benchmarks"]}
    assert found.pop("aime25") == ("best@30", 60)
    assert found == dict.fromkeys(("math500", "math", "gsm8k", "amc23", "minerva_math", "olympiadbench"), ("avg@1", 2))
    first = read_rows(REAL / "aime25" / "nemo_test.txt").rows[0]
    seen = {
        answer.prompt_seen for key, answer in read_answers(tmp_path / "out", "aime25").items() if key[0] == first.id
    }
    assert seen == {wording.replace("{prompt}", first.text)}
