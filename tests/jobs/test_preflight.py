"""Every fault of a node is named by all who came, with the node, in bounded time; a sound job is measured and passes.

Four processes stand for four nodes of one rank each (preflight_job.py).
"""

import json
import re
from importlib import metadata
from pathlib import Path

import preflight_job
import pytest
from job import start_ranks
from run_cases import CHARACTERS, PAIRS, agent_table, write_config

PATIENCE_S = 600.0  # where all come, it is never used up
NODE_BAD = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("models")
    return [
        agent_table(folder, "A", "qwen3", CHARACTERS, tp=2),
        agent_table(folder, "B", "llama", CHARACTERS + PAIRS, cells_per_lane=2),
    ]


class Visit:
    """A preflight of some nodes; once it is over exit statuses, what they wrote, and the record for programs."""

    def __init__(
        self, folder: Path, models: list[dict], faults: dict[int, str], wait_s: float = PATIENCE_S, num: int = 4, **keys
    ) -> None:
        config = write_config(folder, models, run_dir="run", **keys)
        (folder / "run/logs").mkdir(parents=True, exist_ok=True)
        self.folder, self.ranks = folder, start_ranks(num, folder, preflight_job.visit, config, faults, wait_s)

    def over(self, *, is_first_still: bool = False) -> "Visit":
        """Itself, when all ranks have ended, but for a first one that stands still."""
        folder = self.folder
        for rank in self.ranks[is_first_still:]:
            rank.join()
        self.ranks[0].kill()  # a process that has ended keeps its exit status
        self.ranks[0].join()
        self.statuses = [rank.exitcode for rank in self.ranks]
        self.outputs = [(folder / f"{rank}.out").read_text() for rank in range(len(self.ranks))]
        self.errors = [(folder / f"{rank}.err").read_text() for rank in range(len(self.ranks))]
        record = folder / "run/logs/preflight.json"
        self.record = json.loads(record.read_text()) if record.exists() else {}
        self.left = sorted(path.name for path in record.parent.glob("*"))
        return self

    def texts(self) -> dict[str, list[str]]:
        """Findings by node."""
        found: dict[str, list[str]] = {}
        for finding in self.record["findings"]:
            found.setdefault(finding["node"], []).append(finding["text"])
        return found


@pytest.fixture(scope="module")
def waiting(tmp_path_factory, models) -> dict[str, Visit]:
    """Visits that wait for somebody, all at once."""
    faults = {
        "never comes": ({2: "never comes"}, 20.0),
        "first never comes": ({0: "never comes"}, 4.0),
        "hangs": ({2: "hangs"}, 30.0),
    }
    visits = {name: Visit(tmp_path_factory.mktemp("waiting"), models, *how) for name, how in faults.items()}
    pairs = [{**model, "tp": 1, "cells_per_lane": 1, "rollout_gpus": 1} for model in models]
    how = {1: "hangs over weights"}, 30.0
    visits["hangs over weights"] = Visit(tmp_path_factory.mktemp("waiting"), pairs, *how, placement="apart")
    how = {0: "stands still"}, 6.0, 2
    visits["first stands still"] = Visit(tmp_path_factory.mktemp("waiting"), models[:1], *how)
    return visits


def test_a_sound_job_passes_and_is_measured(tmp_path, models):
    visit = Visit(tmp_path, models, {}).over()
    assert visit.statuses == [0] * 4, (visit.outputs, visit.errors)
    record = visit.record
    assert (record["exit_code"], record["bad_nodes"], record["exclude"], record["findings"]) == (0, [], "", [])
    assert [node["node"] for node in record["nodes"]] == ["n0", "n1", "n2", "n3"]
    assert [node["agents"] for node in record["nodes"]] == ["A", "A", "B", "B"]
    groups = {(group["kind"], group["group"]): group["num_ranks"] for group in record["groups"]}
    assert groups == {
        ("cell, all-reduce", "cell 0 of A"): 2,
        ("lane, all-gather", "lane 0"): 3,
        ("agent, all-reduce", "A"): 2,
        ("agent, all-reduce", "B"): 2,
        ("job, barrier", "job"): 4,
    }
    # an all-gather of three carries two ranks' bytes over each link
    (lane,) = [group for group in record["groups"] if group["group"] == "lane 0"]
    assert lane["GB_per_s"] == pytest.approx(2 * (4 << 20) / lane["seconds"] / 1e9)
    assert visit.outputs[1:] == [""] * 3 and not any(visit.errors)
    assert visit.outputs[0].count(" ok\n") == 4
    assert visit.left == ["preflight.json"]


