"""Downloads models that a configuration or a command names by their name on the Hugging Face Hub.

Runs once per job, before its ranks, and downloads the files that `from_pretrained` reads, without weights as pickles.
Elsewhere: the folders of the cache (models/files/hub.py).
"""

from collections.abc import Iterable
from pathlib import Path

import httpx
from huggingface_hub import constants, errors, snapshot_download

from hacpo_mega.models.files.documents import one_line
from hacpo_mega.models.files.hub import CACHE, HubModel, not_cached
from hacpo_mega.models.files.visible import say

NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "README.md", "*.py")
DUPLICATES = ("consolidated*.safetensors", "original/*")  # the same weights in another format


def fetch_models(paths: Iterable[Path]) -> None:
    """Downloads models of the Hub in `paths` that the cache lacks, and ignores folders; ValueError as `_fetch`."""
    for model in dict.fromkeys(map(not_cached, paths)):
        if model is not None:
            _fetch(model)


def _fetch(model: HubModel) -> None:
    """Downloads a model into the cache, or completes it there.

    ValueError, one line, for an unknown name or revision, a model that needs a token, and a machine without network.
    """
    if constants.HF_HUB_OFFLINE:
        raise ValueError(_offline_message(model, "HF_HUB_OFFLINE is set"))
    say(f"{model} is not in {CACHE}: downloading it")
    try:
        snapshot_download(
            model.repo, revision=model.revision, allow_patterns=list(NEEDED), ignore_patterns=list(DUPLICATES)
        )
    except errors.GatedRepoError:  # a RepositoryNotFoundError, too
        raise ValueError(
            f"{model.repo} is gated: accept its terms at {constants.ENDPOINT}/{model.repo}, then `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{model.repo} is neither a folder here nor a model on {constants.ENDPOINT}; a private one needs "
            "`hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{model.repo} has no revision {model.revision!r}; leave @{model.revision} out") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise ValueError(_offline_message(model, one_line(str(error).partition("\n")[0]))) from None


def _offline_message(model: HubModel, reason: str) -> str:
    return (
        f"{model} is not in {CACHE} and cannot be downloaded ({reason}); on a machine with network: "
        f"`{model.download}`, with the same HF_HOME"
    )
