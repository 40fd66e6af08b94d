"""Data sets by their name on the Hugging Face Hub, hub:ORG/NAME@REVISION/CONFIG/SPLIT, by the library `datasets`.

SPLIT[:N] streams the first N rows, so that a part of a huge set is not a download of all of it.

The launcher downloads a set into the library's cache, from which all ranks read it: they are offline. Read by builders
of plain files alone: no script, no image, nothing that is unpickled. The library is an extra and imported only here.
"""

import hashlib
import importlib
import importlib.util
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pyarrow

from hacpo_mega.data.saved_folders import is_saved, saved_batches
from hacpo_mega.models.documents import one_line

HUB = "hub:"
SPELLING = "hub:ORG/NAME[@REVISION]/[CONFIG/]SPLIT, and [:N] behind it for its first N rows"
PART = r"\w[\w.-]{0,95}"
NAME = re.compile(
    rf"hub:(?P<repo>{PART}/{PART})(?:@(?P<revision>{PART}))?(?:/(?P<config>{PART}))?"
    r"/(?P<split>\w+)(?:\[:(?P<first>[1-9]\d{0,8})\])?",
    re.A,
)
KINDS = ("parquet", "json", "csv", "arrow", "text", "cache")  # the last: what one of the others has written
BUILDERS = frozenset(f"datasets.packaged_modules.{kind}.{kind}" for kind in KINDS)


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set; `revision` is a commit, tag or branch, None the newest, `config` None the only one.

    `first` of its rows, None: all.
    """

    repo: str
    split: str
    config: str | None = None
    revision: str | None = None
    first: int | None = None

    @classmethod
    def parse(cls, path: Path) -> Self | None:
        """What a path such as hub:openai/gsm8k/main/train names; None for one of a file. ValueError for half a name."""
        if not str(path).startswith(HUB):
            return None
        found = NAME.fullmatch(str(path))
        if found is None or ".." in str(path):
            raise ValueError(f"is no data set of the Hub; write {SPELLING}, such as hub:openai/gsm8k/main/train")
        parts = found.groupdict()
        return cls(**parts | {"first": int(parts["first"]) if parts["first"] else None})

    def require_library(self) -> None:
        """ValueError, one line, where `datasets` is not installed."""
        if importlib.util.find_spec("datasets") is None:
            raise ValueError("needs the library datasets, which is not installed here; `pip install 'datasets>=4'`")

    def batches(self, num_rows: int) -> Iterator[pyarrow.RecordBatch]:
        """Its rows, at most `num_rows` at once, as they are stored. ValueError, one line, for what cannot be loaded."""
        self.require_library()
        library = importlib.import_module("datasets")
        library.disable_progress_bars()
        folder = Path(library.config.HF_DATASETS_CACHE) / "first_rows" / self._hash
        try:
            if self.first is None:
                builder = self._builder(library)
                builder.download_and_prepare()
                rows = builder.as_dataset(self.split)
            elif not is_saved(folder):
                _save_first(library, self._builder(library).as_streaming_dataset(self.split), self.first, folder)
        except Exception as error:  # whatever the library, the network and its file formats raise
            said = one_line(str(error).partition("\n")[0]) or type(error).__name__
            hint = "`hacpo-mega check CONFIG --data` downloads it, on a machine with network and the same HF_HOME"
            raise ValueError(f"cannot be loaded ({said}); {hint}") from error
        if self.first is not None:
            yield from saved_batches(folder, num_rows)
            return
        for table in rows.with_format("arrow").iter(num_rows):
            yield from table.to_batches()

    def _builder(self, library: ModuleType) -> Any:
        builder = library.load_dataset_builder(self.repo, self.config, revision=self.revision)
        kinds = {kind.__module__ for kind in type(builder).__mro__}  # a set with configurations derives its own
        if not kinds & BUILDERS:
            raise ValueError(f"{type(builder).__name__} is no reader of tables or lines")
        return builder

    @property
    def _hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def _save_first(library: ModuleType, rows: Any, number: int, folder: Path) -> None:
    """Streams so many rows into a folder that ranks read, whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as part:
        found = list(rows.take(number))
        library.Dataset.from_list(found).save_to_disk(Path(part) / "rows")
        with suppress(OSError):  # another process was faster, with the same rows
            (Path(part) / "rows").rename(folder)
