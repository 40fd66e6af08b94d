"""The file of an experiment, the order of its runs, and the choice of a learning rate."""

import math

import pytest
from experiment_cases import grid_file, make_grid, make_result
from repository import ROOT

from hacpo_lab.experiments.evidence import evidence_of
from hacpo_lab.experiments.grid import Cell, config_of_cell, load_grid, overrides_of
from hacpo_lab.experiments.identity import folder_digest
from hacpo_lab.experiments.order import (
    Part,
    num_cells,
    num_done,
    pending_cells,
    reported_cells,
    tuned,
    tuning_cells,
)
from hacpo_lab.experiments.table import to_markdown
from hacpo_lab.experiments.trust import read_results

# Final accuracy by rate: shared is best at 4e-4, alone is as good at both.
SCORES = {("alone", 2e-4): 0.5, ("alone", 4e-4): 0.5, ("shared", 2e-4): 0.6, ("shared", 4e-4): 0.7}


def score_of(cell: Cell) -> float:
    return SCORES[cell.method, cell.learning_rate] if cell.stage == "tuning" else 0.8


def spoken(cells) -> list[str]:
    return [f"{cell.method} {cell.learning_rate} {cell.seed}" for cell in cells]


def test_tuning_comes_first_by_method_then_the_seeds_interleaved(tmp_path):
    """The whole order, written by hand; every run is played as soon as the queue asks for it."""
    grid, scores, played = make_grid(tmp_path), {}, []
    while cells := pending_cells(grid, scores):
        played.append(cells[0])
        scores[cells[0]] = score_of(cells[0])
    assert spoken(played) == [
        *("alone 0.0002 11", "alone 0.0002 12", "alone 0.0004 11", "alone 0.0004 12"),
        *("shared 0.0002 11", "shared 0.0002 12", "shared 0.0004 11", "shared 0.0004 12"),
        *("alone 0.0002 1", "shared 0.0004 1", "cut 0.0004 1"),
        *("alone 0.0002 2", "shared 0.0004 2", "cut 0.0004 2"),
        *("alone 0.0002 3", "shared 0.0004 3"),
    ]
    assert [cell.stage for cell in played] == ["tuning"] * 8 + ["reported"] * 8
    assert len(played) == num_cells(grid) == 16
    assert len({cell.name for cell in played}) == 16


def test_methods_are_tuned_with_equal_budgets_on_seeds_not_reported(tmp_path):
    grid = make_grid(tmp_path)
    budgets = [
        {(c.learning_rate, c.seed) for c in tuning_cells(grid, "skills", method)} for method in ("alone", "shared")
    ]
    assert budgets[0] == budgets[1] == {(rate, seed) for rate in (2e-4, 4e-4) for seed in (11, 12)}
    assert tuning_cells(grid, "skills", "cut") == []


def test_the_best_mean_wins_a_tie_goes_to_the_smaller_and_an_edge_is_named(tmp_path):
    grid = make_grid(tmp_path, learning_rates=[8e-4, 2e-4, 4e-4])
    cells = tuning_cells(grid, "skills", "alone")
    means = {2e-4: (0.4, 0.6), 4e-4: (0.3, 0.9), 8e-4: (0.6, 0.6)}
    scores = {cell: means[cell.learning_rate][cell.seed - 11] for cell in cells}
    found = tuned(grid, "skills", "alone", scores)
    assert (found.learning_rate, found.edge) == (4e-4, None)
    assert found.mean_scores == pytest.approx({2e-4: 0.5, 4e-4: 0.6, 8e-4: 0.6})
    lowest = tuned(grid, "skills", "alone", dict.fromkeys(cells, 0.5))
    assert (lowest.learning_rate, lowest.edge) == (2e-4, "lowest")
    highest = tuned(grid, "skills", "alone", {cell: cell.learning_rate for cell in cells})
    assert (highest.learning_rate, highest.edge) == (8e-4, "highest")
    assert tuned(grid, "skills", "alone", dict.fromkeys(cells[:-1], 0.5)) is None, "one run is missing"


def test_rates_with_as_many_right_answers_are_tied_however_they_are_spread(tmp_path):
    """Two agents have 32 right of 48 prompts, 16 and 16 or 8 and 24: six digits of each make a difference of 5e-7."""
    grid = make_grid(tmp_path)
    ends = {2e-4: (0.333333, 0.333333), 4e-4: (0.166667, 0.5)}
    cells = tuning_cells(grid, "skills", "alone")
    scores = {cell: make_result(cell, ends[cell.learning_rate]).score for cell in cells}
    found = tuned(grid, "skills", "alone", scores)
    assert (found.learning_rate, found.edge) == (2e-4, "lowest")


