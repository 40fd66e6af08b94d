"""The generated pages of docs/reference say what the code says; `make reference` writes them anew."""

import importlib.util
from pathlib import Path

import pytest
from repository import ROOT

from hacpo_mega.logbook.files.rollout_log import ANSWER_FIELDS, FIELDS
from hacpo_mega.records import DROP_REASONS, ReencodingCounts

FOLDER = ROOT / "docs" / "reference"


def _generator():
    found = importlib.util.spec_from_file_location("generate", FOLDER / "generate.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


GENERATOR = _generator()


@pytest.mark.parametrize("page", sorted(GENERATOR.PAGES))
def test_the_page_is_what_the_code_says(page: str) -> None:
    written = Path(FOLDER / page).read_text(encoding="utf-8")
    assert written == GENERATOR.PAGES[page](), f"docs/reference/{page} is out of date: make reference"


def test_every_command_and_every_key_is_there() -> None:
    keys = GENERATOR.PAGES["configuration.md"]()
    assert all(f"`{key}`" in keys for key in ("run_dir", "capability_window", "gpus_per_node", "lr"))
    assert all(f"## {name}\n" in GENERATOR.PAGES["commands.md"]() for name in ("train", "data convert", "slurm"))


def test_every_count_of_answers_and_every_field_of_rollouts_is_there() -> None:
    page = GENERATOR.PAGES["metrics.md"]()
    counts = [name for name in ReencodingCounts.__dataclass_fields__ if name.startswith("num_")]
    reasons = [reason.replace("_", " ") for reason in DROP_REASONS]
    known = page.replace("_", " ")
    assert [name for name in counts if name.removeprefix("num_").replace("_", " ") not in known] == []
    assert [reason for reason in reasons if reason not in known] == []
    assert [name for name in (*FIELDS, *ANSWER_FIELDS) if f'"{name}"' not in page] == []
