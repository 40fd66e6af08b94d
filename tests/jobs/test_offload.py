"""Offload and turns on shared devices change no bit: of an actor and its checkpoints, and of whole runs."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from actor_cases import full_weights, make_actor, objective, one_rank, random_samples
from job import run_group, run_script
from offload_cases import kept, num_bytes, play, write
from run_cases import CHARACTERS, PAIRS, agent_table, train, write_config
from safetensors.torch import load_file
from tiny_models import make_model

from hacpo_mega.checkpoint.files import committed_steps, folder_of, read_checkpoint
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts
from hacpo_mega.megatron.train.optimizer import ActorOffload
from hacpo_mega.memory.weight_numbers import num_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout

pytestmark = pytest.mark.nightly

# Layouts of two ranks: main weights are the model's own in float32, and copies in bf16.
LAYOUTS = {"tp 2, float32": {"tp": 2}, "two cells, bf16": {"dtype": torch.bfloat16}}
BYTES = {"tp 2, float32": 8, "two cells, bf16": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("offload")


@pytest.fixture(scope="module")
def by_rank(folder):
    """By rank, layout -> what four actors left: that stayed, and three of which more and more left; facts."""
    make_model(folder / "model", "qwen3", tied=True)
    return run_group(2, visit_layouts, folder)


def visit_layouts(folder: Path) -> dict:
    found = {}
    for name, options in LAYOUTS.items():
        stays, _ = play(folder / "model", folder / name / "stays", **options)
        frees, _ = play(folder / "model", folder / name / "frees", offload_mode="gradients", **options)
        offloads, actor = play(folder / "model", folder / name / "offloads", offload_mode="state", **options)
        facts = look(actor)
        leaves, actor = play(folder / "model", folder / name / "leaves", offload_mode="everything", **options)
        found[name] = stays, (frees, offloads, leaves), facts, look_at_whole(actor)
    return found


def look(actor) -> dict:
    """Memory on both sides when the state has left, and the fate of an actor that wants to learn then."""
    offload, at_home = actor.optimizer.offload, kept(actor)
    before = num_bytes(at_home)
    offload.begin_offload()
    offload.finish_offload()
    facts = {"given back": before - num_bytes(at_home), "on the host": num_bytes([kept(actor)[1]])}
    for what in (actor.learn, lambda samples, loss: actor.gradient_products([samples], loss)):
        with pytest.raises(RuntimeError, match="gradient buffers have left"):
            what(random_samples(2, seed=1), objective)
    with pytest.raises(RuntimeError, match="must match the size"):
        at_home[1].add_(torch.ones_like(kept(actor)[1]))
    return facts


def look_at_whole(actor) -> dict:
    """The same of an actor that leaves as a whole, and what happens to who wants anything of it then."""
    whole, buffers, samples = ActorOffload(actor.model, actor.optimizer), actor.model.buffers, random_samples(2, seed=1)
    at_home = [tensor for buffer in buffers for tensor in (buffer.param_data, buffer.grad_data)] + kept(actor)
    storages = {tensor.untyped_storage().data_ptr(): tensor.detach() for tensor in at_home}
    scores, before = actor.score(samples), num_bytes(storages.values())
    whole.offload()
    facts = {"held": before, "still held": num_bytes(storages.values()), "numbers": sum(b.numel for b in buffers)}
    for use in (lambda: actor.score(samples), lambda: list(actor.weights())):
        with pytest.raises(RuntimeError):
            use()
    refuse_to_learn(actor, samples)
    whole.onload(to_learn=False)
    facts["scores"] = [score.mean_logprob for score in scores], [score.mean_logprob for score in actor.score(samples)]
    refuse_to_learn(actor, samples)
    return facts


def refuse_to_learn(actor, samples) -> None:
    for given in (samples, []):  # a cell without samples reduces gradients all the same
        with pytest.raises(RuntimeError, match="gradient buffers have left"):
            actor.learn(given, objective)


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_bit_changes(by_rank, name):
    for found in by_rank:
        stays, others, *_ = found[name]
        for other in others:
            assert other.stats == stays.stats and len(stays.stats) == 4
            assert all(torch.equal(other.weights[key], stays.weights[key]) for key in stays.weights)
            assert all(torch.equal(one, two) for one, two in zip(other.state, stays.state, strict=True))
        assert all(bool(moment.any()) for moment in stays.state[1::3])


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_while_it_is_away_is_what_is_written_at_home(by_rank, folder, name):
    written = {who: contents(folder / name / who) for who in ("stays", "frees", "offloads", "leaves")}
    assert written["frees"] == written["offloads"] == written["leaves"] == written["stays"]
    assert len(written["stays"]) == 4, "two ranks, twice"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.distcp")}


@pytest.mark.parametrize(("family", "dtype"), [("gemma4_text", torch.bfloat16), ("glm4_moe", torch.float32)])
def test_frozen_weights_are_written_wherever_they_are_and_read(family, dtype, tmp_path):
    """A layer's scale and a router's bias, which are in no buffer; a run of the same type finds the bits again."""
    window = {"window": 7} if "gemma" in family else {}
    folder = make_model(tmp_path / "model", family, dtype=dtype, **window)
    with one_rank():
        actor = make_actor(folder, dtype=dtype, offload_mode="everything")
        expected = full_weights(actor)
        write(actor, tmp_path / "home", copies=False)
        ActorOffload(actor.model, actor.optimizer).offload()
        write(actor, tmp_path / "away", copies=False)
        assert contents(tmp_path / "home") == contents(tmp_path / "away")
        again = make_actor(make_model(tmp_path / "other", family, seed=2, dtype=dtype, **window), dtype=dtype)
        again.load(tmp_path / "away", num_updates=0, num_applied=0)
        found = full_weights(again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_memory_is_given_back(by_rank, folder, name):
    """By the budget's arithmetic: 8 bytes of moments for every weight of the cells, and 4 of main weights in bf16."""
    facts = [found[name][2] for found in by_rank]
    assert all(fact["given back"] == fact["on the host"] for fact in facts)
    tp = LAYOUTS[name].get("tp", 1)
    whole = tp * BYTES[name] * num_weights(Architecture.from_folder(folder / "model"), Layout(tp=tp))
    assert sum(fact["on the host"] for fact in facts) == whole


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_whole_actor_gives_everything_back(by_rank, name):
    """By hand: the numbers of the weights, 4 bytes of gradient for each, and what offload sends away."""
    for _, _, of_state, facts in (found[name] for found in by_rank):
        weight = 2 if "bf16" in name else 4
        assert facts["held"] == (weight + 4) * facts["numbers"] + of_state["on the host"]
        assert facts["still held"] == 0
        before, after = facts["scores"]
        assert before == after and len(set(before)) > 6


