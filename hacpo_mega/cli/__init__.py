"""The command line: one file per family of commands. `main` is the entry point."""

import atexit
import os
import sys
from contextlib import suppress


def main() -> None:
    """Runs the command line, and ends the process without the teardown of its libraries.

    The teardown takes seconds, and output of Triton and vLLM would bury the line with the reason. Threads are joined
    and exit handlers run as always: the one registered here runs last.
    """
    status, process = 1, os.getpid()
    # A closed stream leaves its number to the next file that is opened, which would get what libraries print. The order
    # is that of the numbers: an opened file takes the lowest that is free.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            os.set_inheritable(null := os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(null, "r+", encoding="utf-8"))
    sys.stdout.reconfigure(errors="backslashreplace")  # a locale may lack a character (zh_CN.GBK, PYTHONIOENCODING)

    def end() -> None:
        if os.getpid() != process:  # a forked child, which ends in its own way
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
        if not isinstance(error.code, str):  # Python prints a text, and the status stays 1
            status = error.code or 0
        raise
    except KeyboardInterrupt:  # during imports, which take seconds from a slow disk
        status = 130


__all__ = ["main"]
