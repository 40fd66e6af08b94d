"""The folder of an export: whole or not there, never another's removed, and one of two at a time."""

import json
import os
from contextlib import suppress

import pytest

from hacpo_mega.commands.export import OURS, draft_of
from hacpo_mega.logbook.run_lock import signature

pytestmark = pytest.mark.nightly


def test_an_export_is_whole_or_not_there(tmp_path):
    with suppress(RuntimeError), draft_of(tmp_path / "out") as draft:
        (draft / "half").write_text("")
        raise RuntimeError("in the middle")
    assert not (tmp_path / "out").exists()
    with draft_of(tmp_path / "out") as draft:
        (draft / "whole").write_text("")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["whole"]


@pytest.mark.parametrize("fails", [True, False])
def test_an_export_removes_no_folder_but_its_own(fails, tmp_path):
    """Whatever a user has called beside it, and drafts of exports that still go on; those of killed ones go."""
    mine = [f"out{end}" for end in (".part", ".unquantized", ".partial")] + [".out.partial", ".out.mine.partial"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious.txt").write_text(name)
    alive, far, dead = (tmp_path / f".out.{name}.partial" for name in ("alive", "far", "dead"))
    for draft, process, space in ((alive, os.getpid(), None), (far, 2**22, "another boot"), (dead, 2**22, None)):
        draft.mkdir()
        person, known = signature("x").splitlines()
        known = json.loads(known) | {"pid": process} | ({"space": space} if space else {})
        (draft / OURS).write_text(f"{person}\n{json.dumps(known)}\n")
    with suppress(RuntimeError), draft_of(tmp_path / "out") as draft:
        (draft / "config.json").write_text("{}")
        if fails:
            raise RuntimeError("in the middle")
    assert all((tmp_path / name / "precious.txt").read_text() == name for name in mine)
    assert (alive.exists(), far.exists(), dead.exists()) == (True, True, False)
    left = {path.name for path in tmp_path.iterdir()} - {*mine, alive.name, far.name}
    assert left == (set() if fails else {"out"})
    assert fails or [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_two_exports_to_one_name_leave_one_whole_folder(tmp_path):
    def export_second() -> None:
        with draft_of(tmp_path / "out") as second:
            assert second != first
            (tmp_path / "out").mkdir()  # empty: the kernel would let a folder take its place

    with draft_of(tmp_path / "out") as first:
        with pytest.raises(ValueError, match="exists by now"):
            export_second()
        (tmp_path / "out").rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