OFFLOAD = "agents.*.offload=optimizer"
SHARED = "placement=shared"
WATCHED = ("training.verify_weights_every=1", "training.diagnose_every=1")


@pytest.fixture(scope="module")
def plain(folder) -> Path:
    """The configuration of a run of two steps that keeps its state on the device, and all its checkpoints."""
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2),
        agent_table(folder, "alone", "llama", CHARACTERS + PAIRS),
    ]
    checkpoint = {"every_steps": 1, "keep_every": 1}
    config = write_config(folder, agents, checkpoint=checkpoint, algorithm={"kl_coef": 0.01})
    train(config, *WATCHED)
    return config


@pytest.fixture(scope="module")
def offloading(plain) -> Path:
    """The folder of the same run with offload."""
    run_dir, noted = plain.parent / "offloading", plain.parent / "noted"
    noted.mkdir()
    run_script("offload_job", 3, plain, noted, *WATCHED, f"run_dir={run_dir}", OFFLOAD)
    return run_dir


@pytest.fixture(scope="module")
def shared(plain) -> Path:
    """The folder of the same run, whose agents take turns; the second step is traced."""
    run_dir, noted = plain.parent / "shared", plain.parent / "noted in turns"
    noted.mkdir()
    traced = ("logging.trace=true", "logging.trace_steps=[2]")
    run_script("shared_job", 3, plain, noted, *WATCHED, *traced, f"run_dir={run_dir}", SHARED)
    return run_dir


