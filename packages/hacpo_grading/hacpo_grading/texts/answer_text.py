"""Finds the answer in a text and strips typesetting from it. Text only, no parser.

Elsewhere: whether two answers are equal (graders/math_grader.py).
"""

import re
import unicodedata

OPENS, CLOSES = "<think>", "</think>"
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \} are characters, not groups
BARE = re.compile(r"[^\s$]+")
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
ANSWER_IS = re.compile(r"\banswer(?: is:?|:| =)\s+(?=[^\s}])", re.IGNORECASE)

# one pass over all commands, so that the second backslash of "\\" never starts one of its own; the space that only ends
# a command ("\times (") goes with it, but for the one before a letter or a digit
COMMAND = re.compile(r"\\(?:[a-zA-Z]+(?:\s+(?![a-zA-Z0-9\s]))?|!\s*|[\s\S])")
SWITCHES = (
    *("bf", "it", "rm", "sf", "tt", "em", "boldmath", "limits", "nolimits", "strut", "mathstrut", "null"),
    *("tiny", "small", "large", "Large", "LARGE", "huge", "Huge"),
)
NOTHING = frozenset("\\" + name for name in ("!", *SWITCHES))
SPACE_NAMES = (*",;:> \n$()[]", "quad", "qquad", "displaystyle", "textstyle", "scriptstyle", "enspace", "thinspace")
SPACES = frozenset("\\" + name for name in SPACE_NAMES)
SIZES = re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?")
SPELLED = {
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac", "\\nicefrac", "\\sfrac"), "\\frac"),
    "\\lbrack": "[", "\\rbrack": "]", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\langle": "(", "\\rangle": ")",
    "\\degree": "^\\circ", "\\leqslant": "\\le", "\\geqslant": "\\ge", "\\varnothing": "\\emptyset", "\\lg": "\\log",
    "\\dots": "\\ldots", "\\dotsc": "\\ldots",
}  # fmt: skip
SIGNS = str.maketrans({
    **{sign: f"\\{name} " for sign, name in zip("×·⋅÷π∞≤≥≠∪∩", (
        "times", "cdot", "cdot", "div", "pi", "infty", "le", "ge", "ne", "cup", "cap"
    ))},
    **{sign: f"\\{name} " for sign, name in zip("αβγδεθλμπρσφωΩ±∓∈∅…≈∠△⌊⌋⌈⌉", (
        "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "pi", "rho", "sigma", "phi", "omega",
        "Omega", "pm", "mp", "in", "emptyset", "ldots", "approx", "angle", "triangle", "lfloor", "rfloor", "lceil",
        "rceil",
    ))},
    **dict.fromkeys("\u00a0\u2009\u202f", " "), **dict.fromkeys("\u200b\ufeff\u2060"),
    **dict.fromkeys("°º", "^\\circ "), **dict.fromkeys("−‐‑", "-"), "⟨": "(", "⟩": ")",
    "ℝ": "\\mathbb{R}", "Å": "\\AA ",
})  # fmt: skip
# one sign for several, full-width and mathematical letters and digits, and units: what they are compatible with
COMPATIBLE = re.compile("[\uff01-\uff5e\u2103\u2109\u2126\u212b\u00b5\U0001d400-\U0001d7ff]")
FRACTION_SIGN = re.compile("[¼-¾⅐-⅞↉]")
RAISED, LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
INSIDE = r"(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*"  # braces up to four deep
GROUP = rf"\{{({INSIDE})\}}"
APPEARANCE = re.compile(  # appearance alone: phantoms and colours are removed, a font's command without its content
    rf"\\(?:[hv]?phantom|color|hspace|vspace|label|tag)\*?\s*\{{{INSIDE}\}}"
    r"|\\(?:color|text)?color(?:box)?\s*\{[^{}]*\}(?=\s*\{)"
    r"|\\(?:begin|end)\{(?:aligned|align|gathered|gather|split|equation|center)\*?\}|(?<=\\\\)\[[-\d.]+ ?[a-z]{2}\]"
    r"|\\(?:underline|boldsymbol|bm|pmb|mathit|mathsf|mathtt|mathop|mathord|ensuremath|emph|num)(?![a-zA-Z])"
    r"|\\mathbf(?![a-zA-Z])(?!\s*\{\s*[a-zA-Z])|\\mathrm(?=\s*(?:\d|\{[^{}a-zA-Z\\]*\d))"
)
QUANTITY = re.compile(rf"\\(?:SI|qty)\s*{GROUP}\s*{GROUP}|\\ang\s*{GROUP}")
SET_AS_TEXT = re.compile(
    rf"\\(?:text|mbox|hbox|mathbf|textbf)\s*\{{((?:[^{{}}$]|\{{{INSIDE}\}})*)\}}"
    r"|\\(?:text|mbox|hbox)\s*\{\$([^$]*)\$\}"
)
SMALL_MATRIX = re.compile(r"\\(begin|end)\{([pbvVB]?)(?:small)?matrix\*?\}(?:\[[lcr]\])?")
ROOT = re.compile(r"(?<![a-zA-Z\\])sqrt(?=[\s({])|\\sqrt\s*(?=\()")
ROOT_SIGN = re.compile(r"([√∛∜])\s*(?:(\d+)|\(([^()]*)\)|(?=[{\\a-zA-Zπ]))")
DEGREES_OF_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}
CHOOSE = re.compile(r"\{([^{}]*?)\s*\\choose(?![a-zA-Z])\s*([^{}]*)\}")
ROOT_IN_BRACKETS = re.compile(r"\\sqrt\s*\(([^()]*)\)")
BARE_ARGUMENT = r"\s*(\d|[a-zA-Z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|pi|phi|omega)(?![a-zA-Z]))"
FIRST_BARE = re.compile(rf"(\\[dtc]?frac)(?![a-zA-Z]){BARE_ARGUMENT}")
SECOND_BARE = re.compile(rf"(\\[dtc]?frac\s*\{{{INSIDE}\}}){BARE_ARGUMENT}")
OVER = re.compile(r"\{([^{}]*?)\s*\\over(?![a-zA-Z])\s*([^{}]*)\}")
SAYS_NOT = r"(?![^{}]*\b(?:not?|never|neither|wrong|false|except|than|least|most)\b)"
LEADING = re.compile(
    r"\A\s*(?:\\(?:text|textbf|mbox|mathrm)\s*\{"
    + SAYS_NOT
    + r"[^{}\d]*(?:[:,=]|\b(?:is|are|so|thus|hence|therefore|answer))\s*\}\s*:?"
    r"|\\(?:text|textbf|mbox)\s*\{" + SAYS_NOT + r"[^{}\d]*\}\s*:"
    r"|\\(?:therefore|Rightarrow|implies|rightarrow|to|approx)(?![a-zA-Z])|=)\s*(?=\S)"
)
TRAILING = re.compile(
    r"(?:\s|\\\\|[.,;✓✔]|\\(?:checkmark|blacksquare|square|qed|Box|,|;)(?![a-zA-Z])"
    r"|\\(?:text|textbf)\s*\{[\s.]*(?:\((?:final )?answer\))?\s*\})+$"
)
TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit|textnormal)\s*\{([^{}]*)\}")
EN_DASH = re.compile(r"(?<![\w)}\]])[–—]\s*(?=[\d\\.])")
THOUSANDS = re.compile(r"(?<=\d),\\!\s*(?=\d{3}(?!\d))")  # 14,\!400 is no pair
REPEATS = re.compile(r"(\d\.\d{0,9}?(?:(\d)\2{2}|(\d{2,9})\3)\d{0,20})\.{3}")  # 0.333... says more than its digits
MARKDOWN = re.compile(r"^\s*(\*\*|`)(.*)\1\s*$", re.DOTALL)
TIMES = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")  # 4.5 x 10^3
BRACED_SIGN = re.compile(r"(?<![\^_a-zA-Z])\{([-+.])\}")
STAR = re.compile(r"(?<=\d)\s*\*\s*(?=[a-zA-Z\\])")  # 3+4*i
PI = re.compile(r"(?<![a-zA-Z\\{])pi(?![a-zA-Z])|(?<=\{)pi(?=\})")
COMMAND_SPACE = re.compile(r"(\\[a-zA-Z]+) (?=\d)")
ONE_SIGN_POWER = re.compile(r"([\^_])\{(\w)\}")
# "1 2" is not 12 and "\sin x" no command, so a space between two letters or digits stays; "1, 234" is a list
LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
LIST_SPACE = re.compile(r"(?<=\d)\s*,\s+(?=\d{3}(?!\d))")
LIST_MARK = "\x00"
MAX_TYPED = 2000  # characters; rules for how people type look backward and forward


