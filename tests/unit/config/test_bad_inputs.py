"""Inputs that nobody writes on purpose, in bulk: every key of the schema and every file of a model folder, mutated.

All go through the real `check`, in this process: exit code 2, short lines that name the key or the file, no traceback.
"""

import gzip
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from bad_cases import GROUPS
from dataset_rows import check_data
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.checkpoint.files import read_checkpoint
from hacpo_mega.cli import app as cli
from hacpo_mega.cluster.launcher_env import LauncherEnv, from_launcher
from hacpo_mega.cluster.machine.environment import (
    from_slurm,
    is_first_of_its_node,
    is_first_of_the_job,
    job_size,
    prepare_environment,
)
from hacpo_mega.config.describe import describe_fields
from hacpo_mega.config.load import config_of_run
from hacpo_mega.data.datasets import read_dataset
from hacpo_mega.data.reading.files import MAX_LINE_BYTES
from hacpo_mega.evaluation.answers import SETTINGS, check_folder, read_answers
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.run.provenance import read_starts

pytestmark = pytest.mark.nightly

NUMBERS = ("-1e308", "1e308", "nan", "inf", "-1", "1e18", str(10**18), "1" * 5000, "0x" + "f" * 5000)
SHAPES = ("[[1]]", "{x=1}", "[" * 5000, "[" * 70 + "]" * 70, '"a\\u0000\\nb"', "true\nnum_steps=1", "''", "'../../x'")
# Values that are wrong without being far outside.
VALUES = (
    ("rollout.rollouts_per_prompt", "1000000000"),
    ("agents.a.vllm.max_num_seqs", "0"),
    ("agents.a.vllm.hf_overrides", "'no.such:module'"),
    ("agents.a.megatron.init_method_std", "-1"),
)
DEEP = "[" * 100_000
# Fields of config.json that get values that no model has.
FIELDS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size", "vocab_size", "max_position_embeddings")  # fmt: skip
ENDS = ("eos_token_id", "bos_token_id", "pad_token_id")
TEMPLATES = {
    "": "leaves the user's message out",
    "{{ messages[-1].content[:9] }}": "leaves out or changes",
    "{{ messages[-1].content | upper }}": "leaves out or changes",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ 'a' + 1 }}": "TypeError",
    "{{ messages.x.y }}": "UndefinedError",
    "{{ raise_exception('needs tools') }}": "refuses the prompt: needs tools",
    "{% for t in tools %}{{ t }}{% endfor %}": "TypeError",
    "{% for i in range(10**9) %}{% endfor %}": "OverflowError",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "CPU seconds",
    "{{ 'a' * 10**10 }}": "MemoryError",
    "{{ messages[-1].content * 2000 }}": "characters of a prompt",
    "{% if": "TemplateSyntaxError",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A right configuration with one model."""
    folder = tmp_path_factory.mktemp("sound")
    write_config(folder, [agent_table(folder, "a", "qwen3", CHARACTERS)], algorithm={"method": "gspo"})
    return folder


@pytest.fixture
def model(sound, tmp_path) -> Path:
    """A copy of its model, the test's own."""
    return Path(shutil.copytree(sound / "a", tmp_path / "m"))


def complaint(monkeypatch, capsys, folder: Path, *overrides: str) -> str:
    """The complaint of `check` about a configuration that it refuses."""
    monkeypatch.setattr(sys, "argv", ["hacpo-mega", "check", str(folder / "run.toml"), *overrides])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 2, (overrides, (folder / "a").exists(), said[-500:])
    lines = said.splitlines()
    assert lines and len(set(lines)) == len(lines), (overrides, said[:500])
    # each line is one problem: it begins with where, and no line goes on
    assert all(0 < len(line) < 900 and not line.startswith((" ", "Traceback")) for line in lines), (overrides, said)
    return said


