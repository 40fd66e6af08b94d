"""A small grid run for real: killed in the middle and started again, it shows what an undisturbed one shows."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from job import run_here, start_command, start_server
from repository import ROOT
from run_cases import CHARACTERS, PAIRS, agent_table, write_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacpo_lab.experiments.final_answers import FinalAnswers
from hacpo_lab.experiments.identity import folder_digest
from hacpo_mega.data.tasks import examples_for_test

pytestmark = pytest.mark.nightly
AGENTS = ("qwen", "llama")


def write_grid(folder: Path, config: Path, *regimes: str) -> Path:
    """Two methods on two seeds in the regime `tiny`; the runs of `broken`, of one method, fail at their start."""
    overrides = ["evaluation.every_steps=1", 'algorithm.method="gspo"']
    known = {
        "broken": {"config": str(config), "set": [*overrides, "rollout.max_prompt_tokens=1"]},
        "tiny": {"config": str(config), "set": overrides},
    }
    table = {
        "results": str(folder / "results"),
        "work_dir": str(folder / "work"),
        "seeds": [1, 2],
        "learning_rates": [2e-2],
        "regimes": {regime: known[regime] for regime in regimes},
        "methods": {
            "gspo": {},
            "one-update": {"set": ["training.prompts_per_update=8"], "regimes": ["tiny"]},
        },
    }
    folder.mkdir()
    path = folder / "grid.toml"
    path.write_text(tomli_w.dumps(table))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    agents = [
        agent_table(folder, "qwen", "qwen3", CHARACTERS),
        agent_table(folder, "llama", "llama", CHARACTERS + PAIRS),
    ]
    return write_config(folder, agents)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, config: Path) -> tuple[Path, subprocess.CompletedProcess]:
    """The folder of a grid that ran in one go, and what the command said."""
    folder = tmp_path_factory.mktemp("undisturbed") / "grid"
    process = start_command("experiment", write_grid(folder, config, "broken", "tiny"))
    out, errors = process.communicate()
    return folder, subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def shown(folder: Path) -> Any:
    """The regime `tiny` of evidence.json, without what differs between two runs of the same: seconds."""

    def without_seconds(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_seconds(inside) for key, inside in value.items() if key != "seconds"}
        return [without_seconds(inside) for inside in value] if isinstance(value, list) else value

    evidence = json.loads((folder / "work" / "evidence.json").read_text())
    assert list(evidence["regimes"]) == ["tiny"] and len(evidence["runs"]) == 4
    return without_seconds([evidence["regimes"], evidence["runs"]])


def test_a_run_that_fails_is_kept_aside_and_the_queue_goes_on(undisturbed):
    folder, done = undisturbed
    assert done.returncode == 1, done.stderr[-4000:]
    assert (
        "broken.gspo.lr-0.02.seed-1 FAILED, exit statuses [2, 2]: rollout.max_prompt_tokens (1) leaves" in done.stdout
    )
    assert "4 runs made, 2 failed, 2 of the grid still missing" in done.stdout
    assert "leaked" not in done.stderr and "Falling back" not in done.stderr, "the server is quiet"
    failure = (folder / "work/failed/broken.gspo.lr-0.02.seed-1/failure.toml").read_text()
    assert "rollout.max_prompt_tokens (1) leaves" in failure
    names = sorted(path.name for path in (folder / "results").iterdir())
    assert names == [f"tiny.{method}.lr-0.02.seed-{seed}.json" for method in ("gspo", "one-update") for seed in (1, 2)]
    assert all(path.stat().st_size < 20_000 for path in (folder / "results").iterdir())
    assert not list((folder / "work/running").iterdir()), "the folder of a run goes when its result is there"


def test_killed_in_the_middle_and_started_again_it_shows_the_same(tmp_path, config, undisturbed):
    """The runs of its first seed are taken over."""
    folder = tmp_path / "grid"
    file = write_grid(folder, config, "tiny")
    (folder / "results").mkdir()
    for result in (undisturbed[0] / "results").glob("*.seed-1.json"):
        shutil.copy(result, folder / "results")
    first = start_command("experiment", file)
    while len(list((folder / "results").glob("[!.]*.json"))) < 3:
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.kill()
    # Its server holds the same pipes, and ends after the last rank: this would wait for anyone left over.
    first.communicate()
    finished = [json.loads(path.read_text()) for path in (folder / "results").glob("[!.]*.json")]
    assert len(finished) == 3
    second = start_command("experiment", file)
    out, errors = second.communicate()
    assert second.returncode == 0, errors[-4000:]
    assert "1 runs made, 0 failed, 0 of the grid still missing" in out
    (packed,) = (folder / "results").iterdir()
    runs = [json.loads(line) for line in packed.read_text().splitlines()]
    assert packed.name == "runs.jsonl" and len(runs) == 4, "a grid of which no run is missing is one file"
    assert all(result in runs for result in finished), "what is finished is not run again: seconds are the same"
    assert shown(folder) == shown(undisturbed[0])


@pytest.fixture(scope="module")
def own_starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished grid of two seeds, each with warm starts of its own, on products alone."""
    folder = tmp_path_factory.mktemp("own") / "grid"
    short = ["num_steps=1", "training.prompts_per_step=4", "training.prompts_per_update=4", "data.skills=['mul']"]
    short += ["evaluation.num_prompts=8", "evaluation.every_steps=1", "rollout.rollouts_per_prompt=4"]
    short += ["logging.report='never'"]
    short += ["agents.*.init.warm_start={num_updates=80, batch_size=64, skills={mul={share=1.0}}}"]
    table = {
        **{"results": str(folder / "results"), "work_dir": str(folder / "work"), "warm_starts": str(folder / "starts")},
        **{"seeds": [1, 2], "learning_rates": [2e-4], "keep_runs": True},
        "regimes": {"mul": {"config": str(ROOT / "configs/quickstart.toml"), "set": short}},
        "methods": {"naive": {"set": ['algorithm.method="naive"']}},
    }
    folder.mkdir()
    (folder / "grid.toml").write_text(tomli_w.dumps(table))
    start_server()  # the queue forks its ranks in this process
    done = run_here("experiment", folder / "grid.toml")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return folder