def after_thinking(text: str) -> str:
    """The text after the last </think>, or the whole text; nothing while a <think> is open."""
    answer = text.rpartition(CLOSES)[2]
    return "" if OPENS in answer else answer


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed or \fbox that is complete: nested braces, or one token as in `\boxed 5`."""
    span = last_box(text)
    return None if span is None else text[span[1] : span[2]]


def boxed_or_all(text: str) -> str:
    """The content of the last box; without one the text itself."""
    content = last_boxed(text)
    return text if content is None else content


def last_box(text: str) -> tuple[int, int, int] | None:
    """Start of the last complete box, and start and end of its content. One pass, linear in the text."""
    closing = _closing_braces(text)
    for box in reversed(list(BOX.finditer(text))):
        if text.startswith("{", box.end()):
            if box.end() in closing:
                return box.start(), box.end() + 1, closing[box.end()]
        elif bare := BARE.match(text, box.end()):
            return box.start(), bare.start(), bare.end()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    closing, opened = {}, []
    for brace in BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def gold_answer(gold: str) -> str:
    """The answer in a gold text: after the last "####" (GSM8K), else the text itself; a box in it is found later."""
    return gold.rpartition("####")[2].strip()


def tidy(answer: str) -> str:
    r"""An answer without typesetting: dollars, sizes, fonts, spaces, display fractions, a full stop, "the answer is".

    "\text{...}" stays, since a parser recognises units by it. Linear in the text. A text of more than MAX_TYPED
    characters loses LaTeX's typesetting alone.
    """
    ends = [found.end() for found in ANSWER_IS.finditer(answer)]
    text = answer[ends[-1] if ends else 0 :]
    is_short = len(text) <= MAX_TYPED
    text = COMMAND.sub(_without_typesetting, _as_latex(text) if is_short else text)
    text = BRACED_SIGN.sub(r"\1", SIZES.sub("", text)).replace("{,}", ",").replace("$", " ").strip()
    text = _unwrapped(LEADING.sub("", TRAILING.sub("", text), count=1)) if is_short else text.rstrip(".").strip()
    return LOOSE_SPACE.sub("", LIST_SPACE.sub("," + LIST_MARK, text)).replace(LIST_MARK, " ")


def _as_latex(text: str) -> str:
    r"""The same answer in the commands that a parser knows: no Unicode signs, fonts, colours, \SI, sqrt() or \over."""
    text = unicode_as_latex(text).replace("~", " ")
    text = REPEATS.sub(r"\1\\ldots ", EN_DASH.sub("-", THOUSANDS.sub("", text)))
    text = SET_AS_TEXT.sub(_unset, APPEARANCE.sub(" ", text))
    text = QUANTITY.sub(_quantity, text)
    text = CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = OVER.sub(r"\\frac{\1}{\2}", SMALL_MATRIX.sub(r"\\\1{\2matrix}", text))
    text = ROOT_IN_BRACKETS.sub(r"\\sqrt{\1}", ROOT.sub(r"\\sqrt", text))
    text = SECOND_BARE.sub(r"\1{\2}", FIRST_BARE.sub(r"\1{\2}", text))
    text = STAR.sub("", TIMES.sub(r"\\times ", text))
    return PI.sub(r"\\pi ", MARKDOWN.sub(r"\2", text))


def unicode_as_latex(text: str) -> str:
    """The same text with Unicode's fractions, powers, digits and symbols as LaTeX."""
    if text.isascii():
        return text
    text = COMPATIBLE.sub(lambda sign: unicodedata.normalize("NFKC", sign[0]), ROOT_SIGN.sub(_root, text))
    text = FRACTION_SIGN.sub(_fraction, text)
    text = RAISED.sub(lambda signs: _script("^", signs[0]), text)
    return LOWERED.sub(lambda signs: _script("_", signs[0]), text).translate(SIGNS)


