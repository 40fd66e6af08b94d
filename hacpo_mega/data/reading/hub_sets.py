"""Data sets by their name on the Hugging Face Hub, hub:ORG/NAME@REVISION/CONFIG/SPLIT, by the library `datasets`.

The launcher downloads one into the library's cache, from which all ranks read it: they are offline. Of SPLIT[:ROWS] the
first rows are streamed, and the cache keeps these alone. Read by builders of plain files alone: no script, no image,
nothing that is unpickled. The library is an extra and imported only here.
"""

import hashlib
import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow
import pyarrow.parquet

from hacpo_mega.models.files.documents import one_line
from hacpo_mega.models.files.replacing import replacing

HUB = "hub:"
SPELLING = "hub:ORG/NAME[@REVISION]/[CONFIG/]SPLIT, or SPLIT[:ROWS] for its first rows"
PART = r"\w[\w.-]{0,95}"
NAME = re.compile(
    rf"hub:(?P<repo>{PART}/{PART})(?:@(?P<revision>{PART}))?(?:/(?P<config>{PART}))?/(?P<split>\w+)"
    r"(?:\[:(?P<num_first>[1-9]\d{0,8})\])?",
    re.ASCII,
)
KINDS = ("parquet", "json", "csv", "arrow", "text", "cache")  # the last: what one of the others has written
BUILDERS = frozenset(f"datasets.packaged_modules.{kind}.{kind}" for kind in KINDS)


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set; `revision` is a commit, tag or branch, None the newest, `config` None the only one.

    `num_first` limits it to so many rows from its start; None: all.
    """

    repo: str
    split: str
    config: str | None = None
    revision: str | None = None
    num_first: int | None = None

    @classmethod
    def parse(cls, path: Path) -> Self | None:
        """The data set that a path such as hub:openai/gsm8k/main/train names; None for a file. ValueError for half a
        name."""
        if not str(path).startswith(HUB):
            return None
        found = NAME.fullmatch(str(path))
        if found is None or ".." in str(path):
            raise ValueError(f"is no data set of the Hub; write {SPELLING}, such as hub:openai/gsm8k/main/train")
        num_first = found["num_first"] and int(found["num_first"])
        return cls(found["repo"], found["split"], found["config"], found["revision"], num_first)

    def require_library(self) -> None:
        """ValueError, one line, where `datasets` is not installed."""
        if importlib.util.find_spec("datasets") is None:
            raise ValueError("needs the library datasets, which is not installed here; `pip install 'datasets>=4'`")

    def batches(self, num_rows: int) -> Iterator[pyarrow.RecordBatch]:
        """Its rows as they are stored, at most `num_rows` at once. ValueError, one line, if they cannot be loaded."""
        self.require_library()
        library = importlib.import_module("datasets")
        library.disable_progress_bars()
        try:
            if self.num_first is None:
                builder = self._builder(library)
                builder.download_and_prepare()
                tables = builder.as_dataset(self.split).with_format("arrow").iter(num_rows)
            else:
                tables = pyarrow.parquet.ParquetFile(self._first_rows(library, num_rows)).iter_batches(num_rows)
        except Exception as error:  # whatever the library, the network and its file formats raise
            reason = one_line(str(error).partition("\n")[0]) or type(error).__name__
            hint = "`hacpo-mega check CONFIG --data` downloads it, on a machine with network and the same HF_HOME"
            raise ValueError(f"cannot be loaded ({reason}); {hint}") from error
        for table in tables:
            yield from table.to_batches() if self.num_first is None else (table,)

    def _builder(self, library: Any) -> Any:
        """The reader of it: one of BUILDERS, or ValueError."""
        builder = library.load_dataset_builder(self.repo, self.config, revision=self.revision)
        # a data set with configurations derives its own
        if not {kind.__module__ for kind in type(builder).__mro__} & BUILDERS:
            raise ValueError(f"{type(builder).__name__} is no reader of tables or lines")
        return builder

    def _first_rows(self, library: Any, num_rows: int) -> Path:
        """The file of its first rows in the library's cache, the newest without a network; made if missing.

        Every commit has its own, so that ranks which cannot ask for the newest read what their launcher has read.
        """
        folder = Path(library.config.HF_DATASETS_CACHE, "hacpo_mega", hashlib.sha256(repr(self).encode()).hexdigest())
        kept = sorted(folder.glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
        try:
            builder = self._builder(library)
        except Exception:  # as for a whole data set, the cached one serves
            if not kept:
                raise
            return kept[-1]
        file = folder / f"{builder.hash}.parquet"
        if not file.is_file():
            tables, num_read = [], 0
            for table in builder.as_streaming_dataset(self.split).with_format("arrow").iter(num_rows):
                tables.append(table)
                num_read += len(table)
                if num_read >= self.num_first:
                    break
            rows = pyarrow.concat_tables(tables, promote_options="permissive").slice(0, self.num_first)
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(file) as stream:
                pyarrow.parquet.write_table(rows, stream)
        return file
