"""Checkpoints as files: which step a run goes on from, whatever a killed job has left."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from checkpoint_cases import complaint, config_in, make_step, start_of, written

from hacpo_mega.checkpoint.files import (
    FORMAT,
    RECORD,
    FileState,
    commit,
    committed_steps,
    folder_of,
    latest_checkpoint,
    read_checkpoint,
    remove_old,
    remove_unfinished,
    set_aside,
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_record_survives_its_file_to_the_last_bit(tmp_path):
    config = config_in(tmp_path)
    writing, record = written(config, 12)
    commit(writing, record)
    found = read_checkpoint(tmp_path / "checkpoints" / "step_000012")
    # NaN is not equal to itself
    assert repr(dataclasses.asdict(found)) == repr(dataclasses.asdict(record))
    assert list(found.content_problems()) == []


def test_the_newest_committed_step_is_the_start(tmp_path):
    config = config_in(tmp_path)
    assert start_of(config) is None
    for step in (2, 10, 4):
        make_step(config, step)
    assert start_of(config).step == 10
    assert start_of(config, fresh=True) is None
    assert committed_steps(tmp_path) == [2, 4, 10]


def test_whatever_stage_a_job_is_killed_in_the_last_whole_step_is_found(tmp_path):
    config = config_in(tmp_path)
    make_step(config, 2)
    writing, record = written(config, 4)
    (writing / "llama" / "shard").unlink()  # between the agents
    assert start_of(config).step == 2
    (writing / "llama" / "shard").write_bytes(b"llama after 4 steps")
    (writing / RECORD).write_text(record.text()[:100])  # within the record
    assert start_of(config).step == 2
    (writing / RECORD).write_text(record.text())  # before the rename
    assert start_of(config).step == 2
    remove_unfinished(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]
    make_step(config, 4)  # after it
    assert start_of(config).step == 4
    removing = folder_of(tmp_path, 2).rename(tmp_path / "checkpoints" / "step_000002.removing")  # in the retention
    (removing / "qwen" / "shard").unlink()
    assert (start_of(config).step, committed_steps(tmp_path)) == (4, [4])
    remove_unfinished(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000004"]


@pytest.mark.parametrize(
    "keep_last, keep_every, kept",
    [(1, 0, [12]), (2, 0, [10, 12]), (2, 4, [4, 8, 10, 12]), (9, 0, [2, 4, 6, 8, 10, 12])],
)
def test_old_steps_are_removed(keep_last, keep_every, kept, tmp_path):
    config = config_in(tmp_path)
    for step in range(2, 13, 2):
        make_step(config, step)
    remove_old(tmp_path, keep_last=keep_last, keep_every=keep_every, keep_best=True)
    assert committed_steps(tmp_path) == kept
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(kept)


def test_a_step_that_cannot_be_removed_keeps_no_other_one(tmp_path, monkeypatch):
    """Else one of them lets the disk fill up in silence. The seam is what removes a folder, as NFS answers there."""
    config, remove, held = config_in(tmp_path), shutil.rmtree, {"step_000002.removing", "step_000004.writing"}

    def removed(path: Path, ignore_errors: bool = False) -> None:
        for child in path.iterdir() if path.name in held else ():
            remove(child) if child.is_dir() else child.unlink()
        if path.name not in held:
            remove(path, ignore_errors)
        elif not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    for step in (2, 6, 8, 10):
        make_step(config, step)
    written(config, 4)
    monkeypatch.setattr(shutil, "rmtree", removed)
    how = {"keep_last": 1, "keep_every": 0, "keep_best": False}
    (said,) = remove_old(tmp_path, **how)
    old = tmp_path / "checkpoints" / "step_000002.removing"
    assert said == f"{old} cannot be removed (Directory not empty: {old}) and takes room until it can"
    assert committed_steps(tmp_path) == [10] and list(old.iterdir()) == []
    assert remove_old(tmp_path, **how) == [said] and len(remove_unfinished(tmp_path)) == 2
    held.clear()
    assert remove_old(tmp_path, **how) == [] and not old.exists()
    old.with_name("step_000006").mkdir()
    old.with_name("step_000006.removing").write_text("a file")  # what cannot be renamed keeps no other one, too
    make_step(config, 12)
    assert len(remove_old(tmp_path, **how)) == 2 and committed_steps(tmp_path) == [6, 12]


@pytest.mark.parametrize(
    "accuracies, best",
    [
        ({2: 0.9, 4: 0.5, 6: None, 8: 0.8, 10: None}, 2),
        ({2: 0.9, 4: 0.9, 6: None, 8: 0.8, 10: None}, 4),  # the newer one of equals
        ({2: 0.5, 4: 0.6, 6: 0.5, 8: 0.7, 10: 0.1}, 8),  # kept anyway
        ({2: 0.0, 4: None, 6: None, 8: None, 10: None}, 2),
    ],
)
def test_the_best_step_stays_although_a_job_died_before_it_looked(accuracies, best, tmp_path):
    config = config_in(tmp_path)
    for step, accuracy in accuracies.items():
        make_step(config, step, accuracy)
    (folder_of(tmp_path, 6) / RECORD).write_text("{}")  # a damaged step is no candidate, and disturbs nobody
    remove_old(tmp_path, keep_last=2, keep_every=0, keep_best=True)
    assert committed_steps(tmp_path) == sorted({best, 8, 10})
    remove_old(tmp_path, keep_last=1, keep_every=0, keep_best=False)
    assert committed_steps(tmp_path) == [10]


@pytest.mark.parametrize(
    "override, best",
    [
        ("evaluation.num_prompts=40", 6),  # an easier set of before is no measure of a later one
        ("reward.kind=exact", 6),
        ("data.skills=['add', 'sub']", 6),
        ("reward.success=0.5", 2),
        ("evaluation.every_steps=2", 2),
        ("num_steps=50", 2),
    ],
)
def test_the_best_step_is_one_of_the_present_held_out_prompts(override, best, tmp_path):
    config, changed = config_in(tmp_path), config_in(tmp_path, override)
    for step, accuracy in {2: 0.9, 4: None}.items():
        make_step(config, step, accuracy)
    make_step(changed, 5)
    remove_old(tmp_path, keep_last=1, keep_every=0, keep_best=True)
    assert committed_steps(tmp_path) == [2, 5], "as long as no other evaluation is there"
    for step, accuracy in {6: 0.6, 8: 0.5, 10: None}.items():
        make_step(changed, step, accuracy)
    remove_old(tmp_path, keep_last=1, keep_every=0, keep_best=True)
    assert committed_steps(tmp_path) == [best, 10]


def edit_record(folder: Path, **changed) -> None:
    table = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps(table | changed))


@pytest.mark.parametrize(
    "harm, file, said",
    [
        (lambda folder: (folder / "llama/shard").unlink(), "llama/shard", "is missing"),
        (lambda folder: (folder / "qwen/shard").write_bytes(b"qwen"), "qwen/shard", "it has 4 bytes, written were 18"),
        (lambda folder: (folder / RECORD).unlink(), RECORD, "is missing"),
        (lambda folder: (folder / RECORD).write_text("{}"), RECORD, "is damaged: it is no record of a checkpoint"),
        (lambda folder: (folder / RECORD).write_bytes(b"\xff"), RECORD, "is damaged: it is no record of a checkpoint"),
        (
            lambda folder: edit_record(folder, format=FORMAT - 1),
            RECORD,
            f"is of format {FORMAT - 1}, this version of hacpo_mega reads format {FORMAT}",
        ),
        (lambda folder: edit_record(folder, sha256="0"), RECORD, "is damaged: it is not what was written"),
    ],
)
def test_a_damaged_step_is_named_and_an_older_one_offered(harm, file, said, tmp_path):
    config = config_in(tmp_path)
    make_step(config, 2)
    folder = make_step(config, 4)
    harm(folder)
    before = contents(tmp_path)
    line = complaint(config)
    assert line.startswith(f"{folder / file} ") and said in line and "\n" not in line
    assert line.endswith(f"Step 2 is whole: move {folder} away to go on from there, or give --last-whole")
    assert start_of(config, last_whole=True).step == 2
    assert contents(tmp_path) == before, "looking moves nothing"
    folder.rename(tmp_path / "checkpoints" / "damaged_step_4")
    assert start_of(config).step == 2


def test_a_record_with_other_entries_is_refused_in_a_line(tmp_path):
    """As another version would write it: whole, of the same format, but not what is read here."""
    folder = make_step(config_in(tmp_path), 2)
    state = json.loads((folder / RECORD).read_text())["state"]
    del state["models"]
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    (folder / RECORD).write_text(json.dumps({"format": FORMAT, "sha256": digest, "state": state}))
    line = complaint(config_in(tmp_path))
    assert line.startswith(f"{folder / RECORD} is not a record that this version of hacpo_mega reads: ")
    assert "'models'" in line and "\n" not in line


def test_an_older_step_is_offered_only_if_every_byte_of_it_is_right(tmp_path):
    config = config_in(tmp_path)
    for step in (2, 4, 6):
        make_step(config, step)
    (folder_of(tmp_path, 6) / "qwen/shard").unlink()
    (folder_of(tmp_path, 4) / "qwen/shard").write_bytes(b"qwen after 5 steps")
    assert "Step 2 is whole" in complaint(config)
    (folder_of(tmp_path, 2) / "qwen/shard").unlink()
    assert "No older step is whole: start anew with --fresh" in complaint(config)
    assert start_of(config, fresh=True) is None


def test_damaged_steps_are_moved_aside_and_never_removed(tmp_path):
    config = config_in(tmp_path)
    for step in (2, 4, 6, 8):
        make_step(config, step)
    (folder_of(tmp_path, 6) / RECORD).write_text("{}")
    (folder_of(tmp_path, 8) / "qwen/shard").unlink()
    (tmp_path / "checkpoints" / "damaged_step_000008").mkdir()
    before = sorted(contents(tmp_path).values())
    assert start_of(config, last_whole=True, damaged={4}).step == 2
    lines = list(set_aside(tmp_path, 2, {4: "step 4 was found to be content_problems"}))
    assert [line.rpartition("/")[2] for line in lines] == [f"damaged_step_00000{end}" for end in ("4", "6", "8.1")], (
        lines
    )
    assert lines[0].startswith("step 4 was found to be content_problems; moved to ")
    assert "step.json is damaged: it is no record" in lines[1] and "qwen/shard is missing; moved to " in lines[2]
    assert committed_steps(tmp_path) == [2] and start_of(config).step == 2
    assert sorted(contents(tmp_path).values()) == before


def test_a_run_without_a_whole_step_does_not_begin_anew_by_itself(tmp_path):
    config = config_in(tmp_path)
    for step in (2, 4):
        (make_step(config, step) / RECORD).unlink()
    assert complaint(config, last_whole=True).endswith("has no step that is whole: start anew with --fresh")
    make_step(config, 6)
    assert "has no step that is whole" in complaint(config, last_whole=True, damaged={6})
    assert start_of(config_in(tmp_path / "new"), last_whole=True) is None


def test_a_copy_under_the_name_of_a_later_step_is_refused(tmp_path):
    config = config_in(tmp_path)
    folder = make_step(config, 6)
    copy = folder.with_name("step_000013")
    shutil.copytree(folder, copy)
    line = complaint(config)
    assert line.startswith(f"{copy} is step 6 by its step.json: a copy, or renamed. Step 6 is whole: move {copy} away ")
    assert start_of(config, last_whole=True).folder == folder
    assert "is step 6 by its step.json" in complaint(config_in(tmp_path / "two"), branch=copy)
    assert start_of(config_in(tmp_path / "two"), branch=copy.rename(tmp_path / "kept")).step == 6


def test_a_changed_byte_is_found_by_whoever_reads_the_file(tmp_path):
    config = config_in(tmp_path)
    file = make_step(config, 2) / "llama/shard"
    file.write_bytes(b"llama after 3 steps")
    found = latest_checkpoint(tmp_path)
    assert [list(found.content_problems(slice(rank, None, 2))) for rank in (0, 1)] == [
        [],
        [f"{file} is damaged: it is not what was written (SHA-256 differs)"],
    ]


def test_a_file_with_a_bad_block_is_a_damaged_one(tmp_path):
    """Else --last-whole would end with a traceback at every start, in place of the step before."""
    found = read_checkpoint(make_step(config_in(tmp_path), 2))
    (found.folder / "llama/block").symlink_to("/proc/self/mem")  # the kernel reads nothing at its begin: EIO
    found = dataclasses.replace(found, files=found.files | {"llama/block": FileState(0, "0")})
    said = f"{found.folder / 'llama/block'} cannot be read (Input/output error)"
    assert (list(found.size_problems()), list(found.content_problems())) == ([], [said])


def test_a_record_that_cannot_be_read_is_not_called_missing(tmp_path):
    config = config_in(tmp_path)
    make_step(config, 2)
    record = make_step(config, 4) / RECORD
    record.unlink()
    record.symlink_to(RECORD)  # to itself
    assert f"{record} cannot be read (Too many levels of symbolic links). Step 2 is whole" in complaint(config)
    assert start_of(config, last_whole=True).step == 2


def test_a_run_branches_off_only_where_it_has_no_step_of_its_own(tmp_path):
    source = config_in(tmp_path / "one")
    folder = make_step(source, 2)
    config = config_in(tmp_path / "two")
    assert start_of(config, branch=folder).folder == folder
    own = make_step(config, 6)
    assert start_of(config, branch=folder).folder == own
    assert start_of(config, branch=folder, fresh=True).folder == folder
    assert "is no checkpoint of a run" in complaint(config_in(tmp_path / "three"), branch=tmp_path)


def test_a_run_that_is_moved_aside_cannot_begin_with_a_step_of_its_own(tmp_path, monkeypatch):
    """Else its later checkpoints stayed beside another trajectory, or the step was moved away under its reader."""
    config = config_in(tmp_path / "one")
    folder = make_step(config, 2)
    monkeypatch.chdir(tmp_path)
    for branch in (folder, folder.relative_to(tmp_path)):
        (line,) = complaint(config, branch=branch, fresh=True).splitlines()
        assert line.startswith(f"--from {branch} is of {config.run_dir}, which --fresh moves aside: give "), line
