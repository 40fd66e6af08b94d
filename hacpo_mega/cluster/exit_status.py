"""Exit status of a rank, and with it of the job: docs/reference/exit-codes.md has the table."""

FAILED, REFUSED, STOPPED, STALLED, SIGNALLED = 1, 2, 3, 4, 128  # SIGNALLED + n: ended by signal n
RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: ended by a signal, the run is on disk; start it again to resume