def bad_values() -> Iterator[tuple[str, str]]:
    """Every number of the schema far outside, every other key by values of no use."""
    fields = [f for f in describe_fields() if not f.section.startswith(("slurm", "agents.init")) and f.name != "slurm"]
    for field in fields:
        key = field.key.replace("agents.", "agents.a.")
        is_number = field.allowed.startswith(("number", "whole"))
        for value in (NUMBERS if is_number else ()) + SHAPES[: 2 if field.allowed in ("table", "text") else 6]:
            free = field.allowed == "table" or (field.allowed == "text" and value in SHAPES)
            means_never = key.endswith("clip_grad") and value in ("1e18", NUMBERS[6])
            if not free and not means_never and (is_number or value not in SHAPES):
                yield key, value
    yield from VALUES


def bad_documents(model: Path) -> Iterator[tuple[str, str]]:
    """Every JSON of a model folder, torn or with a field that is wrong: name and text."""
    described = json.loads((model / "config.json").read_text())
    whole = {file.name: file.read_bytes() for file in sorted(model.iterdir())}
    changes = [("config.json", {field: value}) for field in FIELDS for value in (0, -1, 10**12, 1.5, "9", [], True)]
    changes += [("config.json", {key: value}) for key in ENDS for value in (-1, 999, 10**30, "x", {}, 1.0, True)]
    changes += [("config.json", {"dtype": name}) for name in ("int8", "float64")]
    changes += [("tokenizer_config.json", {"eos_token": value}) for value in (5, [], {}, "</other>")]
    changes += [("tokenizer_config.json", {"added_tokens_decoder": value}) for value in ([1], {"x": 1}, {"999": {}})]
    for name in whole:
        if name.endswith(".json"):
            yield from ((name, text) for text in (DEEP, "{", '{"a":1,"a":2}', "[]", "3"))
    for name, change in changes:
        yield name, json.dumps({**(described if name == "config.json" else json.loads(whole[name])), **change})


def test_there_are_450_of_them(sound):
    counts = len(list(bad_values())), len(list(bad_documents(sound / "a"))), len(TEMPLATES)
    elsewhere = sum(map(len, GROUPS.values()))
    print(f"{sum(counts)} bad inputs: {counts} values, documents, templates; {elsewhere} more in bad_cases.py")
    assert sum(counts) >= 450


def test_no_key_takes_what_nobody_means(sound, monkeypatch, capsys):
    for key, value in bad_values():
        assert key.rpartition(".")[2] in complaint(monkeypatch, capsys, sound, f"{key}={value}"), (key, value)


def test_a_model_folder_that_says_nonsense_is_named(sound, model, monkeypatch, capsys):
    for name, text in bad_documents(model):
        before = (model / name).read_bytes()
        (model / name).write_text(text)
        print(name, text[:300])  # shown where the next line fails
        assert str(model) in complaint(monkeypatch, capsys, sound, f"agents.a.model={model}")
        (model / name).write_bytes(before)


def test_another_models_tokenizer_is_refused(sound, model, monkeypatch, capsys):
    tokens = json.loads((model / "tokenizer.json").read_text())
    tokens["model"]["vocab"]["~"] = 99
    (model / "tokenizer.json").write_text(json.dumps(tokens))
    said = complaint(monkeypatch, capsys, sound, f"agents.a.model={model}")
    assert "beyond the model's" in said and "'~' with id 99" in said


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_loses_the_prompt_names_its_folder(template, sound, model, monkeypatch, capsys):
    (model / "chat_template.jinja").write_text(template or "1+1=")
    (line,) = complaint(
        monkeypatch, capsys, sound, f"agents.a.model={model}", "agents.a.chat_template=true"
    ).splitlines()
    assert f"agents.a: the chat template of {model}/chat_template.jinja" in line and TEMPLATES[template] in line


