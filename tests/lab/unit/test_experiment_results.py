"""Results on disk: what is kept of a run, digests of what it was made from, and what is refused to stand in a table."""

import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from experiment_cases import COMMIT, grid_file, make_grid, make_result
from job import run_here
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_lab.experiments import campaign, trust
from hacpo_lab.experiments.grid import Cell, load_grid
from hacpo_lab.experiments.identity import folder_digest, identity_of
from hacpo_lab.experiments.order import Part
from hacpo_lab.experiments.result import diagnose, measure, pack_results, read_packed, read_result, write_result
from hacpo_lab.experiments.trust import (
    check_cells,
    check_identities,
    read_results,
    require_agreement,
    require_same,
    seeds_begun_elsewhere,
)
from hacpo_mega.cli import app as cli
from hacpo_mega.config import load_config
from hacpo_mega.logbook.files.metrics import MetricsWriter, StepMetrics
from hacpo_mega.logbook.run.run_lock import RunLock

CELL = Cell("skills", "alone", 2e-4, 11, "tuning")
OTHER = Cell("skills", "shared", 2e-4, 11, "tuning")


@pytest.fixture(scope="module")
def run_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    agent = agent_table(folder, "qwen", "qwen3", CHARACTERS)
    return write_config(folder, [agent], evaluation={"num_prompts": 8, "every_steps": 1})


def test_a_packed_folder_reads_as_its_files_did_and_a_broken_line_is_named(tmp_path):
    results = [make_result(cell, (0.5,)) for cell in (CELL, OTHER)]
    for result in results:
        write_result(tmp_path, result)
    packed = pack_results(tmp_path, results)
    assert [path.name for path in tmp_path.iterdir()] == ["runs.jsonl"]
    assert sorted(read_packed(tmp_path), key=str) == sorted(results, key=str)
    other = make_result(CELL, (0.75,)).model_copy(update={"stage": "reported"})
    pack_results(tmp_path, [other])  # of a grid that has the same seed for another stage, and not the other method
    assert sorted(read_packed(tmp_path), key=str) == sorted([*results, other], key=str)
    unpacked = write_result(tmp_path, other)  # of a grid that is not done yet
    pack_results(tmp_path, results[1:])
    assert unpacked.exists()
    with packed.open("a") as file:
        file.write('{"agents": 1}\n')
    with pytest.raises(ValueError, match=r"runs.jsonl:4: not the result of a run"):
        pack_results(tmp_path, results)
    *_, problem = read_packed(tmp_path)
    assert str(problem).startswith(f"{packed}:4: not the result of a run (")
    assert not list(read_packed(tmp_path / "none"))


@pytest.mark.parametrize("when", ["between two files", "after the packed ones"])
def test_a_folder_that_another_machine_packs_meanwhile_is_read_whole(tmp_path, monkeypatch, when):
    grid = make_grid(tmp_path)
    results = {cell: make_result(cell, (0.5,)) for cell in (CELL, OTHER)}
    for result in results.values():
        write_result(grid.results, result)

    def read_then_pack(*where):
        found = read_result(*where) if when == "between two files" else list(read_packed(*where))
        pack_results(grid.results, results.values())
        return found

    monkeypatch.setattr(trust, "read_result" if when == "between two files" else "read_packed", read_then_pack)
    assert read_results(grid) == (results, [])


def test_a_result_is_read_back_as_it_was_written(tmp_path):
    result = make_result(CELL, (0.5, 0.75))
    path = write_result(tmp_path / "new", result)
    assert path.name == "skills.alone.lr-0.0002.seed-11.json"
    assert read_result(path) == result
    assert result.score == pytest.approx(0.625)
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half written is left"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 1, "regime": '])
def test_a_broken_file_is_named(tmp_path, text):
    grid = make_grid(tmp_path)
    path = write_result(grid.results, make_result(CELL, (0.5,)))
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path.name}: not the result of a run .*; remove it"):
        read_results(grid)


def test_a_renamed_file_is_named(tmp_path):
    grid = make_grid(tmp_path)
    path = write_result(grid.results, make_result(CELL, (0.5,)))
    path.rename(path.with_name("copy.json"))
    with pytest.raises(ValueError, match=rf"copy.json: holds the run {CELL.name}; expected it as {CELL.name}.json"):
        read_results(grid)


