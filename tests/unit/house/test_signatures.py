"""Stand-ins declare what the pinned releases declare.

The releases' side is text that was read off their sources (signatures.py); where one is installed, its
own files are read again.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from repository import ROOT
from signatures import read_record, signature

STAND_INS = ROOT / "tests" / "support" / "stand_ins"
RECORD = read_record()
CASES = [(release, file, name) for release, files in RECORD.items() for file, names in files.items() for name in names]
# Where a stand-in has another name than the library's.
NAMED = {
    ("transformer-engine", "FusedAdam"): "TEAdam",
    ("transformer-engine", "FusedAdam.step"): "_Adam.step",
    ("apex", "FusedAdam"): "ApexAdam",
}


def stand_in(release: str, name: str) -> str:
    """The signature of what stands for a name of a release."""
    library, (first, _, _) = release.split()[0], name.partition(".")
    own = NAMED.get((library, name)) or name.replace(first, NAMED.get((library, first), first), 1)
    for file in ("te_stand_in.py", "fused_stand_in.py"):
        try:
            return signature((STAND_INS / file).read_text(encoding="utf-8"), own)
        except KeyError:
            continue
    raise KeyError(own)


@pytest.mark.parametrize(
    "release, file, name", CASES, ids=[f"{release.split()[0]} {name}" for release, _, name in CASES]
)
def test_a_stand_in_declares_what_the_release_declares(release, file, name):
    assert stand_in(release, name) == RECORD[release][file][name]


@pytest.mark.parametrize("release", RECORD)
def test_the_installed_release_is_the_recorded_one(release):
    library, version = release.split()[:2]
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed here")
    for file, names in RECORD[release].items():
        package = Path(importlib.util.find_spec(file.partition("/")[0]).origin).parents[1]
        text = (package / file).read_text(encoding="utf-8")
        assert {name: signature(text, name) for name in names} == names, version


def test_the_record_is_of_the_image():
    """The packages of launch/image are those that the stand-ins stand for."""
    pinned = (ROOT / "launch" / "image" / "transformer_engine.txt").read_text(encoding="utf-8")
    recipe = (ROOT / "launch" / "image" / "Dockerfile").read_text(encoding="utf-8")
    releases = dict(release.split()[:2] for release in RECORD)
    assert f"transformer_engine=={releases['transformer-engine']} " in pinned
    assert f"APEX_COMMIT={releases['apex']}" in recipe
