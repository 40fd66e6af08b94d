"""A run that is killed goes on as if it had not been: weights, Adam, metrics and answers, to the last bit.

Two agents of unequal layout, tensor parallel 2 beside two cells, with a KL to the initial policy: whatever a run
remembers from step to step is in the comparison.
"""

import json
import shutil
import signal
import threading
import time
from pathlib import Path
from statistics import fmean

import pytest
import torch
import torch.distributed as dist
from actor_cases import full_weights, make_actor, random_samples
from job import play_command, run_command, run_group, run_here, start_ranks, wait_for_ranks
from recorded_cuda import Memory, RecordedCuda
from run_cases import CHARACTERS, PAIRS, agent_table, train, write_config
from safetensors.torch import load_file
from tiny_models import make_model
from told_job import told_at_call

from hacpo_mega.checkpoint.files import committed_steps, folder_of, read_checkpoint
from hacpo_mega.config import OptimizerConfig
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import logged_steps, read_rollouts
from hacpo_mega.logbook.run.provenance import read_starts

pytestmark = pytest.mark.nightly

NAMES = ("wide", "twice")
NUM_RANKS = 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The configuration of a run of four steps, a checkpoint every second one, that was left in peace."""
    folder = tmp_path_factory.mktemp("runs")
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2),
        agent_table(folder, "twice", "llama", CHARACTERS + PAIRS, cells_per_lane=2),
    ]
    config = write_config(
        folder,
        agents,
        num_steps=4,
        algorithm={"delta": 0.9, "kl_coef": 0.01},
        checkpoint={"every_steps": 2},
    )
    train(config)
    return config


@pytest.fixture(scope="module")
def resumed(undisturbed) -> Path:
    """The folder of the same run, killed after step 3 and the commit of step 2, and started again."""
    run_dir = undisturbed.parent / "killed"
    override = f"run_dir={run_dir}"
    logs = undisturbed.parent / "logs"
    logs.mkdir()
    ranks = start_ranks(NUM_RANKS, logs, play_command, "train", str(undisturbed), override)
    metrics = run_dir / "metrics.jsonl"
    # The checkpoint of step 2 is written while step 3 goes on, and counts from the end of that at the earliest.
    while not committed_steps(run_dir) or max(read_metrics(metrics)) < 3:
        assert all(rank.is_alive() for rank in ranks), [log.read_text() for log in logs.glob("*.err")]
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
        rank.join()
    assert committed_steps(run_dir) == [2]
    half = run_dir / "checkpoints" / "step_000004.writing" / "wide"
    half.mkdir(parents=True, exist_ok=True)
    (half / "__0_0.distcp").write_bytes(b"half")
    train(undisturbed, override)
    return run_dir


@pytest.fixture(scope="module")
def told(undisturbed) -> Path:
    """The folder of the same run, told to end before it learns in step 2, again while it learns in step 3."""
    run_dir = undisturbed.parent / "told"
    arguments = ("train", str(undisturbed), f"run_dir={run_dir}")
    for number, name, nth, kept in ((signal.SIGTERM, "learner_view", 2, [1]), (signal.SIGUSR1, "learn", 3, [2, 3])):
        logs = undisturbed.parent / f"told_{name}"
        logs.mkdir()
        ranks = start_ranks(NUM_RANKS, logs, told_at_call, NUM_RANKS - 1, number, name, nth, *arguments)
        wait_for_ranks(ranks)
        said = [(logs / f"{rank}.err").read_text() for rank in range(NUM_RANKS)]
        assert [rank.exitcode for rank in ranks] == [75] * NUM_RANKS, said
        assert not any("Traceback" in text or "told to end" in text for text in said), said
        assert max(read_metrics(run_dir / "metrics.jsonl")) == max(kept) == logged_steps(run_dir)[-1]
        assert committed_steps(run_dir) == kept
    train(undisturbed, f"run_dir={run_dir}")
    return run_dir


@pytest.mark.parametrize("how", ["resumed", "told"])
def test_a_resumed_run_ends_with_the_bits_of_the_undisturbed_one(how, undisturbed, request):
    """The shards of a checkpoint hold weights, main weights and both moments of every rank."""
    resumed = request.getfixturevalue(how)
    one, other = (read_checkpoint(folder_of(run, 4)) for run in (undisturbed.parent / "run", resumed))
    shards = {path: file for path, file in one.files.items() if path.endswith(".distcp")}
    assert len(shards) == NUM_RANKS
    assert {path: other.files[path] for path in shards} == shards
    assert (other.agents, other.capability, other.accuracy) == (one.agents, one.capability, one.accuracy)
    values = read_metrics(one.folder.parents[1] / "metrics.jsonl")[4].values
    assert one.accuracy == fmean(values[f"agent/{name}/eval/reward_mean"] for name in NAMES)
    assert read_checkpoint(folder_of(one.folder.parents[1], 2)).accuracy is None, "it had no evaluation"
    for name in NAMES:
        first, second = (
            load_file(run / "agents" / name / "model.safetensors") for run in (one.folder.parents[1], resumed)
        )
        assert all(torch.equal(first[tensor], second[tensor]) for tensor in first)


def test_the_clock_of_a_chat_template_stands_over_starts_and_evaluations(tmp_path):
    """It tells seconds, and each of these processes starts at another one; what it draws has no seed but the prompt."""
    agent = agent_table(tmp_path, "a", "qwen3", CHARACTERS, chat_template=True)
    template = "{{ strftime_now('%s') }}{{ range(10)|random }}s{{ messages[0].content }}="
    (tmp_path / "a" / "chat_template.jinja").write_text(template)
    rollout = {"rollouts_per_prompt": 2, "max_prompt_tokens": 20, "max_answer_tokens": 4}
    config = write_config(tmp_path, [agent], rollout=rollout, algorithm={"method": "gspo"})
    run, seen = tmp_path / "run", {}
    for steps in (1, 2):
        train(config, f"num_steps={steps}", "checkpoint.every_steps=1")
    texts = [row["prompt_seen"]["a"] for step in (1, 2) for row in read_rollouts(run, step)]
    for number, model in enumerate((run / "agents" / "a", folder_of(run, 2) / "a")):
        problems, out = tmp_path / "problems.jsonl", tmp_path / f"out_{number}"
        problems.write_text("".join(json.dumps({"prompt": f"{n}+1", "answer": "1"}) + "\n" for n in range(8)))
        run_command(1, "eval", str(model), str(problems), "--out", str(out), "max_answer_tokens=4", "--trust")
        lines = [line for file in sorted((out / "answers").iterdir()) for line in file.read_text().splitlines()]
        seen[number] = {answer["id"]: answer["prompt_seen"] for answer in map(json.loads, lines)}
        texts += seen[number].values()
    assert len({text[:10] for text in texts}) == 1 and texts[0][:10].isdecimal()
    assert seen[0] == seen[1] and len({text[10] for text in seen[0].values()}) > 1


@pytest.mark.parametrize("how, starts", [("resumed", [0, 2]), ("told", [0, 1, 3])])
def test_every_step_is_logged_once_and_alike(how, starts, undisturbed, request):
    run, resumed = undisturbed.parent / "run", request.getfixturevalue(how)
    one, other = (read_metrics(folder / "metrics.jsonl") for folder in (run, resumed))
    lines = [json.loads(line)["step"] for line in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 2, 3, 4]
    assert [m.values for m in other.values()] == [m.values for m in one.values()]
    assert logged_steps(resumed) == logged_steps(run) == [1, 2, 3, 4]
    assert all(read_rollouts(resumed, step) == read_rollouts(run, step) for step in range(1, 5))
    assert any(value > 0.0 for name, value in other[4].values.items() if name.endswith("/kl"))
    assert [start["steps_done"] for start in read_starts(resumed)] == starts
    assert "checkpoint" not in str([m.values for m in other.values()]), "its seconds are timing"


def test_what_a_killed_run_was_writing_is_gone(resumed):
    assert sorted(path.name for path in (resumed / "checkpoints").iterdir()) == ["step_000002", "step_000004"]


def test_a_new_run_branches_off_and_may_have_its_state_in_host_memory(undisturbed):
    """It does step 3 as the run did that it comes from, evaluation aside: it is its last."""
    run, branch = undisturbed.parent / "run", undisturbed.parent / "branch"
    overrides = (f"run_dir={branch}", "num_steps=3", "agents.*.offload=optimizer")
    run_command(NUM_RANKS, "train", undisturbed, *overrides, "--from", folder_of(run, 2))
    steps = read_metrics(branch / "metrics.jsonl")
    expected = read_metrics(run / "metrics.jsonl")[3].values
    assert list(steps) == [3]
    assert {name: value for name, value in steps[3].values.items() if name in expected} == expected
    scored = {"eval", "num_evaluated", "held_out_gain", "held_out_gain_square", "num_held_out_pairs"}
    assert {name.split("/")[2] for name in steps[3].values.keys() - expected.keys()} == scored
    assert read_rollouts(branch, 3) == read_rollouts(run, 3)
    assert committed_steps(branch) == [3] and committed_steps(run) == [2, 4]


ADAM = OptimizerConfig(lr=1e-3, weight_decay=0.1, schedule="linear")
SHARES = (3, 1)  # of cells that take up what two have written


@pytest.fixture(scope="module")
def on_other_cells(tmp_path_factory) -> tuple[tuple, dict[int, tuple], list[list[str]]]:
    """An actor after two updates and one more; what other numbers of cells make of its checkpoint; races."""
    folder = tmp_path_factory.mktemp("cells")
    make_model(folder / "model", "qwen3", tied=True)
    (folder / "state").mkdir()
    ((written, races), *_) = run_group(2, save_after_two_updates, folder)
    return written, {cells: run_group(cells, update_after_loading, folder)[0] for cells in SHARES}, races


def save_after_two_updates(folder: Path) -> tuple:
    actor = make_actor(folder / "model", optimizer=ADAM)
    for number in range(2):
        update(actor, number)
    counts, write = actor.save(folder / "state", copies=True)
    after = full_weights(actor), update(actor, 2)  # what is written is the actor as it was
    write()
    if dist.get_rank() == 0:
        (folder / "counts.json").write_text(json.dumps(counts))
    return after, [read_beside(actor, folder, copies=copies) for copies in (False, True)]


def read_beside(actor, folder: Path, *, copies: bool) -> list[str]:
    """Races of a thread that reads what `save` has handed out of an actor that learns on a stream of its own."""
    with RecordedCuda().installed() as cuda:
        state = Memory("the actor's state")
        with torch.cuda.stream(torch.cuda.Stream()):
            cuda.ask("learn", writes=(state,))
            actor.save(folder / "state", copies=copies)

        def write() -> None:
            cuda.set_device(cuda.index)
            cuda.ask("write", reads=(state,))

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        return cuda.races


def test_who_writes_a_checkpoint_reads_what_is_there(on_other_cells):
    """On CUDA, whatever stream the actor is on; waiting or not."""
    assert on_other_cells[2] == [[], []]


def update_after_loading(folder: Path) -> tuple:
    actor = make_actor(folder / "model", optimizer=ADAM)
    actor.load(folder / "state", **json.loads((folder / "counts.json").read_text()))
    return full_weights(actor), update(actor, 2)


def update(actor, number: int) -> tuple:
    """One update by all cells together: its loss, gradient norm and rate, and the weights that it leaves."""
    samples = [sample for sample in random_samples(4, seed=60 + number) if sample.num_trained]
    mine = samples[dist.get_rank() :: dist.get_world_size()]
    stats = actor.learn_supervised(mine, sum(sample.num_trained for sample in samples))
    return stats.loss, stats.grad_norm, stats.lr, full_weights(actor)


@pytest.mark.parametrize("cells", SHARES)
def test_other_numbers_of_cells_take_up_a_checkpoint(cells, on_other_cells):
    """Weights to the last bit; the next update differs by rounding, where lost moments would turn it around."""
    (weights, (loss, grad_norm, lr, after)), found, _ = on_other_cells
    (other_weights, (other_loss, other_grad_norm, other_lr, other_after)) = found[cells]
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert other_lr == lr
    assert (other_loss, other_grad_norm) == pytest.approx((loss, grad_norm), rel=1e-5)
    moved = sum(float((after[name] - weights[name]).square().sum()) for name in weights) ** 0.5
    differs = sum(float((after[name] - other_after[name]).square().sum()) for name in weights) ** 0.5
    assert differs < 1e-2 * moved


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def refused(config: Path, run_dir: Path, *arguments: str) -> str:
    """The refusal of `train` before any rank starts; the folder is as it was."""
    before = contents(run_dir)
    done = run_here("train", config, f"run_dir={run_dir}", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert contents(run_dir) == before
    return done.stderr


@pytest.fixture
def copy(undisturbed, tmp_path) -> Path:
    return shutil.copytree(undisturbed.parent / "run", tmp_path / "copy")


def test_a_finished_run_says_so_and_stays(undisturbed):
    run = undisturbed.parent / "run"
    before = contents(run)
    done = run_here("train", undisturbed)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 steps are done" in done.stdout and "--fresh starts anew" in done.stdout
    assert contents(run) == before


@pytest.mark.parametrize(
    "harm, said",
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is damaged: it has "),
    ],
)
def test_a_missing_or_torn_file_is_named_and_the_older_step_offered(undisturbed, copy, harm, said):
    file = folder_of(copy, 4) / "twice" / "__1_0.distcp"
    harm(file)
    line = refused(undisturbed, copy)
    assert line.startswith(f"{file} {said}") and line.count("\n") == 1
    assert f"Step 2 is whole: move {folder_of(copy, 4)} away to go on from there" in line


def test_a_flipped_bit_is_named_before_a_model_is_loaded(undisturbed, copy, tmp_path):
    file = folder_of(copy, 4) / "wide" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = contents(copy)
    ranks = start_ranks(NUM_RANKS, tmp_path, play_command, "train", str(undisturbed), f"run_dir={copy}", "num_steps=5")
    for rank in ranks:
        rank.join()
    said = "".join((tmp_path / f"{rank}.err").read_text() for rank in range(NUM_RANKS))
    assert [rank.exitcode for rank in ranks] == [2] * NUM_RANKS, said
    assert said.startswith(f"{file} is damaged: it is not what was written") and said.count("\n") == 1
    assert "Step 2 is whole" in said
    assert contents(copy) == before


def test_another_configuration_is_refused_key_by_key(undisturbed, copy):
    lines = refused(undisturbed, copy, "seed=3", "agents.wide.optimizer.lr=0.5", "num_steps=9").splitlines()
    assert lines == [
        f"{folder_of(copy, 4)} is of another configuration:",
        "seed was 1, is 3: go on all the same with --accept seed, or start anew with --fresh",
        "agents.wide.optimizer.lr was 0.02, is 0.5: go on all the same with --accept agents.wide.optimizer.lr, or "
        "start anew with --fresh",
        "To go on as before, add seed=1 agents.wide.optimizer.lr=0.02",
    ]
    assert "has 4 steps done, num_steps is 3" in refused(undisturbed, copy, "num_steps=3")
