"""Data sets by their name on the Hugging Face Hub, hub:ORG/NAME@REVISION/CONFIG/SPLIT, by the library `datasets`.

The launcher downloads one into the library's cache, from which all ranks read it: they are offline. Read by builders of
plain files alone: no script, no image, nothing that is unpickled. The library is an extra and imported only here.
"""

import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pyarrow

from hacpo_mega.models.documents import one_line

HUB = "hub:"
SPELLING = "hub:ORG/NAME[@REVISION]/[CONFIG/]SPLIT"
PART = r"\w[\w.-]{0,95}"
NAME = re.compile(
    rf"hub:(?P<repo>{PART}/{PART})(?:@(?P<revision>{PART}))?(?:/(?P<config>{PART}))?/(?P<split>\w+)", re.A
)
KINDS = ("parquet", "json", "csv", "arrow", "text", "cache")  # the last: what one of the others has written
BUILDERS = frozenset(f"datasets.packaged_modules.{kind}.{kind}" for kind in KINDS)


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set; `revision` is a commit, tag or branch, None the newest, `config` None the only one."""

    repo: str
    split: str
    config: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, path: Path) -> Self | None:
        """What a path such as hub:openai/gsm8k/main/train names; None for one of a file. ValueError for half a name."""
        if not str(path).startswith(HUB):
            return None
        found = NAME.fullmatch(str(path))
        if found is None or ".." in str(path):
            raise ValueError(f"is no data set of the Hub; write {SPELLING}, such as hub:openai/gsm8k/main/train")
        return cls(**found.groupdict())

    def require_library(self) -> None:
        """ValueError, one line, where `datasets` is not installed."""
        if importlib.util.find_spec("datasets") is None:
            raise ValueError("needs the library datasets, which is not installed here; `pip install 'datasets>=4'`")

    def batches(self, num_rows: int) -> Iterator[pyarrow.RecordBatch]:
        """Its rows, at most `num_rows` at once, as they are stored. ValueError, one line, for what cannot be loaded."""
        self.require_library()
        library = importlib.import_module("datasets")
        library.disable_progress_bars()
        try:
            builder = library.load_dataset_builder(self.repo, self.config, revision=self.revision)
            kinds = {
                kind.__module__ for kind in type(builder).__mro__
            }  # a data set with configurations derives its own
            if not kinds & BUILDERS:
                raise ValueError(f"{type(builder).__name__} is no reader of tables or lines")
            builder.download_and_prepare()
            rows = builder.as_dataset(self.split)
        except Exception as error:  # whatever the library, the network and its file formats raise
            said = one_line(str(error).partition("\n")[0]) or type(error).__name__
            hint = "`hacpo-mega check CONFIG --data` downloads it, on a machine with network and the same HF_HOME"
            raise ValueError(f"cannot be loaded ({said}); {hint}") from error
        for table in rows.with_format("arrow").iter(num_rows):
            yield from table.to_batches()
