"""Answers written to break a grader, with the verdicts that are right for each when the gold answer is 7."""

import random

from hacpo_mega.records import Verdict

WRONG = {Verdict.WRONG}
NO_ANSWER = {Verdict.NO_ANSWER}
# where evaluating has no end, or takes more memory than there is, saying so is right too
UNDECIDED = {Verdict.WRONG, Verdict.TIMEOUT, Verdict.ERROR}

BRACKETS = (
    ("{", "8", "}"), ("(", "8", ")"), ("[", "8", "]"), ("\\sqrt{", "8", "}"), ("\\frac{1}{", "2", "}"),
    ("\\text{", "8", "}"), ("\\left(", "8", "\\right)"), ("x^{", "2", "}"), ("\\{", "8", "\\}"), ("-(", "8", ")"),
)  # fmt: skip

ENDLESS = r"""
10^{10^{10}} 9^{9^{9^{9}}} 2^{10000000000} 10^{-10^{10^{10}}} (9^{9^{9}})! 1000000000! ((9!)!)!
\binom{10^{9}}{5\cdot10^{8}} \arctan(\tan(10^{10^{9}})) \gcd(10^{10^{8}},7)
\sum_{k=1}^{10^{12}}\frac{1}{k!} \prod_{k=1}^{10^{9}}k \int_0^1e^{-x^{x^{x}}}\sin(x^x)dx \lim_{n\to\infty}n^{n^{n}}
(x+y+z+w)^{300}-x^{300} 7^{7^{7^{7}}}\bmod10 \sqrt[10^{10}]{10^{10^{10}}} \log_{2}(2^{2^{100}})
""".split()  # noqa: SIM905

LONG = [
    *(
        "8" * 100_000,
        "0." + "3" * 100_000,
        " " * 100_000 + "8",
        "1," * 50_000 + "1",
        "a" * 100_000,
        "1+" * 50_000 + "1",
    ),
    *("\\frac12" * 10_000, "-" * 100_000 + "8", "8 " * 50_000, "\\$" * 50_000 + "8", "\\text{and}" * 20_000 + "8"),
]

BACKTRACKING = [s * n + "!" for n in (30, 500) for s in ("a", "1 ", "1,", "\\ ", "1.", "x=", "\\,1", "(1", ",,")]

LOOK_ALIKES = (
    *(
        "\u0417",
        "\u2462",
        "\uff18",
        "\u0668",
        "\u00b2",
        "\u221e",
        "\u22128",
        "\u202e8",
        "8\u200b",
        "\u00bd",
        "\U0001d7d6",
    ),
    *("\ud800", "\ufffd", "\u5341", "VIII", "8\u0338"),
)

ODD = [
    *("", " ", "7 or 8", "\x00\x01\x02", "8\x00", "\\text{7 or 8}", "'; DROP TABLE", "8\\ne 7", "a" * 50),
    *r"""
\\ & % # _ ^ ~ $ $$ nan \infty None True __import__('os')._exit(1) exec('1') 1e400 1e999999999 0x8 8e 8! i
\emptyset \{\} 8\% 8. 8, ,8 8;9 8=9 7=8 x=8 \pm7 7,8 (7)(8) 77 7.0000001 -7 7^{1.01} 7\cdot0 \begin{matrix} \end{matrix}
\begin{pmatrix}7\\8\end{pmatrix} \left( \right) \frac{7} \frac{}{} \sqrt \text{eight} \color{red}8 \href{x}{8}
\input{/etc/passwd} \newcommand <b>8</b> {{8}} \alpha 7/0 \frac{7}{0} 0^0 \log0 \tan(\pi/2) 8\text{cm} 8\%\% [7,8)
\overline{8} 7:8 7/8/9 7^8 8^{1/3} |8| \lfloor8.7\rfloor 8_7 7\mid8 7\to8 x\le7 x\ne7 x>7 7\le7
""".split(),  # noqa: SIM905
]

WITHOUT_A_BOX = [
    *("", " ", "\n" * 1000, "\x00", "\x00" * 100_000, "7", "7" * 100_000, "\\boxed", "\\boxed{", "\\boxed{7"),
    *("\\boxed{" * 20_000, "{" * 100_000, "}" * 100_000, "\\" * 99_999, "$" * 100_000, "boxed{7}", "\\boxedx{7}"),
    *("<think>\\boxed{7}", "<think>\\boxed{7}</think>", "\ufffd" * 100_000, "\\box{7}", "####7", "\\boxed{\\}"),
]


def hostile_answers() -> list[tuple[str, set[Verdict]]]:
    """(answer, the verdicts that are right) for well over 200 answers."""
    nested = [left * n + inner + right * n for n in (25, 60, 300, 3000) for left, inner, right in BRACKETS]
    boxed = [(answer, WRONG) for answer in (*nested, *LONG, *LOOK_ALIKES)]
    boxed += [(answer, UNDECIDED) for answer in (*ENDLESS, *BACKTRACKING, *ODD)]
    whole = [("\\boxed{8}" * 10_000, WRONG), ("\\boxed{8}" + "\\text{and}" * 20_000, WRONG)]
    return (
        [(f"\\boxed{{{answer}}}", right) for answer, right in boxed] + whole + [(a, NO_ANSWER) for a in WITHOUT_A_BOX]
    )


# no generated answer has this value: it is a prime that none of the pieces below makes
GENERATED_GOLD = "734197"
NUMBERS = ["8", "-3", "0", "99", "0.5", "1e308", "10^{9}", "2^{2^{2^{2^{2}}}}", "9" * 60, "\\infty", "\\pi", "i", "nan"]
LETTERS = [*"xn{}$\\\x00\u0417\u2462", "\\alpha", "\\text{seven}", "\\mathbb{R}", "\\emptyset"]
CODE = [
    "__import__('os').system('touch {0}')", "open('{0}','w')", "\\input{{{0}}}", "\\immediate\\write18{{touch {0}}}",
    "exec(\"open('{0}','w')\")", "Symbol('x').__class__.__base__.__subclasses__()", "(lambda: open('{0}','w'))()",
]  # fmt: skip
AROUND = r"""
{0}^{{{1}}} ({0})^{{({1})}} \frac{{{0}}}{{{1}}} \sqrt[{0}]{{{1}}} {0}+{1} {0}{1} {0},{1} ({0},{1}] \log_{{{0}}}{{{1}}}
\sum_{{n={0}}}^{{{1}}}n^n \int_{{{0}}}^{{{1}}}x^{{x}}dx {0}!+{1}! {0}={1} {0}<{1} \binom{{{0}}}{{{1}}} \sin({0})^{{{1}}}
\begin{{pmatrix}}{0}&{1}\\{1}\end{{pmatrix}} \left({0}\right){1} \{{{0},{1}\}} {0}\cup{1} \lim_{{n\to({0})}}{1}
{0}_{{{1}}} {0}\bmod{1} |{0}|{1} {0}:{1} {0}/{1}
""".split()  # noqa: SIM905


def generated_answers(number: int, seed: int, canary: str) -> list[str]:
    """Boxed answers of random pieces, nested up to six deep; where one runs as code, the file `canary` appears."""
    generator = random.Random(seed)

    def piece(depth: int) -> str:
        if depth == 0 or generator.random() < 0.15:
            kind = generator.choice((NUMBERS, NUMBERS, LETTERS, CODE))
            return generator.choice(kind).format(canary) if kind is CODE else generator.choice(kind)
        return generator.choice(AROUND).format(piece(depth - 1), piece(generator.randrange(depth)))

    return [f"\\boxed{{{piece(generator.randrange(1, 7))}}}" for _ in range(number)]
