"""Graders of model answers, and the judge that runs them in guarded processes. It knows nothing of hacpo_mega.

judge.Judge is the door; graders.registry.GRADERS has every built-in grader; workers.grader_calls.Unjudged is what a
grader of yours raises where it is at fault itself.
"""
