"""Harm to a stored checkpoint: a bit, another format, a pickle that would run."""

import json
from dataclasses import replace
from pathlib import Path

from hostile_pickles import touching

from hacpo_mega.checkpoint.files import FORMAT, RECORD, Checkpoint, FileState, file_sha256


def flip_a_bit(folder: Path) -> None:
    (file,) = (folder / "first").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def be_of_another_format(folder: Path) -> None:
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps(record | {"format": FORMAT + 1}))


def be_hostile(touched: Path, folder: Path) -> None:
    """Somebody else's checkpoint: its index makes a file when it is unpickled, and every digest is right."""
    (folder / "first" / ".metadata").write_bytes(touching(touched)["os.system"])
    record = Checkpoint.parse(folder, (folder / RECORD).read_text())
    files = {path: FileState((folder / path).stat().st_size, file_sha256(folder / path)) for path in record.files}
    (folder / RECORD).write_text(replace(record, files=files).text())
