"""The judges of numbers, choices and JSON, by hand-made cases; hostile text takes them no time; verdicts explained."""

import json
import math

import pytest
from judged import questions

from hacpo_grading.graders import choice, graders, json_equality
from hacpo_grading.graders.number import Number, last_number
from hacpo_grading.judge import Judge
from hacpo_grading.judgement import Stop, Verdict


@pytest.mark.parametrize(
    "text, value",
    [
        ("9.8 m/s^2", 9.8),
        ("9.8\\,\\text{m}\\,\\text{s}^{-2}", 9.8),
        ("4.5 \\times 10^{33}", 4.5e33),
        ("$4.5\\times10^{33}$ erg", 4.5e33),
        ("4.5e33", 4.5e33),
        ("3 × 10**8 m/s", 3e8),
        ("6.02 x 10^23 mol^{-1}", 6.02e23),
        ("10 ** 8 m/s", 1e8),
        ("x**2 = 9", 9.0),
        ("2 ** 3", 2.0),
        ("3 boxes, so the answer is **42**.", 42.0),
        ("**Answer:** 42", 42.0),
        ("**Answer** -4.5 m", -4.5),
        ("**-3.5** m", -3.5),
        ("**Step 10** 5 apples", 5.0),
        ("2.0\\times 10^{-3}\\text{ m}^3", 2e-3),
        ("10^{5}", 1e5),
        ("\\frac{1}{2}", 0.5),
        ("3/4 cup", 0.75),
        ("\\frac12", 0.5),
        ("\\dfrac 3 {40}.", 0.075),
        ("x = \\frac{-1}{2}", -0.5),
        ("-\\frac{-1}{-2}", -0.5),
        ("5-\\frac12", 0.5),
        ("3\\frac{1}{2}", 3.5),
        ("- 1{,}002\\,\\tfrac12", -1002.5),
        ("3 \\frac{5}{2}", 2.5),
        ("3 \\frac{1}{-2}", -0.5),
        ("1 \\frac{" + "1" * 5000 + "}{3}", math.inf),
        ("x^2 \\frac{1}{2}", 0.5),
        ("2 1/2 cups", 2.5),
        ("1/2 1/3", 1 / 3),
        ("1:\n2\n1/4", 0.25),
        ("1 000 000", 1e6),
        ("-12\u202f000.5 kg", -12_000.5),
        ("1\\,000", 1000.0),
        ("10 20 300", 300.0),
        ("1 000 5", 5.0),
        ("2024 300", 300.0),
        ("cards of 9 $200 each", 200.0),
        ("1.0×10⁻³", 1e-3),
        ("1.0 \\times 10^{ -3}", 1e-3),
        ("6⋅10²³ m·s⁻¹", 6e23),
        ("5 m²", 5.0),
        ("1,234.5 cm", 1234.5),
        ("10{,}000", 10_000.0),
        ("x=-5", -5.0),
        ("−3", -3.0),
        ("x = –3", -3.0),
        ("a loss of -\\$5", -5.0),
        ("1.6 x 10^(-19) C", 1.6e-19),
        ("3-2", 2.0),
        ("5,\\ 600", 600.0),
        ("5,\\,600", 600.0),
        ("5,\\!600", 5600.0),
        ("5\\ 600", 5600.0),
        ("1\\,\\,000", 1000.0),
        ("6.022\\,140\\times10^{23}", 6.02214e23),
        ("3\\ 1/2", 3.5),
        ("\\frac{1}{2}\\times 10^3", 500.0),
        ("-1\\tfrac12 \\cdot 10^{-2}", -0.015),
        ("3/4 x 10^2m", 75.0),
        ("1/10^{3}", 1e-3),
        ("6\\times10^3/2", 3000.0),
        ("2\\times10^{999999}", math.inf),
        ("5 \\times 10^{3}/2", 2500.0),
        ("2\\times10^{3}-500", 500.0),
        ("6 \\times 10^2 / 2 \\times 10^3", 0.3),
        ("2\\times10^{3}5", 5.0),
        ("10^{3}m", 1000.0),
        ("3 X 10^5", 3e5),
        ("１２．５％", 12.5),
        ("1½ cups", 1.5),
        ("v_1 = 3 m", 3.0),
        ("12 \\approx5", 5.0),
        ("50 \\%", 50.0),
        ("0.5.", 0.5),
        ("The answer is $1/2$.", 0.5),
        ("It is 3 1/2.", 3.5),
        ("H2O", None),
        ("none", None),
        ("5/0", None),
    ],
)
def test_the_number_of_a_text(text, value):
    assert last_number(text) == value


@pytest.mark.parametrize(
    "answer, gold, reward",
    [
        ("about 3.1415926", "3.1415927", 1.0),
        ("3.14", "3.1415927", 0.0),
        ("12 then \\boxed{-2e3}.", "#### -2,000", 1.0),
        ("\\boxed{3} of 4", "4", 0.0),
        ("<think>4</think> 5", "4", 0.0),
        ("none", "4", None),
        ("9" * 100_000, "4", 0.0),
        ("9.1e-31", "1.6e-19", 0.0),  # both are next to nothing, and nothing alike
        ("1.6e-19 C", "\\boxed{1.6 \\times 10^{-19}}", 1.0),
    ],
)
def test_numbers_within_a_tolerance(answer, gold, reward):
    assert Number()("", answer, gold) == reward


