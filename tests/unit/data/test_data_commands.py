"""`hacpo-mega data` and `hacpo-mega grade`: what they print, write, and answer with."""

import json
from pathlib import Path

from job import run_here

from hacpo_mega.data.reading.files import load_prompts
from hacpo_mega.samples.tokenizers import make_tokenizer

QUICKSTART_TOKENS = (*"0123456789+-*=,;s",)
ROWS = [
    {"question": "How many legs has a dog?", "answer": "Four legs. #### 4"},
    {"question": "How much is 1 + 1?", "answer": "Two. #### 2"},
    {"question": "how much is 1+1", "answer": "It is two. #### 2"},
]


def run(*arguments: object) -> tuple[int, str]:
    done = run_here(*arguments)
    return done.returncode, done.stdout + done.stderr


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_inspect_counts_and_warns_of_what_harms_nothing(tmp_path):
    code, text = run("data", "inspect", write(tmp_path / "train.jsonl", ROWS), "--golds")
    assert code == 0
    assert "3 problems, layout gsm8k" in text
    assert "1 repeated:" in text
    assert "3 of 3 gold answers are correct against themselves" in text


def test_inspect_measures_with_every_model(tmp_path):
    """Models of runs lie in folders of one name."""
    models = [tmp_path / run / "qwen" for run in "ab"]
    for model in models:
        make_tokenizer(model, QUICKSTART_TOKENS)
    file = write(tmp_path / "sums.jsonl", [{"question": "1+1=", "answer": "#### 2"}])
    code, text = run("data", "inspect", file, "--model", models[0], "--model", models[1])
    assert code == 0, text
    assert all(f"  {model}: prompt tokens median 4," in text for model in models), text
    assert "  qwen: prompt tokens median 4," in run("data", "inspect", file, "--model", models[0])[1]


def test_inspect_fails_for_what_makes_a_result_wrong(tmp_path):
    train, test = write(tmp_path / "train.jsonl", ROWS), write(tmp_path / "test.jsonl", ROWS[:1])
    assert run("data", "inspect", train, "--against", test)[0] == 1
    contradiction = [*ROWS, {"question": "How many legs has a dog?", "answer": "#### 5"}]
    code, text = run("data", "inspect", write(tmp_path / "two.jsonl", contradiction))
    assert code == 1
    assert "another gold answer" in text


def test_convert_leaves_out_repetitions_and_evaluation_problems(tmp_path):
    train, test = write(tmp_path / "train.jsonl", ROWS), write(tmp_path / "test.jsonl", ROWS[:1])
    out = tmp_path / "clean.jsonl"
    code, text = run("data", "convert", train, "--out", out, "--without", test)
    assert (code, len(out.read_text().splitlines())) == (0, 1)
    assert "1 problems; 1 repetitions and 1 evaluation problems left out" in text
    assert json.loads(out.read_text())["answer"] == "2"


def test_convert_writes_nothing_from_a_file_with_bad_rows(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(ROWS[0]) + '\n{"question": "cut')
    code, text = run("data", "convert", broken, "--out", tmp_path / "clean.jsonl")
    assert (code, f"{broken}:2" in text) == (2, True), text
    assert not (tmp_path / "clean.jsonl").exists()


def test_convert_reads_the_named_columns_and_a_run_reads_its_output(tmp_path):
    """Chats stay lists of messages, other columns and the row's own id stay, a repeated row is left out."""
    chats = [
        [{"role": "system", "content": "Be brief.\u2028"}, {"role": "user", "content": f"{n}+1?"}] for n in (1, 2, 1)
    ]
    rows = [
        {"id": f"own{i}", "talk": chat, "target": len(chat[1]["content"]), "hard": i} for i, chat in enumerate(chats)
    ]
    file, out = write(tmp_path / "chats.jsonl", rows), tmp_path / "out.jsonl"
    said = run("data", "convert", file, "--out", out)[1]
    assert "fits no known layout" in said and "--prompt-field and --gold-field name other columns" in said
    code, text = run("data", "convert", file, "--out", out, "--prompt-field", "talk", "--gold-field", "target")
    assert (code, "2 problems; 1 repetitions" in text) == (0, True), text
    written = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]
    assert [(row["prompt"], row["answer"], row["id"], row["hard"]) for row in written] == [
        (chats[0], "4", "own0", 0),
        (chats[1], "4", "own1", 1),
    ]
    assert [row.text for row in load_prompts([out])] == [
        row.text for row in load_prompts([file], "talk", "target", keep_first=True)
    ]
    plain = write(tmp_path / "plain.jsonl", [{"prompt": chats[0], "answer": "2"}])
    assert run("data", "convert", plain, "--out", out)[0] == 0
    assert json.loads(out.read_text())["prompt"] == chats[0]


def test_grade_writes_a_verdict_per_line(tmp_path):
    answers = [
        {"gold": "1/2", "pred": r"so \boxed{0.5}"},
        {"gold": "3", "pred": r"\boxed{4}"},
        {"gold": "3", "pred": "?"},
    ]
    out = tmp_path / "verdicts.jsonl"
    code, text = run("grade", write(tmp_path / "answers.jsonl", answers), "--out", out, "--timeout-s", "600")
    assert code == 0
    assert [json.loads(line)["verdict"] for line in out.read_text().splitlines()] == ["correct", "wrong", "no_answer"]
    assert "correct: 1" in text
    code, text = run("grade", tmp_path / "answers.jsonl", "--out", out, "--gold-field", "label")
    assert code == 1 and "--gold-field and --pred-field name other columns" in text
