"""Judging of an agent's rollouts: all at the end or, beside the engine, each as soon as it has ended.

Beside the engine, a thread passes ended answers to the judge, whose graders are processes of their own
(guarded_workers.py). A judgement depends on its answer alone, so it is the same either way. One thing differs: a user's
grader that has not worked yet is tried on the first answers of every batch, not of the step.

Elsewhere: what a judgement is (judge.py).
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from hacpo_grading.judge import AnyJudge, JudgeReport
from hacpo_grading.judgement import Asked
from hacpo_mega.config.tables.schema import RewardConfig
from hacpo_mega.grading.run_judge import environment_judgement
from hacpo_mega.records import EVENTS, Judgement, Prompt, Rollout

# Answers in one call of the judge, at most: the end of the thread waits for one call.
MAX_BATCH = 64
# Counts of a conversation that are reasons why it has no reward, beside the name of its environment's failure.
REASONS = ("unencodable", "too_long")

AnswerKey = tuple[int, int]  # prompt index, rollout index


class RolloutJudge(AbstractContextManager["RolloutJudge"]):
    """One cell's judge of rollouts, on its leader. A context manager, whose exit ends the thread.

    hidden_s   seconds of judging that the last `judge` did not have to wait for
    """

    def __init__(
        self,
        judge: AnyJudge,
        *,
        while_sampling: bool,
        is_leader: bool = True,
        agent: str = "",
        opened_thinking: Callable[[str], str] = lambda _prompt: "",
        judge_reward: Callable[[float | None], Judgement] = partial(environment_judgement, RewardConfig()),  # noqa: B008
        last_error: Callable[[], str] = str,
    ) -> None:
        """Starts nothing yet: the thread begins with the first answer.

        judge             asked about answers, and about conversations whose environment has given no reward
        while_sampling    judges beside the engine, unless a grader is in this process or compares a group's answers
        is_leader         other ranks judge nothing: only the leader needs judgements
        agent             name of the agent that writes the answers
        opened_thinking   start of an answer that its prompt already contains (a <think>), judged as a part of it; turns
                          of a conversation have theirs in Turn.opened
        judge_reward      judgement of a conversation from its environment's reward
        last_error        name and text of the environment's last failure in this process
        """
        self._judge, self._is_leader, self._agent, self._opened_thinking = judge, is_leader, agent, opened_thinking
        self._judge_reward, self._last_error = judge_reward, last_error
        self._settled = JudgeReport()  # of conversations that no judge was asked about, since the last report
        self._is_beside_engine = while_sampling and is_leader and judge.has_workers and not judge.compares_groups
        self._ended: queue.SimpleQueue[tuple[Prompt, Rollout] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_leaving = False
        self._judgements: dict[AnswerKey, Judgement] = {}  # of the thread
        self._error: BaseException | None = None
        self._judged_s = self.hidden_s = 0.0

    @property
    def on_answer(self) -> Callable[[Prompt, Rollout], None] | None:
        """Callback for an answer that has ended while others have not; None if judging waits for all."""
        return self._begin if self._is_beside_engine else None

    def _begin(self, prompt: Prompt, rollout: Rollout) -> None:
        if _is_settled(rollout):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="judge", daemon=True)
            self._thread.start()
        self._ended.put((prompt, rollout))

    def judge(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Judgement]:
        """One judgement per rollout, in order; `prompts` are the answered ones. Waits for judging in progress.

        An empty list on other ranks than the leader.
        """
        if not self._is_leader:
            return []
        judgements = self._finish()
        by_index = {prompt.index: prompt for prompt in prompts}
        settled = [rollout for rollout in rollouts if _is_settled(rollout)]
        judgements |= {_key(rollout): self._judge_reward(rollout.conversation.reward) for rollout in settled}
        # A role that was not reached ("silent") is nobody's failure.
        failed = [r for r in settled if not (judgements[_key(r)].is_judged or "silent" in r.conversation.counts)]
        errors = Counter(map(self._failure, failed))
        self._settled = JudgeReport(num_answers=len(settled), num_unjudged=len(failed), errors=errors)
        rest = [rollout for rollout in rollouts if _key(rollout) not in judgements]
        judgements |= self._judge_all([(by_index[rollout.prompt_index], rollout) for rollout in rest])
        return [judgements[_key(rollout)] for rollout in rollouts]

    def take_report(self) -> JudgeReport:
        """Problems since the last report, and the seconds that the last `judge` did not have to wait for.

        Conversations that their environment left unjudged count as if a grader had left them unjudged.
        """
        report, settled, self._settled = self._judge.take_report(), self._settled, JudgeReport()
        counts = {name: getattr(report, name) + getattr(settled, name) for name in ("num_answers", "num_unjudged")}
        return replace(report, hidden_s=self.hidden_s, errors={**report.errors, **settled.errors}, **counts)

    def _failure(self, rollout: Rollout) -> str:
        """The reason why an environment left a conversation unjudged."""
        conversation = rollout.conversation
        if conversation.reward is not None:
            return "the environment's reward lies outside reward.range"
        names = [name for name in conversation.counts if name in REASONS or name not in (*EVENTS, "environment_ms")]
        last_error = self._last_error()
        reason = last_error if last_error.partition(":")[0] in names else ", ".join(names)
        return f"a conversation failed ({reason or 'no turn was taken'})"

    def _judge_all(self, answers: Sequence[tuple[Prompt, Rollout]]) -> dict[AnswerKey, Judgement]:
        judgements = self._judge.judge([self._question(prompt, rollout) for prompt, rollout in answers])
        return {_key(rollout): judgement for (_, rollout), judgement in zip(answers, judgements, strict=True)}

    def _question(self, prompt: Prompt, rollout: Rollout) -> Asked:
        conversation = rollout.conversation
        opened = self._opened_thinking(prompt.text) if conversation is None else conversation.answer.opened
        answer = opened + rollout.text
        return Asked(prompt.text, answer, prompt.gold, rollout.stop, prompt.row, self._agent, prompt.index)

    def _run(self) -> None:
        """Thread: judges ended answers in batches of all that wait, until it takes the None of `_end_thread`."""
        batch: list[tuple[Prompt, Rollout] | None] = []
        try:
            while None not in batch and not self._is_leaving:
                batch = [self._ended.get()]
                while len(batch) < MAX_BATCH and not self._ended.empty():
                    batch.append(self._ended.get())
                start = time.monotonic()
                self._judgements |= self._judge_all([answer for answer in batch if answer is not None])
                self._judged_s += time.monotonic() - start
        except BaseException as error:  # raised again by `_finish`
            self._error = error

    def _finish(self) -> dict[AnswerKey, Judgement]:
        """Ends the thread and takes its judgements; raises the error that ended it."""
        start = time.monotonic()
        self._end_thread()
        self.hidden_s = max(0.0, self._judged_s - (time.monotonic() - start))
        error, judgements = self._error, self._judgements
        self._error, self._judgements, self._judged_s = None, {}, 0.0
        if error is not None:
            raise error
        return judgements

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._ended.put(None)
            self._thread.join()
            self._thread = None

    def __exit__(self, *exception: object) -> None:
        self._is_leaving = True
        self._end_thread()


def _is_settled(rollout: Rollout) -> bool:
    """True for a conversation that no judge is asked about."""
    return rollout.conversation is not None and rollout.conversation.is_settled


def _key(rollout: Rollout) -> AnswerKey:
    return rollout.prompt_index, rollout.rollout_index