def _unset(found: re.Match[str]) -> str:
    """Content set as text: the bare content where it is a number or a formula, else unchanged."""
    if found[1] is None:
        return found[2]
    return found[1] if re.search(r"(?<!\^)(?<!\^\{)\d", found[1]) else found[0]


def _quantity(found: re.Match[str]) -> str:
    r"""5\text{ m} for \SI{5}{m}; the unit's commands become its words."""
    if found[1] is None:
        return f"{found[3]}^\\circ"
    unit = re.sub(r"[\\.~]", " ", re.sub(r"[{}]", "", found[2]))
    return rf"{found[1]}\text{{ {unit}}}" if re.search("[a-zA-Z]", unit) else found[1]


def _root(found: re.Match[str]) -> str:
    content = found[2] or found[3]
    return rf"\sqrt{DEGREES_OF_ROOTS[found[1]]}" + (f"{{{content}}}" if content else "")


def _fraction(sign: re.Match[str]) -> str:
    over, _, under = unicodedata.normalize("NFKC", sign[0]).partition("\u2044")
    return rf"\frac{{{over}}}{{{under}}}"


def _script(mark: str, signs: str) -> str:
    content = unicodedata.normalize("NFKC", signs).replace("−", "-")
    return f"{mark}{content}" if len(content) == 1 else f"{mark}{{{content}}}"


def _unwrapped(text: str) -> str:
    """A text without the braces around all of it."""
    text = text.strip()
    while text.startswith("{") and _closing_braces(text).get(0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _without_typesetting(command: re.Match[str]) -> str:
    name = command[0] if command[0] in SPACES else command[0].rstrip()
    if name in NOTHING:
        return ""
    if name in SPACES:
        return " "
    return SPELLED.get(name, name)


def plain(answer: str) -> str:
    """The form that two spellings of one answer share: tidy, without text commands and braces round single signs."""
    text = TEXT_COMMAND.sub(lambda found: found[1] or " ", tidy(answer))
    return ONE_SIGN_POWER.sub(r"\1\2", COMMAND_SPACE.sub(r"\1", text)).rstrip(".")