def test_every_seed_has_warm_starts_of_its_own_with_their_digests(own_starts):
    runs = [json.loads(line) for line in (own_starts / "results/runs.jsonl").read_text().splitlines()]
    kept = [{name: folder_digest(own_starts / f"starts/mul/seed-{seed}" / name) for name in AGENTS} for seed in (1, 2)]
    assert [run["identity"]["models"] for run in runs] == kept
    assert all(kept[0][name] != kept[1][name] for name in AGENTS)
    assert runs[0]["identity"]["config"] == runs[1]["identity"]["config"]


def test_final_answers_are_those_of_the_exported_models(own_starts):
    """Greedy answers by Hugging Face, of the models that a run has exported, judged by the gold alone."""
    run = json.loads((own_starts / "results/runs.jsonl").read_text().splitlines()[0])
    final, examples = FinalAnswers.model_validate(run["final"]), examples_for_test("mul")
    assert final.num_prompts == {"mul": 150} == {"mul": len(examples)}
    for name in AGENTS:
        folder = own_starts / f"work/runs/mul.naive.lr-0.0002.seed-{run['seed']}/agents" / name
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        right = [greedy_answer(model, tokenizer, e.prompt).rpartition(";")[2] == e.result for e in examples]
        found, sampled = final.right("greedy", name)["mul"], final.right("sampled", name)["mul"]
        assert (found != np.array(right, float)).sum() <= 3, "of two equally likely tokens, rounding may choose another"
        assert found.sum() > 0 and (found != sampled).any(), "other answers, and some of them right"


def greedy_answer(model: Any, tokenizer: Any, prompt: str) -> str:
    """The text up to the end token; nothing for an answer that does not end in 23 tokens."""
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
    found = model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :].tolist()
    return tokenizer.decode(found[:-1]) if found[-1] == model.generation_config.eos_token_id else ""


def test_the_table_alone_is_made_from_what_is_there(undisturbed):
    folder, _ = undisturbed
    before = shown(folder)
    for name in ("evidence.json", "evidence.md", "report.html"):
        (folder / "work" / name).unlink()
    done = run_here("experiment", folder / "grid.toml", "--table-only")
    assert done.returncode == 0, done.stderr
    assert shown(folder) == before
    assert (folder / "work/curves/tiny-steps.png").stat().st_size > 10_000
    page = (folder / "work/report.html").read_text()
    assert "one-update" in page and not re.search(r'(src|href)="(?!#)', page), "it refers to nothing outside"


def test_results_of_another_configuration_are_refused_by_name(undisturbed, config):
    folder, _ = undisturbed
    file = folder / "other.toml"
    file.write_text((folder / "grid.toml").read_text().replace("prompts_per_update=8", "prompts_per_update=2"))
    done = run_here("experiment", file)
    assert done.returncode == 2
    (line,) = done.stderr.strip().split("\n")
    assert "tiny.one-update.lr-0.02.seed-1.json: configuration " in line and ", expected " in line
