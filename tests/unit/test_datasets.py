"""Dataset readers: every public layout written small, every defect named with its line, and the real files' counts."""

import gzip
import io
import json
import re
import tarfile
from collections import Counter
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from repository import SHARED

from hacpo_mega.commands.inspect_data import inspect_dataset, inspect_overlap
from hacpo_mega.data.containers import ABOUT_OTHERS
from hacpo_mega.data.dataset_checks import (
    deduplicated,
    normalised,
    overlap,
    prompt_lengths,
    repetitions,
    without_overlap,
)
from hacpo_mega.data.datasets import Problem, read_dataset, write_dataset
from hacpo_mega.data.files import content_id, load_prompts
from hacpo_mega.data.row_values import quoted

REAL = SHARED / "data"
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"real mathematics files are not in {REAL}")


def lines(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


VERL = {
    "prompt": [{"role": "user", "content": "What is $1+1$?"}],
    "reward_model": {"style": "rule", "ground_truth": {"question": "q", "solution": "s", "target": "2"}},
}


@pytest.mark.parametrize(
    "layout, record, prompt, answer",
    [
        ("math", {"problem": "P", "solution": "so $\\boxed{\\frac{1}{2}}$", "level": "Level 2"}, "P", "\\frac{1}{2}"),
        ("math", {"problem": "P", "solution": "so $\\boxed 5$."}, "P", "5"),
        ("answered", {"problem": "P", "answer": 27.0, "question": "P"}, "P", "27"),
        ("answered", {"problem": "P", "answer": "025", "solution": "s"}, "P", "25"),
        (
            "answered",
            {"problem": "P", "answer": "\\left( 3, 0 \\right)", "unique_id": "u"},
            "P",
            "\\left( 3, 0 \\right)",
        ),
        ("gsm8k", {"question": "Q", "answer": "<<1+1=2>>2\n#### 1,002"}, "Q", "1002"),
        ("nemo", {"problem": "P", "expected_answer": "73", "reference_solution": "r"}, "P", "73"),
        ("olympiadbench", {"question": "Q", "final_answer": ["$1$"], "context": None}, "Q", "$1$"),
        ("olympiadbench", {"question": "Q", "final_answer": ["2"], "context": "C"}, "C\n\nQ", "2"),
        ("verl", VERL, "What is $1+1$?", "2"),
        ("verl", {**VERL, "reward_model": {"ground_truth": "3"}}, "What is $1+1$?", "3"),
        ("plain", {"prompt": "P", "answer": 7}, "P", "7"),
        ("question", {"question": "Q", "answer": "7"}, "Q", "7"),
    ],
)
def test_every_layout(tmp_path, layout, record, prompt, answer):
    found = read_dataset(lines(tmp_path / "f.jsonl", record))
    assert (found.layout, found.defects) == (layout, ())
    (problem,) = found.problems
    assert (problem.prompt, problem.gold, problem.id, problem.line) == (prompt, answer, content_id(prompt), 1)


def test_containers_hold_the_same_problems(tmp_path):
    records = [
        {"problem": f"P{i}", "solution": f"\\boxed{{{i}}}", "type": "Algebra", "level": "Level 1"} for i in range(4)
    ]
    folder = tmp_path / "MATH" / "train" / "algebra"
    folder.mkdir(parents=True)
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as archive:
        for i, record in enumerate(records):
            raw = json.dumps(record).encode()
            (folder / f"{i}.json").write_bytes(raw)
            member = tarfile.TarInfo(f"MATH/train/algebra/{i}.json")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "m.parquet")
    (tmp_path / "m.json").write_text(json.dumps(records, indent=1))
    lines(tmp_path / "m.jsonl", *records)
    lines(tmp_path / "lines.json", *records)
    expected = [(f"P{i}", str(i), "Algebra", "Level 1") for i in range(4)]
    for name in ("MATH", "m.tar.gz", "m.parquet", "m.json", "m.jsonl", "lines.json"):
        found = read_dataset(tmp_path / name)
        assert not found.defects, name
        assert [(p.prompt, p.gold, p.subject, p.level) for p in found.problems] == expected, name
        lines_of_files = [1, 1, 1, 1] if name in ("MATH", "m.tar.gz") else [1, 2, 3, 4]
        assert [p.line for p in found.problems] == lines_of_files, name


