"""An agent leaves its run, at the end or by a checkpoint: byte-equal as it is, within a number format's rounding when
quantized, with a true card; and a checkpoint is evaluated as what was exported.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tomli_w
import torch
from job import play_command, run_command, run_here, start_command, start_ranks
from repository import ROOT
from run_cases import CHARACTERS, train
from safetensors.torch import load_file
from stored_harm import be_hostile, be_of_another_format, flip_a_bit
from tiny_models import SCALED_ROPE, make_model

from hacpo_mega.checkpoint.files import FORMAT, RECORD, FileState, file_sha256, folder_of, remove_old
from hacpo_mega.commands import export
from hacpo_mega.commands.export import export_copy, trained_agent
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts
from hacpo_mega.logbook.run.run_lock import RunLock
from hacpo_mega.megatron.checkpoint.stored_state import WEIGHT, Part, stored_name, stored_weights, write_parts
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.files.weight_files import StoredTensor, stored_tensors, tower_tensors
from hacpo_mega.models.sharding.segments import all_sources
from hacpo_mega.samples.tokenizers import make_tokenizer

GRADER = ROOT / "tests/support/graders.py"
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """The folder of a finished run of two agents, one step long."""
    folder = tmp_path_factory.mktemp("export")
    size = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 64}
    agents = []
    for name, family in (("first", "qwen3"), ("second", "llama")):
        make_model(folder / name, family, vocab_size=len(CHARACTERS) + 2, tied=family == "qwen3", **size)
        make_tokenizer(folder / name, CHARACTERS)
        agents.append({"name": name, "model": str(folder / name), "optimizer": {"lr": 1e-3}})
    agents[1]["prompt_template"] = "s{prompt}"
    config = {
        "run_dir": str(folder / "run"),
        "num_steps": 1,
        "agents": agents,
        "data": {"generator": "arithmetic"},
        "algorithm": {"alpha": 2.0, "delta": 0.9},
        "reward": {"kind": f"{GRADER}:share_of_ones"},
        "rollout": {"rollouts_per_prompt": 4, "max_prompt_tokens": 9, "max_answer_tokens": 12},
        "training": {"prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 256},
        "evaluation": {"num_prompts": 8},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(config))
    train(folder / "run.toml")
    return folder / "run"


def test_an_exported_agent_is_the_trained_one_byte_by_byte(run_dir, tmp_path):
    done = run_here("export", run_dir, "--agent", "first", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    trained = {file.name: file.read_bytes() for file in (run_dir / "agents" / "first").iterdir()}
    exported = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    card = exported.pop("README.md").decode()
    assert exported == trained and "model.safetensors" in trained
    assert not (tmp_path / "out.part").exists()
    steps = read_metrics(run_dir / "metrics.jsonl")
    for when, step in (("start", 0), ("end", 1)):
        assert (
            f"| held-out mean reward at the {when} | {steps[step].values['agent/first/eval/reward_mean']:.4f} |" in card
        )
    commit = json.loads((run_dir / "starts.jsonl").read_text().splitlines()[-1])["commit"]
    assert f"| commit | `{commit}` |" in card
    assert "| alpha, delta, delta_step | 2, 0.9, 0.025 |" in card
    assert "learning from its own answers and those of second." in card


def test_what_has_come_to_lie_beside_an_agent_is_not_exported(run_dir, tmp_path):
    run = Path(shutil.copytree(run_dir, tmp_path / "run"))
    folder = run / "agents" / "first"
    for name in ("optimizer.pt", "notes.json", "README.md", "trainer_state.json"):
        (folder / name).write_text("{}")
    done = run_here("export", run, "--agent", "first", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    found = files_of(tmp_path / "out")
    assert "first" in found.pop("README.md").decode()
    assert found == files_of(run_dir / "agents" / "first")
    (folder / "adapter_config.json").write_text("{}")
    done = run_here("export", run, "--agent", "first", "--out", tmp_path / "again")
    assert done.returncode == 2 and done.stderr.startswith(f"{folder} holds adapter_config.json beside whole weights")


def test_the_log_of_a_run_holds_what_each_agent_read(run_dir):
    prompts = read_rollouts(run_dir, 1)
    assert [prompt["prompt_seen"] for prompt in prompts] == [{"second": f"s{p['prompt']}"} for p in prompts]


def test_the_card_says_how_an_agent_was_asked(run_dir, tmp_path):
    export_copy(trained_agent(run_dir, "second"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Prompt:\n\n```\ns{prompt}\n```" in card


def test_an_image_checkpoint_leaves_whole_or_as_its_text(tmp_path):
    """Its engines sample from the text model; evaluated, the whole folder answers as its text alone does."""
    model = make_model(
        tmp_path / "model", "ministral3", images=True, num_heads=2, head_dim=32, vocab_size=len(CHARACTERS) + 2,
        tied=False, rope_scaling=SCALED_ROPE,
    )  # fmt: skip
    make_tokenizer(model, CHARACTERS)
    (model / "processor_config.json").write_text("{}")
    config = {
        "run_dir": str(tmp_path / "run"),
        "num_steps": 1,
        "agents": [{"name": "a", "model": str(model), "optimizer": {"lr": 1e-3}}],
        "algorithm": {"method": "grpo"},
        "data": {"generator": "arithmetic"},
        "reward": {"kind": f"{GRADER}:share_of_ones"},
        "rollout": {"rollouts_per_prompt": 4, "max_prompt_tokens": 9, "max_answer_tokens": 40},
        "training": {"prompts_per_step": 4, "prompts_per_update": 4, "max_tokens_per_microbatch": 256},
        "checkpoint": {"every_steps": 1},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(config))
    step = train(tmp_path / "run.toml")[1]
    assert step.values["agent/a/engine_gap_max"] < 1e-4
    trained = tmp_path / "run" / "agents" / "a"
    assert (trained / "processor_config.json").exists() and Architecture.from_folder(trained).query_beta == 0.1
    assert bytes_of(trained, tower_tensors(trained)) == bytes_of(model, tower_tensors(model))
    assert bytes_of(trained, stored_tensors(trained)) != bytes_of(model, stored_tensors(model))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    for source, name in ((tmp_path / "run", "run"), (checkpoint, "checkpoint")):
        for options in ([], ["--text-only"]):
            out = tmp_path / "".join(["of-", name, *options])
            done = run_here("export", source, *options, "--out", out, *["--trust"] * (source is checkpoint))
            assert done.returncode == 0, done.stderr
            assert bytes_of(out, stored_tensors(out)) == bytes_of(trained, stored_tensors(trained))
            assert bytes_of(out, tower_tensors(out)) == ({} if options else bytes_of(model, tower_tensors(model)))
    problems = tmp_path / "b.jsonl"
    problems.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    answers = []
    for name in ("of-run", "of-run--text-only"):
        evaluated, lengths = tmp_path / f"{name}.eval", ("max_prompt_tokens=9", "max_answer_tokens=40")
        run_command(1, "eval", tmp_path / name, problems, "--out", evaluated, "reward.kind=arithmetic", *lengths)
        answers.append([file.read_text() for file in (evaluated / "answers").iterdir()])
    assert answers[0] == answers[1] != []


def bytes_of(folder: Path, tensors: dict[str, StoredTensor]) -> dict[str, bytes]:
    return {name: (folder / stored.file).read_bytes()[stored.start : stored.stop] for name, stored in tensors.items()}


@pytest.mark.parametrize("out", ["/proc/x", "file/x", "dangling", "n" * 250])
def test_an_export_that_cannot_be_made_is_one_line(out, run_dir, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    done = run_here("export", run_dir, "--agent", "first", "--out", tmp_path / out)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"{tmp_path / out} "), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


def test_an_export_onto_a_full_disk_is_one_line_and_leaves_nothing(run_dir, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=16k", "none"]
    if shutil.which("mount") is None or subprocess.run(["mount", *options, disk], check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        done = run_here("export", run_dir, "--agent", "first", "--out", disk / "out")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"{disk / 'out'} is not written: ") and "No space left" in done.stderr
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_what_is_not_there_is_named(run_dir, tmp_path):
    for arguments, complaint in (
        ((run_dir, "--out", tmp_path / "x"), "trained first, second: say which one with --agent"),
        ((run_dir, "--agent", "third", "--out", tmp_path / "x"), "has no agent 'third'; there are: first, second"),
        ((run_dir, "--agent", "first", "--out", tmp_path), "exists: give a new folder"),
        ((tmp_path, "--out", tmp_path / "x"), "has no config.toml: give the run_dir of a run"),
    ):
        done = run_here("export", *arguments)
        assert done.returncode == 2 and complaint in done.stderr, done.stderr


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def going_on(run_dir, tmp_path) -> Path:
    """The run as it was before its end: it has a checkpoint, and nothing exported."""
    return shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("agents", "finished.json"))


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_checkpoint_of_a_run_that_goes_on_leaves_as_the_run_exports_it(name, run_dir, going_on, tmp_path):
    with RunLock(going_on):
        done = run_here("export", folder_of(going_on, 1), "--agent", name, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    found = files_of(tmp_path / "out")
    card = found.pop("README.md").decode()
    assert found == files_of(run_dir / "agents" / name)
    steps = read_metrics(run_dir / "metrics.jsonl")
    assert "| weights | of the checkpoint step_000001 |" in card
    score = steps[1].values[f"agent/{name}/eval/reward_mean"]
    assert f"| held-out mean reward at the end | {score:.4f} |" in card and "accuracy" not in card


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / RECORD).unlink(), "step_000001 is no checkpoint of a run. There is no other step"),
        (
            lambda folder: folder.rename(folder_of(folder.parents[1], 2)),
            "is no checkpoint of a run. Other steps there: 2",
        ),
        (flip_a_bit, "__0_0.distcp is damaged: it is not what was written (SHA-256 differs)"),
        (lambda folder: (folder / "first" / ".metadata").unlink(), "first/.metadata is missing"),
        (be_of_another_format, f"is of format {FORMAT + 1}, this version of hacpo_mega reads format {FORMAT}"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_one_line(harm: Callable[[Path], object], said: str, going_on, tmp_path):
    """And nothing is left where the model was to be."""
    folder = folder_of(going_on, 1)
    harm(folder)
    assert said in refused_export(folder, tmp_path)


def refused_export(folder: Path, tmp_path: Path, agent: str = "first") -> str:
    done = run_here("export", folder, "--agent", agent, "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == []
    return done.stderr


def test_what_is_no_checkpoint_is_one_line(going_on, tmp_path):
    folder = folder_of(going_on, 1)
    assert "step_000001 has no agent 'third'; there are: first, second" in refused_export(folder, tmp_path, "third")
    writing = folder.rename(folder.with_name("step_000001.writing"))
    assert "step_000001.writing is no checkpoint: it is half written" in refused_export(writing, tmp_path)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (Path.unlink, "its config.json is not there"),
        (lambda file: file.write_text("{}"), "config.json is not what it was"),
    ],
)
def test_the_model_folder_must_be_what_it_was(harm: Callable[[Path], object], said: str, going_on, tmp_path):
    file = trained_agent(folder_of(going_on, 1), "first").agent.model / "config.json"
    content = file.read_bytes()
    try:
        harm(file)
        assert said in refused_export(folder_of(going_on, 1), tmp_path)
    finally:
        file.write_bytes(content)


def test_a_number_that_is_not_finite_leaves_no_checkpoint(going_on, tmp_path):
    """Whole by its record, so only a look at the numbers finds it."""
    folder = folder_of(going_on, 1)
    stored = trained_agent(folder, "first").stored
    sources = tuple(all_sources(Architecture.from_folder(stored.agent.model)))
    weights = dict(stored_weights(stored.folder, sources, torch.float32))
    weights["model.norm.weight"][3] = torch.nan
    shutil.rmtree(stored.folder)
    stored.folder.mkdir()
    write_parts(
        {stored_name(WEIGHT, s.name): [Part(s.shape, (0,) * len(s.shape), weights[s.name])] for s in sources},
        stored.folder,
    )
    written = {
        f"first/{file.name}": FileState(file.stat().st_size, file_sha256(file)) for file in stored.folder.iterdir()
    }
    files = {path: file for path, file in stored.checkpoint.files.items() if not path.startswith("first/")} | written
    (folder / RECORD).write_text(replace(stored.checkpoint, files=files).text())
    line = refused_export(folder, tmp_path)
    assert "is not written: model.norm.weight holds 1 numbers that are not finite" in line


def test_a_checkpoint_removed_during_its_export_leaves_no_partial_output(going_on, tmp_path, monkeypatch):
    """It is removed when its bytes have been compared, and before its weights are read."""
    shutil.copytree(folder_of(going_on, 1), folder_of(going_on, 2))
    copy_beside_weights = export.copy_beside_weights

    def then_it_is_removed(*arguments: object, **options: object) -> None:
        copy_beside_weights(*arguments, **options)
        remove_old(going_on, keep_last=1, keep_every=0, keep_best=False)

    monkeypatch.setattr(export, "copy_beside_weights", then_it_is_removed)
    line = refused_export(folder_of(going_on, 1), tmp_path)
    assert "step_000001 was removed while it was read: its run keeps checkpoint.keep_last steps. Other" in line
    assert "Other steps there: 2" in line


def test_a_checkpoint_is_evaluated_as_what_the_run_exported(run_dir, tmp_path):
    """The same answers, and again no engine; a damaged one is refused by name before an engine starts."""
    bench = tmp_path / "bench.jsonl"
    rows = [{"prompt": f"{i}+{2 * i}=", "answer": "1"} for i in range(30)]
    bench.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = {}
    for model in (run_dir / "agents" / "second", folder_of(run_dir, 1) / "second"):
        out = tmp_path / model.parent.name
        arguments = ("eval", model, bench, "--out", out, "num_answers=2", "--trust")  # its grader is a file
        run_command(1, *arguments)
        (file,) = (out / "answers").iterdir()
        answers[out.name] = file.read_text()
        settings = json.loads((out / "settings.json").read_text())
        assert (settings["prompting"]["prompt_template"], settings["max_answer_tokens"]) == ("s{prompt}", 12)
    assert answers["step_000001"] == answers["agents"] and answers["agents"].count("\n") == 60
    run_command(1, *arguments)  # everything is answered
    assert file.read_text() == answers["agents"]


def test_what_cannot_be_evaluated_of_a_checkpoint_is_one_line(going_on, tmp_path):
    bench = tmp_path / "bench.jsonl"
    bench.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    folder = folder_of(going_on, 1)
    done = run_here("eval", folder, bench, "--out", tmp_path / "out")
    agents = f"give one of them, {folder}/first, {folder}/second"
    assert (done.returncode, done.stderr) == (2, f"{folder} holds all agents of a run: {agents}\n")
    arguments = ("eval", f"{folder}/first", str(bench), "reward.kind=exact", "--out")
    for harm, said in (
        (flip_a_bit, "first/__0_0.distcp is damaged"),
        (
            partial(be_hostile, tmp_path / "touched"),
            "first/.metadata is no index of a stored state: it names os.system",
        ),
    ):
        harm(folder)
        (place := tmp_path / harm.__class__.__name__).mkdir()
        (rank,) = start_ranks(1, place, play_command, *arguments, f"{place}/out")
        rank.join()
        errors = (place / "0.err").read_text()
        assert rank.exitcode == 2 and said in errors and errors.count("\n") == 1, errors
    assert not (tmp_path / "touched").exists()


def test_a_hostile_checkpoint_runs_no_code_when_exported_or_started_from(going_on, tmp_path):
    folder, touched = folder_of(going_on, 1), tmp_path / "touched"
    be_hostile(touched, folder)
    said = f"{folder}/first/.metadata is no index of a stored state: it names os.system. Nothing of it was run"
    assert refused_export(folder, tmp_path) == f"{said}\n"
    beginning = ("train", f"{tmp_path}/run.toml", "--from", str(folder), f"run_dir={tmp_path}/new")
    shutil.copy(going_on / "config.toml", tmp_path / "run.toml")
    ranks = start_ranks(2, tmp_path, play_command, *beginning)
    for rank in ranks:
        rank.join()
    assert ranks[0].exitcode == 2 and (tmp_path / "0.err").read_text() == f"{said}\n"
    assert not touched.exists()


@pytest.fixture(scope="module")
def fp8(run_dir) -> Path:
    """The export of the checkpoint of the run's end, which is the run's export."""
    out = run_dir.parent / "fp8"
    # in a fresh process, as a user does: modelopt changes the modules of the process that quantizes
    process = start_command("export", folder_of(run_dir, 1), "--agent", "first", "--out", out, "--quantize", "fp8")
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return out


def test_fp8_weights_are_the_trained_ones_but_for_rounding(run_dir, fp8):
    """Largest magnitude on 448, three mantissa bits: an error of at most 1/16 of a weight or half the least step."""
    trained = load_file(run_dir / "agents" / "first" / "model.safetensors")
    stored = load_file(fp8 / "model.safetensors")
    quantized = [name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(quantized) == 2 * 7
    for name in quantized:
        scale = stored[f"{name}_scale"].float()
        weight = trained[name].bfloat16().float()
        assert scale.item() == pytest.approx(weight.abs().max().item() / 448, rel=1e-2)
        error = (stored[name].float() * scale - weight).abs()
        assert bool((error <= weight.abs() / 16 + scale * 2**-10 + 1e-6).all()), name
    for name in trained.keys() - set(quantized):
        assert torch.equal(stored[name], trained[name].bfloat16()), name


def test_an_fp8_folder_is_whole(run_dir, fp8):
    assert {file.name for file in (run_dir / "agents" / "first").iterdir()} < {file.name for file in fp8.iterdir()}
    config = json.loads((fp8 / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "FP8"
    card = (fp8 / "README.md").read_text()
    assert re.search(r"fp8 by nvidia-modelopt [\d.]+, calibrated on 8 answers.* mean log-prob: 0\.\d+ nats", card)


def test_vllm_serves_fp8_where_it_has_the_kernels(fp8, tmp_path):
    """On a GPU it answers. vLLM's CPU build reads the folder, and then has no operator that scales to FP8."""
    bench = tmp_path / "bench.jsonl"
    bench.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    options = ("reward.kind=exact", "max_prompt_tokens=8", "max_answer_tokens=8")
    arguments = ["eval", fp8, bench, "--out", tmp_path / "out", *options]
    (rank,) = start_ranks(1, tmp_path, play_command, *map(str, arguments))
    rank.join()
    errors = (tmp_path / "0.err").read_text()
    if torch.cuda.is_available():
        assert rank.exitcode == 0, errors[-3000:]
    else:
        assert rank.exitcode == 1, errors[-3000:]
        assert "RuntimeError: _C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4" in errors