def test_the_tolerance_is_of_the_gold():
    """1 % of 200 is 2."""
    about = Number(rel_tol=0.01)
    assert [about("", answer, "200 kJ") for answer in ("202", "198 J", "202.1", "197.9")] == [1.0, 1.0, 0.0, 0.0]
    assert [Number(abs_tol=0.5)("", answer, "0") for answer in ("0.5", "-0.5", "0.6")] == [1.0, 1.0, 0.0]
    assert Number()("", "1e-300", "0") == 0.0


@pytest.mark.parametrize(
    "answer, letter",
    [
        ("\\boxed{B}", "B"),
        ("\\boxed{(b)}", "B"),
        ("\\boxed{c}", "C"),
        ("\\boxed{\\text{B}}", "B"),
        ("\\boxed{B. 42}", "B"),
        ("\\boxed{A or B}", ""),
        ("\\boxed{AB}", ""),
        ("\\boxed{(A) or (B)}", ""),
        ("\\boxed{(A), (B)}", ""),
        ("\\boxed{42}", ""),
        ("The answer is A, no: \\boxed{D}", "D"),
        ("\\boxed{\\textbf{(E)}\\ 5}", "E"),
        ("\\boxed{\\text{\\textbf{(E)} } 5}", "E"),
        ("\\boxed{\\mathrm{(E)}\\,5}", "E"),
        ("\\boxed{(A)(B)}", ""),
        ("<answer>B</answer>", "B"),
        ("<answer>A</answer> no: <answer>(C) 5</answer>", "C"),
        ("<answer>42</answer>", ""),
        ("I think it's D", "D"),
        ("The correct option is E.", "E"),
        ("So (B) is the right one", "B"),
        ("Option B is correct.", "B"),
        ("Option B is not correct.", None),
        ("It is not C, so option B is correct", "B"),
        ("I don't think option B is correct.", None),
        ("Neither option A nor option B is right.", None),
        ("Either option A or option B is correct.", None),
        ("\\boxed{\uff08\uff22\uff09}", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B) because", "B"),
        ("The answer is C because", "C"),
        ("Answer: **C**", "C"),
        ("(a) is wrong, so the answer is **(b) Paris**.", "B"),
        ("the answer is (a) or (b)", ""),
        ("the answer is f(a)", None),
        ("final answer is option E", "E"),
        ("The answer is A", "A"),
        ("The answer is A. No, the answer is D.", "D"),
        ("The answer is A or B", ""),
        ("answer is B, C", ""),
        ("The answer is \\(\\text{B}\\).", "B"),
        ('```json\n{"answer": "A"}\n```', "A"),
        ('The answer is "B" or "C".', ""),
        ("The answer is A because the others fail.", "A"),
        ("Answer: A  \nB is too small.", "A"),
        ("The answer is A - Paris", "A"),
        ("The answer is A-level maths", None),
        ("The answer is B, I think.", "B"),
        ("The answer is B, and A is wrong.", "B"),
        ("The answer is B (or C).", ""),
        ("A is too small. Therefore, B is the correct answer.", "B"),
        ("None of A, B is correct.", None),
        ("so it is\n(D)", "D"),
        ("so it is\nD.", "D"),
        ("so it is\u2028D", None),  # a line ends at "\n" alone
        ("the answer is a matrix", None),
        ("the answer is I think unknown", None),
        ("Because of that I", None),
        ("Answer is 42", None),
        ("<think>\\boxed{A}</think> hm", None),
        ("<think>The answer is A", None),
        ("<think>no</think><think>\\boxed{A}", None),
        ("", None),
        ("So.\n#### B", "B"),
        ("#### (b)", "B"),
        ("[B]", "B"),
        ("Answer: [[B]]", "B"),
        ("The answer is [A] or [B].", ""),
        ("The array x[B]", None),
        ("I don't think the answer is B.", None),
        ("I do not believe that the answer is B. It is C", "C"),
        ("The answer is C. I don't think the answer is B.", "C"),
        ("I don't think so: the answer is B", "B"),
        ("I doubt the answer is B.", None),
        ("The answer is C; I really doubt that the answer is B", "C"),
        ("No doubt the answer is B", "B"),
        ("I have no doubt that the answer is B", "B"),
        ("I can't believe the answer is B", "B"),
    ],
)
def test_the_letter_of_an_answer(answer, letter):
    for gold in ("A", "(B)", "C. because", "\\boxed{D. E}"):
        wanted = None if letter is None else float(letter != "" and letter in gold[:9])
        assert choice.choice("", answer, gold) == wanted
    assert choice.explain("choice", answer, "A")["extracted"] == letter