def test_what_is_written_is_read_by_a_run(tmp_path):
    found = read_dataset(
        lines(
            tmp_path / "in.jsonl",
            {"problem": "P é", "solution": "\\boxed{1}"},
            {"problem": "Q", "solution": "\\boxed{2}"},
        )
    )
    write_dataset(found.problems, tmp_path / "out.jsonl")
    assert [(r.id, r.text, r.gold) for r in load_prompts([tmp_path / "out.jsonl"])] == [
        (content_id("P é"), "P é", "1"),
        (content_id("Q"), "Q", "2"),
    ]
    again = read_dataset(tmp_path / "out.jsonl")
    assert [(p.id, p.prompt, p.gold, p.solution) for p in again.problems] == [
        (p.id, p.prompt, p.gold, p.solution) for p in found.problems
    ]


def test_defects_are_named_with_their_line_and_good_rows_still_come(tmp_path):
    file = lines(
        tmp_path / "bad.jsonl",
        {"problem": "fine", "solution": "\\boxed{1}"},
        {"problem": "no box", "solution": "it is 1"},
        {"problem": "empty box", "solution": "\\boxed{}"},
        {"problem": "cut", "solution": "\\boxed{1"},
        {"question": "other layout", "answer": "#### 2"},
        {"text": "no layout"},
        '{"problem": "trunc',
        {"problem": ["a list"], "solution": "\\boxed{1}"},
        {"problem": "P", "solution": 7},
        {"problem": "", "solution": "\\boxed{1}"},
    )
    found = read_dataset(file)
    assert [p.prompt for p in found.problems] == ["fine"]
    assert [(d.line, d.field, d.what.split(" (")[0].split(": Unt")[0]) for d in found.defects] == [
        (2, None, "has no complete \\boxed{} to take the answer from"),
        (3, None, "boxes nothing: the last \\boxed{} is empty"),
        (4, None, "has no complete \\boxed{} to take the answer from"),
        (5, None, "is a row of layout 'gsm8k' in a file of 'math'"),
        (6, None, "fits no known layout"),
        (7, None, "invalid JSON"),
        (8, "problem", "has a message 1 that is a str, needs role and content"),
        (9, None, "is malformed"),
        (10, "problem", "is empty"),
    ]


def test_layout_specific_defects(tmp_path):
    chat = {**VERL, "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    assert "messages of 'system, user'" in read_dataset(lines(tmp_path / "a.jsonl", chat)).defects[0].what
    two = {"question": "Q", "final_answer": ["1", "2"]}
    assert "has 2 final answers" in read_dataset(lines(tmp_path / "b.jsonl", two)).defects[0].what
    no_target = {**VERL, "reward_model": {"ground_truth": {"question": "q"}}}
    assert "malformed (KeyError: 'target')" in read_dataset(lines(tmp_path / "c.jsonl", no_target)).defects[0].what


def test_damaged_containers(tmp_path):
    with tarfile.open(tmp_path / "whole.tar.gz", "w:gz") as archive:
        raw = json.dumps({"problem": "P" * 5000, "solution": "\\boxed{1}"}).encode()
        member = tarfile.TarInfo("1.json")
        member.size = len(raw)
        archive.addfile(member, io.BytesIO(raw))
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes((tmp_path / "whole.tar.gz").read_bytes()[:60])
    assert "unreadable archive" in read_dataset(cut).defects[0].what
    (tmp_path / "x.json").write_text('[{"problem": "P", "solution": "\\\\boxed{1}"}, 3]')
    found = read_dataset(tmp_path / "x.json")
    assert (len(found.problems), found.defects[0].what) == (1, "is a JSON int, needs an object with fields")
    assert read_dataset(tmp_path / "absent.jsonl").defects[0].what == "does not exist"
    (tmp_path / "none").mkdir()
    assert read_dataset(tmp_path / "none").defects[0].what == "has no rows"
    (tmp_path / "b.json").write_text("{")
    assert "invalid JSON" in read_dataset(tmp_path / "b.json").defects[0].what


@pytest.mark.parametrize("kind", [*ABOUT_OTHERS, tarfile.GNUTYPE_SPARSE])
def test_a_header_of_an_archive_that_fills_the_memory_is_not_read(tmp_path, kind):
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, 2**32
    packed = gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(2**20))
    (tmp_path / "a.tar.gz").write_bytes(packed)
    (defect,) = read_dataset(tmp_path / "a.tar.gz").defects
    assert "unreadable archive: holds a " in defect.what


