"""The documented import of `Unjudged`, which a grader of the user's raises; it stands in workers/grader_calls.py."""

from hacpo_mega.grading.workers.grader_calls import Unjudged

__all__ = ["Unjudged"]