@pytest.mark.parametrize("gold", ["K", "", "AB", "A or B", "12"])
def test_a_gold_that_is_no_letter_is_refused(gold):
    with pytest.raises(ValueError, match="is no letter from A to J"):
        choice.choice("", "\\boxed{A}", gold)


GOLD = {"a": [1, 2.5, None, True], "b": {"c": "x"}}


@pytest.mark.parametrize(
    "answer, reward",
    [
        (json.dumps(GOLD), 1.0),
        (json.dumps(dict(reversed(GOLD.items())), indent=4), 1.0),
        ("Here:\n```json\n" + json.dumps(GOLD) + "\n```\nas asked", 1.0),
        ("```\n{}\n```\nno,\n```json\n" + json.dumps(GOLD) + "\n```", 1.0),
        (json.dumps(GOLD).replace("1,", "1.0,").replace("2.5", "25e-1"), 1.0),
        (json.dumps(GOLD).replace("1,", "true,", 1), 0.0),
        (json.dumps(GOLD).replace("true", "1"), 0.0),
        (json.dumps(GOLD).replace("1, 2.5", "2.5, 1"), 0.0),
        (json.dumps(GOLD).replace("null", '"null"'), 0.0),
        ("```json\n" + json.dumps(GOLD)[:-1] + "\n```", 0.0),
        (json.dumps(GOLD)[:-1] + ', "a": 1}', None),
        ('{"a": NaN}', None),
        ("no JSON", None),
        ("[" * 100_000, None),
        ("```\n" + "[" * 100_000 + "\n```", 0.0),
        ("1e" + "9" * 18, 0.0),
        ("1e" + "9" * 20, None),
    ],
)
def test_json_is_compared_by_value(answer, reward):
    assert json_equality.json_equality("", answer, json.dumps(GOLD)) == reward


def test_a_gold_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match=r"the gold answer '\{' is not JSON"):
        json_equality.json_equality("", "1", "{")


PIECES = ["9", "1,", "111 ", "1 1", "\\frac1", "\\frac{-", "⁻",
          "10^", "1 ", "-", "\\frac{1}{", "^{", "1.1", "e5", " ", "1/", "*", "(A", "answer ",
          "answer is A or ",
          "answer:", "```\n", "[", '{"a":', "\\text{", "\\boxed{", "\n", "A\n"]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("kind, gold", [("number", "1"), ("choice", "A"), ("json", "1"), ("exact", "1")])
def test_hostile_text_takes_time_that_grows_like_the_text(kind, gold):
    """They run in the trainer's own process, where nothing could end them."""
    texts = [piece * (100_000 // len(piece)) for piece in PIECES]
    with Judge(kind) as judge:
        judge.judge(questions([""] * len(texts), [gold] * len(texts), texts, [Stop.EOS] * len(texts)))
        assert judge.counts.num_errors == 0
        assert judge.counts.cpu_s < 0.5 * len(texts)  # a quadratic pattern takes minutes


def explained(kind, answer, gold, **options):
    with Judge(kind, options=options) as judge:
        ((judgement, explanation),) = judge.judge_and_explain(questions([""], [gold], [answer], [Stop.EOS]))
    return judgement.reward, explanation


def test_verdicts_are_explained():
    assert explained("number", "so \\boxed{3/4 m}", "0.75", rel_tol=0.01) == (
        1.0,
        {
            "extracted": "3/4 m",
            "parsed_answer": 0.75,
            "parsed_gold": 0.75,
            "rule": "|answer - gold| <= max(0.01 |gold|, 0)",
        },
    )
    assert explained("choice", "Answer: B", "C") == (
        0.0,
        {"extracted": "B", "parsed_gold": "C", "rule": "the last 'answer is'"},
    )
    reward, explanation = explained("json", "```\n{\n```", "1")
    assert (reward, explanation["extracted"], explanation["rule"]) == (0.0, "{\n", "the last fenced block")
    assert "Expecting property name" in explanation["not JSON"]
    assert explained("arithmetic", "7+5=12;12", "12")[1]["extracted"] == "12"
    assert explained("exact", " 12", "12 ") == (1.0, graders.explain("exact", " 12", "12 "))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind, gold", [("math", "42"), ("math_any", "42"), ("number", "42"), ("choice", "B"), ("json", "[1]")]
)
def test_thinking_that_goes_on_is_no_answer(kind, gold):
    """Cut inside of it, an answer has said nothing yet, whoever has written the <think>."""
    said = {"choice": "\\boxed{B}", "json": "```\n[1]\n```"}.get(kind, "\\boxed{42}")
    texts = [said, f"<think>hm</think>{said}", f"hm</think>{said}", f"<think>so\n{said}", f"a</think><think>b\n{said}"]
    with Judge(kind) as judge:
        judged = judge.judge(questions([""] * 5, [gold] * 5, texts, [Stop.EOS] * 5))
    assert [judgement.verdict for judgement in judged] == [Verdict.CORRECT] * 3 + [Verdict.NO_ANSWER] * 2
