# ruff: noqa: E501
r"""Golds as people type them, and golds with one thing changed: kinds by name, so that half of them can stay unseen.

A kind is a template in which "@" is the gold, or a function gold -> text (None where it does not apply). A kind
changes the meaning of a gold (CHANGES) or keeps it (SPELLINGS). The kinds of a half are those whose names hash to it.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from gold_mutations import MATRIX, kind_of

Rewrite = str | Callable[[str], str | None]
NUMBERS = ("integer", "decimal", "fraction", "closed form", "mixed number")
FORMULAS = (*NUMBERS, "expression in letters", "tuple", "interval", "matrix", "list", "equation", "inequality")
FRACTION = re.compile(r"(-?)\\[dtc]?frac\{(\d+)\}\{(\d+)\}")


def _replaced(pattern: str, by: str) -> Rewrite:
    return lambda gold: re.sub(pattern, by, gold)


def _of_fraction(template: str) -> Rewrite:
    return lambda gold: found.expand(template) if (found := FRACTION.fullmatch(gold)) else None


def _grouped(separator: str) -> Rewrite:
    def group(gold: str) -> str | None:
        digits = gold.replace(",\\!", "").replace(",", "")
        return f"{int(digits):,}".replace(",", separator) if digits.isdigit() and digits[0] != "0" else None

    return group


def _table(gold: str, begin: str, end: str) -> str | None:
    return re.sub(r"\\begin\{[pb]matrix\}(.*)\\end\{[pb]matrix\}", lambda m: begin + m[1] + end, gold, flags=re.S)


WHOLE: dict[str, Rewrite] = {name: name for name in (
    r"{\bf @}", r"\mathbf @", r"\mathbf{@}", r"\color{red} @", r"\color{red}{@}", r"\textcolor{blue}{@}",
    r"{\color{blue} @}", r"\boldsymbol{@}", r"\bm{@}", r"\mathit{@}", r"\mathsf{@}", r"{\it @}", r"{\large @}",
    r"\Large @", r"\underline{@}", r"\underline{\underline{@}}", r"\ensuremath{@}", r"\displaystyle{@}",
    r"\mathstrut @", r"\hspace{2mm} @", r"\colorbox{yellow}{$@$}", r"{@}", r"{{@}}", r"\, @ \,", r"~@", r"@~",
    r"\text{The answer is } @", r"\text{Answer: } @", r"\textbf{Answer:} @", r"\text{Therefore, } @", r"\therefore @",
    r"\text{Final answer: } @", r"\text{so } @", r"Answer = @", r"@ \checkmark", r"@ \quad \blacksquare",
    r"@ \qquad \square", r"@ ✓", r"@ \text{.}", r"@ \text{ (final answer)}", r"@,", r"@;", r"@\\", r"\Rightarrow @",
    r"\implies @", r"= @", r"\(@\)", r"\[@\]", r"$$@$$", r"**@**", r"`@`", r"\begin{aligned} @ \end{aligned}",
    r"\begin{align*} @ \end{align*}", r"\begin{gathered} @ \end{gathered}", r"\hbox{$@$}", r"\text{$@$}", r"\mbox{$@$}",
    "\u00a0@\u202f", "\u200b@", r"\phantom{} @", r"\mathop{@}", r"\mathord{@}", r"\textstyle @", r"\scriptstyle @",
)}  # fmt: skip
OF_A_NUMBER: dict[str, Rewrite] = {name: name for name in (
    *(rf"@ \text{{ {unit}}}" for unit in (
        "N", "J", "V", "W", "K", "A", "L", "PM", "AM", "USD", "Hz", "MPa", "kJ", "GeV", "EUR", "C", "F", "T",
        "dollars", "euros", "people", "square units", "meters per second", "km/h", "apples", "cubic centimeters",
        "units of length", "degrees Celsius", "nm", "Å", "ways", "solutions", "light years", "mol/L",
    )),
    r"@ \mathrm{N}", r"@\,\mathrm{cm}", r"@ \mathrm{~cm}", r"@~\text{cm}", r"@~\mathrm{m/s}", r"@ \mathrm{cm}^2",
    r"@ \mathrm{cm^2}", r"@ \text{ cm}^3", r"@ \text{ units}^2", r"@\ \text{m}/\text{s}", r"\SI{@}{m}", r"\num{@}",
    r"\qty{@}{\meter}", r"\SI{@}{\meter\per\second}", r"@ dollars", r"@ \textrm{ cm}", r"@ \textit{ cm}", r"@ cm",
    r"@ \operatorname{cm}", r"@ \mathrm{m \cdot s^{-1}}", r"@ \,\Omega", r"@ \text{m} \text{s}^{-1}", r"\mathrm{@\,m}",
    r"\text{@}", r"\text{@ cm}", r"(@)", r"[@]", r"\left(@\right)", r"x = @", r"x=@", r"\text{Area} = @", r"n = @",
    r"f(x) = @", r"P(A) = @", r"|AB| = @", r"\angle ABC = @", r"AB = @", r"S_n = @", r"a_{10} = @", r"x \to @",
    r"\text{Area of the triangle} = @", r"y' = @", r"\text{Total} : @", r"1 \cdot @", r"@ + 0", r"\therefore x = @",
    r"@ \bmod 10000000000", r"@.", r"@ !?",
)}  # fmt: skip
OF_A_NUMBER.pop(r"@ \bmod 10000000000")
OF_A_NUMBER.pop(r"@ !?")
SPECIAL: dict[str, tuple[tuple[str, ...], Rewrite]] = {
    "degree sign": (("degrees",), _replaced(r"\^\s*(?:\{\\circ\}|\\circ)", "°")),
    "degrees in words": (("degrees",), _replaced(r"\^\s*(?:\{\\circ\}|\\circ)", r" \\text{ degrees}")),
    "degree command": (("degrees",), _replaced(r"\^\s*(?:\{\\circ\}|\\circ)", r"\\degree")),
    "no degree": (("degrees",), lambda gold: None if "\\cos" in gold or "\\tan" in gold else re.sub(r"\^\s*(?:\{\\circ\}|\\circ)", "", gold)),
    "ang": (("degrees",), lambda gold: rf"\ang{{{re.sub('[^0-9.]', '', gold)}}}" if gold[0].isdigit() else None),
    "root sign": (FORMULAS, _replaced(r"\\sqrt\{(\d+)\}", r"√\1")),
    "root sign, brackets": (FORMULAS, _replaced(r"\\sqrt\{(\d+)\}", r"√(\1)")),
    "sqrt()": (FORMULAS, _replaced(r"\\sqrt\{([^{}]+)\}", r"sqrt(\1)")),
    r"\sqrt()": (FORMULAS, _replaced(r"\\sqrt\{([^{}]+)\}", r"\\sqrt(\1)")),
    "power one half": (NUMBERS, _replaced(r"\\sqrt\{(\d+)\}", r" (\1)^{1/2}")),
    "pi in letters": (FORMULAS, _replaced(r"\\pi(?![a-z])", "pi")),
    "pi as a sign": (FORMULAS, _replaced(r"\\pi(?![a-z])", "π")),
    "infinity as a sign": (FORMULAS, _replaced(r"\\infty", "∞")),
    "cup as a sign": (FORMULAS, _replaced(r"\\cup", "∪")),
    "minus sign": (FORMULAS, _replaced("-", "−")),
    "en dash": (NUMBERS, _replaced("^-", "–")),
    "times sign": (FORMULAS, _replaced(r"\\cdot", "×")),
    "middle dot": (FORMULAS, _replaced(r"\\cdot", "·")),
    "star": (FORMULAS, _replaced(r"\\cdot|\\times", "*")),
    "two stars": (("closed form", "expression in letters"), _replaced(r"\^(\d)(?!\d)", r"**\1")),
    "squared sign": (("closed form", "expression in letters"), _replaced(r"\^\{?2\}?(?!\d)", "²")),
    "less or equal sign": (FORMULAS, _replaced(r"\\leq?(?![a-z])", "≤")),
    "less or equal slanted": (FORMULAS, _replaced(r"\\leq?(?![a-z])", r"\\leqslant ")),
    "tilde after comma": (("tuple", "list"), _replaced(r",\s*", ",~")),
    "wide comma": (("tuple",), _replaced(r",\s*", "，")),
    "semicolon": (("tuple",), _replaced(r",\s*", "; ")),
    "langle": (("tuple",), lambda gold: rf"\langle {gold[1:-1]} \rangle" if gold[0] == "(" else None),
    "big brackets": (("tuple", "interval"), lambda gold: rf"\big{gold[0]}{gold[1:-1]}\big{gold[-1]}" if gold[0] in "([" else None),
    "words or": (("list",), lambda gold: " or ".join(gold.split(",")) if gold.count(",") == 1 and "(" not in gold else None),
    r"\text{ and }": (("list",), lambda gold: r"\text{ and }".join(gold.split(",")) if "(" not in gold else None),
    "set braces": (("list",), lambda gold: rf"\{{{gold}\}}" if "(" not in gold and "=" not in gold else None),
    "set words": (("list",), lambda gold: rf"\lbrace {gold} \rbrace" if "(" not in gold and "=" not in gold else None),
    "psmallmatrix": (("matrix",), lambda gold: gold.replace("matrix}", "smallmatrix}")),
    "array": (("matrix",), lambda gold: _table(gold, r"\left(\begin{array}{rrr}", r"\end{array}\right)")),
    "array, square": (("matrix",), lambda gold: _table(gold, r"\left[\begin{array}{ccc}", r"\end{array}\right]")),
    "matrix in brackets": (("matrix",), lambda gold: _table(gold, r"\left(\begin{matrix}", r"\end{matrix}\right)")),
    "starred matrix": (("matrix",), lambda gold: _table(gold, r"\begin{pmatrix*}[r]", r"\end{pmatrix*}")),
    "dollars in words": (("money",), lambda gold: gold.replace("\\$", "") + r" \text{ dollars}"),
    "euro words": (("money",), lambda gold: gold.replace("\\$", "") + " dollars"),
    "USD": (("money",), lambda gold: gold.replace("\\$", "") + r"\text{ USD}"),
    "USD before": (("money",), lambda gold: r"\text{USD } " + gold.replace("\\$", "")),
    "bare percent": (("percent",), lambda gold: gold.replace("\\%", "%")),
    "percent in words": (("percent",), lambda gold: gold.replace("\\%", r" \text{ percent}")),
    "percent in text": (("percent",), lambda gold: gold.replace("\\%", r"\text{\%}")),
    "nicefrac": (("fraction",), _of_fraction(r"\1\\nicefrac{\2}{\3}")),
    "sfrac": (("fraction",), _of_fraction(r"\1\\sfrac{\2}{\3}")),
    "over": (("fraction",), _of_fraction(r"\1{\2 \\over \3}")),
    "divided by": (("fraction",), _of_fraction(r"\1\2 \\div \3")),
    "spaced frac": (("fraction",), _of_fraction(r"\1\\frac{ \2 }{ \3 }")),
    "slash": (("fraction",), _of_fraction(r"\1\2 / \3")),
    "braced slash": (("fraction",), _of_fraction(r"\1{\2}/{\3}")),
    "ratio": (("fraction",), _of_fraction(r"\1(\2)/(\3)")),
    "minus on top": (("fraction",), lambda gold: rf"\frac{{-{found[2]}}}{{{found[3]}}}" if (found := FRACTION.fullmatch(gold)) and found[1] else None),
    "thousands {,}": (("integer",), _grouped("{,}")),
    "thousands \\,": (("integer",), _grouped("\\,")),
    "thousands \\;": (("integer",), _grouped("\\;")),
    "thousands ~": (("integer",), _grouped("~")),
    "thousands ,\\!": (("integer",), _grouped(",\\!")),
    "thousands nbsp": (("integer",), _grouped("\u202f")),
    "plus": (("integer", "decimal"), lambda gold: f"+{gold}" if gold[0].isdigit() else None),
    "2.0": (("integer",), lambda gold: f"{gold}.00" if gold.isdigit() else None),
    "e-notation with unit": (("scientific",), lambda gold: re.sub(r"e\+?(-?\d+)$", r" \\cdot 10^{\1} \\text{ m/s}", gold)),
    "powers, erg": (("scientific",), lambda gold: re.sub(r"e\+?(-?\d+)$", r" \\times 10^{\1} \\text{ erg/s}", gold)),
    "powers, mathrm": (("scientific",), lambda gold: re.sub(r"e\+?(-?\d+)$", r" \\times 10^{\1} \\mathrm{~cm}", gold)),
    "powers, negative": (("scientific",), lambda gold: re.sub(r"e\+?(-?\d+)$", r" \\times 10^{\1} \\mathrm{kg\\,m^{-3}}", gold)),
    "capital E": (("scientific",), lambda gold: gold.replace("e", "E")),
    "capital E, unit": (("scientific",), lambda gold: gold + r"\text{ Hz}"),
    "x 10^": (("scientific",), lambda gold: re.sub(r"e\+?(-?\d+)$", r" x 10^{\1}", gold)),
    "about": (("scientific",), lambda gold: re.sub(r"e\+?(-?\d+)$", r"\\times 10^{\1}~\\text{K}", "n=" + gold)),
    "factor i with a star": (("closed form", "expression in letters"), _replaced(r"(\d)i(?![a-z])", r"\1*i")),
    "factor with a star": (("expression in letters",), _replaced(r"(?<![\d^_{])(\d)([a-z])(?![a-z])", r"\1*\2")),
    "mathrm e": (("closed form", "expression in letters"), _replaced(r"(?<![a-z\\])e(?![a-z])", r"\\mathrm{e}")),
    "words quoted": (("text",), lambda gold: re.sub(r"\\text\{([^{}]*)\}", r"\1", gold)),
    "words bold": (("text",), lambda gold: gold.replace("\\text{", "\\textbf{")),
    "words capital": (("text",), lambda gold: re.sub(r"\\text\{\s*([a-zA-Z])", lambda m: m[0][:-1] + m[1].swapcase(), gold)),
}  # fmt: skip
SPELLINGS: Mapping[str, tuple[tuple[str, ...], Rewrite]] = {
    **{name: (FORMULAS, text) for name, text in WHOLE.items()},
    **{name: (NUMBERS, text) for name, text in OF_A_NUMBER.items()},
    **SPECIAL,
}


def _first(pattern: str, by: str) -> Rewrite:
    return lambda gold: re.sub(pattern, by, gold, count=1)


def _without_last(gold: str) -> str | None:
    body, comma, last = gold.rpartition(",")
    return body + (last[-1] if last.endswith((")", "]")) else "") if comma else None


CHANGES: Mapping[str, tuple[tuple[str, ...], Rewrite]] = {
    "sign": (NUMBERS, lambda gold: gold[1:] if gold.startswith("-") else f"-{gold}" if gold.strip("0.") else None),
    "minus for plus": (FORMULAS, _first(r"\+", "-")),
    "plus for minus": (FORMULAS, _first(r"(?<=[\w}])\s*-", "+")),
    "bracket": (("interval",), lambda gold: ("[" if gold[0] == "(" else "(") + gold[1:] if r"\infty" not in gold.split(",")[0] and gold[0] in "([" else None),
    "end bracket": (("interval",), lambda gold: gold[:-1] + ("]" if gold[-1] == ")" else ")") if r"\infty" not in gold.rsplit(",")[-1] and gold[-1] in ")]" else None),
    "cap for cup": (FORMULAS, _first(r"\\cup", r"\\cap")),
    "element dropped": (("tuple", "list"), _without_last),
    "element added": (("tuple", "list"), lambda gold: gold[:-1] + ",977" + gold[-1] if gold[-1] in ")]" else gold + ",977"),
    "inverted": (("fraction",), lambda gold: rf"{m[1]}\frac{{{m[3]}}}{{{m[2]}}}" if (m := FRACTION.fullmatch(gold)) and m[2] != m[3] else None),
    "digit added": (NUMBERS, _first(r"(\d)(?=\D*$)", r"\g<1>7")),
    "one more": (NUMBERS, lambda gold: gold + "+1"),
    "doubled": (NUMBERS, lambda gold: None if gold.strip("-0.") == "" else f"2({gold})"),
    "halved": (NUMBERS, lambda gold: None if gold.strip("-0.") == "" else rf"\frac{{{gold}}}{{2}}"),
    "times ten": (NUMBERS, lambda gold: None if gold.strip("-0.") == "" else f"{gold} \\cdot 10"),
    "point": (("decimal",), lambda gold: gold.replace(".", "") if gold.strip("0.") else None),
    "thousandth": (("integer",), lambda gold: f"{gold}.001"),
    "variable": (("expression in letters", "equation"), _first(r"(?<![a-zA-Z\\])x(?![a-zA-Z])", "w")),
    "function": (FORMULAS, _first(r"\\sin", r"\\cos")),
    "cosine": (FORMULAS, _first(r"\\cos", r"\\sin")),
    "greek": (FORMULAS, _first(r"\\pi(?![a-z])", r"\\theta ")),
    "factor pi": (("integer", "fraction"), lambda gold: rf"{gold}\pi" if gold.strip("0") else None),
    "factor letter": (("integer",), lambda gold: f"{gold}x" if gold.strip("0") else None),
    "factor root": (("integer",), lambda gold: rf"{gold}√2" if gold.strip("0") else None),
    "root of": (("integer",), lambda gold: f"√{gold}" if gold.isdigit() and int(gold) > 1 else None),
    "root word": (("integer",), lambda gold: f"sqrt({gold})" if gold.isdigit() and int(gold) > 1 else None),
    "power": (("integer",), lambda gold: f"{gold}²" if gold.isdigit() and int(gold) > 1 else None),
    "power command": (("integer",), lambda gold: f"{gold}^3" if gold.isdigit() and int(gold) > 1 else None),
    "over 97": (("integer",), lambda gold: rf"{gold} \over 97" if gold.strip("0") else None),
    "strict": (("inequality",), _first(r"\\[lg]eq?(?![a-z])", "<")),
    "direction": (("inequality",), lambda gold: gold.translate(str.maketrans("<>", "><")) if set(gold) & {"<", ">"} else None),
    "transposed": (("matrix",), lambda gold: gold.replace("\\\\", "&") if "&" not in gold else None),
    "or 977": (NUMBERS, r"@ \text{ or } 977"),
    "977 or": (NUMBERS, r"977 \text{ or } @"),
    "or bare": (NUMBERS, "977 or @"),
    "and 977": (NUMBERS, r"@ \text{ and } 977"),
    "list of two": (NUMBERS, "@, 977"),
    "list of three": (NUMBERS, "976, 977, @"),
    "set of guesses": (NUMBERS, r"\{976, 977, @\}"),
    "slash guesses": (NUMBERS, r"@ \text{ / } 977"),
    "either": (NUMBERS, r"\text{either } @ \text{ or } 977"),
    "maybe": (NUMBERS, r"@ \text{ (or } 977 \text{)}"),
    "semicolon guesses": (NUMBERS, "@; 977"),
    "vee": (NUMBERS, r"@ \vee 977"),
    "lor": (NUMBERS, r"x = @ \lor x = 977"),
    "two equations": (NUMBERS, "x = @, x = 977"),
    "apples and pears": (NUMBERS, r"@ \text{ apples and } 977 \text{ pears}"),
    "in a sentence": (NUMBERS, r"\text{it is } @ \text{, no, it is } 977"),
    "text or": (NUMBERS, r"\text{@ or 977}"),
    "range": (NUMBERS, "@-977"),
    "range of dots": (NUMBERS, r"@ \ldots 977"),
    "not": (NUMBERS, r"\text{not } @"),
    "not equal": (NUMBERS, r"\neq @"),
    "at least": (NUMBERS, r"\ge @"),
    "more than": (NUMBERS, r"\text{more than } @"),
    "about a pair": (NUMBERS, r"(@, 977)"),
    "qty of another": (NUMBERS, r"\SI{977}{@}"),
    "hidden": (NUMBERS, r"\phantom{@}"),
    "hidden beside": (NUMBERS, r"977\phantom{@}"),
    "colour": (NUMBERS, r"\color{@} 977"),
    "stacked": (NUMBERS, r"\overset{@}{977}"),
    "index": (NUMBERS, r"977_{@}"),
    "struck": (NUMBERS, r"\cancel{@} 977"),
    # what follows was written after the last rule
    "minus before": (NUMBERS, lambda gold: f"−{gold}" if gold[0].isdigit() and gold.strip("0.") else None),
    "billion": (NUMBERS, r"@ \text{ billion}"), "kilo": (NUMBERS, r"@ \text{ thousand dollars}"),
    "between": (NUMBERS, r"\text{between } @ \text{ and } 977"), "pm": (NUMBERS, r"@ \pm 977"),
    "exclusive": (NUMBERS, r"@ \text{ xor } 977"), "except": (NUMBERS, r"\text{everything except } @"),
    "boxed twice": (NUMBERS, r"\begin{cases} @ \\ 977 \end{cases}"), "otherwise": (NUMBERS, r"@ \text{ if true, else } 977"),
    "set difference": (NUMBERS, r"\mathbb{R} \setminus \{@\}"), "interval of": (NUMBERS, r"[@, \infty)"),
    "absolute": (NUMBERS, lambda gold: rf"|{gold}|" if gold.startswith("-") else None),
    "floor": (("decimal", "fraction", "mixed number"), r"\lfloor @ \rfloor"), "ceiling": (("decimal", "fraction"), r"\lceil @ \rceil"),
    "log": (NUMBERS, r"\ln(@)"), "exponent": (NUMBERS, r"e^{@}"), "of x": (NUMBERS, r"@ x^2"), "imaginary": (NUMBERS, r"@ i"),
    "denominator": (NUMBERS, r"\frac{@}{7}"), "percent of": (("decimal", "integer"), r"@ \text{ of } 977"),
    "smaller": (NUMBERS, "< @"), "product of guesses": (NUMBERS, r"@ \cdot 977"), "ratio": (NUMBERS, "@ : 977"),
    "next line": (NUMBERS, r"@ \\ 977"), "tabular": (NUMBERS, r"@ & 977"), "ampersand": (NUMBERS, r"@ \quad 977"),
    "comment": (NUMBERS, "977 % @"), "subscript text": (NUMBERS, r"977_{\text{@}}"), "superscript": (NUMBERS, r"977^{@}"),
    "tag": (NUMBERS, r"977 \tag{@}"), "label": (NUMBERS, r"977 \label{@}"), "hspace": (NUMBERS, r"977 \hspace{@}"),
    "footnote": (NUMBERS, r"977 \footnote{@}"), "textcolor": (NUMBERS, r"\textcolor{@}{977}"), "raised": (NUMBERS, r"\raisebox{@}{977}"),
    "underset": (NUMBERS, r"\underset{@}{977}"), "stackrel": (NUMBERS, r"\stackrel{@}{977}"), "rule": (NUMBERS, r"\rule{@}{977}"),
    "nested question": (NUMBERS, r"\text{is it } @ \text{?}"), "no": (NUMBERS, r"\text{no, } @ \text{ is wrong}"),
    "tuple reversed": (("tuple",), lambda gold: gold[0] + ",".join(reversed(gold[1:-1].split(","))) + gold[-1] if "\\frac" not in gold and len(set(gold[1:-1].split(","))) > 1 and gold[1:-1] != ",".join(reversed(gold[1:-1].split(","))) else None),
    "mirrored interval": (("interval",), lambda gold: r"\{" + gold[1:-1] + r"\}" if r"\cup" not in gold else None),
    "negated equation": (("equation",), _first("=", r"\\ne ")),
    "x for a value": (NUMBERS, "x"), "empty set": (FORMULAS, r"\emptyset"), "dots": (FORMULAS, r"\ldots"),
    # and this after two of those had been accepted
    "denied": (NUMBERS, r"\text{it cannot be } @"), "guess": (NUMBERS, r"@ \text{ or something else}"),
    "neither": (NUMBERS, r"\text{neither } @ \text{ nor } 977"), "under": (NUMBERS, r"\text{less than } @"),
    "almost": (NUMBERS, r"\text{nearly } @ \text{, namely } 977"), "percent more": (("integer", "decimal"), r"@ \text{ percent of } 977"),
    "squared unit": (NUMBERS, r"@^{2} \text{ cm}"), "minus unit": (NUMBERS, r"-(@)^2 \text{ cm}"), "half": (NUMBERS, r"\text{half of } @"),
    "twice": (NUMBERS, r"@ \text{ twice}"), "sum": (NUMBERS, r"@ + 977"), "difference": (NUMBERS, r"977 - @"), "root of a sum": (NUMBERS, r"\sqrt{@ + 977}"),
    "two boxes": (NUMBERS, r"@} \text{ and also } \boxed{977"), "smaller box": (NUMBERS, r"\text{see } \fbox{977}"),
    "html": (NUMBERS, r"977<!-- @ -->"), "struck html": (NUMBERS, r"<s>@</s> 977"), "markdown": (NUMBERS, r"~~@~~ 977"),
    "hidden in a style": (NUMBERS, r"\style{display:none}{@} 977"), "mathchoice": (NUMBERS, r"\mathchoice{977}{977}{977}{@}"),
    "vphantom": (NUMBERS, r"977 \vphantom{@}"), "smash": (NUMBERS, r"977 \smash{\phantom{@}}"), "llap": (NUMBERS, r"977 \llap{@}"),
    "unit alone": (NUMBERS, r"\text{cm}"), "question marks": (FORMULAS, "??"), "none": (NUMBERS, r"\text{none}"),
}  # fmt: skip


def spelled(gold: str, kinds: Mapping[str, tuple[tuple[str, ...], Rewrite]]) -> Iterator[tuple[str, str]]:
    """(name, text) of every kind that applies to a gold and does not leave it as it is."""
    kind = kind_of(gold)
    for name, (applies_to, rewrite) in kinds.items():
        if kind in applies_to and not (kind == "matrix" and not MATRIX.search(gold)):
            text = rewrite.replace("@", gold) if isinstance(rewrite, str) else rewrite(gold)
            if text is not None and text != gold:
                yield name, text
