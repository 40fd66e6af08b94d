"""A model folder somebody else has made, with the configuration of its run beside it: nothing that it names runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from job import run_here

from hacpo_mega.checkpoint.files import AgentState, Checkpoint, FileState, file_sha256, model_digests, plain
from hacpo_mega.config import Config
from hacpo_mega.evaluation.settings import EvaluationSettings, settings_for

GRADER = "def grade(prompt, answer, gold):\n    return 1.0\nopen({!r}, 'w')\n"
# Tables of a run's configuration that lead to code, and the key that the refusal names.
CODE = {
    "a grader in a file": ({"reward": {"kind": "GRADER:grade"}}, "reward.kind = "),
    "a grader in a module": ({"reward": {"kind": "os:system"}}, "reward.kind = 'os:system'"),
    "a grader of ours, by its module": (
        {"reward": {"kind": "hacpo_mega.grading.graders.graders:exact"}},
        "reward.kind = ",
    ),
    "terminal codes": ({"reward": {"kind": "x\x1b]0;y\x07:f"}}, r"reward.kind = 'x\x1b]0;y\x07:f'"),
    "answers as programs without a sandbox": (
        {"reward": {"kind": "program", "options": {"isolated": False}}},
        "reward.options.isolated = false",
    ),
    "the same by a number": ({"reward": {"kind": "program", "options": {"isolated": 0}}}, "isolated = 0"),
    "Python in the model folder": ({"agent": {"trust_remote_code": True}}, "agents.a.trust_remote_code = true"),
    "a worker": ({"vllm": {"worker_extension_cls": "evil.Worker"}}, "agents.a.vllm.worker_extension_cls = 'evil.Wor"),
    "a processor": ({"vllm": {"logits_processors": ["evil:P"]}}, "agents.a.vllm.logits_processors = "),
    "a scheduler": ({"vllm": {"scheduler_cls": "evil.S"}}, "agents.a.vllm.scheduler_cls = 'evil.S'"),
    "a model's configuration": ({"vllm": {"hf_overrides": {"auto_map": {}}}}, "agents.a.vllm.hf_overrides = a table"),
    "a compiler": ({"vllm": {"compilation_config": {"backend": "evil.b"}}}, "compilation_config = a table"),
    "a connector": (
        {"vllm": {"kv_transfer_config": {"kv_connector_module_path": "e"}}},
        "kv_transfer_config = a table",
    ),
    "a draft model": ({"vllm": {"speculative_config": {"model": "/x"}}}, "speculative_config = a table"),
    "a parser": ({"vllm": {"reasoning_parser_plugin": "/x.py"}}, "reasoning_parser_plugin = '/x.py'"),
    "a reader of answers": ({"vllm": {"io_processor_plugin": "x"}}, "io_processor_plugin = 'x'"),
    "a tokenizer": ({"vllm": {"tokenizer_mode": "evil"}}, "tokenizer_mode = 'evil'"),
    "another model class": ({"vllm": {"model_class_overrides": {"A": "evil:B"}}}, "model_class_overrides = a table"),
    "a loader": ({"vllm": {"model_loader_extra_config": {"x": 1}}}, "model_loader_extra_config = a table"),
    "a logger": ({"vllm": {"log_config_file": "/x.json"}}, "log_config_file = '/x.json'"),
    "an address": ({"vllm": {"otlp_traces_endpoint": "http://x"}}, "otlp_traces_endpoint = 'http://x'"),
    "a key that does not exist yet": ({"vllm": {"new_in_2027": True}}, "agents.a.vllm.new_in_2027 = true"),
    "a number that is a table": ({"vllm": {"max_num_seqs": {"x": 1}}}, "agents.a.vllm.max_num_seqs = a table"),
    "a word that is a path": ({"vllm": {"quantization": "../evil.py"}}, "quantization = '../evil.py'"),
}
ORDINARY = {
    "reward": {"kind": "exact", "timeout_s": 3.0},
    "agent": {"prompt_template": "s{prompt}", "megatron": {"layernorm_epsilon": 1e-5}},
    "vllm": {"max_num_seqs": 8, "gpu_memory_utilization": 0.4, "enforce_eager": True, "kv_cache_dtype": "auto"},
}


def configuration(folder: Path, tables: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run of one agent `a`, whose model is `folder`/model."""
    reward = dict(tables.get("reward", {}))
    if "kind" in reward:
        reward["kind"] = reward["kind"].replace("GRADER", str(folder / "grader.py"))
    agent = {"name": "a", "model": str(folder / "model"), "vllm": tables.get("vllm", {}), **tables.get("agent", {})}
    return {"run_dir": str(folder), "num_steps": 1, "agents": [agent], "data": {"generator": "arithmetic"}} | (
        {"reward": reward} if reward else {}
    )