def test_results_of_other_grids_are_left_alone(tmp_path):
    grid = make_grid(tmp_path)
    for cell in (CELL, Cell("gap", "alone", 2e-4, 11, "tuning"), Cell("skills", "alone", 2e-4, 99, "reported")):
        write_result(grid.results, make_result(cell, (0.5,)))
    known, others = read_results(grid)
    assert list(known) == [CELL] and len(others) == 2


def test_results_that_this_source_would_not_make_are_refused(tmp_path):
    grid = make_grid(tmp_path)
    expected = {("skills", "alone"): make_result(CELL, (0.5,)).identity}
    require_same(grid, {CELL: make_result(CELL, (0.5,))}, expected, COMMIT)
    changes = {
        "commit": ({"commit": "b" * 40}, f"commit {'b' * 40}, expected {COMMIT}; check that commit out"),
        "config": ({"config": "x"}, "configuration x, expected config of alone; undo the change"),
        "prompts": ({"held_out": "x"}, "held-out data x, expected prompts"),
        "model": ({"models": {"A": "x"}}, "warm start of A x, expected start; copy the model folder"),
    }
    for change, complaint in changes.values():
        with pytest.raises(ValueError, match=rf"{CELL.name}.json: {complaint}.*--table-only") as refused:
            require_same(grid, {CELL: make_result(CELL, (0.5,), **change)}, expected, COMMIT)
        assert "\n" not in str(refused.value)
    both = {
        cell: make_result(cell, (0.5,), commit="b" * 40)
        for cell in (CELL, Cell("skills", "alone", 4e-4, 1, "reported"))
    }
    with pytest.raises(ValueError, match=r"^[^\n]*--table-only \(1 more like it\)$"):
        require_same(grid, both, expected, COMMIT)


def test_without_a_checkout_the_installed_version_is_the_source(tmp_path, run_config, monkeypatch):
    regimes = {"skills": {"config": str(run_config)}}
    grid = load_grid(grid_file(tmp_path, methods={"fine": {}}, regimes=regimes, learning_rates=[2e-4], tuning_seeds=[]))
    identity = check_identities(check_cells(grid))["skills", "fine"].model_dump()
    for commit, refusal in ((None, "commit None, expected v7"), ("v7", "")):
        write_result(
            grid.results, make_result(Cell("skills", "fine", 2e-4, 1, "reported"), (0.5,), commit=commit, **identity)
        )
        monkeypatch.setattr(campaign, "source_commit", lambda: None)
        monkeypatch.setattr(campaign, "installed_versions", lambda: {"hacpo_mega": "7"})
        with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
            campaign.run_campaign(grid, print, print, limit=0)


def test_results_of_two_sources_never_stand_in_one_table(tmp_path):
    grid = make_grid(tmp_path)
    twin = Cell("skills", "alone", 2e-4, 12, "tuning")
    first = make_result(CELL, (0.5,))
    require_agreement(grid, [first, make_result(twin, (0.4,)), make_result(OTHER, (0.4,))])
    for change in ({"commit": "b" * 40}, {"held_out": "x"}, {"config": "x"}):
        with pytest.raises(ValueError, match=rf"{twin.name}.json: .*, but .* in {CELL.name}.json") as refused:
            require_agreement(grid, [first, make_result(twin, (0.4,), **change)])
        assert "\n" not in str(refused.value)


def test_warm_starts_may_differ_between_seeds_and_not_within_one(tmp_path):
    grid = make_grid(tmp_path)
    cells = [Cell("skills", method, 4e-4, seed, "reported") for seed in (1, 2) for method in ("alone", "shared")]
    of_seed = {cell: make_result(cell, (0.5,), models={"A": f"start {cell.seed}"}) for cell in cells}
    require_agreement(grid, list(of_seed.values()))
    of_seed[cells[3]] = make_result(cells[3], (0.5,), models={"A": "start 1"})
    complaint = rf"{cells[3].name}.json: warm start of A start 1, but start 2 in {cells[2].name}.json"
    with pytest.raises(ValueError, match=complaint):
        require_agreement(grid, list(of_seed.values()))