def test_an_archive_of_empty_files_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr("hacpo_mega.data.files.ALWAYS_UNPACKED_BYTES", 100 * tarfile.BLOCKSIZE)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for _ in range(20_000):
            archive.addfile(tarfile.TarInfo("x.txt"))
    (defect,) = read_dataset(tmp_path / "a.tar.gz").defects
    assert "unpacks to more than 200 times its size" in defect.what


def test_a_parquet_column_that_fills_the_memory_is_not_read(tmp_path):
    """200 different texts of 1 MB, each its own repetition: 4 kB a row on disk, and all of them one group."""
    table = pyarrow.table({"prompt": [f"{n:03}" * 350_000 for n in range(200)], "answer": ["1"] * 200})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    (defect,) = read_dataset(tmp_path / "a.parquet").defects
    assert "one column of a row group unpacks to 210," in defect.what and "more than 200 times" in defect.what


def test_members_of_an_archive_that_are_packed_again_are_named(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
            raw = json.dumps({"problem": "P", "answer": "1"}).encode()
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    found = read_dataset(tmp_path / "a.tar.gz")
    assert len(found.problems) == 1
    assert [str(defect).partition("a.tar.gz/")[2].split(":")[0] for defect in found.defects] == [
        "b.jsonl.gz",
        "c.parquet",
    ]


@pytest.mark.parametrize("field", ["solution", "id", "level"])
def test_half_a_surrogate_pair_is_named_in_every_field_that_is_kept(tmp_path, field):
    row = {"problem": "p", "answer": "1", field: "x \ud800"}
    (defect,) = read_dataset(lines(tmp_path / "a.jsonl", row)).defects
    assert (defect.line, defect.field) == (1, field)


def test_a_gold_with_letters_is_a_formula_and_no_choice():
    words = [f"word{'abcdefghijklmnopqrstuvwxyz'[i]}" for i in range(26)]
    text, edited = " ".join(words), " ".join([*words[:20], "other", *words[21:]])
    for gold, num_copies in ((r"\frac{2}{3} \frac{C}{S}", 1), ("C", 0), (r"\text{(C)}", 0)):
        assert len(overlap([problem(text, gold)], [problem(edited, gold)])) == num_copies


def problem(prompt, answer="1", line=1):
    return Problem(content_id(prompt), prompt, answer, source="f", line=line)


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("What is $1+1$?", "what is  1 + 1 ?", True),
        ("Find $\\left(x\\right)$.", "Find $(x)$", True),
        (
            "Find $\\dfrac12$. Let's think step by step and output the final answer within \\boxed{}.",
            "Find $\\frac12$.",
            True,
        ),
        ("Compute $\\tan 22.5^\\circ.$", "Compute $\\tan 225^\\circ$.", False),
        ("Add 1 2", "Add 12", False),
        ("Find x+1", "Find x-1", False),
        ("Find $f(x)$", "Find $g(x)$", False),
    ],
)
def test_normalised_text(one, other, same):
    assert (normalised(one) == normalised(other)) == same


