"""Problems that are there twice, in a data set or in two, and an inspection of both in words."""

from pathlib import Path

import pytest
from dataset_rows import problem, write_lines

from hacpo_grading.texts.chat_messages import messages_text
from hacpo_mega.commands.inspect_data import inspect_dataset, inspect_overlap
from hacpo_mega.data.dataset_checks import deduplicated, normalised, overlap, repetitions, without_overlap
from hacpo_mega.data.datasets import Dataset, read_dataset


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


def test_a_chat_is_compared_by_what_is_said_in_it():
    short = "Find $\\frac12$ of\n8. Please reason step by step, and put your final answer within \\boxed{}."
    says = [{"role": "system", "content": "Solve the 2 problems."}, {"role": "user", "content": short}]
    chats = [problem(messages_text(says[start:]), "4", 1 + start) for start in (0, 1)]
    for kind, text in (("same text", short), ("same normalised", "Find 1/2 of 8".replace("1/2", "$\\dfrac12$"))):
        assert [found.kind for found in overlap(chats, [problem(text, "4")])] == [kind]
        assert [found.kind for found in overlap([problem(text, "4")], chats)] == [kind, kind]
        assert without_overlap(chats, [problem(text, "4")]) == ()
    assert deduplicated([problem(short, "4", 3), *chats]) == (problem(short, "4", 3), chats[0])


def test_lengths_by_hand():
    problems = tuple(problem("a" * n) for n in range(1, 101))
    lines = inspect_dataset(Dataset(Path("a.jsonl"), "plain", problems, ()), {"m": Characters()}, 95).lines
    assert "  m: prompt tokens median 51, 99 % 100, longest 100; 5 over 95" in lines
    none = inspect_dataset(Dataset(Path("a.jsonl"), "plain", (), ()), {"m": Characters()}, 95)
    assert "  m: no prompts to measure" in none.lines


class Characters:
    def prompt_lengths(self, texts):
        return [len(text) for text in texts]


def test_inspection_in_words(tmp_path):
    records = [{"problem": f"P{'x' * i}", "solution": "\\boxed{1}", "type": "Algebra"} for i in range(8)]
    file = write_lines(tmp_path / "t.jsonl", *records, records[0], {**records[1], "solution": "\\boxed{2}"}, *["{"] * 7)
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
    assert inspect_dataset(read_dataset(write_lines(tmp_path / "ok.jsonl", *records)), {}, 7).is_sound
    assert not inspect_dataset(read_dataset(tmp_path / "absent.jsonl"), {"a": Characters()}, 7).is_sound


def test_inspection_of_overlap(tmp_path):
    training = read_dataset(write_lines(tmp_path / "t.jsonl", {"problem": "P?", "solution": "\\boxed{1}"})).problems
    clean = write_lines(tmp_path / "c.jsonl", {"question": "Q", "answer": "#### 1"})
    leaky = write_lines(
        tmp_path / "l.jsonl", {"question": "p", "answer": "#### 1"}, {"question": "q", "answer": "#### 1"}
    )
    torn = write_lines(tmp_path / "torn.jsonl", {"question": "Q", "answer": "#### 1"}, {"question": "Q"})
    assert inspect_overlap(training, [read_dataset(clean)]).is_sound
    assert not inspect_overlap(training, [read_dataset(torn)]).is_sound
    found = inspect_overlap(training, [read_dataset(clean), read_dataset(leaky)])
    assert not found.is_sound
    assert found.lines[0] == f"none of {clean} in the training data"
    assert found.lines[1:] == (
        f"  1 of 2 of {leaky} also in the training data (1 same normalised):",
        "    l.jsonl:1 repeats t.jsonl:1 (same normalised)",
    )
