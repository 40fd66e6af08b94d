"""Shared parts of the judge's tests: a user's graders by their file, and verdicts by name."""

from repository import ROOT

from hacpo_grading.judgement import Stop

FILE = ROOT / "tests/grading/grading_cases.py"
CASES = f"{FILE}:reward"


def verdicts(judge, texts, gold="1"):
    stops = [Stop.EOS] * len(texts)
    return [j.verdict.name for j in judge.judge([""] * len(texts), [gold] * len(texts), texts, stops)]
