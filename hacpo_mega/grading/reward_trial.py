"""A trial of the reward before training: what the gold earns when it is given as the answer, and an empty answer.

Without it, a function that returns no reward would be reported after whole steps, and one that rewards a right answer
no more than an empty one would be trained on. Elsewhere: whether there is such a function (config/user_code.py).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hacpo_grading.graders.registry import find_grader
from hacpo_grading.judge import AnyJudge
from hacpo_grading.judgement import Asked, Judgement, Stop
from hacpo_grading.texts.chat_messages import contents
from hacpo_grading.workers.grader_calls import RETURNED
from hacpo_mega.config import RewardConfig
from hacpo_mega.data.reading.files import PromptRow
from hacpo_mega.data.reading.row_values import quoted, unread_problems

# Ways in which people ask models to write an answer; a function of the user's may read any of them.
FORMS = ("GOLD", "\\boxed{GOLD}", "#### GOLD", "<answer>GOLD</answer>", "The answer is GOLD.")
# Patterns of a prompt that asks for such a form. DAPO's instructions end with "Answer: $Answer"; a last "Answer:" is a
# cue for the answer, not a request.
FORM_PATTERNS = {
    r"\\boxed": FORMS[1],
    r"after\W*####": FORMS[2],
    "<answer>": FORMS[3],
    r"Answer:\s*\S(?!.*Answer:\s*\Z)": "Answer: GOLD",
}
# A grader of the user's may fail because of one row alone: it is tried on so many before it counts as failing.
MOST_ROWS = 4
NO_SOURCE = 'warning: the grader asks for data_source and gets "": the first prompt\'s row has no such field; add it'


@dataclass(frozen=True)
class RewardTrial:
    """Rewards of a trial: `gold` for the best of `answers`, forms of the gold as an answer, `empty` for an empty one.

    errors   what graders failed with, by how many of the tried answers
    lacks_source   whether a grader of verl's asks for the data source that the row does not name
    requested   the gold in the forms that the prompt itself asks for, with their judgements
    unread   fields of the row with choices or a passage that the prompt lacks, and the reason not to use each
    """

    answers: tuple[str, ...]
    gold: Judgement
    empty: Judgement
    errors: Mapping[str, int]
    lacks_source: bool = False
    requested: tuple[tuple[str, Judgement], ...] = ()
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def refusal(self) -> str | None:
        """Why training would end with such a reward; None where it would not."""
        no_rewards = [error for error in self.errors if RETURNED in error]
        is_judged = self.gold.is_judged or self.empty.is_judged
        if no_rewards:
            reason = no_rewards[0]
        elif is_judged or any("Unjudged: " in error for error in self.errors):
            return None
        else:
            reason = next(iter(self.errors), "it ran out of time (reward.timeout_s)")
        return (
            f"the reward cannot be used: {reason}. Tried on the gold of the first prompt and on an empty answer; it "
            'has to return a number in reward.range, None, or a table with "score"'
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines for a person to read before training."""
        num_tried = len(self.answers) + len(self.requested) + 1
        lines = [f"warning: the reward fails on {number} of {num_tried} answers tried: {error}"
                  for error, number in self.errors.items()]  # fmt: skip
        lines += [NO_SOURCE] if self.lacks_source else []
        lines += [f"warning: field {quoted(field)} of the first prompt's row {reason}" for field, reason in self.unread]
        if self.requested and all(given.is_judged and given.reward <= self.empty.reward for _, given in self.requested):
            lines += [
                f"warning: the first prompt asks for the form {quoted(text)}, which earns {_shown(given)}, no more "
                "than an empty answer: another reward.kind (math_any, number) reads more forms"
                for text, given in self.requested
            ]
        if not (self.gold.is_judged and self.empty.is_judged) or self.gold.reward > self.empty.reward:
            return tuple(lines)
        tried = ", ".join(map(quoted, self.answers))
        return (
            *lines,
            f"warning: the gold of the first prompt earns {_shown(self.gold)} and an empty answer "
            f"{_shown(self.empty)}, so a right answer is worth no more than none. Tried as {tried}: does the reward "
            "read the gold as data.gold_field has it, and the form in which the prompt asks for an answer?",
        )

    def __str__(self) -> str:
        return f"it earns {_shown(self.gold)}, an empty answer {_shown(self.empty)}"


def servers_of(reward: RewardConfig) -> dict[str, str]:
    """The URLs that graders ask, by the keys of their tables."""
    return {key: str(g.options.get("url", "")) for key, g in reward.graders.items() if find_grader(g.kind).asks_server}


def try_reward(reward: RewardConfig, judge: AnyJudge, rows: Sequence[PromptRow], agent: str) -> RewardTrial:
    """Tries the judge of `reward` on the first row, and on a few more where it fails on everything there."""
    for row in rows[:MOST_ROWS]:
        trial = _try_on(reward, judge, row, agent)
        if trial.gold.is_judged or trial.empty.is_judged or trial.refusal is None or not trial.errors:
            break
    return trial


def _try_on(reward: RewardConfig, judge: AnyJudge, row: PromptRow, agent: str) -> RewardTrial:
    answers, forms = _answers_with(reward, row.gold), _forms_asked_for(reward, row)
    judge.take_report()
    texts = [*answers, *forms, ""]
    judged = judge.judge(
        [Asked(row.text, text, row.gold, Stop.EOS, row.row, agent, place) for place, text in enumerate(texts)]
    )
    of_gold, empty = judged[: len(answers)], judged[-1]
    best = max(of_gold, key=lambda judgement: judgement.reward if judgement.is_judged else -math.inf)
    fields = json.loads(row.row or "{}")
    lacks_source = judge.asks_for_source and "data_source" not in fields
    requested = tuple(zip(forms, judged[len(answers) : -1], strict=True))
    unread = tuple(unread_problems(fields, "\n".join(contents(row.text))))
    return RewardTrial(answers, best, empty, judge.take_report().errors, lacks_source, requested, unread)


def _answers_with(reward: RewardConfig, gold: str) -> tuple[str, ...]:
    """Texts that answer with gold, as the graders read answers; a server is asked about one alone."""
    graders = [find_grader(part.kind) for part in reward.graders.values()]
    forms = FORMS if any(grader.is_own for grader in graders) and not servers_of(reward) else ()
    own = [(grader.solution or grader.gold_as_answer)(gold) for grader in graders]
    return tuple(dict.fromkeys([*own, *(form.replace("GOLD", gold) for form in forms)]))


def _forms_asked_for(reward: RewardConfig, row: PromptRow) -> tuple[str, ...]:
    """The gold in the forms that a prompt asks for; none where a server would be asked, or for programs and graders
    of the user's, which read others."""
    graders = [find_grader(part.kind) for part in reward.graders.values()]
    if servers_of(reward) or any(grader.is_own or grader.solution for grader in graders):
        return ()
    return tuple(
        form.replace("GOLD", row.gold) for asks, form in FORM_PATTERNS.items() if re.search(asks, row.text, re.DOTALL)
    )


def _shown(judgement: Judgement) -> str:
    if not judgement.is_judged:
        return f"nothing ({judgement.verdict.name.lower()}: unjudged)"
    parts = "".join(f", {name} {value:.4g}" for name, value in judgement.parts)
    return f"{judgement.reward:.4g} ({judgement.verdict.name.lower().replace('_', ' ')}{parts})"
