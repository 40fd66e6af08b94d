"""modelopt is called as the installed release declares, and its absence is one line."""

import inspect
import runpy
import sys

import pytest
from repository import ROOT

from hacpo_mega.commands import quantize

pytestmark = pytest.mark.nightly


def test_what_is_asked_of_modelopt_is_there():
    """The installed one is the pinned one on the CPU, too."""
    inspect.signature(quantize.mtq.quantize).bind("model", {"quant_cfg": []}, lambda model: None)
    inspect.signature(quantize.export_hf_checkpoint).bind("model", export_dir="folder")
    assert quantize.FORMATS.keys() == quantize.SIMULATED_ON.keys()


def test_without_modelopt_it_is_one_line(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "modelopt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "modelopt", None)
    with pytest.raises(ValueError, match="--quantize needs nvidia-modelopt, which is not installed here") as said:
        runpy.run_path(str(ROOT / "hacpo_mega" / "commands" / "quantize.py"))
    assert "\n" not in str(said.value)
