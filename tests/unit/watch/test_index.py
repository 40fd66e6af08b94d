"""The index of a watched run says what the run's own readers say, and follows it wherever it goes."""

import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from repository import ROOT
from watched_run import AGENTS, WatchedRun
from written_run import write_run

from hacpo_mega.logbook.files.json_lines import dated_line
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import logged_steps, read_rollouts
from hacpo_mega.logbook.run.provenance import read_alarms
from hacpo_mega.logbook.run.run_lock import RunLock
from hacpo_mega.report.run import agents_of
from hacpo_mega.watch.answers import Judges, exported, one_answer, page_of_answers
from hacpo_mega.watch.index import Gone
from hacpo_mega.watch.runs import Runs, Watched
from hacpo_mega.watch.views import VerdictViews, comparison, curves, job, run_list

TEXTS = ["the cat sat", "a dog ran off", "7+5=12;44", "über 日本", "no <b>tag</b>", "the end"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    found = WatchedRun(tmp_path / "runs" / "one", num_steps=6)
    for step in range(1, 5):
        found.add_metrics(step)
        found.add_answers(step, [f"{text} s{step}x" for text in TEXTS], per_prompt=4)
    return found


def watched(folder: Path, say: Callable[[str], None] = print) -> Watched:
    found = Watched(folder, None, say)
    extend(found)
    return found


def extend(run: Watched) -> bool:
    changed = False
    while run.index.extend():
        changed = True
    return changed


def rows(run: Watched) -> dict[str, int]:
    """The number of every answer in the index, by its place: another number says that it was read again."""
    with run.index.reading() as db:
        query = "SELECT answers.id, answers.step, prompt_index, place FROM answers JOIN prompts ON prompts.id = prompt"
        return {f"{step} {prompt} {place}": number for number, step, prompt, place in db.execute(query)}


def total(run: Watched, **selection: Any) -> int:
    return page_of_answers(run.index, selection, "-step", 0)["total"]


def test_curves_are_those_of_the_runs_own_reader(tmp_path: Path) -> None:
    write_run(tmp_path / "run", ("qwen", "llama"), num_steps=8, evaluate_every=4)
    found, steps = watched(tmp_path / "run"), read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = curves(found, [], None, None)["names"]
    assert sorted([*names, "time_unix_s"]) == sorted({n for m in steps.values() for n in m.values | m.timing})
    seen = curves(found, names, None, None)
    assert seen["steps"] == list(steps)
    for name in names:
        expected = [(m.values | m.timing).get(name) for m in steps.values()]
        assert [value is None for value in seen["series"][name]] == [value is None for value in expected], name
        known = [value for value in expected if value is not None]
        assert [v for v in seen["series"][name] if v is not None] == pytest.approx(known, rel=1e-6), name
    low, high = seen["intervals"]["agent/qwen/accuracy"].values()
    assert [value is None for value in low] == [step % 4 != 0 for step in steps]
    assert all(a <= v <= b for a, v, b in zip(low, seen["series"]["agent/qwen/accuracy"], high) if v is not None)
    assert [e["kind"] for e in seen["events"]] == []


@pytest.mark.parametrize(
    ("selection", "fits"),
    [
        ({}, lambda p, a: True),
        ({"agent": "llama", "step": [2, 3]}, lambda p, a: a["agent"] == "llama" and 2 <= p["step"] <= 3),
        ({"verdict": "wrong", "skill": "sub"}, lambda p, a: a["verdict"] == "wrong" and p["skill"] == "sub"),
        ({"reward": [0.5, None]}, lambda p, a: a["reward"] >= 0.5),
        ({"ratio": [2.0, None]}, lambda p, a: any(value >= 2.0 for value in a["ratio"].values())),
        ({"advantage": [None, 1.0]}, lambda p, a: any(value <= 1.0 for value in a["advantage"].values())),
        ({"length": [4, 4]}, lambda p, a: a["num_tokens"] == 4),
        ({"text": "the"}, lambda p, a: re.search(r"\bthe", a["text"])),
        ({"text": "5=12"}, lambda p, a: "5=12" in a["text"]),
        ({"text": "s3x", "prompt_id": "prompt1"}, lambda p, a: "s3x" in a["text"] and p["id"] == "prompt1"),
        ({"regex": r"^(the|a) \w{3} r"}, lambda p, a: re.search(r"^(the|a) \w{3} r", a["text"])),
        ({"stop": "length"}, lambda p, a: False),
    ],
)
def test_selections_are_those_of_plain_python(run: WatchedRun, selection: dict[str, Any], fits: Any) -> None:
    found = watched(run.folder)
    prompts = [prompt for step in logged_steps(run.folder) for prompt in read_rollouts(run.folder, step)]
    everything = [(prompt, answer) for prompt in prompts for answer in prompt["answers"]]
    expected = [(p, a) for p, a in everything if fits(p, a)]
    seen = page_of_answers(found.index, selection, "-step", 0)
    assert seen["total"] == len(expected)
    keys = {f"{p['step']}.0.{p['prompt_index']}.{a['agent']}.{a['rollout']}" for p, a in expected}
    assert {row["key"] for row in seen["rows"]} == keys
    texts = [json.loads(line)["text"] for line in exported(found.index, selection, "step")]
    assert sorted(texts) == sorted(a["text"] for _, a in expected)


def test_answers_are_sorted_and_whole(run: WatchedRun) -> None:
    found = watched(run.folder)
    for sort, key in {"-ratio": lambda row: -max(row["ratio"].values()), "length": lambda row: row["length"]}.items():
        seen = [key(row) for row in page_of_answers(found.index, {}, sort, 0)["rows"]]
        assert seen == sorted(seen) and len(seen) == 24
    answer = one_answer(found.index, "3.0.1.llama.0", Judges(), None)
    (prompt,) = (p for p in read_rollouts(run.folder, 3) if p["prompt_index"] == 1)
    assert (answer["text"], answer["gold"], answer["prompt"]) == ("the end s3x", "44", prompt["prompt"])
    assert [other["text"] for other in answer["others"]] == [prompt["answers"][0]["text"]]
    with pytest.raises(ValueError, match="no answer"):
        one_answer(found.index, "3.0.9.llama.0", Judges(), None)


def test_index_grows_and_is_not_built_again(run: WatchedRun, said: list[str]) -> None:
    before = rows(found := watched(run.folder))
    assert len(before) == 24 and not extend(found)
    run.add_metrics(5)
    run.add_answers(5, TEXTS)
    found = watched(run.folder, said.append)  # another process, later
    after = rows(found)
    assert {place: after[place] for place in before} == before and len(after) == 30
    assert curves(found, ["agent/qwen/lr"], 4, 0)["steps"] == [5] and said == []


def test_a_line_that_is_cut_waits_for_its_end(run: WatchedRun) -> None:
    found, line = watched(run.folder), run.metrics_line(5)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(line[:300])
    extend(found)
    assert curves(found, ["agent/qwen/lr"], None, None)["steps"] == [1, 2, 3, 4]
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(f"{line[300:]}no line\n{run.metrics_line(6)}")
    extend(found)
    assert curves(found, ["agent/qwen/lr"], None, None)["steps"] == [1, 2, 3, 4, 5, 6]
    assert "no line of metrics" in found.index.notes[0]


def test_a_resumed_run_replaces_what_it_does_again(run: WatchedRun) -> None:
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(run.metrics_line(5)[:100])  # killed in the middle
    found = watched(run.folder)
    before, first = rows(found), curves(found, ["agent/qwen/lr"], None, None)
    (run.folder / "alarms.jsonl").write_bytes(dated_line(step=2, text="kept") + dated_line(step=4, text="overtaken"))
    time.sleep(0.01)
    run.start(2)
    run.add_metrics(3, lr=0.25)
    run.add_answers(3, ["other words"])
    extend(found)
    seen = curves(found, ["agent/qwen/lr"], 4, first["generation"])
    assert seen["full"] and seen["steps"] == [1, 2, 3]
    assert seen["series"]["agent/qwen/lr"] == [*first["series"]["agent/qwen/lr"][:2], 0.25]
    kept = {place: number for place, number in rows(found).items() if place[0] in "12"}
    assert kept == {place: number for place, number in before.items() if place[0] in "12"}
    assert (total(found), total(found, text="s4x"), total(found, text="other words")) == (13, 0, 1)
    assert [(e["step"], e["kind"]) for e in seen["events"]] == [(0, "start"), (2, "resume"), (2, "alarm")]
    assert [alarm["text"] for alarm in read_alarms(run.folder)] == ["kept"]


def test_a_long_run_is_shown_by_some_of_its_steps_first(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path / "run", num_steps=33)
    for step in range(1, 34):
        run.add_metrics(step)
    found, names = watched(run.folder), ["agent/qwen/lr", "agent/qwen/accuracy"]
    whole, some = (curves(found, names, None, None, every) for every in (1, 10))
    places = [9, 19, 29, 32]
    assert some["steps"] == [10, 20, 30, 33] == [whole["steps"][place] for place in places]
    for key in ("seconds", "trained_answers"):
        assert some[key] == [whole[key][place] for place in places], key
    assert some["series"] == {name: [values[place] for place in places] for name, values in whole["series"].items()}
    assert some["intervals"][names[1]]["low"][:3] == [
        whole["intervals"][names[1]]["low"][place] for place in places[:3]
    ]


def test_a_folder_that_is_moved_deleted_or_another_runs(run: WatchedRun, tmp_path: Path) -> None:
    found = watched(run.folder)
    run.folder.rename(aside := tmp_path / "runs" / "one.1")
    assert not extend(found) and found.state == "gone"
    assert "was moved or deleted" in run_list([found])[0]["note"] and total(found, text="s4x") == 6
    with pytest.raises(Gone, match="moved, deleted or resumed"):
        one_answer(found.index, "3.0.1.llama.0", Judges(), None)
    assert list(exported(found.index, {}, "step")) == []
    other = WatchedRun(run.folder)
    other.add_metrics(1)
    extend(found)
    assert "another run" in found.index.notes[-1]
    assert (total(found), curves(found, ["agent/qwen/lr"], None, None)["steps"]) == (0, [1])
    shutil.rmtree(aside)
    shutil.rmtree(run.folder)
    assert not extend(found) and job(found)["state"] == "gone"


@pytest.mark.parametrize("content", ["version", "garbage"])
def test_an_index_of_another_version_is_built_anew(run: WatchedRun, said: list[str], content: str) -> None:
    path = watched(run.folder).index.path
    if content == "version":
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
    else:
        for file in path.parent.iterdir():
            file.unlink()
        path.write_bytes(b"no index at all" * 100)
    assert total(watched(run.folder, said.append)) == 24
    assert len(said) == 1 and "another version" in said[0] and "\n" not in said[0]


def test_a_cache_that_cannot_be_written_is_said(
    run: WatchedRun, said: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache.write_text("a file")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    assert total(watched(run.folder, said.append)) == 24
    assert len(said) == 1 and "cannot hold an index" in said[0] and "XDG_CACHE_HOME" in said[0]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert total(watched(run.folder, said.append)) == 24
    assert said[1].startswith("the home's cache cannot hold an index (Could not determine home directory.)")
    monkeypatch.setattr("tempfile.tempdir", str(cache))
    with pytest.raises(ValueError, match=r"cannot hold an index either .*Not a directory"):
        watched(run.folder, said.append)


@pytest.mark.nightly
def test_a_file_system_without_locks_is_said(run: WatchedRun, cache: Path, tmp_path: Path) -> None:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler on this machine")
    library, temporary = tmp_path / "without_locks.so", tmp_path / "tmp"
    cache.mkdir()
    temporary.mkdir()
    source = Path(__file__).parent / "without_locks.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    program = (
        "import sys; from pathlib import Path; from hacpo_mega.watch import index; index.BUSY_S = 0.1; "
        "found = index.Index(Path(sys.argv[1]), print); print(found.extend(), found.path)"
    )
    places = {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary), "WITHOUT_LOCKS": str(cache.resolve())}
    command = [sys.executable, "-c", program, run.folder]
    environment = os.environ | places | {"LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    line, last = done.stdout.splitlines()
    assert line.startswith(str(cache)) and "cannot hold an index (database is locked)" in line
    assert line.endswith("Set XDG_CACHE_HOME to a local folder") and last.startswith(f"True {temporary}")
    environment["WITHOUT_LOCKS"] = str(tmp_path.resolve())
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "cannot hold an index either (database is locked)" in done.stderr.splitlines()[-1]


def test_an_index_is_its_users_alone_and_the_run_stays_as_it_is(run: WatchedRun) -> None:
    def state() -> dict[str, tuple[int, int, int]]:
        paths = [run.folder, *run.folder.rglob("*")]
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size, p.stat().st_ctime_ns) for p in paths}

    before, found = state(), watched(run.folder)
    for ask in (run_list, lambda runs: [job(*runs), VerdictViews().of(*runs), comparison(runs), total(*runs)]):
        ask([found])
    one_answer(found.index, "3.0.1.llama.0", Judges(), None)
    assert state() == before
    assert {stat.S_IMODE(p.stat().st_mode) for p in found.index.path.parent.iterdir()} == {0o600}
    assert stat.S_IMODE(found.index.path.parent.stat().st_mode) == 0o700