def test_a_seed_is_not_finished_from_other_warm_starts(tmp_path):
    """A grid with a single rate has finished seed 1; seed 2 lacks a run, which would begin from what is here now."""
    grid = make_grid(tmp_path, learning_rates=[4e-4], tuning_seeds=[])
    cells = [Cell("skills", method, 4e-4, seed, "reported") for seed in (1, 2) for method in grid.methods]
    here = {(cell.regime, cell.method): make_result(cell, (0.5,)).identity for cell in cells}
    there = {cell: make_result(cell, (0.5,), models={"A": "there"}) for cell in cells}
    require_same(grid, {cell: there[cell] for cell in cells[:3]}, here, COMMIT)
    assert seeds_begun_elsewhere(grid, there, here) == [1, 2]
    mixed = {cells[0]: make_result(cells[0], (0.5,)), cells[3]: there[cells[3]]}
    assert seeds_begun_elsewhere(grid, mixed, here) == [2]
    with pytest.raises(ValueError, match=rf"{cells[3].name}.json: warm start of A there, expected start"):
        require_same(grid, {cell: there[cell] for cell in cells[:4]}, here, COMMIT)
    require_same(grid, {cell: there[cell] for cell in cells[:4]}, here, COMMIT, Part.parse("1/2"))
    with pytest.raises(ValueError, match="warm start of A there"):
        require_same(grid, {cell: there[cell] for cell in cells[:4]}, here, COMMIT, Part.parse("2/2"))


def test_the_table_of_two_sources_is_refused_by_the_command(tmp_path):
    grid = make_grid(tmp_path)
    write_result(grid.results, make_result(CELL, (0.5,)))
    write_result(grid.results, make_result(OTHER, (0.5,), commit="b" * 40))
    done = run_here("experiment", tmp_path / "grid.toml", "--table-only")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "commit" in done.stderr and not grid.work_dir.exists()


