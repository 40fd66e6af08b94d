"""A rank on the CPU alone, forked from its launcher, which has imported its modules once for all ranks.

It begins as a fresh interpreter would: without signal handlers, from the command line, with its launcher's output
streams. The memory of imported modules is shared. Elsewhere: ranks in fresh interpreters, and waiting for ranks
(local.py).
"""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress


class ForkedRank(multiprocessing.get_context("fork").Process):
    """The part of subprocess.Popen's interface that the launcher uses. It ends without taking its libraries down."""

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], signals: Collection[signal.Signals]
    ) -> None:
        """Starts `python -m MODULE ARGUMENTS` in a session of its own, which every one of the `signals` ends.

        They are blocked until the child has replaced the launcher's handlers, which it inherits.
        """
        super().__init__(target=_run_module, args=(module, arguments, environment, signals))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """The exit status, or minus the number of the signal that ended it; None while it runs."""
        return self.exitcode

    @property
    def returncode(self) -> int | None:
        """The result of `poll`: no call is needed before."""
        return self.exitcode

    def wait(self) -> None:
        """Waits until it has ended."""
        self.join()

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self.exitcode is None:
            with suppress(ProcessLookupError):  # called from a signal handler, amid the reaping of the process
                os.kill(self.pid, number)


def _run_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], signals: Collection[signal.Signals]
) -> None:
    os.setsid()
    for number in signals:
        if signal.getsignal(number) != signal.SIG_IGN:  # a fresh interpreter, too, inherits that a signal is ignored
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
