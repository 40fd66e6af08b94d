"""Running processes, and the ports on which they listen, from /proc."""

import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

LISTENS = "0A"


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
    """True if a process exists and is more than an entry that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which one of these processes accepts connections."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):  # it may end while we read
            inodes |= {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in inodes]
    return {(_address(digits), int(port, 16)) for digits, port in found}


def _address(digits: str) -> str:
    """The kernel writes words of 32 bits as this machine has them."""
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    return str(ip_address(struct.pack(f"={len(words)}I", *words)))