def test_repetitions_overlap_and_what_is_left():
    training = [problem("A?", "1", 1), problem("B", "2", 2), problem("a", "3", 3), problem("B", "2", 4)]
    found = repetitions(training)
    assert [(r.first.line, r.second.line, r.kind, r.agrees) for r in found] == [
        (1, 3, "same normalised", False),
        (2, 4, "same text", True),
    ]
    assert str(found[0]) == "f:3 repeats f:1 (same normalised), with other answers ('1', '3')"
    assert [p.line for p in deduplicated(training)] == [2]
    evaluation = [problem("b.", "2"), problem("C")]
    assert [(r.first.line, r.second.prompt) for r in overlap(training, evaluation)] == [(2, "b.")]
    assert [p.line for p in without_overlap(training, evaluation)] == [1, 3]  # both B are copies of b.


CHINESE = "农夫有12头牛,又买了30头,卖了5头,还剩多少头?"
SENTENCE = "A farmer has twelve cows and buys 30 more at the market, then sells 5 of them to a friend"


@pytest.mark.parametrize(
    "one, other, kind",
    [
        # edited copies: LaTeX fonts, spellings of numbers and signs, an instruction, a sentence put before
        ((SENTENCE, "37"), (SENTENCE, "37"), "same text"),
        ((SENTENCE, "37"), (f"{SENTENCE.upper()}.", "38"), "same normalised"),
        ((SENTENCE, "37"), (f"Answer with a number. {SENTENCE}. How many cows has he got?", "37 cows"), "contained"),
        ((SENTENCE, "37"), (SENTENCE.replace("and buys", "\\text{and} $\\mathrm{~buys}$"), "37"), "contained"),
        (("Let $a_1, a_2, \\dots, a_9$ be reals with $a_i \\leq 5$ for all indices $i$. Find the sum.", "45"),
         ("Let $a_{1}, a_{2}, \\ldots, a_{9}$ be reals with $a_{i} \\le 5$ for all indices $i$. Find the sum", "45"),
         "contained"),
        # golds in two notations are one gold
        ((f"{SENTENCE} now?", "4.5e33"), (f"So: {SENTENCE}", "4.5 \\times 10^{33}"), "contained"),
        ((f"{SENTENCE} now?", "\\frac{1}{2}"), (f"So: {SENTENCE}", "1/2"), "contained"),
        # short prompts: all their words, or nothing
        (("Add $2$ to 3.", "5"), ("add \\textbf{2} to {3}", "5"), "contained"),
        (("Add 2 to 3", "5"), ("Add 2 to 3 and then 4 to what you got before", "9"), None),
        (("Add 2 to 3", "5"), ("Add 2 to 3 and say what you got, in one number only, please", "5"), None),
        (("Compute 2+3", "5"), ("Compute 2-3", "5"), None),
        # other problems in the same words
        ((SENTENCE, "37"), (SENTENCE.replace("30", "40"), "47"), None),
        ((SENTENCE, "37"), (SENTENCE.replace("30", "40"), "37"), None),
        ((f"{SENTENCE}. How many are left?", "37"), (f"{SENTENCE}. How many did he lose?", "5"), None),
        ((f"{SENTENCE}. (A) All his red cows (B) No", "no"), (f"{SENTENCE}. (A) The rest (B) No", "no"), "contained"),
        ((f"{SENTENCE}. (A) All his red cows (B) None", "(B)"), (f"{SENTENCE}. (A) The rest (B) None", "(B)"), None),
        ((SENTENCE, "37"), ("A farmer has twelve cows. His daughter is 30 years old and owns 5 hens", "37"), None),
        (("", "1"), ("", "2"), "same text"),
        ((CHINESE, "37"), (f"请回答:{CHINESE[:-1]}", "37"), "contained"),
    ],
)  # fmt: skip
def test_three_kinds_of_copies(one, other, kind):
    first, second = problem(*one), problem(*other, line=2)
    for training, evaluation in ((first, second), (second, first)):
        found = overlap([training], [evaluation])
        assert [repetition.kind for repetition in found] == ([kind] if kind else [])
        assert without_overlap([training], [evaluation]) == (() if kind else (training,))