@pytest.mark.parametrize("how", ["offloading", "shared"])
def test_a_run_of_which_something_leaves_is_the_run_without(how, plain, request):
    """Metrics, answers, every shard of every checkpoint, and what is exported; so whoever goes on from these finds the
    same.

    Such runs take up others' steps in test_checkpoint.py (with offload) and in test_three_agents.py (in turns).
    """
    run, other, steps = plain.parent / "run", request.getfixturevalue(how), [1, 2]
    assert committed_steps(other) == steps
    expected, metrics = (read_metrics(folder / "metrics.jsonl") for folder in (run, other))
    for step in steps:
        assert metrics[step].values == expected[step].values
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
    """Two steps of every agent as (method, where the state was before it, where after it)."""
    for rank in range(3):
        noted = [tuple(note) for note in json.loads((offloading.parent / "noted" / f"{rank}.json").read_text())]
        start = noted.index(("answer_once", "ON_HOST", "ON_HOST"))
        assert noted[:start] == [("publish_weights", "ON_HOST", "ON_HOST"), ("verify_weights", "ON_HOST", "ON_HOST")]
        step = [
            ("roll_out", "ON_HOST", "ONLOADING"),
            ("score", "ONLOADING", "ONLOADING"),
            *(("diagnose", "ONLOADING", "ON_DEVICE"), ("learn", "ON_DEVICE", "ON_DEVICE")),
            *(("diagnose", "ON_DEVICE", "ON_DEVICE"), ("learn", "ON_DEVICE", "ON_DEVICE")),
            *(
                ("wake", "weights", "OFFLOADING"),
                ("wake", "cache", "ON_HOST"),
                ("publish_weights", "ON_DEVICE", "ON_HOST"),
            ),
            ("verify_weights", "ON_HOST", "ON_HOST"),
        ]
        assert noted[start + 1 :] == [
            *(*step, ("save", "ON_HOST", "ON_HOST")),
            *(*step, ("answer_once", "ON_HOST", "ON_HOST"), ("save", "ON_HOST", "ON_HOST")),
        ]


def test_engine_and_actor_have_the_device_one_after_the_other(shared):
    """Every rank's calls as (method, are the weights there, are the gradient buffers) before each."""
    there, to_score, nothing = (True, True), (True, False), (False, False)
    hand_over = [("wake", *to_score), ("publish", *to_score)]
    answers = [*hand_over, ("wake", *nothing), ("generate", *nothing), ("sleep", *nothing)]
    verifies = [*hand_over, ("differences", *to_score), ("sleep", *nothing)]
    # Each update is diagnosed, has the KL's reference, and is learnt from.
    update = [("gradient_products", *there), ("learn", *there)]
    for rank in range(3):
        noted = [tuple(note) for note in json.loads((shared.parent / "noted in turns" / f"{rank}.json").read_text())]
        noted = [note for note in noted if note != ("score", *there)]  # by the KL's reference, of each update
        scores = [note for note in noted if note == ("score", *to_score)]
        step = [*answers, *scores[:2], *update, *update, *verifies]
        assert len(scores) == 4, "for the first update, and of all else, in two steps"
        assert noted == [
            *(("sleep", *nothing), *verifies, *answers),
            *(*step, ("save", *nothing)),
            *(*step, *answers, ("save", *nothing)),
            *[("save_hf", *to_score)] * 2,  # once on a full disk, of which all hear
        ]


def test_every_step_says_what_is_held_while_the_engine_sleeps(plain):
    for step, metrics in read_metrics(plain.parent / "run" / "metrics.jsonl").items():
        for name in ("wide", "alone"):
            assert (f"agent/{name}/asleep_bytes" in metrics.timing) == (step > 0)
            assert step == 0 or 1e8 < metrics.timing[f"agent/{name}/asleep_bytes"] < 1e11


def test_agents_are_on_the_device_one_after_another(shared):
    """In the traced step: to roll out, to score, to learn, to verify, to evaluate. The clocks are of one machine."""
    trace = json.loads(gzip.decompress((shared / "trace" / "step_000002.json.gz").read_bytes()))
    events = trace["traceEvents"]
    turns = {pid: [e for e in events if e["name"] == "turn" and e["pid"] == pid] for pid in (0, 1)}
    assert [len(turns[0]), len(turns[1])] == [2 * 5, 5], "of two ranks, and of one"
    slack = 2e6 * max(trace["otherData"]["clock_accuracy_s"].values())
    for one in turns[0]:
        for other in turns[1]:
            assert one["ts"] + one["dur"] <= other["ts"] + slack or other["ts"] + other["dur"] <= one["ts"] + slack
    device = {"forward and backward", "optimizer"}
    work = [e for e in events if e["name"] in device]
    assert len(work) > 8
    for event in work:
        assert any(
            t["tid"] == event["tid"] and t["ts"] <= event["ts"] and event["ts"] + event["dur"] <= t["ts"] + t["dur"]
            for t in turns[event["pid"]]
        )
