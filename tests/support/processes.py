"""Which processes there are, from /proc."""

from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """All processes below one, from /proc."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may end while we read
            fields = status.read_text().rpartition(")")[2].split()
            parents[int(status.parent.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than an entry that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