@pytest.mark.parametrize(
    "one, other, agree",
    [("2340", "\\mathbf{2340}", True), ("3 \\text{ cm}", "3cm", True), ("(1,2)", "[1,2]", False), ("-4", "4", False)],
)
def test_golds_that_differ_in_fonts_alone_do_not_contradict(one, other, agree):
    both = [problem("A", one), problem("A", other, 2)]
    assert [repetition.agrees for repetition in repetitions(both)] == [agree]
    assert deduplicated(both) == (tuple(both[:1]) if agree else ())


def test_every_copy_is_left_out_and_the_strictest_is_named():
    training = [problem(f"Now: {SENTENCE}", "37", 1), problem(SENTENCE, "37", 2), problem("Other", "1", 3)]
    evaluation = [problem("Nothing", "1", 1), problem(SENTENCE, "37", 2), problem(SENTENCE.lower(), "37", 3)]
    assert [(r.first.line, r.second.line, r.kind) for r in overlap(training, evaluation)] == [
        (2, 2, "same text"),
        (2, 3, "same normalised"),
    ]
    assert [p.line for p in without_overlap(training, evaluation)] == [3]


def test_lengths_by_hand():
    lengths = prompt_lengths([problem("a" * n) for n in range(1, 101)], Characters(), max_prompt_tokens=95)
    assert (lengths.median, lengths.percentile_99, lengths.longest, lengths.num_over_limit) == (51, 100, 100, 5)
    with pytest.raises(ValueError, match="no problems"):
        prompt_lengths([], Characters(), 95)


COUNTS = {  # of SOURCES.md beside the files: rows, of which without an answer in the box
    "math/MATH_original_train.tar.gz": (7500, 2),
    "math/MATH_original_test.tar.gz": (5000, 0),
    "math/harness_test.jsonl": (5000, 0),
    "math/verl_train.parquet": (7500, 4),
    "math500/test.jsonl": (500, 0),
    "gsm8k/train.jsonl": (7473, 0),
    "gsm8k/test.jsonl": (1319, 0),
    "amc23/test.jsonl": (40, 0),
    "aime24/qwen_test.jsonl": (30, 0),
    "aime24/nemo_test.txt": (30, 0),
    "aime25/nemo_test.txt": (30, 0),
    "minerva_math/qwen_test.jsonl": (272, 0),
    "olympiadbench/test.jsonl": (675, 0),
    "model_outputs/qwen_math_cot_100.jsonl": (100, 0),
}


@pytest.fixture(scope="module")
def datasets():
    return {name: read_dataset(REAL / name) for name in COUNTS}


@real
def test_real_files_have_the_rows_they_should(datasets):
    """Two MATH solutions box nothing, and verl's copy lost the answer of two more; each is named."""
    for name, (num_rows, num_empty) in COUNTS.items():
        found = datasets[name]
        assert len(found.problems) + len(found.defects) == num_rows, name
        boxes = ["boxes nothing: the last \\boxed{} is empty", "field 'reward_model.ground_truth' is empty"]
        expected = boxes[name.endswith("parquet")] if num_empty else ""
        assert [str(d).split(": ", 1)[1] for d in found.defects] == [expected] * num_empty, name
    members = [str(d.file.relative_to(REAL)) for d in datasets["math/MATH_original_train.tar.gz"].defects]
    assert members == [f"math/MATH_original_train.tar.gz/MATH/train/number_theory/{n}.json" for n in (7115, 7117)]


@real
def test_real_golds(datasets):
    assert (
        sum("," in json.loads(line)["answer"].rpartition("####")[2] for line in (REAL / "gsm8k/train.jsonl").open())
        == 79
    )
    for name in ("gsm8k/train.jsonl", "amc23/test.jsonl", "aime24/qwen_test.jsonl", "aime25/nemo_test.txt"):
        assert all(str(int(p.gold)) == p.gold for p in datasets[name].problems), name
    twice = [
        sorted(int(p.gold) for p in datasets[f"aime24/{n}"].problems) for n in ("qwen_test.jsonl", "nemo_test.txt")
    ]
    assert twice[0] == twice[1]


