"""Errors of a user in a configuration: exit code 2, one line for each problem, before anything is loaded.

A case is a list of overrides on a configuration that is right, and what each line must say, in order. `check` runs in
this process, `train` in one of its own.
"""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from advice import advices, taken
from bad_case import ROWS
from bad_cases import GROUPS
from bad_sources import DATA
from bad_values import INIT
from repository import ROOT
from run_cases import CHARACTERS, PAIRS, agent_table, write_config

from hacpo_grading.graders.registry import GRADERS
from hacpo_grading.workers.own_file import load_by_name
from hacpo_mega.cli import app as cli
from hacpo_mega.commands.check_prompts import check_prompts
from hacpo_mega.config import load_config
from hacpo_mega.config.describe import describe_fields
from hacpo_mega.config.tables.choices import SKILLS
from hacpo_mega.data.tasks import evaluation_examples, training_examples

pytestmark = pytest.mark.nightly

CASES = [pytest.param(case, id=f"{group}: {case.name}") for group, cases in GROUPS.items() for case in cases]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with a configuration that is right, its two models, and all kinds of files."""
    folder = tmp_path_factory.mktemp("bad")
    shapes = {"a": ("qwen3", CHARACTERS), "b": ("llama", CHARACTERS + PAIRS)}
    agents = [agent_table(folder, name, *shape, vllm={}) for name, shape in shapes.items()]
    write_config(folder, agents, data={"generator": "arithmetic"})
    write_prompt_files(folder)
    (folder / "mine.py").write_text(
        "def grader(p, a, g, *, bonus=0.0):\n    def inner():\n        pass\n    return 1.0\n"
    )
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "uncallable.py").write_text(
        "def none(): ...\ndef needs(p, a, g, *, k): ...\ndef four(a, b, c, d): ...\nclass Bare: ...\nnumber = 3\n"
        "def second(said, ground_truth, scale=1): ...\n"
        "def named(x, y, z, level, *, answer): ...\ndef late(p, a, g, more=1): ...\n"
        "class Made:\n    __call__ = late\n"
        "class Alone:\n    log = finish = late\n"
        "class Tracker(Alone): ...\n"
    )
    (folder / "folder.py").mkdir()
    for name, described in (("bare", None), ("torn", "{"), ("listed", "[]")):
        (folder / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (folder / name / file).symlink_to(folder / "a" / file)
        if described is not None:
            (folder / name / "tokenizer_config.json").write_text(described)
    return folder


def write_prompt_files(folder: Path) -> None:
    def write(name: str, *lines: object) -> None:
        (folder / name).write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )

    (folder / "folder").mkdir()
    (folder / "nothing").mkdir()
    (folder / "saved" / "train").mkdir(parents=True)
    write("saved/dataset_dict.json", {"splits": ["train"]})
    write("saved/train/state.json", {})
    write("good.jsonl", *ROWS)
    write("folder/x.jsonl", *ROWS)
    write("same.jsonl", ROWS[3])
    write("rows.jsonl", ROWS[0], {"prompt": "1"}, [1], "{", ROWS[0])
    write("many.jsonl", ROWS[0], *({"prompt": str(i), "answer": ""} for i in range(29)))
    write("empty.jsonl")
    write("white.jsonl", "", "  ")
    write("array.json", ROWS)
    write("table.csv", "prompt,answer", "1+1=,2")
    (folder / "wide.jsonl").write_bytes(json.dumps(ROWS[0]).encode("utf-16"))
    (folder / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x20")
    (folder / "a.arrow").write_bytes(b"\xff\xff\xff\xff\x10")
    write("text.parquet", *ROWS)
    (folder / "link.jsonl").symlink_to(folder / "good.jsonl")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "one.parquet")
    whole = (folder / "one.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "parquet.jsonl").write_bytes(whole)


def filled(text: str, here: Path) -> str:
    return text.replace("{here}", str(here))


def run_here(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """The command line in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["hacpo-mega", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0, *capsys.readouterr()


def test_the_configuration_of_all_cases_is_right(here, monkeypatch, capsys):
    code, shown, complaints = run_here(monkeypatch, capsys, "check", "--data", str(here / "run.toml"))
    assert (code, complaints) == (0, "")
    assert "0 data files read, no bad row; 13882 prompts to train on, 0 longer than" in shown
    files = f"data={{files=['{here / 'good.jsonl'}']}}"
    assert run_here(monkeypatch, capsys, "check", str(here / "run.toml"), files)[0] == 0


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_a_line_each(case, here, monkeypatch, capsys):
    overrides = [filled(override, here) for override in case.set]
    code, shown, complaints = run_here(monkeypatch, capsys, *case.command, str(here / "run.toml"), *overrides)
    assert code == 2, complaints
    lines = complaints.splitlines()
    assert len(lines) == len(case.says), complaints
    for line, says in zip(lines, case.says):
        assert filled(says, here) in line
        assert "Traceback" not in line
    assert case.command == DATA or shown == ""


def test_there_are_enough_of_them():
    assert len(CASES) >= 120
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("none.toml", None, "cannot be read (No such file or directory)"),
        ("broken.toml", b"seed = = 3", "not valid TOML"),
        ("latin.toml", b"run_dir = '\xe9'", "not valid TOML"),
        (
            "run.yaml",
            b"# mine\nrun_dir: x\ndata:\n  train: y\n",
            "not valid TOML: Expected '=' after a key in a key/value "
            "pair (at line 2, column 8); this looks like YAML, and TOML has num_steps = 5 for num_steps: 5",
        ),
        (
            "run.json",
            b'{"run_dir": "x"}',
            "not valid TOML: Invalid statement (at line 1, column 1); this looks like JSON",
        ),
        ("empty.toml", b"", "run_dir: required, not given"),
        ("grid.toml", b"[regimes.a]\n[methods.b]", "an experiment's grid, no run's configuration: use hacpo-mega exp"),
        ("wide.toml", "run_dir = 'x'".encode("utf-16"), "not valid TOML: this is UTF-16; save it as UTF-8"),
    ],
)
def test_a_file_that_is_no_configuration(name, content, says, tmp_path, monkeypatch, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, _, complaints = run_here(monkeypatch, capsys, "check", str(tmp_path / name))
    assert code == 2
    assert f"{tmp_path / name}: {says}" in complaints
    assert "Traceback" not in complaints
    assert len(complaints.splitlines()) == (4 if name == "empty.toml" else 1)  # run_dir, num_steps, agents, data


def test_a_byte_order_mark_and_spaces_around_an_override_are_ignored(here, tmp_path):
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + (here / "run.toml").read_bytes().replace(b"\n", b"\r\n"))
    assert load_config(tmp_path / "marked.toml", ["num_steps = 7"]).num_steps == 7


