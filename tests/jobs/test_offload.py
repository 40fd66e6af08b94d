"""Offload changes no bit: of an actor and its checkpoints, and of whole runs, which take up each other's steps."""

import json
from pathlib import Path

import pytest
import torch
from actor_cases import objective, random_samples
from job import run_command, run_group, run_script
from offload_cases import kept, num_bytes, play
from run_cases import CHARACTERS, PAIRS, agent_table, train, write_config
from safetensors.torch import load_file
from tiny_models import make_model

from hacpo_mega.checkpoint import committed_steps, folder_of, read_checkpoint
from hacpo_mega.logbook.metrics import read_metrics
from hacpo_mega.logbook.rollout_log import read_rollouts
from hacpo_mega.models.architecture import Architecture
from hacpo_mega.models.layout import Layout
from hacpo_mega.models.memory import num_weights

pytestmark = pytest.mark.slow

# Of two ranks: main weights are the model's own in float32, and copies in bf16.
LAYOUTS = {"tp 2, float32": {"tp": 2}, "two cells, bf16": {"dtype": torch.bfloat16}}
BYTES = {"tp 2, float32": 8, "two cells, bf16": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("offload")


@pytest.fixture(scope="module")
def by_rank(folder):
    """Of every rank: layout -> (what the actor left that kept its state, and the one that sent it away, facts)."""
    make_model(folder / "model", "qwen3", tied=True)
    return run_group(2, visit_layouts, folder)


def visit_layouts(folder: Path) -> dict:
    found = {}
    for name, options in LAYOUTS.items():
        stays, _ = play(folder / "model", folder / name / "stays", offloads=False, **options)
        leaves, actor = play(folder / "model", folder / name / "leaves", offloads=True, **options)
        found[name] = stays, leaves, look(actor)
    return found


def look(actor) -> dict:
    """What memory there is on both sides when the state has left, and what happens to who wants to learn then."""
    offload, at_home = actor.optimizer.offload, kept(actor)
    before = num_bytes(at_home)
    offload.start_leaving()
    offload.finish_leaving()
    facts = {"given back": before - num_bytes(at_home), "on the host": num_bytes([kept(actor)[1]])}
    for what in (actor.learn, lambda samples, loss: actor.gradient_products([samples], loss)):
        with pytest.raises(RuntimeError, match="is in host memory"):
            what(random_samples(2, seed=1), objective)
    with pytest.raises(RuntimeError, match="must match the size"):
        at_home[1].add_(torch.ones_like(kept(actor)[1]))
    return facts


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_bit_changes(by_rank, name):
    for found in by_rank:
        stays, leaves, _ = found[name]
        assert leaves.stats == stays.stats and len(stays.stats) == 4
        assert all(torch.equal(leaves.weights[key], stays.weights[key]) for key in stays.weights)
        assert all(torch.equal(one, other) for one, other in zip(leaves.state, stays.state, strict=True))
        assert all(bool(moment.any()) for moment in stays.state[1::3])


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_while_it_is_away_is_what_is_written_at_home(by_rank, folder, name):
    written = {who: contents(folder / name / who) for who in ("stays", "leaves")}
    assert written["leaves"] == written["stays"]
    assert len(written["stays"]) == 4, "two ranks, twice"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.distcp")}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_memory_is_given_back(by_rank, folder, name):
    """By the budget's arithmetic: 8 bytes of moments for every weight of the cells, and 4 of main weights in bf16."""
    facts = [found[name][2] for found in by_rank]
    assert all(fact["given back"] == fact["on the host"] for fact in facts)
    tp = LAYOUTS[name].get("tp", 1)
    whole = tp * BYTES[name] * num_weights(Architecture.from_folder(folder / "model"), Layout(tp=tp))
    assert sum(fact["on the host"] for fact in facts) == whole


OFFLOAD = "agents.*.offload=optimizer"
WATCHED = ("training.verify_weights_every=1", "training.diagnose_every=1")


@pytest.fixture(scope="module")
def plain(folder) -> Path:
    """The configuration of a run of three steps that keeps its state on the device, and all its checkpoints."""
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2),
        agent_table(folder, "alone", "llama", CHARACTERS + PAIRS),
    ]
    config = write_config(folder, agents, num_steps=3, checkpoint={"every_steps": 1, "keep_every": 1})
    train(config, *WATCHED)
    return config