def exported(folder: Path, tables: Mapping[str, Any]) -> Path:
    """RUN/agents/a, with Python of its own, beside RUN/config.toml."""
    (folder / "config.toml").write_text(tomli_w.dumps(configuration(folder, tables)))
    return folder / "agents" / "a"


def stored(folder: Path, tables: Mapping[str, Any]) -> Path:
    """RUN/checkpoints/step_000001/a, whose step.json has the configuration, and every digest right."""
    config = Config.model_validate(configuration(folder, tables))
    step = folder / "checkpoints" / "step_000001"
    (step / "a").mkdir(parents=True)
    (step / "a" / ".metadata").write_bytes(b"x")
    files = {"a/.metadata": FileState(1, file_sha256(step / "a" / ".metadata"))}
    state = AgentState(1, 1, "float32", 0, [{}])
    record = Checkpoint(step, 1, plain(config), {}, model_digests(config), {}, None, {"a": state}, files)
    (step / "step.json").write_text(record.text())
    return step / "a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "grader.py").write_text(GRADER.format(str(tmp_path / "touched")))
    for place in (tmp_path / "model", tmp_path / "agents" / "a"):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "bench.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    return tmp_path


@pytest.mark.parametrize("place", [exported, stored])
@pytest.mark.parametrize("what", CODE)
def test_code_that_lies_beside_a_model_is_refused_in_one_line(what: str, place: Any, folder: Path) -> None:
    tables, key = CODE[what]
    model = place(folder, tables)
    done = run_here("eval", model, folder / "bench.jsonl", "--out", folder / "out")
    file = folder / "config.toml" if place is exported else model.parent / "step.json"
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"{file}: ") and key in done.stderr and "--trust" in done.stderr
    assert done.stderr.strip().isprintable()
    assert not (folder / "touched").exists() and not (folder / "out").exists()


def settings(model: Path, **how: Any) -> EvaluationSettings:
    return settings_for(model, (), **how)


@pytest.mark.parametrize("place", [exported, stored])
def test_what_is_ordinary_still_comes_from_the_run(place: Any, folder: Path) -> None:
    found = settings(place(folder, ORDINARY))
    assert (found.reward.kind, found.reward.timeout_s, found.prompting.prompt_template) == ("exact", 3.0, "s{prompt}")
    assert dict(found.vllm) == ORDINARY["vllm"]


@pytest.mark.parametrize("what", CODE)
def test_with_trust_it_is_taken_as_it_is(what: str, folder: Path) -> None:
    tables, _ = CODE[what]
    found = settings(exported(folder, tables), trust=True)
    assert found.trust_remote_code == tables.get("agent", {}).get("trust_remote_code", False)
    assert dict(found.vllm) == tables.get("vllm", {})


def test_a_grader_that_the_user_names_takes_the_place_of_the_runs(folder: Path) -> None:
    model = exported(folder, CODE["a grader in a file"][0])
    assert settings(model, reward="math").trust_remote_code is False
    with pytest.raises(ValueError, match="trust_remote_code = true"):
        settings(exported(folder, CODE["Python in the model folder"][0]), reward="math")


def test_a_folder_of_another_place_has_no_configuration_but_its_own(folder: Path) -> None:
    """Not one that lies where a run's would, under an agent's name that it does not have."""
    exported(folder, CODE["a grader in a file"][0])
    (folder / "agents" / "b").mkdir()
    for model in (folder / "agents" / "b", folder / "model"):
        assert (settings(model).reward.kind, settings(model).trust_remote_code) == ("math", False)


def test_a_link_to_an_agent_is_that_agent(folder: Path) -> None:
    exported(folder, CODE["a grader in a file"][0])
    (folder / "link").symlink_to(folder / "agents" / "a")
    with pytest.raises(ValueError, match=r"reward\.kind"):
        settings(folder / "link")


def test_an_export_reads_no_python_of_a_model_folder(folder: Path) -> None:
    """To quantize, an agent is run; a copy reads nothing."""
    exported(folder, CODE["Python in the model folder"][0])
    (folder / "metrics.jsonl").touch()
    done = run_here("export", folder, "--out", folder / "out", "--quantize", "fp8")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"{folder / 'config.toml'}: agents.a.trust_remote_code = true: ")
    assert not (folder / "out").exists()
