"""Labelled pairs of public graders: the grader "math_any", under the options with which a label was given."""

import json

from hacpo_grading.graders.math_grader import EXPRESSION, LATEX, MatchRules, decide_anywhere
from hacpo_grading.texts.answer_text import after_thinking

TARGETS = {"latex": LATEX, "expr": EXPRESSION}


def rules_of(options):
    """The options of a case, as far as they are about what is equal."""
    precision = options.get("precision", 6)
    targets = tuple(TARGETS[kind] for kind in options.get("match_types", []) if kind in TARGETS)
    return MatchRules(
        decimals=4 if precision == "1e-4" else precision,
        relations_are_sets=options.get("allow_set_relation_comp", False),
        targets=targets or (LATEX, EXPRESSION),
    )


def same(options, answer, gold):
    """The prompt carries the options, as JSON."""
    text = after_thinking(answer).strip()
    return float(bool(text) and decide_anywhere(gold, text, rules_of(json.loads(options) or {})).is_equal)
