"""Checkpoints as files: which step a run goes on from, whatever a killed job has left, and what may differ then."""

import dataclasses
import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
from repository import ROOT

from hacpo_mega.checkpoint.files import (
    FORMAT,
    RECORD,
    AgentState,
    Checkpoint,
    FileState,
    commit,
    committed_steps,
    completed,
    file_sha256,
    find_start,
    folder_of,
    latest_checkpoint,
    model_digests,
    plain,
    read_checkpoint,
    remove_old,
    remove_unfinished,
    set_aside,
)
from hacpo_mega.config import Config, load_config
from hacpo_mega.config.changes import changes, refusals

NAMES = ("qwen", "llama")


def config_in(run_dir: Path, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / "quickstart.toml", [f"run_dir={run_dir}", *overrides])


def written(config: Config, step: int, accuracy: float | None = None) -> tuple[Path, Checkpoint]:
    """The shards of a step on disk, and the record that would commit it."""
    folder = folder_of(config.run_dir, step)
    writing = folder.with_name(folder.name + ".writing")
    for name in NAMES:
        (writing / name).mkdir(parents=True)
        (writing / name / "shard").write_bytes(f"{name} after {step} steps".encode())
    files = {f"{name}/shard": writing / name / "shard" for name in NAMES}
    record = Checkpoint(
        folder=folder,
        step=step,
        config=plain(config),
        versions={"torch": "2"},
        models=model_digests(config),
        # what JSON has no number for, and what needs all of a float64
        capability={"history": [[0.1 + 0.2, math.nan], [1 / 3, 1.0]]},
        accuracy=accuracy,
        agents={
            name: AgentState(4 * step, 4 * step - 1, "bfloat16", {"low": [0.1, 1 / 3]}, 1, [{"told": []}])
            for name in NAMES
        },
        files={path: FileState(file.stat().st_size, file_sha256(file)) for path, file in files.items()},
    )
    return writing, record


def make_step(config: Config, step: int, accuracy: float | None = None) -> Path:
    writing, record = written(config, step, accuracy)
    commit(writing, record)
    return record.folder


def start_of(config: Config, **how):
    return find_start(config, **how)


def complaint(config: Config, **options) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        start_of(config, **options)
    return str(error.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_record_survives_its_file_to_the_last_bit(tmp_path):
    config = config_in(tmp_path)
    writing, record = written(config, 12)
    commit(writing, record)
    found = read_checkpoint(tmp_path / "checkpoints" / "step_000012")
    # NaN is not equal to itself
    assert repr(dataclasses.asdict(found)) == repr(dataclasses.asdict(record))
    assert list(found.altered()) == []


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
    assert start_of(config, last_whole=True, but={4}).step == 2
    lines = list(set_aside(tmp_path, 2, {4: "step 4 was found to be altered"}))
    assert [line.rpartition("/")[2] for line in lines] == [f"damaged_step_00000{end}" for end in ("4", "6", "8.1")], (
        lines
    )
    assert lines[0].startswith("step 4 was found to be altered; moved to ")
    assert "step.json is damaged: it is no record" in lines[1] and "qwen/shard is missing; moved to " in lines[2]
    assert committed_steps(tmp_path) == [2] and start_of(config).step == 2
    assert sorted(contents(tmp_path).values()) == before


def test_a_run_without_a_whole_step_does_not_begin_anew_by_itself(tmp_path):
    config = config_in(tmp_path)
    for step in (2, 4):
        (make_step(config, step) / RECORD).unlink()
    assert complaint(config, last_whole=True).endswith("has no step that is whole: start anew with --fresh")
    make_step(config, 6)
    assert "has no step that is whole" in complaint(config, last_whole=True, but={6})
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
    assert [list(found.altered(slice(rank, None, 2))) for rank in (0, 1)] == [
        [],
        [f"{file} is damaged: it is not what was written (SHA-256 differs)"],
    ]


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


@pytest.mark.parametrize(
    "override",
    [
        "num_steps=50",
        "evaluation.every_steps=3",
        "checkpoint.keep_last=5",
        "training.diagnose_every=2",
        "reward.num_workers=3",
        "lanes=2",
        "stall_s=60.0",
        "logging.trace=true",
        "agents.llama.cells_per_lane=2",
    ],
)
def test_what_trains_nothing_may_change(override, tmp_path):
    make_step(config_in(tmp_path), 2)
    assert start_of(config_in(tmp_path, override)).step == 2


def test_what_trains_is_refused_unless_accepted(tmp_path):
    folder = make_step(config_in(tmp_path), 2)
    config = config_in(tmp_path, "seed=11", "agents.qwen.optimizer.lr=1e-5", "algorithm.delta=0.25")
    assert complaint(config).splitlines() == [
        f"{folder} is of another configuration:",
        "seed was 7, is 11: go on all the same with --accept seed, or start anew with --fresh",
        "agents.qwen.optimizer.lr was 0.0004, is 1e-05: go on all the same with --accept agents.qwen.optimizer.lr, or "
        "start anew with --fresh",
        "algorithm.delta was 0.5, is 0.25: go on all the same with --accept algorithm.delta, or start anew with "
        "--fresh",
    ]
    assert complaint(config, accept=("seed", "agents.*.optimizer")).count("\n") == 1
    assert start_of(config, accept=("seed", "agents.*.optimizer.lr", "algorithm")).step == 2


def test_another_layout_goes_through_and_other_fields_of_megatron_are_asked_for():
    before, now = plain(config_in(Path("run"))), plain(config_in(Path("run")))
    stages = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2}
    now["agents"][0] |= {"tp": 2, "pp": 2, "engine_tp": 1, "megatron": {**stages, "recompute_granularity": "full"}}
    free = ("tp", "pp", "engine_tp", *(f"megatron.{key}" for key in stages))
    assert {change.key: change.kind for change in changes(before, now)} == {
        **{f"agents.qwen.{key}": "free" for key in free},
        "agents.qwen.megatron.recompute_granularity": "asked",
    }