@pytest.mark.nightly
def test_what_a_node_says_of_itself_is_compared(tmp_path, models):
    """Three faults at a time; the fourth node has none, and is not named."""
    visit = Visit(tmp_path, models, {1: "other version", 2: "full disk", 3: "no model"}).over()
    assert visit.statuses == [NODE_BAD] * 4, (visit.outputs, visit.errors)
    assert visit.record["bad_nodes"] == ["n3", "n2", "n1"]
    texts = visit.texts()
    version, packages = texts["n1"]
    assert version == f"torch's version: 0.0.1; on 2 other node(s): {metadata.version('torch')}"
    assert packages == f"installed packages: torch: 0.0.1; on 2 other node(s): {metadata.version('torch')}"
    (disk,) = texts["n2"]
    assert re.match(r"run_dir: [\d,]+ bytes are needed, 4,096 are free .*: 3 checkpoints ", disk), disk
    assert any("nowhere does not exist" in text for text in texts["n3"]), texts
    assert "\n--exclude=n3,n2,n1\n" in visit.outputs[0]
    assert visit.outputs[0].count(" BAD\n") == 3 and visit.outputs[0].count(" ok\n") == 1


@pytest.mark.nightly
def test_what_takes_two_nodes_is_found(tmp_path, models):
    visit = Visit(tmp_path, models, {1: "closed port", 2: "own run folder", 3: "wrong clock"}).over()
    assert visit.statuses == [NODE_BAD] * 4, (visit.outputs, visit.errors)
    texts = visit.texts()
    assert sorted(texts) == ["n1", "n2", "n3"], texts
    assert "n0 and n3 cannot connect to it" in texts["n1"][0] and "refused" in texts["n1"][0]
    assert texts["n2"][0].startswith("the run folder: seen from here is what n2 wrote; on 3 other node(s): ")
    assert texts["n3"] == [text for text in texts["n3"] if "s behind" in text]
    assert visit.record["exclude"].startswith("--exclude=") and visit.record["groups"] == []


@pytest.mark.nightly
def test_a_node_that_never_comes_is_named(waiting):
    visit = waiting["never comes"].over()
    assert visit.statuses == [NODE_BAD, NODE_BAD, 0, NODE_BAD], (visit.outputs, visit.errors)
    assert visit.texts() == {"n2": ["did not come"]}
    assert visit.record["missing_ranks"] == [2]
    assert "ranks that did not come: 2\n--exclude=n2\n" in visit.outputs[0]


@pytest.mark.nightly
def test_a_first_node_that_never_comes_is_named(waiting):
    """By its address, since nobody could be told its name."""
    visit = waiting["first never comes"].over()
    assert visit.statuses == [0, NODE_BAD, NODE_BAD, NODE_BAD], (visit.outputs, visit.errors)
    assert visit.record["bad_nodes"] == ["127.0.0.1"]
    for rank in (1, 2, 3):
        line, _, rest = visit.errors[rank].partition("\n")
        assert line.startswith(f"node n{rank} does not reach rank 0 at 127.0.0.1 port ") and rest == ""


@pytest.mark.nightly
def test_of_two_nodes_the_late_one_is_named(tmp_path, models):
    """The other has given up by then, and cannot be seen any more."""
    visit = Visit(tmp_path, models[:1], {0: "late"}, wait_s=4.0, num=2).over()
    assert visit.statuses == [NODE_BAD, NODE_BAD], (visit.outputs, visit.errors)
    ((node, (text,)),) = visit.texts().items()
    assert node == "n0" and text.startswith("rank 0 came when n1 had given up, after "), text
    assert visit.record["exclude"] == "--exclude=n0" and visit.left == ["preflight.json"]


@pytest.mark.nightly
def test_a_node_that_hangs_while_groups_are_made_is_named(waiting):
    visit = waiting["hangs"].over()
    assert visit.statuses == [NODE_BAD] * 4, (visit.outputs, visit.errors)
    assert list(visit.texts()) == ["n2"], visit.texts()


@pytest.mark.nightly
def test_nodes_that_hang_over_weights_are_named(waiting):
    """The trainer and the engine of an agent, neither of which can be told from the other."""
    visit = waiting["hangs over weights"].over()
    assert visit.statuses == [NODE_BAD] * 4, (visit.outputs, visit.errors)
    assert list(visit.texts()) == ["n0", "n1"] and "weights, all-gather" in visit.texts()["n1"][0], visit.texts()


@pytest.mark.nightly
def test_a_first_node_that_stands_still_while_groups_are_made_is_named(waiting):
    """Although the store, which it keeps, has no limit for a request."""
    visit = waiting["first stands still"].over(is_first_still=True)
    assert visit.statuses[1:] == [NODE_BAD], (visit.outputs, visit.errors)
    assert visit.record["bad_nodes"] == ["127.0.0.1"]


@pytest.mark.nightly
def test_another_number_of_ranks_is_refused_before_anybody_waits(tmp_path, models):
    visit = Visit(tmp_path, [models[0]], {}).over()
    assert visit.statuses == [2] * 4, (visit.outputs, visit.errors)
    assert "needs 2 ranks" in visit.errors[0] and not any(visit.errors[1:])


@pytest.mark.nightly
def test_what_all_nodes_find_wrong_is_the_users(tmp_path, models):
    """Said once, and it is nobody's node."""
    visit = Visit(tmp_path, models, dict.fromkeys(range(4), "no model")).over()
    assert visit.statuses == [2] * 4, (visit.outputs, visit.errors)
    assert "nowhere" in visit.errors[0] and not any(visit.errors[1:]) and visit.record == {}
