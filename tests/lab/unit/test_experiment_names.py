"""Names of a grid become names of files: what a grid may call its regimes and methods."""

import pytest
from experiment_cases import grid_file

from hacpo_lab.experiments.grid import NAME_MAX, PID_DIGITS, Cell, load_grid

pytestmark = pytest.mark.nightly

SHARED = {"shared": {}}


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "-x", "a b", "a\n", "a\x1b[2J", "", "ä", "a.json"])
@pytest.mark.parametrize("table", ["regimes", "methods"])
def test_a_name_that_leads_elsewhere_is_refused(table, name, tmp_path):
    tables = {"regimes": {name: {"config": str(tmp_path / "run.toml")}}, "methods": {**SHARED, name: {}}}
    with pytest.raises(ValueError, match=rf"grid.toml: {table}\."):
        load_grid(grid_file(tmp_path, **{table: tables[table]}))


def test_the_longest_accepted_name_is_the_longest_that_a_disk_can_store(tmp_path, monkeypatch):
    """The file that is written first carries a dot, the process and an ending beside the name of the run."""
    monkeypatch.setattr("hacpo_lab.experiments.grid.load_config", lambda *_: None)
    around = len(f".{Cell('skills', 'shared', 4e-4, 12, 'reported').name}.json.{'9' * PID_DIGITS}.tmp")
    longest = "skills" + "s" * (NAME_MAX - around)
    (tmp_path / ("x" * NAME_MAX)).touch()  # this file system takes as many
    for regime, is_long in ((longest, False), (longest + "s", True)):
        file = grid_file(tmp_path, regimes={regime: {"config": str(tmp_path / "run.toml")}}, methods=SHARED)
        try:
            load_grid(file)
            said = ""
        except ValueError as error:
            said = str(error)
        assert ("a file system takes 255. Nearest: 1 characters less" in said) == is_long, said