def test_tools_that_a_chat_template_never_reads_are_refused(sound, model, monkeypatch, capsys):
    (model / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    given = (f"agents.a.model={model}", "agents.a.chat_template=true", "data.tools_field=tools")
    (line,) = complaint(monkeypatch, capsys, sound, *given).splitlines()
    assert f"the chat template of {model}/chat_template.jinja never reads tools; leave data.tools_field" in line


@pytest.mark.parametrize("rank", [{"LOCAL_RANK": "1"}, {"SLURM_LOCALID": "1"}, {"HACPO_MEGA_LAUNCHER_PID": "1"}, {}])
def test_a_chat_template_is_tried_once_on_a_node(rank, sound, model, monkeypatch, capsys):
    """By the first process that reads it: no rank of a large job starts a process of its own."""
    endless = next(text for text, says in TEMPLATES.items() if says == "CPU seconds")
    (model / "chat_template.jinja").write_text(endless)
    given = ("agents.a.chat_template=true", f"agents.a.model={model}")
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    if rank:
        monkeypatch.setattr(sys, "argv", ["hacpo-mega", "check", str(sound / "run.toml"), *given])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0
    else:
        assert "CPU seconds" in complaint(monkeypatch, capsys, sound, *given)


def test_tensors_on_the_same_bytes_are_refused_by_their_file(sound, model, monkeypatch, capsys):
    file = model / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    first, second = [name for name in header if name.endswith("norm.weight")][:2]
    header[first]["data_offsets"] = header[second]["data_offsets"]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    assert str(file) in complaint(monkeypatch, capsys, sound, f"agents.a.model={model}")


def test_a_line_without_an_end_is_not_read(tmp_path):
    """Nor one that a small packed file unpacks to."""
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.write(b'{"prompt": "')
        for _ in range(3):
            stream.write(b" " * MAX_LINE_BYTES)
    (problem,) = check_data([tmp_path / "bomb.jsonl.gz"])
    assert "bomb.jsonl.gz:1: has more than 16,777,216 bytes" in str(problem)


def test_a_small_file_cannot_fill_the_memory(tmp_path):
    """Packed lines, packed documents, archives, and a Parquet file whose rows are all one large cell: a line each."""
    row, many = json.dumps({"prompt": " " * 2**20 + "1", "answer": "1"}).encode() + b"\n", 66
    with gzip.open(tmp_path / "lines.jsonl.gz", "wb", compresslevel=6) as stream:
        for _ in range(many):
            stream.write(row)
    with tarfile.open(tmp_path / "members.tar.gz", "w:gz", compresslevel=6) as archive:
        for i in range(many):
            entry = tarfile.TarInfo(f"{i}.jsonl")
            entry.size = len(row)
            archive.addfile(entry, io.BytesIO(row))
    cells = pyarrow.array(["1" * (MAX_LINE_BYTES + 1)]).take(pyarrow.array([0] * 3))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": cells, "answer": ["1"] * 3}), tmp_path / "cells.parquet")
    (tmp_path / "deep.json").write_text(DEEP)
    said = {file.name: read_dataset(file).defects for file in sorted(tmp_path.iterdir())}
    times = "unpacks to more than 200 times"
    for name, text in (("lines.jsonl.gz", times), ("members.tar.gz", times), ("deep.json", "more than 64 deep")):
        (defect,) = said[name]
        assert text in str(defect) and str(tmp_path / name) in str(defect)
    assert [str(d) for d in said["cells.parquet"]] == [
        f"{tmp_path}/cells.parquet:{i}: has more than 16,777,216 bytes" for i in range(1, 4)
    ]


RECORDS = {
    "metrics.jsonl": lambda run: read_metrics(run / "metrics.jsonl"),
    "starts.jsonl": read_starts,
    "config.toml": config_of_run,
    "step.json": read_checkpoint,
    "answers/b.lane_0.jsonl": lambda run: read_answers(run, "b"),
    "settings.json": lambda run: check_folder(run, {}),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("content", [DEEP.encode(), b"\xff\xfe", b'{"a": 1, "a": 2}', b"[]", b"x = " + b"1" * 5000])
def test_a_record_that_nobody_wrote_is_a_line_that_names_it(name, content, tmp_path):
    file = tmp_path / (SETTINGS if name == "settings.json" else name)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content + b"\n")
    with pytest.raises(ValueError, match=re.escape(str(file))) as error:
        RECORDS[name](tmp_path)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 600


@pytest.mark.parametrize("value", ["abc", "", "-1", "1" * 5000, "1.0"])
def test_a_launchers_variable_that_is_no_number_is_named(value, monkeypatch):
    monkeypatch.setenv("RANK", value)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    with pytest.raises(ValueError, match="RANK"):
        from_launcher("RANK", "SLURM_PROCID")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for name in ("WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, value or "x")
        with pytest.raises(ValueError, match=f"{name} must be a number"):
            LauncherEnv.find()
        monkeypatch.setenv(name, "2")
    for find, name in ((job_size, "WORLD_SIZE"), (is_first_of_the_job, "RANK"), (is_first_of_its_node, "LOCAL_RANK")):
        monkeypatch.setenv(name, value or "x")
        with pytest.raises(ValueError, match=f"{name} must be a number from 0 to"):
            find()


def test_a_rank_is_below_the_number_of_ranks(monkeypatch):
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape("RANK (2) must be below WORLD_SIZE (2)")):
        LauncherEnv.find()


SLURM_TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2(x2)",
              "SLURM_JOB_NODELIST": "a[1-2]"}  # fmt: skip


