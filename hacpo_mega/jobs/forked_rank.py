"""A rank on the CPU alone, forked from its launcher, which has imported its modules once for all ranks.

It begins as a fresh interpreter would: no signal is handled, the command line is read again, and its output goes where
its launcher's goes. Imported modules are shared memory. Elsewhere: ranks in fresh interpreters, and waiting for any of
them (local.py).
"""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress


class ForkedRank(multiprocessing.get_context("fork").Process):
    """As much of subprocess.Popen as a launcher asks of a rank. It ends without taking its libraries down."""

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], signals: Collection[signal.Signals]
    ) -> None:
        """Starts `python -m MODULE ARGUMENTS` in a session of its own; none of the `signals` is missed or misled.

        Between the fork and the moment in which they end it, the child holds the launcher's handlers: so they wait.
        """
        super().__init__(target=_play, args=(module, arguments, environment, signals))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """The exit status, None while it runs; the number of the signal that has ended it, negative."""
        return self.exitcode

    @property
    def returncode(self) -> int | None:
        """The same."""
        return self.exitcode

    def wait(self) -> None:
        """Until it has ended."""
        self.join()

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.exitcode is None:
            with suppress(ProcessLookupError):  # a handler may strike between its end and the note of it
                os.kill(self.pid, number)


def _play(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], signals: Collection[signal.Signals]
) -> None:
    os.setsid()
    for number in signals:
        if signal.getsignal(number) != signal.SIG_IGN:  # which a fresh interpreter inherits, too
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