def test_digests_follow_what_they_are_of(tmp_path, run_config):
    base = identity_of(load_config(run_config))
    changes = ["seed=5", "run_dir=elsewhere", "agents.*.optimizer.lr=1e-5", "wait_s=60.0", "slurm.partition=gpu"]
    changes += ["reward.num_workers=1", "training.verify_weights_every=3", "agents.*.cells_per_lane=2"]
    same = identity_of(load_config(run_config, changes))
    assert same == base
    other = identity_of(load_config(run_config, ["training.prompts_per_update=8"]))
    assert (other.held_out, other.models) == (base.held_out, base.models) and other.config != base.config
    assert identity_of(load_config(run_config, ["evaluation.num_prompts=12"])).held_out != base.held_out
    assert identity_of(load_config(run_config, ["reward.kind=arithmetic"])).held_out != base.held_out
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in load_config(run_config).agents[0].model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert folder_digest(copy) == base.models["qwen"]
    twin = tmp_path / "twin"
    copy.rename(twin)
    with (twin / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert folder_digest(twin) != base.models["qwen"]


def test_digests_follow_the_users_own_code(tmp_path, run_config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = ["reward.kind=own_reward:reward", "algorithm.advantages=own.py:advantages"]
    file, module = Path("own.py"), Path("own_reward.py")
    file.write_text("def advantages(judged):\n    return judged.rewards_PNG\n")
    module.write_text("def reward(answer):\n    return 1.0\n")
    base = identity_of(load_config(run_config, named))
    assert identity_of(load_config(run_config, named)) == base
    file.write_text(file.read_text().replace("return ", "return -"))
    other = identity_of(load_config(run_config, named))
    assert other.config != base.config and other.held_out == base.held_out
    module.write_text(module.read_text().replace("1.0", "0.0"))
    last = identity_of(load_config(run_config, named))
    assert last.config != other.config and last.held_out != other.held_out


def test_every_cell_is_checked_before_anything_starts(tmp_path, run_config):
    methods = {
        "fine": {},
        "odd": {"set": ["training.prompts_per_update=3"]},
        "typo": {"set": ["algorithm.alhpa=1.0"]},
        "blind": {"set": ["evaluation.every_steps=0"]},
    }
    grid = load_grid(grid_file(tmp_path, methods=methods, regimes={"skills": {"config": str(run_config)}}))
    with pytest.raises(ValueError, match=r"methods\.odd") as refused:
        check_cells(grid)
    lines = str(refused.value).split("\n")
    assert len(lines) == 3
    assert lines[0].startswith(f"regimes.skills with methods.odd: {run_config}: training.prompts_per_step (8) must be")
    assert "methods.typo" in lines[1] and "did you mean 'alpha'?" in lines[1]
    assert "methods.blind" in lines[2] and "evaluation.every_steps is 0" in lines[2]


def test_methods_must_share_held_out_data(tmp_path, run_config):
    methods = {"fine": {}, "easy": {"set": ["evaluation.num_prompts=12"]}}
    grid = load_grid(grid_file(tmp_path, methods=methods, regimes={"skills": {"config": str(run_config)}}))
    with pytest.raises(ValueError, match=r"held-out data of methods.easy \(.*\) and methods.fine \(.*\) differ"):
        check_identities(check_cells(grid))


def test_a_second_queue_on_the_same_folder_is_refused(tmp_path, run_config):
    file = grid_file(tmp_path, methods={"fine": {}}, regimes={"skills": {"config": str(run_config)}})
    with RunLock(tmp_path / "work"):
        done = run_here("experiment", file)
    assert done.returncode == 2
    assert f"work_dir {tmp_path / 'work'} is being written by process" in done.stderr


def write_metrics(folder: Path, name: str = "accuracy") -> None:
    """Three steps of 4 answers each, evaluated before, after 2 and after 3; the clock runs 10 s per step."""
    with MetricsWriter(folder) as writer:
        for step in range(4):
            values = {"agent/A/num_answers": 4.0, "agent/A/reward_mean": step / 4, "omega/A/B": 2.0} if step else {}
            if step != 1:
                values |= {f"agent/A/{name}": 0.1 * step, f"agent/A/{name}/add": 0.2 * step}
            if step != 1 and name == "eval/reward_mean":
                values |= {"agent/A/eval/reward_square": 0.05 * step, "agent/A/eval/reward_square/add": 0.1 * step}
            writer.write(step, StepMetrics(values, {"agent/A/phase/evaluate_s": 1.5} if step in (2, 3) else {}))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["timing"]["time_unix_s"] = 1000.0 + 10 * line["step"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_is_kept_of_a_run_by_hand(tmp_path):
    write_metrics(tmp_path)
    found = measure(tmp_path, ["A"], every_steps=2)
    assert found.steps == (0, 2, 3)
    assert found.seconds == (0.0, 18.5, 27.0)
    assert found.curves.accuracy == {"A": (0.0, 0.2, 0.3)}
    assert found.curves.accuracy_by_skill == {"A": {"add": (0.0, 0.4, 0.6)}}
    assert found.curves.generated_answers == {"A": (0, 8, 12)}
    assert found.curves.trained_answers == found.curves.updates == {}, "absent is absent"
    assert found.diagnosis.values == {"agent/A/reward_mean": (0.5,), "omega/A/B": (2.0,)}


def test_what_is_kept_of_graded_rewards_is_the_same_by_another_name(tmp_path):
    for name in ("accuracy", "eval/reward_mean"):
        (tmp_path / name).mkdir(parents=True)
        write_metrics(tmp_path / name, name)
    right, graded = (measure(tmp_path / name, ["A"], 2) for name in ("accuracy", "eval/reward_mean"))
    assert (right.curves.is_graded, graded.curves.is_graded) == (False, True)
    assert graded.curves == right.curves.model_copy(update={"is_graded": True})
    assert graded.diagnosis == right.diagnosis


def test_a_run_without_one_of_its_evaluations_has_measured_nothing(tmp_path):
    write_metrics(tmp_path)
    assert measure(tmp_path, ["A"], every_steps=1) is None
    assert measure(tmp_path, ["A", "B"], every_steps=2) is None


def test_diagnosis_has_windows_of_ten_steps_and_no_broken_number():
    steps = {step: StepMetrics({"omega/A/B": float(step), "agent/A/gap_max": float(step)}, {}) for step in range(1, 26)}
    steps[12] = StepMetrics({"omega/A/B": math.nan}, {})
    found = diagnose(steps)
    assert found.steps_per_window == 10
    assert found.values == {"agent/A/gap_max": (10.0, 20.0, 25.0), "omega/A/B": (5.5, None, 23.0)}


def test_the_file_of_a_long_run_of_many_agents_stays_small(tmp_path):
    names = {f"agent/{a}/from/{b}/{m}": 0.123456 for a in "ABCD" for b in "ABCD" for m in ("below", "inside", "above")}
    diagnosis = diagnose({step: StepMetrics(names, {}) for step in range(1, 401)})
    result = make_result(CELL, (0.5, 0.75)).model_copy(update={"diagnosis": diagnosis})
    assert write_result(tmp_path, result).stat().st_size < 20_000


def test_results_of_an_experiment_that_are_a_file_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").write_text("")
    grid = grid_file(tmp_path, results=str(tmp_path / "taken"))
    monkeypatch.setattr(sys, "argv", ["hacpo-mega", "experiment", str(grid)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert any("results" in line and str(tmp_path / "taken") in line for line in said), said
