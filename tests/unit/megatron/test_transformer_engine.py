"""A TransformerEngine that Megatron would stumble over is one line; none at all is fine."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from repository import ROOT

from hacpo_mega.megatron.model.installed import version_problem

INSTALLED = ROOT / "hacpo_mega" / "megatron" / "model" / "installed.py"


def install(folder: Path, body: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text(body)
    described = folder / f"transformer_engine-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """The stand-in leaves no trace in this process."""
    yield
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules.pop(name, None)


def test_a_package_without_its_extension_is_one_line(tmp_path, monkeypatch):
    install(tmp_path, "raise FileNotFoundError('no transformer_engine_torch*.so')", "2.17.1", monkeypatch)
    with pytest.raises(ValueError, match=r"installed in part: FileNotFoundError: no transformer_engine_torch") as said:
        runpy.run_path(str(INSTALLED))
    assert "\n" not in str(said.value)


def test_a_version_that_megatron_does_not_take_is_one_line(tmp_path, monkeypatch):
    install(tmp_path, "", "2.20.2", monkeypatch)
    with pytest.raises(ValueError, match=r"transformer-engine 2\.20\.2 is installed; Megatron takes 2\.14 up to"):
        runpy.run_path(str(INSTALLED))


def test_a_whole_one_and_none_pass(tmp_path, monkeypatch):
    runpy.run_path(str(INSTALLED))
    install(tmp_path, "", "2.17.1", monkeypatch)
    runpy.run_path(str(INSTALLED))


@pytest.mark.parametrize(
    "version, is_taken", [("2.13.0", False), ("2.14.0", True), ("2.17.1.post1", True), ("2.20", False)]
)
def test_the_range(version, is_taken):
    assert (version_problem(version) is None) is is_taken


def test_the_extra_asks_for_what_is_taken():
    (extra,) = re.findall(r'"transformer-engine\[pytorch\](.*?)"', (ROOT / "setup.py").read_text())
    assert extra == ">=2.14,<2.20"