def test_a_link_out_of_the_run_is_not_followed(run: WatchedRun, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes((run.folder / "rollouts" / "step_000001.lane_0000.jsonl").read_bytes())
    (run.folder / "rollouts" / "step_000009.lane_0000.jsonl").symlink_to(tmp_path / "secret")
    found = watched(run.folder)
    assert total(found, step=[9, 9]) == 0 and total(found) == 24
    assert "leads out of" in found.index.notes[-1]


def test_states_follow_lock_and_end(run: WatchedRun) -> None:
    found = watched(run.folder)
    assert found.state == "stopped"
    with RunLock(run.folder):
        assert found.state == "running"
    (run.folder / "finished.json").write_text('{"steps_done": 6}\n')
    assert found.state == "finished"
    lock = run.folder / ".lock"
    lock.write_text(f"a process\n{json.dumps({'token': 'x', 'space': 'another machine', 'pid': 1, 'start': 1})}\n")
    assert found.state == "running"
    os.utime(lock, (0, 0))
    assert found.state == "finished"


def test_verdicts_say_who_learns_from_whom(run: WatchedRun) -> None:
    for step in (5, 6):
        run.add_metrics(step, **{"from/qwen/grad_cosine": -0.5})
    found = VerdictViews().of(watched(run.folder))
    steps = read_metrics(run.folder / "metrics.jsonl")
    inside = [m.values["agent/qwen/from/llama/inside"] for m in steps.values()]
    reached = sum(round(30 * share) for share in inside)
    (verdict,) = (v for v in found["verdicts"] if (v["chart"], v.get("learner")) == ("fates", "qwen"))
    assert f"qwen learns from llama: {reached / (32 * 6):.0%} of its 192 usable answers" in verdict["text"]
    fates = next(f for f in found["fates"] if f["learner"] == "qwen")
    assert fates["steps"] == [1, 2, 3, 4, 5, 6] and fates["series"]["too_long"] == [2] * 6
    assert fates["series"]["outside_band"] == [30 - n for n in fates["series"]["reached"]]


def test_seeds_are_groups_and_settings_differ(tmp_path: Path) -> None:
    for name, seed, steps in (("a", 1, 6), ("b", 2, 6), ("c", 1, 9)):
        WatchedRun(tmp_path / "grid" / name, num_steps=steps, seed=seed).add_metrics(1)
    runs = Runs([tmp_path / "grid"], print)
    names = {run.id: run.folder.name for run in runs}
    found = comparison(list(runs))
    assert [sorted(names[run] for run in group["runs"]) for group in found["groups"]] == [["a", "b"], ["c"]]
    different = {d["key"]: {names[run]: value for run, value in d["values"].items()} for d in found["differences"]}
    assert different == {"seed": {"a": 1, "b": 2, "c": 1}, "num_steps": {"a": 6, "b": 6, "c": 9}}
    assert {run["experiment"] for run in run_list(runs)} == {"grid"}


def test_a_folders_name_hides_no_setting(tmp_path: Path) -> None:
    """Files inside a run are its own; a method of the same name is none."""
    for name in ("naive", "sgt"):
        run = WatchedRun(tmp_path / name)
        run.add_metrics(1)
        text = (run.folder / "config.toml").read_text()
        text = re.sub("^run_dir = .*", f'run_dir = "{name}"', text, flags=re.M)
        (run.folder / "config.toml").write_text(
            f'{text}\n[algorithm]\nmethod = "{name}"\n[data]\nfiles = ["{name}/x"]\n'
        )
    found = comparison(list(Runs([tmp_path], print)))
    assert [len(group["runs"]) for group in found["groups"]] == [1, 1]


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        ({"colour": "red"}, "no field 'colour'"),
        ({"reward": "high"}, "needs .low, high."),
        ({"regex": "("}, "is none"),
        ({"regex": "a" * 501}, "at most 500"),
        ({"text": "=+"}, "has no word"),
        ({"turn": True}, "needs a whole number"),
        ({"agent": 3}, "needs text"),
    ],
)
def test_bad_selections_are_one_line(run: WatchedRun, selection: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        page_of_answers(watched(run.folder).index, selection, "-step", 0)
    assert "\n" not in str(error.value)


@pytest.mark.nightly
@pytest.mark.nightly
def test_a_regular_expression_that_never_ends_is_stopped(run: WatchedRun) -> None:
    run.add_answers(9, [f"{'a' * 200}!"] * 40)
    began = time.monotonic()
    found = page_of_answers(watched(run.folder).index, {"regex": "^(a|aa)+$"}, "-step", 0)
    assert found["total"] == 0 and "stopped" in found["note"] and time.monotonic() - began < 30.0


def test_agents_have_the_order_of_the_configuration(run: WatchedRun) -> None:
    assert agents_of(watched(run.folder).config, ["agent/zeta/lr", "agent/llama/lr"]) == (*AGENTS, "zeta")


def test_verdicts_are_explained_by_graders_of_the_project_alone(run: WatchedRun, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\ndef grade(**_): return 1.0\n")
    found = watched(run.folder)
    with Judges() as judges:
        answer = one_answer(found.index, "3.0.0.qwen.1", judges, {"kind": "exact"})
        assert (answer["text"], answer["extracted"]) == ("7+5=12;44 s3x", "7+5=12;44 s3x")
        assert answer["rule"] == "the whole answer is the gold text"
        for reward in ({"kind": f"{tmp_path / 'own.py'}:grade"}, {"kind": "no such"}, "nonsense", {"kind": "program"}):
            assert one_answer(found.index, "3.0.0.qwen.1", judges, reward)["rule"] is None
    assert not (tmp_path / "was_run").exists()


@pytest.fixture
def two_lanes(tmp_path: Path) -> Watched:
    """Two agents on two lanes: ranks 0 and 1 are qwen's, 2 and 3 llama's."""
    folder = WatchedRun(tmp_path / "run").folder
    (folder / "config.toml").write_text("lanes = 2\n" + (ROOT / "configs/quickstart.toml").read_text())
    (folder / "ranks").mkdir()
    return Watched(folder, None, print)


def tell(two_lanes: Watched, rank: int, seconds_ago: float = 0.0, **fields: Any) -> None:
    content = {"time_unix_s": time.time() - seconds_ago, "host": "n1", "phase": "exchange", "when": "of step 3"}
    content |= {"phase_s": 4.0, "num_done": 0, "num_before": None, "waits_for": None, "waited_s": 0.0}
    (two_lanes.folder / "ranks" / f"rank_{rank}.json").write_text(json.dumps(content | fields))


def test_ranks_wait_for_those_that_work(two_lanes: Watched) -> None:
    for rank in (0, 1):
        tell(two_lanes, rank, waits_for="what ranks [0, 2] of lane 0 gather", waited_s=3.5)
    tell(two_lanes, 2, seconds_ago=42.0, phase="learn", num_done=6, num_before=8)
    tell(two_lanes, 3, phase="learn", num_done=30, num_before=8)
    found = job(two_lanes)
    ranks = found["ranks"]
    assert [(rank["agent"], rank["lane"], rank["phase"], rank["node"]) for rank in ranks] == [
        *(("qwen", 0, "exchange", "n1"), ("qwen", 1, "exchange", "n1")),
        *(("llama", 0, "learn", "n1"), ("llama", 1, "learn", "n1")),
    ]
    assert found["waited_for"] == [2, 3]
    assert [rank["progress"] for rank in ranks] == [None, None, 0.75, 1.0]
    assert [rank["silent"] for rank in ranks] == [False, False, True, False] and 42.0 <= ranks[2]["seen_s_ago"] < 60.0
    for rank in (2, 3):
        tell(two_lanes, rank, waits_for="a barrier of all ranks")
    assert job(two_lanes)["waited_for"] == []


def test_what_is_no_file_of_a_rank_is_left_out(two_lanes: Watched, tmp_path: Path) -> None:
    tell(two_lanes, 0)
    outside = two_lanes.folder / "ranks" / "rank_0.json"
    outside.rename(tmp_path / "secret.json")
    outside.symlink_to(tmp_path / "secret.json")
    for rank, content in ((1, '{"phase": '), (2, "[]"), (3, '{"phase": 1}')):
        (two_lanes.folder / "ranks" / f"rank_{rank}.json").write_text(content)
    tell(two_lanes, 77)
    found = job(two_lanes)
    assert [rank["phase"] for rank in found["ranks"]] == [None] * 4 and found["waited_for"] == []


@pytest.mark.nightly
def test_metrics_and_newest_answers_are_there_before_the_index_is_complete(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path / "run", num_steps=200)
    for step in range(1, 201):
        run.add_metrics(step)
        run.add_answers(step, ["it is 4"])
    found = Watched(run.folder, None, print)
    assert found.index.extend(0.0)
    (told,) = run_list([found])
    share = re.fullmatch(r"indexing: (\d+) % of the metrics, 0 % of the answers", told["note"])
    steps = told["last_step"]
    assert 0 < steps < 200 and abs(int(share[1]) - steps / 2) <= 1.0
    shown = page_of_answers(found.index, {}, "-step", 0)
    assert ([row["step"] for row in shown["rows"]], shown["note"]) == (
        [200],
        "199 files of answers are still to be read; the newest are here",
    )
    extend(found)
    (told,) = run_list([found])
    assert (told["last_step"], told["note"], total(found)) == (200, None, 200)


def test_a_folder_that_takes_longer_to_list_than_a_look_is_read(run: WatchedRun, monkeypatch) -> None:
    """A folder of 20,000 steps of 8 lanes does: the index would get on by one file in every look."""
    now, scandir = [0.0], os.scandir

    def slow(folder: Path) -> Any:
        now[0] += 10.0
        return scandir(folder)

    found = Watched(run.folder, None, print)
    monkeypatch.setattr("hacpo_mega.watch.index.time", Mock(monotonic=lambda: now[0]))
    monkeypatch.setattr("os.scandir", slow)
    assert found.index.extend() and total(found) == 4 * len(TEXTS)


def test_a_run_for_which_there_is_no_index_now_is_watched_later(
    run: WatchedRun, said: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that follows goes on: its end would freeze the page of all runs."""
    monkeypatch.setattr("hacpo_mega.watch.runs.FIND_S", 0.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "runs" / "one" / "config.toml"))
    runs, ends = Runs([tmp_path / "runs"], said.append), threading.Event()
    cache.rename(tmp_path / "away")
    cache.touch()  # no folder can be made there
    follower = threading.Thread(target=runs.follow, args=(ends,), daemon=True)
    follower.start()
    WatchedRun(tmp_path / "runs" / "two")
    while not any("cannot be watched yet" in line for line in said):
        assert follower.is_alive()
        time.sleep(0.01)
    cache.unlink()
    (tmp_path / "away").rename(cache)
    while len(list(runs)) < 2:
        assert follower.is_alive()
        time.sleep(0.01)
    ends.set()
    follower.join()
