"""Replacement of a file in one step: a reader finds the old content or the new one, never a part.

Elsewhere: lines that are added to a file (logbook/files/backlog.py) and secrets (cluster/security/secret.py).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, synced: bool = False) -> Iterator[BinaryIO]:
    """A stream of bytes that replaces `path` when the block ends, and leaves it alone if the block raises.

    synced   whether the bytes are on disk before they have the name, so that a crash of the machine loses neither
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)  # of a killed process that had this one's number, or somebody's link
    try:
        with draft.open("xb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def replace_file(path: Path, content: str | bytes, *, synced: bool = False) -> None:
    """Replaces `path` by bytes, or by a text in UTF-8."""
    with replacing(path, synced=synced) as file:
        file.write(content.encode() if isinstance(content, str) else content)