def test_agents_are_compared_by_name_and_their_order_counts():
    config = config_in(Path("run"))
    before = plain(config)
    swapped = before | {"agents": before["agents"][::-1]}
    (change,) = changes(before, swapped)
    assert (change.key, change.kind) == ("agents", "fixed")
    assert list(refusals([change], ["agents"])) == [
        'agents was ["qwen", "llama"], is ["llama", "qwen"]: a run cannot go on with another; put it back, or start '
        "anew with --fresh"
    ]
    assert changes(before, json.loads(json.dumps(before))) == []


def test_a_key_that_one_side_lacks_is_a_change():
    before, now = (
        plain(config_in(Path("run"), *override)) for override in ([], ["agents.qwen.prompt_template=Add {prompt}"])
    )
    assert [str(change) for change in changes(before, now)] == [
        'agents.qwen.prompt_template was not given, is "Add {prompt}"'
    ]
    assert [str(change) for change in changes(now, before)] == [
        'agents.qwen.prompt_template was "Add {prompt}", is not given'
    ]


def test_fewer_steps_than_are_done_is_refused(tmp_path):
    folder = make_step(config_in(tmp_path), 6)
    assert (
        complaint(config_in(tmp_path, "num_steps=4"))
        == f"{folder} has 6 steps done, num_steps is 4: give more, or --fresh"
    )


def test_another_model_in_the_same_folder_is_refused(tmp_path):
    models = [f"agents.{name}.model={tmp_path / name}" for name in NAMES]
    config = config_in(tmp_path / "run", *models)
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    folder = make_step(config, 2)
    assert start_of(config).step == 2
    (tmp_path / "llama" / "config.json").write_text('{"hidden_size": 64}')
    assert complaint(config) == (
        f"{folder} is of another model: the config.json of agents.llama.model is not what it was"
    )


def test_keys_that_are_newer_than_a_checkpoint_are_no_change_at_their_defaults():
    config = config_in(Path("run"), "rollout.temperature=0.9")
    now, before = plain(config), plain(config)
    del before["rollout"]["temperature"], before["training"]["pack_by"], before["agents"][0]["offload"]
    assert [str(change) for change in changes(completed(before), now)] == ["rollout.temperature was 1.0, is 0.9"]
    assert completed(now) == now
    gone = plain(config) | {"a_key_of_before": 1}
    assert [str(change) for change in changes(completed(gone), now)] == ["a_key_of_before was 1, is not given"]