@pytest.fixture(scope="module")
def offloading(plain) -> Path:
    """The folder of the same run with offload, which goes on without after two steps."""
    run_dir, noted = plain.parent / "offloading", plain.parent / "noted"
    noted.mkdir()
    run_script("offload_job", 3, plain, noted, *WATCHED, f"run_dir={run_dir}", OFFLOAD, "num_steps=2")
    train(plain, *WATCHED, f"run_dir={run_dir}")
    return run_dir


@pytest.fixture(scope="module")
def branched(plain) -> Path:
    """The folder of a run with offload that goes on where the one without was after two steps."""
    run_dir = plain.parent / "branched"
    overrides = (*WATCHED, f"run_dir={run_dir}", OFFLOAD)
    run_command(3, "train", plain, *overrides, "--from", folder_of(plain.parent / "run", 2))
    return run_dir


@pytest.mark.parametrize("how, steps", [("offloading", [1, 2, 3]), ("branched", [3])])
def test_a_run_with_offload_is_the_run_without(how, steps, plain, request):
    """Metrics, answers, every shard of every checkpoint, and what is exported; an evaluation more where it stopped."""
    run, other = plain.parent / "run", request.getfixturevalue(how)
    assert committed_steps(other) == steps
    expected, metrics = (read_metrics(folder / "metrics.jsonl") for folder in (run, other))
    for step in steps:
        assert {key: metrics[step].values[key] for key in expected[step].values} == expected[step].values
        assert read_rollouts(other, step) == read_rollouts(run, step)
        one, another = (read_checkpoint(folder_of(folder, step)) for folder in (run, other))
        shards = {path: file for path, file in one.files.items() if path.endswith(".distcp")}
        assert len(shards) == 3
        assert {path: another.files[path] for path in shards} == shards
        assert another.agents == one.agents
    for name in ("wide", "alone"):
        first, second = (load_file(folder / "agents" / name / "model.safetensors") for folder in (run, other))
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_state_is_away_whenever_the_engine_is_awake(offloading):
    """What every agent has done in two steps: (method, where the state was before it, where after it)."""
    for rank in range(3):
        noted = [tuple(note) for note in json.loads((offloading.parent / "noted" / f"{rank}.json").read_text())]
        start = noted.index(("answer_greedily", "AWAY", "AWAY"))
        assert noted[:start] == [("publish_weights", "AWAY", "AWAY"), ("verify_weights", "AWAY", "AWAY")]
        step = [
            ("roll_out", "AWAY", "RETURNING"),
            ("score", "RETURNING", "RETURNING"),
            *(("diagnose", "RETURNING", "HOME"), ("learn", "HOME", "HOME")),
            *(("diagnose", "HOME", "HOME"), ("learn", "HOME", "HOME")),
            *(("wake", "weights", "LEAVING"), ("wake", "cache", "AWAY"), ("publish_weights", "HOME", "AWAY")),
            ("verify_weights", "AWAY", "AWAY"),
        ]
        assert noted[start + 1 :] == [
            *(*step, ("save", "AWAY", "AWAY")),
            *(*step, ("answer_greedily", "AWAY", "AWAY"), ("save", "AWAY", "AWAY")),
        ]


def test_every_step_says_what_is_held_while_the_engine_sleeps(plain):
    for step, metrics in read_metrics(plain.parent / "run" / "metrics.jsonl").items():
        for name in ("wide", "alone"):
            assert (f"agent/{name}/asleep_bytes" in metrics.timing) == (step > 0)
            assert step == 0 or 1e8 < metrics.timing[f"agent/{name}/asleep_bytes"] < 1e11