def test_graders_that_can_be_called_are_taken(here):
    for name in ("named", "late", "Made"):
        assert load_config(here / "run.toml", [f"reward.kind={here}/uncallable.py:{name}"])
    given = [f"reward.kind={here}/uncallable.py:needs", "reward.options={k=1}"]
    assert load_config(here / "run.toml", given)
    assert load_config(here / "run.toml", [f"logging.trackers=['{here}/uncallable.py:Tracker']"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(here, tmp_path, monkeypatch, capsys):
    tmp_path.chmod(0o555)
    code, _, complaints = run_here(monkeypatch, capsys, "check", str(here / "run.toml"), f"run_dir={tmp_path}/run")
    assert code == 2
    assert complaints.endswith(f"cannot be made, since {tmp_path} is not writable; give a folder that you may write\n")


ODD_VALUES = ("true", "-1", "inf", "'x'", "''", "[]", "{}", "[1, 'x', nan]", "[[]]", str(10**30))


def test_no_value_of_any_key_is_more_than_a_line(here):
    """For every value of a key load_config returns or raises ValueError, one short line per problem."""
    keys = [field.key.replace("agents.", "agents.a.").replace("NAME", "add") for field in describe_fields()]
    assert len(keys) > 90
    for key, value in itertools.product(keys, ODD_VALUES):
        try:
            load_config(here / "run.toml", [f"{key}={value}"])
        except ValueError as error:
            for line in str(error).splitlines():
                assert line.startswith((f"{here / 'run.toml'}: ", "override ")), (key, value, line)
                assert len(line) < 600, (key, value, line)


def test_what_is_declared_for_other_rooms_is_what_they_have():
    for kind, record in GRADERS.items():
        grader = load_by_name(record.function)
        has = inspect.signature(grader).parameters.values()
        named = [p.name for p in has if isinstance(grader, type) or p.kind is p.KEYWORD_ONLY]
        assert named == list(record.options), kind
    for skill, size in SKILLS.items():
        assert len(training_examples(skill)) == size.num_training
        assert len(evaluation_examples(skill, size.num_held_out)) == size.num_held_out


def test_a_grader_is_found_where_python_finds_it_and_nothing_of_it_runs(tmp_path, monkeypatch, here):
    """In a file, in a module of the current folder, in a package; by def, by assignment, by import."""
    loud = "raise RuntimeError('this ran')\n"
    (tmp_path / "a_grader.py").write_text(f"from json import loads as parse\n{loud}\nif 1:\n    rule = parse\n")
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").write_text(loud)
    (tmp_path / "a_package" / "part.py").write_text(f"{loud}class Grader:\n    def __call__(self, p, a, g): ...\n")
    (tmp_path / "no_package").mkdir()
    monkeypatch.chdir(tmp_path)
    for kind in (
        "a_grader.py:parse",
        "a_grader:rule",
        "a_package.part:Grader",
        "math:sqrt",
        "email.utils:formatdate",
    ):
        assert load_config(here / "run.toml", [f"reward.kind={kind}"]).reward.kind == kind
    with pytest.raises(ValueError, match="'no_package' is a folder without code"):
        load_config(here / "run.toml", ["reward.kind=no_package:rule"])


TRAIN_CASES = (
    (("reward.kind='mth'",), ("reward.kind: 'mth' is unknown",)),
    (
        ("data={files=['{here}/rows.jsonl']}",),
        ("rows.jsonl:2: ", "rows.jsonl:3: ", "rows.jsonl:4: ", "rows.jsonl:5: "),
    ),
    (("data={files=['{here}/good.jsonl']}", "training.prompts_per_step=16"), ("only 12 rows. Nearest: 12",)),
    (
        ("agents.a.model='{here}/later'", INIT % "add={share=1.0}"),
        ("agents.a: model folder {here}/later does not exist",),
    ),
)


@pytest.mark.parametrize("place", ["folder.py", "mine.py"])
def test_init_is_refused_where_it_could_not_put_a_model(place, here):
    """Else it would teach for minutes, and then fail to rename its draft onto a file or other files."""
    (here / "folder.py" / "inside").touch()
    with pytest.raises(ValueError, match=f"agents.a: model = '{here / place}' is there and has no config.json; init"):
        load_config(here / "run.toml", [f"agents.a.model='{here / place}'", INIT % "add={share=1.0}"])


@pytest.mark.parametrize("overrides, says", TRAIN_CASES, ids=["reward", "rows", "too few rows", "no model yet"])
def test_train_refuses_before_any_process_starts(overrides, says, here, tmp_path):
    """The launching process imports no torch before it has read everything, so no rank can have been started."""
    code = "import sys\nfrom hacpo_mega import cli\ntry:\n    cli.main()\nfinally:\n    print('torch' in sys.modules)"
    overrides = [filled(override, here) for override in overrides]
    command = [sys.executable, "-c", code, "train", str(here / "run.toml"), f"run_dir={tmp_path / 'run'}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(says), done.stderr
    for line, expected in zip(lines, says):
        assert filled(expected, here) in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_job_one_process_of_a_node_says_it(rank, here, monkeypatch, capsys):
    """Under srun or torchrun every rank finds the same and ends with 2; the first of the node says it."""
    for name, value in (("SLURM_PROCID", rank), ("SLURM_LOCALID", rank), ("SLURM_NTASKS", 2)):
        monkeypatch.setenv(name, str(value))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for overrides, says in ((["reward.kind=mth"], "'mth' is unknown"), (["agents.a.tp=2"], "needs 3 ranks")):
        code, _, complaints = run_here(monkeypatch, capsys, "train", str(here / "run.toml"), *overrides)
        assert code == 2
        assert (says in complaints, len(complaints.splitlines())) == ((True, 1) if rank == 0 else (False, 0))


@pytest.mark.parametrize("placement", ["split", "shared", "apart"])
def test_check_is_one_screen_that_ends_with_what_to_do(placement, here, tmp_path, monkeypatch, capsys):
    """For three agents with long names and a long path: what was given, who is where, the memory, the command."""
    agents = [
        {"name": f"{name}-of-the-third-family", "model": str(here / model)}
        for name, model in (("gemma", "a"), ("moe", "b"), ("m", "a"))
    ]
    deep = tmp_path / ("a-long-name-" * 8) / "run"
    overrides = [f"placement={placement}", f"run_dir={deep}", "agents.*.optimizer.lr=0.5", "rollout.temperature=0.75"]
    overrides += ["device_memory_gib=80", *["agents.*.rollout_gpus=1"][: placement == "apart"]]
    file = write_config(tmp_path, agents, data={"generator": "arithmetic"})
    code, shown, wrong = run_here(monkeypatch, capsys, "check", str(file), *overrides)
    assert (code, wrong) == (0, "")
    *screen, last = shown.splitlines()
    assert last.startswith(f"ok: train with hacpo-mega train {file} placement={placement} ")
    assert len(screen) <= 48 and not [line for line in screen if len(line) > 80 and not line.startswith("reward")]
    assert (
        re.search(r"^  agents\.\*: .*optimizer.lr = 0.5$", shown, re.M)
        and "temperature = 0.75" in shown
        and "betas" not in shown
    )
    assert sum(line.endswith((" generate", " publish", " learn")) for line in screen) == (
        6 if placement == "apart" else 3
    )
    _, whole, _ = run_here(monkeypatch, capsys, "check", "--resolved", str(file), *overrides)
    resolved, _ = json.JSONDecoder().raw_decode(whole)
    assert resolved["run_dir"] == str(deep) and resolved["agents"][0]["optimizer"]["betas"] == [0.9, 0.95]
    assert whole.splitlines()[-1] == last and max(map(len, whole.splitlines()[-40:-4])) <= 80


@pytest.mark.parametrize(
    "limit, says",
    [
        ("12:00", "12:00 is 12 minutes to Slurm; 12 hours is 12:00:00"),
        ("01:30", "01:30 is 1 minutes 30 seconds to Slurm; 1 hours 30 minutes is 01:30:00"),
        ("24", "24 is 24 minutes to Slurm; 24 hours is 24:00:00"),
        ("90", ""),
        ("12:00:00", ""),
        ("1-12:00", ""),
    ],
)
def test_a_time_limit_that_slurm_reads_as_minutes_is_said(limit, says, here, monkeypatch, capsys):
    _, shown, _ = run_here(monkeypatch, capsys, "check", str(here / "run.toml"), f"slurm.time={limit}")
    assert [line for line in shown.splitlines() if line.startswith("slurm.time: ")] == [f"slurm.time: {says}"] * bool(
        says
    )
    assert shown.splitlines()[-1].startswith("ok: train with hacpo-mega slurm ")


# Beside the cases above, whose refusals have advice too: what several keys, files, a model or a device decide together.
ADVISED = (
    ("agents.a.tp=3",),
    ("agents.a.pp=3",),
    ("agents.a.cp=3",),
    ("agents.a.ep=2",),
    ("agents.a.tp=2", "agents.a.engine_tp=3"),
    ("agents.a.tp=4", "agents.a.cp=2"),
    ("agents.a.tp=4", "agents.a.pp=2", "algorithm.method=sgt"),
    ("rollout.max_answer_tokens=300",),
    ("rollout.max_prompt_tokens=300",),
    ("rollout.max_prompt_tokens=300", "rollout.max_answer_tokens=300", "evaluation.max_answer_tokens=400"),
    ("evaluation.max_answer_tokens=300",),
    ("conversation={environment='calculator', max_total_tokens=300}",),
    ("conversation={environment='calculator'}", "rollout.max_answer_tokens=300"),
    ("rollout.max_prompt_tokens=300", "evaluation.max_answer_tokens=100"),
    ("agents.a.lora={targets=['q_prj']}",),
    ("agents.a.lora={}", "agents.a.transformer=te"),
    ("agents.a.lora.r=8",),
    ("lanes=3", "training.prompts_per_update=16", "training.prompts_per_step=64"),
    ("agents.a.cells_per_lane=2", "agents.b.cells_per_lane=3"),
    ("agents.a.tp=2", "training.max_tokens_per_microbatch=19"),
    ("agents.a.tp=2", "rollout.max_answer_tokens=27", "training.max_tokens_per_microbatch=33"),
    ("rollout.rollouts_per_prompt=1000000000",),
    ("training.prompts_per_step=8000000", "training.prompts_per_update=8000000", "rollout.rollouts_per_prompt=1"),
    ("data.skills=['mul','srt','add']", "training.prompts_per_step=6000", "training.prompts_per_update=2000"),
    ("agents.a.megatron.virtual_pipeline_model_parallel_size=2",),
    ("agents.a.vllm.quantization=fp8",),
    ("agents.a.router_replay=true",),
    ("placement=apart",),
    ("placement=apart", "agents.a.rollout_gpus=3", "agents.a.engine_tp=2", "agents.b.rollout_gpus=2"),
    ("logging.trackers=['wandb','wandb']",),
    ("learning_rate=1e-5",),
    ("partition=gpu",),
    ("algorithm.kl=0.1",),
    ("device_memory_gib=8", "agents.*.vllm.gpu_memory_utilization=0.9"),
    ("device_memory_gib=80", "agents.*.vllm.gpu_memory_utilization=0.01"),
)
OF_FILES = (
    ("data={files=['{here}/good.jsonl']}", "training.prompts_per_step=4096", "training.prompts_per_update=64"),
    ("data={files=['{here}/good.jsonl']}", "training.prompts_per_step=25", "training.prompts_per_update=5"),
    ("data={files=['{here}/good.jsonl']}", "rollout.max_prompt_tokens=2"),
    ("data.skills=['mul', 'srt']", "rollout.max_prompt_tokens=5"),
)


def refusal_of(here: Path, overrides: list[str], reads_data: bool) -> list[str]:
    """The lines with which a configuration is refused; none where it is right."""
    try:
        config = load_config(here / "run.toml", overrides)
        if reads_data:
            check_prompts(config)
    except ValueError as error:
        return [
            line if line.startswith(f"{here}/run.toml: ") else f"run.toml: {line}" for line in str(error).splitlines()
        ]
    return []


REFUSED = dict.fromkeys([*ADVISED, *OF_FILES, *(case.values[0].set for case in CASES)])


@pytest.mark.parametrize(
    "overrides",
    REFUSED,
    ids=lambda given: " ".join(given)[:60],
)
def test_advice_helps(overrides, here):
    """Each alternative of each line mends what the line says, and all first ones, taken again and again, mend all."""
    reads_data = overrides in OF_FILES
    given = [filled(override, here).replace("agents.*.tpp", "agents.a.tpp") for override in overrides]
    lines = refusal_of(here, given, reads_data)
    assert lines or overrides not in (*ADVISED, *OF_FILES)
    assert any(map(advices, lines)) or overrides not in (*ADVISED, *OF_FILES)
    for line in lines:
        for advice in advices(line):
            after = refusal_of(here, taken(given, advice), reads_data)
            assert line not in after and not any(other.startswith("run.toml: override") for other in after), advice
    for _ in range(6):
        first = dict.fromkeys(key for line in lines for key in (advices(line) or [[]])[0])
        given, before = taken(given, list(first)), lines
        lines = refusal_of(here, given, reads_data) if first else []
    assert lines == [], before


BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    "task, says",
    [
        (BATCH | {"SLURM_NTASKS": "2"}, "this is the batch script of job 7 and no task of srun (SLURM_NTASKS is 2, "),
        (BATCH, "this is the batch script of job 7 and no task of srun (SLURM_NTASKS is not set, "),
        (BATCH | {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "batch"}, "put srun before the command (srun --ntasks=2 "),
        (
            BATCH | {"SLURM_NTASKS": "1"},
            "found SLURM_NTASKS 1, which a Slurm job has set for this shell. Start it with",
        ),
        (BATCH | {"SLURM_NTASKS": "3", "SLURM_STEP_ID": "0"}, "found SLURM_NTASKS 3, which a Slurm job has set for"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}, "found WORLD_SIZE 3. Start it with launch/local.sh"),
    ],
)
def test_a_job_that_cannot_be_is_told_so_by_the_variable_that_was_set(task, says, here, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    code, shown, complaints = run_here(monkeypatch, capsys, "train", str(here / "run.toml"))
    assert (code, shown, len(complaints.splitlines())) == (2, "", 1) and says in complaints, complaints