@pytest.mark.nightly
@real
def test_real_overlaps(datasets):
    """MATH-500 is in the test split, and all but two problems of it not in train; verl's prompts are the train problems
    behind an instruction. Normalised text alone finds 3 of the 21 problems that train and test share."""
    train, test = (datasets[f"math/MATH_original_{split}.tar.gz"].problems for split in ("train", "test"))
    math500 = datasets["math500/test.jsonl"].problems
    assert len(overlap(test, math500)) == 500
    leaked = {r.second.source.partition("#")[2] for r in overlap(train, math500)}
    assert leaked == {"test/intermediate_algebra/337.json", "test/algebra/170.json"}
    verl = overlap(train, datasets["math/verl_train.parquet"].problems)
    assert (len(verl), {r.kind for r in verl}) == (7496, {"same normalised"})
    assert len(overlap(test, datasets["math/harness_test.jsonl"].problems)) == 5000
    found = overlap(train, test)
    assert {r.second.source for r in found if r.kind == "same normalised"} == {
        f"MATH/test/{name}.json" for name in ("algebra/636", "intermediate_algebra/965", "precalculus/24307")
    }
    assert Counter(r.kind for r in found) == {"same normalised": 3, "contained": 18}
    assert overlap(without_overlap(train, test), test) == []


@real
def test_real_copies_are_found_and_nothing_else(datasets):
    """Two editions of AIME 2024 share 23 of 30 by normalised text; benchmarks of other sources share nothing."""
    editions = [datasets[f"aime24/{name}"].problems for name in ("qwen_test.jsonl", "nemo_test.txt")]
    assert Counter(r.kind for r in overlap(*editions)) == {"same text": 3, "same normalised": 20, "contained": 7}
    train = (*datasets["math/MATH_original_train.tar.gz"].problems, *datasets["gsm8k/train.jsonl"].problems)
    names = ("aime24/qwen_test.jsonl", "aime25/nemo_test.txt", "amc23/test.jsonl", "minerva_math/qwen_test.jsonl")
    assert overlap(train, [p for name in (*names, "gsm8k/test.jsonl") for p in datasets[name].problems]) == []
    olympiad = overlap(train, datasets["olympiadbench/test.jsonl"].problems)
    assert [(r.kind, r.first.gold in r.second.gold) for r in olympiad] == [
        ("contained", True), ("contained", True), ("contained", True), ("same normalised", True), ("contained", True)
    ]  # fmt: skip


@real
def test_edited_copies_of_a_real_benchmark_are_found(datasets):
    """All 272 Minerva problems, rewritten as an editor would: fonts, spacing, units without LaTeX, a new first line."""
    minerva = datasets["minerva_math/qwen_test.jsonl"].problems
    edited = [
        replace(p, prompt="Give the final value.\n" + re.sub(r"\\mathrm\{~?([A-Za-z/ ]+)\}", r"\\text{ \1}", p.prompt))
        for p in minerva
    ]
    assert not {normalised(p.prompt) for p in minerva} & {normalised(p.prompt) for p in edited}
    found = overlap(edited, minerva)
    assert [r.second.line for r in found] == [p.line for p in minerva]
    assert without_overlap(edited, minerva) == ()


class Characters:
    def prompt_lengths(self, texts):
        return [len(text) for text in texts]


