"""A user's graders by their file, questions for a judge from columns, and verdicts by name."""

from repository import ROOT

from hacpo_grading.judgement import Asked, Stop

FILE = ROOT / "tests/grading/grading_cases.py"
CASES = f"{FILE}:reward"


def questions(prompts, golds, texts, stops, rows=(), agent=""):
    columns = zip(prompts, texts, golds, stops, rows or [""] * len(texts), strict=True)
    return [Asked(*column, agent) for column in columns]


def verdicts(judge, texts, gold="1"):
    stops = [Stop.EOS] * len(texts)
    return [j.verdict.name for j in judge.judge(questions([""] * len(texts), [gold] * len(texts), texts, stops))]
