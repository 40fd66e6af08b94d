"""Models by their name on the Hugging Face Hub, such as Qwen/Qwen3-4B@main, and where the local cache keeps them.

The cache of a machine holds snapshots: models--Qwen--Qwen3-4B/snapshots/COMMIT is a model folder, refs/main the commit
that a branch or tag had when it was last downloaded (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
A run keeps `name@COMMIT`, so that it goes on with the same files after the branch has moved. A name whose first part is
a folder here is a path, never one of the Hub, unless it has a commit: whoever owns an organisation "models" would
otherwise give its weights to everybody who misspells one of his own. Nothing here asks the network;
commands/fetch_models.py does.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from huggingface_hub import constants

from hacpo_mega.models.files.documents import one_line

NAME = re.compile(r"(?P<repo>\w[\w.-]{0,95}/\w[\w.-]{0,95})(?:@(?P<revision>\w[\w./-]{0,127}))?", re.ASCII)
CACHE = constants.HF_HUB_CACHE
COMMIT = re.compile(r"[0-9a-f]{40}")
# The address of a model's page, or of one of its revisions, as a path has it: two slashes are one there.
PAGE = re.compile(
    r"(?:https?:/)?(?:huggingface\.co|hf\.co)/(?P<repo>[^/]+/[^/@]+)(?:/(?:tree|resolve|blob)/(?P<revision>[^/]+).*)?"
)
SCHEME = re.compile(r"hf:/(?P<repo>[^/]+/[^/@]+)(?:@(?P<revision>[^/]+))?")
KINDS_OF_MODEL = "a Hugging Face folder, such as RUN/agents/NAME, or a name on the Hub, ORG/NAME or ORG/NAME@REVISION"


@dataclass(frozen=True)
class HubModel:
    """`repo` is organisation/name; `revision` a branch, a tag or a commit, by default the branch main."""

    repo: str
    revision: str = constants.DEFAULT_REVISION

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The Hub model of a text such as Qwen/Qwen3-4B or Qwen/Qwen3-4B@v1.1; None for one that can only be a path."""
        match = NAME.fullmatch(text)
        if match is None or ".." in text:
            return None
        return cls(match["repo"], match["revision"] or constants.DEFAULT_REVISION)

    @classmethod
    def of_snapshot(cls, folder: Path) -> Self | None:
        """The inverse of `snapshot`: the model, with its commit, of a folder in a cache; None for another."""
        kind, *parts = folder.parent.parent.name.split("--")
        is_one = folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) and kind == "models"
        return cls("/".join(parts), folder.name) if is_one and len(parts) == 2 else None

    @property
    def stored(self) -> Path:
        """The folder of all its snapshots in this machine's cache (HF_HUB_CACHE, or hub in HF_HOME)."""
        return Path(CACHE) / f"models--{self.repo.replace('/', '--')}"

    def snapshot(self) -> Path | None:
        """The folder of its files in the cache; None where the cache does not have it."""
        commit = self.revision
        if not COMMIT.fullmatch(commit):
            ref = self.stored / "refs" / self.revision
            commit = ref.read_text(encoding="ascii", errors="replace").strip() if ref.is_file() else ""
        folder = self.stored / "snapshots" / commit
        return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None

    @property
    def download(self) -> str:
        """The command that puts it into the cache."""
        is_default = self.revision == constants.DEFAULT_REVISION
        return f"hf download {self.repo}" + ("" if is_default else f" --revision {self.revision}")

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


def given_path(text: str | Path) -> Path:
    """The path that a user writes. One with ./ before it or / behind it means a folder, whatever the Hub has."""
    path, is_folder = Path(text), str(text).startswith("./") or str(text).endswith("/")
    return path.absolute() if is_folder and _hub_model(path) else path


def model_folder(path: Path) -> Path:
    """The folder of the model that a user names: the cached snapshot for a name on the Hub, else the path.

    A folder of that name comes first.
    """
    model = _hub_model(path)
    return (model and model.snapshot()) or path


def model_name(folder: Path) -> str:
    """The inverse of `model_folder`, for a run's records: name@COMMIT for a snapshot, else the path."""
    return str(HubModel.of_snapshot(folder) or folder)


def not_cached(path: Path) -> HubModel | None:
    """The Hub model that a path means, if no folder has that name and the cache lacks the model; else None."""
    model = _hub_model(path)
    return None if model is None or model.snapshot() else model


def _hub_model(path: Path) -> HubModel | None:
    model = HubModel.parse(str(path))
    if model is None or path.exists():
        return None
    is_local = Path(model.repo).parent.is_dir() and not COMMIT.fullmatch(model.revision)
    return None if is_local else model


def missing_folder(path: Path) -> str:
    """A line on a model folder that does not exist: what its parent has, and the nearest."""
    model = HubModel.parse(str(path))
    named = Path(path if model is None else model.repo)
    if named.is_dir():
        return f"model folder {path} does not exist: {named} is a folder here, without revisions. Nearest: {named}"
    if not named.parent.is_dir():
        return f"model folder {path} does not exist; give {KINDS_OF_MODEL}{_nearest_name(path)}"
    names = sorted(
        one_line(entry.name) for entry in named.parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    has = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "no folder"
    near = difflib.get_close_matches(named.name, names, n=1)
    note = "" if model is None else f" (the Hub is not asked where {named.parent}/ is a folder)"
    nearest = f". Nearest: {named.parent / near[0]}" if near else ""
    parent = str(named.parent).rstrip("/")
    return f"model folder {path} does not exist: {parent}/ has no {named.name}; it has {has}{note}{nearest}"


def _nearest_name(path: Path) -> str:
    """The end of a line about a Hub page's address: the model name in it."""
    match = PAGE.fullmatch(str(path)) or SCHEME.fullmatch(str(path))
    model = match and HubModel.parse(match["repo"] + (f"@{match['revision']}" if match["revision"] else ""))
    is_default = model is not None and model.revision == constants.DEFAULT_REVISION
    return f". Nearest: {model.repo if is_default else model}" if model else ""