def test_inspection_in_words(tmp_path):
    records = [{"problem": f"P{'x' * i}", "solution": "\\boxed{1}", "type": "Algebra"} for i in range(8)]
    file = lines(tmp_path / "t.jsonl", *records, records[0], {**records[1], "solution": "\\boxed{2}"}, *["{"] * 7)
    found = inspect_dataset(read_dataset(file), {"a": Characters()}, max_prompt_tokens=7)
    text = "\n".join(found.lines).replace(str(tmp_path), "D")
    assert text.splitlines()[:4] == [
        "D/t.jsonl: 10 problems, layout math",
        "  subjects: Algebra 10",
        "  a: prompt tokens median 4, 99 % 8, longest 8; 1 over 7",
        "  7 cannot be used:",
    ]
    assert "    D/t.jsonl:11: invalid JSON" in text
    assert "    ... and 2 more" in text
    contradiction = "    t.jsonl:10 repeats t.jsonl:2 (same text), with other answers ('1', '2')"
    assert f"  1 repeated with another gold answer:\n{contradiction}" in text
    assert "  1 repeated:\n    t.jsonl:9 repeats t.jsonl:1 (same text)" in text
    assert not found.is_sound
    assert inspect_dataset(read_dataset(lines(tmp_path / "ok.jsonl", *records)), {}, 7).is_sound
    assert not inspect_dataset(read_dataset(tmp_path / "absent.jsonl"), {"a": Characters()}, 7).is_sound


def test_inspection_of_overlap(tmp_path):
    training = read_dataset(lines(tmp_path / "t.jsonl", {"problem": "P?", "solution": "\\boxed{1}"})).problems
    clean = lines(tmp_path / "c.jsonl", {"question": "Q", "answer": "#### 1"})
    leaky = lines(tmp_path / "l.jsonl", {"question": "p", "answer": "#### 1"}, {"question": "q", "answer": "#### 1"})
    torn = lines(tmp_path / "torn.jsonl", {"question": "Q", "answer": "#### 1"}, {"question": "Q"})
    assert inspect_overlap(training, [read_dataset(clean)]).is_sound
    assert not inspect_overlap(training, [read_dataset(torn)]).is_sound
    found = inspect_overlap(training, [read_dataset(clean), read_dataset(leaky)])
    assert not found.is_sound
    assert found.lines[0] == f"none of {clean} in the training data"
    assert found.lines[1:] == (
        f"  1 of 2 of {leaky} also in the training data (1 same normalised):",
        "    l.jsonl:1 repeats t.jsonl:1 (same normalised)",
    )


def golds(found):
    return [(p.prompt, p.gold, p.line) for p in found.problems]


def test_packed_and_odd_files_are_read(tmp_path):
    """gzip by content, an archive of lines, a folder of several kinds, a byte order mark, Windows line ends."""
    rows = [{"prompt": "P é", "answer": "1"}, {"prompt": "Q", "answer": 2}]
    text = "\n".join(map(json.dumps, rows)).encode()
    expected = [("P é", "1", 1), ("Q", "2", 2)]
    for name, raw in (
        ("a.jsonl.gz", gzip.compress(text)),
        ("misnamed.jsonl", gzip.compress(text)),
        ("a.json.gz", gzip.compress(json.dumps(rows).encode())),
        ("lines.json.gz", gzip.compress(text)),
        ("mark.jsonl", b"\xef\xbb\xbf" + text),
        ("mark.json", b"\xef\xbb\xbf" + json.dumps(rows).encode()),
        ("windows.jsonl", text.replace(b"\n", b"\r\n") + b"\r\n\r\n"),
    ):
        (tmp_path / name).write_bytes(raw)
        found = read_dataset(tmp_path / name)
        assert (golds(found), found.defects) == (expected, ()), name
    assert [r.gold for r in load_prompts([tmp_path / "a.jsonl.gz"])] == ["1", "2"]
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "mark.jsonl", "d/a.jsonl")
        archive.add(tmp_path / "mark.json", "d/b.json")
        archive.add(tmp_path / "mark.json", "d/readme.md")
    found = read_dataset(tmp_path / "a.tar.gz")
    assert (golds(found), found.defects) == (expected * 2, ())
    assert [p.source for p in found.problems] == ["d/a.jsonl"] * 2 + ["d/b.json"] * 2
    folder = tmp_path / "folder"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["P é", "Q"], "answer": ["1", "2"]}), folder / "a.parquet")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(text))
    (folder / "notes.txt").write_text("no data")
    assert golds(read_dataset(folder)) == expected * 2


