"""The command line: one file per family of commands. `main` is the entry point."""

import atexit
import os
import sys
from contextlib import suppress


def main() -> None:
    """Runs the command line in a process of its own, which ends without taking its libraries down.

    Taking them down takes seconds, and output of Triton and vLLM would bury the line with the reason. Threads are
    joined and exit handlers run as always: this is the last of them.
    """
    status, process = 1, os.getpid()
    for name in ("stdin", "stdout", "stderr"):  # in the order of their numbers, of which each file takes the first
        if getattr(sys, name) is None:  # closed: a file of ours would take its number, and what libraries print
            os.set_inheritable(nowhere := os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(nowhere, "r+", encoding="utf-8"))
    sys.stdout.reconfigure(errors="backslashreplace")  # a locale may lack a sign (zh_CN.GBK, PYTHONIOENCODING)

    def end() -> None:
        if os.getpid() != process:  # forked from it, with an end of its own
            return
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed
            with suppress(OSError):  # the reader may be gone
                stream.flush()
        os._exit(status)

    atexit.register(end)
    try:
        from hacpo_mega.cli import app  # it loads the commands of other packages, which import parts of this one

        app.main()
        status = 0
    except SystemExit as error:
        if not isinstance(error.code, str):  # which is printed, and a failure
            status = error.code or 0
        raise
    except KeyboardInterrupt:  # while it loads, for seconds from a slow disk
        status = 130


__all__ = ["main"]
