"""Every test file has a budget, all together keep what docs/design/testing.md says, and a slow day is no finding."""

import ast
from pathlib import Path

import pytest
from budgets import (
    FAST,
    LAB,
    MAKE_TEST,
    NIGHTLY,
    SPARE,
    TESTS,
    Part,
    file_of,
    is_left_out,
    order,
    over_budget,
    read_budgets,
    scope_of,
    write_budgets,
)

# Seconds of the workers that the Makefile starts on two cores: 4 1/3 minutes of `make test`, and 29 of `make test-all`.
LIMITS_S = {(FAST,): 2 * 260, (FAST, NIGHTLY, LAB): 3 * 29 * 60}


def files_with_tests() -> list[str]:
    """Relative to tests/; those that need a CUDA device are in no tier."""
    files = (path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py"))
    return sorted(file for file in files if not file.startswith("gpu/"))


def tiers_of(file: Path) -> set[str]:
    """The tiers of a file's tests, by where the marker stands: on the file, on a test or on one of its cases."""
    if file.is_relative_to(TESTS / LAB):
        return {LAB}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and names_nightly(node.value):
            return {NIGHTLY}
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            is_nightly = any(ast.unparse(decorator) == "pytest.mark.nightly" for decorator in node.decorator_list)
            found |= {NIGHTLY} if is_nightly else {FAST}
    return found | ({NIGHTLY} if names_nightly(tree) else set())


def names_nightly(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == NIGHTLY for node in ast.walk(tree))


def test_every_file_has_a_budget_in_every_tier_that_it_has_tests_in():
    expected = {Part(tier, file) for file in files_with_tests() for tier in tiers_of(TESTS / file)}
    found = set(read_budgets())
    assert sorted(expected - found) == [], "run it with --write-budgets (make budgets runs everything)"
    assert sorted(found - expected) == [], "there is no such test"


@pytest.mark.parametrize("tiers", LIMITS_S, ids=" and ".join)
def test_all_budgets_together_keep_the_time_that_is_promised(tiers):
    budgets = read_budgets()
    assert sum(seconds for part, seconds in budgets.items() if part.tier in tiers) <= SPARE * LIMITS_S[tiers]


def test_a_run_replaces_its_own_numbers_alone(tmp_path):
    file, here = tmp_path / "budgets.toml", "unit/house/test_budgets.py"
    file.write_text(f'[fast]\n"{here}" = 9\n"unit/gone.py" = 9\n[lab]\n"test_architecture.py" = 7\n')
    write_budgets({Part(FAST, here): 10.0, Part(NIGHTLY, here): 0.01, Part(FAST, "gpu/test_x.py"): 5.0}, file)
    kept = {Part(LAB, "test_architecture.py"): 7}
    assert read_budgets(file) == kept | {Part(FAST, here): 12, Part(NIGHTLY, here): 1}
    assert "make budgets" in file.read_text()


BUDGETS = {Part(FAST, f"unit/test_{letter}.py"): 10.0 for letter in "abcdefgh"}
A = Part(FAST, "unit/test_a.py")


def test_a_machine_that_is_slower_makes_no_file_slow():
    assert over_budget(dict.fromkeys(BUDGETS, 8.0), BUDGETS) == (1.0, [])
    assert over_budget(dict.fromkeys(BUDGETS, 70.0), BUDGETS) == (7.0, [])


def test_a_file_that_is_slower_than_the_others_is_named_with_its_seconds():
    slow = ["unit/test_a.py (fast): 16 s, budget 10 s"]
    assert over_budget({A: 16.0}, BUDGETS) == (1.0, slow)
    assert over_budget(dict.fromkeys(BUDGETS, 8.0) | {A: 16.0}, BUDGETS) == (1.0, slow)
    assert over_budget(dict.fromkeys(BUDGETS, 20.0) | {A: 31.0}, BUDGETS)[1] == [slow[0].replace("16", "31")]
    assert over_budget({Part(NIGHTLY, A.file): 6.0}, BUDGETS)[1] == ["unit/test_a.py (nightly): 6 s, budget 0 s"]


def test_the_longest_begin_first_and_what_starts_no_job_before_what_does(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    seconds = {"unit/test_x.py": 3, "test_y.py": 5, "jobs/test_a.py": 50, "jobs/test_actor.py": 30}
    seconds |= {"jobs/test_place.py": 31, "walk/test_w.py": 40}
    budgets = {Part(FAST, file): value for file, value in seconds.items()}
    together = ["jobs/test_place.py", "jobs/test_actor.py"]  # 61 s on one worker
    assert scope_of(together[0]) == scope_of(together[1]) != scope_of("jobs/test_a.py")
    assert order(budgets, budgets) == ["test_y.py", "unit/test_x.py", *together, "jobs/test_a.py", "walk/test_w.py"]
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert order(budgets, budgets)[2:4] == ["jobs/test_a.py", "walk/test_w.py"]


def test_make_test_imports_no_file_of_another_tier_alone():
    left_out = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py") if is_left_out(path)}
    tiers = {file: {part.tier for part in read_budgets() if part.file == file} for file in files_with_tests()}
    assert left_out == {file for file, of_file in tiers.items() if FAST not in of_file} and len(left_out) > 50
    assert f'-m "{MAKE_TEST}"\n' in (TESTS.parent / "Makefile").read_text(encoding="utf-8")
    assert not is_left_out(TESTS / "jobs") and not is_left_out(TESTS.parent / "tests.py")


def test_a_file_is_named_alike_from_wherever_pytest_is_started():
    names = {file_of("tests/unit/test_x.py::test_y[a::b]"), file_of("../tests/unit/test_x.py::test_z")}
    assert names == {"unit/test_x.py"}