@pytest.mark.parametrize(
    "change, says",
    [
        ({"SLURM_TASKS_PER_NODE": None}, "SLURM_PROCID is set, and SLURM_TASKS_PER_NODE not"),
        ({"SLURM_NODEID": None, "SLURM_JOB_NODELIST": None}, "and SLURM_NODEID, SLURM_JOB_NODELIST not, which srun"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID is 2, and SLURM_TASKS_PER_NODE ('2(x2)') is of 2 nodes"),
        ({"SLURM_JOB_ID": "7x"}, "SLURM_JOB_ID must be a number from 0 to 4294967295, found '7x'"),
        ({"SLURM_CPUS_PER_TASK": "x"}, "SLURM_CPUS_PER_TASK must be a number"),
        ({"SLURM_JOB_NODELIST": "a[x-y]"}, "'a[x-y]' is no list of nodes as Slurm writes it, such as gpu[01-03,7]"),
    ],
)
def test_a_task_of_slurm_that_lacks_what_srun_sets_is_a_line(change, says):
    task = {name: value for name, value in {**SLURM_TASK, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        from_slurm(task, 4)
    assert len(str(error.value).splitlines()) == 1
    assert from_slurm(SLURM_TASK, 4)["MASTER_ADDR"] == "a1"


@pytest.mark.parametrize("value", ["abc", "", "0", "-3", "2.0", "2,4", "9" * 30])
def test_a_number_of_threads_that_is_none_is_refused(value, monkeypatch):
    """Libraries would take as many as there are cores, in every process, and print a line for each of them."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(ValueError, match="OMP_NUM_THREADS must be the threads of a process, a number from 1 on, found"):
        prepare_environment()


def test_a_level_and_a_language_that_libraries_do_not_know_are_refused(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    with pytest.raises(ValueError, match=r"VLLM_LOGGING_LEVEL must be one of CRITICAL, .* found 'loud'"):
        prepare_environment()
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "info")
    monkeypatch.setattr("locale.getpreferredencoding", lambda do_setlocale: "ANSI_X3.4-1968")
    with pytest.raises(ValueError, match="Python reads files as ASCII here"):
        prepare_environment()


def test_an_interpreter_without_asserts_is_refused():
    """Their loss is no error of vLLM's: its engine takes steps without end."""
    code = "from hacpo_mega.cluster.machine.environment import prepare_environment as prepare; prepare()"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "unset PYTHONOPTIMIZE (-O)" in done.stderr