def test_a_best_rate_at_an_end_is_followed_until_it_lies_inside(tmp_path):
    """Scores with a single top at 6e-5 (in the logarithm): 2e-4 and 4e-4 are followed by 1e-4, 5e-5, 2.5e-5."""
    grid, scores = make_grid(tmp_path, further_rates=9), {}
    while missing := [cell for cell in tuning_cells(grid, "skills", "alone", scores) if cell not in scores]:
        assert tuned(grid, "skills", "alone", scores) is None
        scores |= {cell: -abs(math.log(cell.learning_rate / 6e-5)) for cell in missing}
    found = tuned(grid, "skills", "alone", scores)
    assert list(found.mean_scores) == [2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4]
    assert (found.learning_rate, found.edge) == (5e-5, None)
    assert {cell.learning_rate for cell in tuning_cells(grid, "skills", "shared", scores)} == {2e-4, 4e-4}
    assert set(found.mean_scores) <= set(grid.possible_rates())


def test_a_rate_that_stays_at_an_end_is_named_after_the_last_further_rate(tmp_path):
    grid, scores = make_grid(tmp_path, further_rates=2), {}
    while missing := [cell for cell in tuning_cells(grid, "skills", "alone", scores) if cell not in scores]:
        scores |= {cell: cell.learning_rate for cell in missing}
    found = tuned(grid, "skills", "alone", scores)
    assert list(found.mean_scores) == [2e-4, 4e-4, 8e-4, 1.6e-3] and found.edge == "highest"
    largest = make_grid(tmp_path, learning_rates=[0.3, 0.9], further_rates=3)
    assert max(largest.possible_rates()) == 0.9, "a rate above 1 is none"


def test_an_ablation_waits_for_the_rate_of_its_method(tmp_path):
    grid = make_grid(tmp_path)
    scores = {cell: score_of(cell) for cell in tuning_cells(grid, "skills", "alone")}
    assert {cell.method for cell in reported_cells(grid, "skills", scores)} == {"alone"}
    scores |= {cell: score_of(cell) for cell in tuning_cells(grid, "skills", "shared")}
    assert {cell.learning_rate for cell in reported_cells(grid, "skills", scores) if cell.method == "cut"} == {4e-4}


def test_a_single_rate_needs_no_tuning(tmp_path):
    grid = make_grid(tmp_path, learning_rates=[3e-4], tuning_seeds=[])
    assert {cell.stage for cell in pending_cells(grid, {})} == {"reported"}
    assert tuned(grid, "skills", "cut", {}).edge is None


def test_two_machines_share_all_cells_and_never_divide_what_is_compared(tmp_path):
    grid = make_grid(tmp_path)
    scores = {cell: score_of(cell) for method in grid.methods for cell in tuning_cells(grid, "skills", method)}
    for known in ({}, scores):
        shares = [pending_cells(grid, known, Part.parse(text)) for text in ("1/2", "2/2")]
        assert sorted(map(repr, shares[0] + shares[1])) == sorted(map(repr, pending_cells(grid, known)))
    assert [{cell.seed for cell in share} for share in shares] == [{1, 3}, {2}]
    assert {cell.method for cell in pending_cells(grid, {}, Part(0, 2))} == {"alone"}
    for text in ("2", "0/2", "3/2", "a/b", "1/"):
        with pytest.raises(ValueError, match="expected NUMBER/TOTAL"):
            Part.parse(text)


def test_overrides_apply_in_order_regime_method_cell(tmp_path):
    regimes = {"skills": {"config": "run.toml", "set": ["num_steps=3", "algorithm.alpha=2.0"]}}
    grid = make_grid(tmp_path, regimes=regimes)
    assert overrides_of(grid, Cell("skills", "cut", 2e-5, 7, "reported")) == [
        "num_steps=3",
        "algorithm.alpha=2.0",
        "algorithm.alpha=0.0",
        "seed=7",
        "agents.*.optimizer.lr=2e-05",
    ]


BAD = {
    "shared seed": ({"tuning_seeds": [2, 11]}, r"tuning_seeds: \[2\] are also in seeds"),
    "repeated seed": ({"seeds": [1, 2, 1]}, r"seeds: 1 is listed more than once. Nearest: \[1, 2\]"),
    "rates without seeds": ({"tuning_seeds": []}, "learning_rates has 2 values, so tuning_seeds needs at least one"),
    "unknown reference": ({"reference": "shard"}, "reference 'shard' is none of the methods: alone, shared, cut"),
    "a run's file": ({"agents": [{"name": "a"}]}, "a run's configuration, no experiment's grid: use hacpo-mega train"),
    "unknown key": ({"learning_rate": [1e-4]}, "learning_rate: unknown key; did you mean 'learning_rates'?"),
    "unknown key inside": (
        {"methods": {"a": {"seed": [2]}}},
        "methods.a.seed: unknown key; did you mean 'seeds'?",
    ),
    "no config": ({"regimes": {"skills": {}}}, "regimes.skills.config: required, not given"),
    "text for a rate": ({"learning_rates": ["1e-4"]}, "learning_rates.0: needs a number, found '1e-4'"),
    "no results": ({"results": None}, "results: required, not given"),
    "strange seed": (
        {"methods": {"a": {"seeds": [3, 4]}}},
        r"methods.a.seeds: \[4\] are none of the grid's seeds \[1, 2, 3\]",
    ),
    "repeated seed of a method": (
        {"methods": {"a": {"seeds": [3, 3]}}},
        r"methods.a.seeds: 3 is listed more than once. Nearest: \[3\]",
    ),
    "unknown regime": (
        {"methods": {"a": {"regimes": ["gap"]}}},
        r"methods.a.regimes: \['gap'\] unknown; there are: sk",
    ),
    "chain": (
        {"methods": {"a": {}, "b": {"learning_rate_of": "a"}, "c": {"learning_rate_of": "b"}}},
        "methods.c.learning_rate_of 'b' is no method that is tuned itself; there are: a",
    ),
    "own key": (
        {"methods": {"a": {"set": ["agents.qwen.optimizer.lr=1e-3"]}}},
        "methods.a.set: 'agents.qwen.optimizer.lr=1e-3': agents.qwen.optimizer.lr is set by the grid",
    ),
    "own key of a regime": (
        {"regimes": {"skills": {"config": "run.toml", "set": ["seed=3"]}}},
        "regimes.skills.set: 'seed=3': seed is set by the grid",
    ),
    "bad name": ({"methods": {"a b": {}}}, "methods.a b: needs letters, digits, - and _"),
}