def test_what_is_damaged_is_named_where_it_lies(tmp_path):
    text = b"\n".join(json.dumps({"prompt": f"P{i}" * 50, "answer": "1"}).encode() for i in range(2000))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(text, compresslevel=0)[: len(text) // 2])
    found = read_dataset(tmp_path / "cut.jsonl.gz")
    (defect,) = found.defects
    assert 0 < len(found.problems) < 2000 and defect.line == len(found.problems) + 1
    assert "unreadable from here: Compressed file ended" in defect.what
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"[" + text + b"]")[:-20])
    assert "unreadable: Compressed file ended" in read_dataset(tmp_path / "cut.json.gz").defects[0].what
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(lines(tmp_path / "bad.jsonl", {"prompt": "P", "answer": "1"}, "{"), "d/bad.jsonl")
    (defect,) = read_dataset(tmp_path / "a.tar").defects
    assert str(defect).startswith(f"{tmp_path}/a.tar/d/bad.jsonl:2: invalid JSON")
    for name in ("empty.jsonl", "empty.json", "empty.parquet", "empty.tar.gz", "empty.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
        found = read_dataset(tmp_path / name)
        assert not found.problems and len(found.defects) == 1, name


@pytest.mark.parametrize(
    "gold", [[70], True, {"a": 1}, float("nan"), float("inf"), [], ["1", "2"], "", " ", "\ud800", [[1]]]
)
@pytest.mark.parametrize(
    "row",
    [
        lambda gold: {"prompt": "P", "answer": gold},
        lambda gold: {"question": "P", "answer": gold},
        lambda gold: {"problem": "P", "answer": gold},
        lambda gold: {"problem": "P", "expected_answer": gold},
        lambda gold: {"question": "P", "final_answer": gold},
        lambda gold: {**VERL, "reward_model": {"ground_truth": gold}},
        lambda gold: {**VERL, "reward_model": {"ground_truth": {"target": gold}}},
    ],
)
def test_what_is_no_answer_is_refused_with_its_line(tmp_path, gold, row):
    file = lines(tmp_path / "f.jsonl", row("1"), row(gold))
    found = read_dataset(file)
    if "final_answer" in row("1") and gold == [70]:  # that layout keeps its answer in a list of one
        assert [p.gold for p in found.problems] == ["1", "70"]
        return
    assert [p.gold for p in found.problems] == ["1"]
    assert [(defect.file, defect.line) for defect in found.defects] == [(file, 2)]


def test_list_columns_of_parquet_are_no_golds(tmp_path):
    table = pyarrow.table({"prompt": ["P", "Q"], "answer": [["1"], ["2", "3"]]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    found = read_dataset(tmp_path / "t.parquet")
    assert [str(d).partition(": ")[2] for d in found.defects] == [
        "field 'answer' is a list, needs str or int or float (found ['1'])",
        "field 'answer' is a list, needs str or int or float (found ['2', '3'])",
    ]


def test_a_message_about_five_megabytes_is_short(tmp_path):
    huge = "x" * 5_000_000
    for row in (
        {"prompt": [huge], "answer": "1"},
        {"prompt": "P", "answer": [huge]},
        {huge: 1},
        {f"{i}": "" for i in range(1000)},
        {"problem": "P", "solution": huge},
        {**VERL, "prompt": [{"role": huge, "content": "c"}]},
    ):
        (defect,) = read_dataset(lines(tmp_path / "huge.jsonl", row)).defects
        assert len(str(defect)) < 400 + len(str(tmp_path)), str(defect)[:500]
    two = [problem("P", huge), problem("P", "1", 2)]
    assert len(str(repetitions(two)[0])) < 300


@pytest.mark.parametrize("value", ["a", "x" * 80, "'\"\n", 7, None, [1, "b"]])
def test_short_values_are_quoted_whole(value):
    assert quoted(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 81, ["x" * 100], "\n" * 80, "\U0001f600" * 100])
def test_long_values_are_cut(value):
    assert quoted(value).endswith("...") and len(quoted(value)) <= 83
