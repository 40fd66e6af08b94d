"""A grader for labelled pairs: the prompt carries the options, as JSON, under which the label was given."""

import json

from hacpo_mega.data.answer_text import after_thinking, gold_answer
from hacpo_mega.grading.math_grader import MatchRules, equal


def same(options, answer, gold):
    given = json.loads(options) or {}
    types = given.get("match_types", ["latex", "expr"])
    precision = given.get("precision", 6)
    rules = MatchRules(
        latex="latex" in types,
        expressions="expr" in types,
        decimals=4 if precision == "1e-4" else precision,
        relations_are_sets=given.get("allow_set_relation_comp", False),
    )
    return float(equal(gold_answer(gold), after_thinking(answer).strip(), rules))
