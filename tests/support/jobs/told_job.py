"""A rank of a run that is told to end at one place of its step: jobs/test_checkpoint.py, jobs/test_answers_ahead.py."""

import os
import time

from job import play_command

import hacpo_mega.trainer.trainer
from hacpo_mega.agent.agent import Agent
from hacpo_mega.cluster.watchdog import Watchdog


def told_at_call(rank: int, number: int, name: str, nth: int, *arguments: str) -> None:
    """`hacpo-mega ARGUMENTS`, in which a rank is told to end as it calls a function for the nth time."""
    owner = Agent if name == "learn" else hacpo_mega.trainer.trainer
    original, calls, watchdogs = getattr(owner, name), [], []

    def telling(*args, **options):
        calls.append(name)
        if len(calls) == nth and os.environ["PLACE_IN_JOB"] == str(rank):
            os.kill(os.getpid(), number)
            while not watchdogs[0].signal_number:  # a thread notes it
                time.sleep(0.001)
        return original(*args, **options)

    os.environ["PLACE_IN_JOB"] = os.environ["RANK"]  # later on RANK counts inside the agent
    setattr(owner, name, telling)
    make = Watchdog.__init__
    Watchdog.__init__ = lambda watchdog, *given: watchdogs.append(watchdog) or make(watchdog, *given)
    play_command(*arguments)