@pytest.mark.parametrize("case", BAD, ids=lambda name: name.replace(" ", "-"))
def test_a_bad_grid_is_one_clear_line(tmp_path, case):
    changes, complaint = BAD[case]
    file = grid_file(tmp_path, **changes)
    with pytest.raises(ValueError, match=complaint) as refused:
        load_grid(file)
    assert all(line.startswith(f"{file}: ") for line in str(refused.value).split("\n"))


def test_all_complaints_come_at_once(tmp_path):
    with pytest.raises(ValueError, match="tuning_seeds") as refused:
        make_grid(tmp_path, tuning_seeds=[1], reference="x", methods={"a": {"seeds": [9]}})
    assert len(str(refused.value).split("\n")) == 3


# Cells of tuning, of all seeds, of ablations.
SHIPPED = {
    "evidence": ("skills", 8 * 3 * 2 + 8 * 6 + 7 * 3),
    "evidence_gap": ("gap", 7 * 3 * 1 + 7 * 6 + 6 + 3 * 3),
    "evidence_unequals": ("strong_weak", 9 * 2 * 2 + 12 * 8),
    "evidence_ways": ("two_ways", 10 * 2 * 2 + 13 * 8),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_grid_is_sound_in_every_cell(monkeypatch, tmp_path, name):
    monkeypatch.chdir(ROOT)
    grid, (regime, cells) = load_grid(ROOT / f"configs/{name}.toml"), SHIPPED[name]
    assert num_cells(grid) == cells
    configs = {m: config_of_cell(grid, Cell(regime, m, 2e-4, 1, "reported"), tmp_path / "run") for m in grid.methods}
    assert len(
        {config.model_dump_json(include={"algorithm", "rollout", "training"}) for config in configs.values()}
    ) == len(grid.methods)
    assert {agent.optimizer.lr for config in configs.values() for agent in config.agents} == {2e-4}


@pytest.mark.parametrize("name", ["evidence", "evidence_gap", "evidence_equals", "evidence_unequals", "evidence_ways"])
def test_the_tables_in_the_repository_are_those_of_its_results(monkeypatch, name):
    """Beside the results of a whole grid lie its tables, as --table-only makes them."""
    monkeypatch.chdir(ROOT)
    grid = load_grid(ROOT / f"configs/{name}.toml")
    results, strangers = read_results(grid)
    assert results and all(".hacpo_calibrated." in name for name in strangers), "an option that is gone"
    scores = {cell: result.score for cell, result in results.items()}
    used = num_done(grid, scores)
    assert num_cells(grid, scores) == used
    made = to_markdown(grid, evidence_of(grid, results), used, 0)
    assert (grid.results / "README.md").read_text(encoding="utf-8") == made


@pytest.mark.parametrize(
    ("name", "seed", "folder"),
    [
        ("evidence", 6, ""),
        ("evidence_gap", 6, ""),
        ("evidence_equals", 1, ""),
        ("evidence_unequals", 1, "strong_weak/seed-1"),
        ("evidence_ways", 1, "two_ways/seed-1"),
    ],
)
def test_the_stored_warm_starts_are_those_that_a_seed_began_from(monkeypatch, name, seed, folder):
    """So whoever goes on with a grid, or repeats a cell, on another processor, which would make others, can do so."""
    monkeypatch.chdir(ROOT)
    grid = load_grid(ROOT / f"configs/{name}.toml")
    began = [found for cell, found in read_results(grid)[0].items() if (cell.stage, cell.seed) == ("reported", seed)]
    kept = {model.name: folder_digest(model) for model in (grid.results / "warm_starts" / folder).iterdir()}
    assert began and all(found.identity.models == kept for found in began)
