"""Inputs of a run beside its configuration: a run that goes on is refused where their contents have changed."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from checkpoint_cases import make_step
from run_cases import CHARACTERS, TRAINING, agent_table, write_config
from safetensors.numpy import load_file, save_file

from hacpo_mega.checkpoint.files import RECORD, Checkpoint
from hacpo_mega.config import Config, load_config
from hacpo_mega.logbook.run.run_inputs import input_changes, run_contents, start_with_same_inputs

ROWS = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) + "\n" for number in range(8)]
FUNCTION = "def count(answers, golds):\n    return [float(len(answer)) for answer in answers]\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        agent_table(folder, name, "qwen3", CHARACTERS)
    return folder


class Work:
    """A folder with all that a run names, and its configuration."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models = folder, shutil.copytree(models, folder / "models")
        self.rows, self.held_out, self.own = (folder / name for name in ("rows.jsonl", "held_out.jsonl", "own.py"))
        self.rows.write_text("".join(ROWS))
        self.held_out.write_text(json.dumps({"prompt": "9-1=", "answer": "8"}) + "\n")
        self.own.write_text(FUNCTION)

    def config(self, *overrides: str) -> Config:
        agents = [{"name": name, "model": str(self.models / name)} for name in ("one", "two")]
        tables = {"data": {"files": [str(self.rows)]}, "evaluation": {"files": [str(self.held_out)]}}
        tables |= {"reward": {"kind": f"{self.own}:count"}, "training": TRAINING}
        return load_config(write_config(self.folder, agents, **tables), overrides)

    def said(self, config: Config, **how) -> list[str]:
        with pytest.raises(ValueError, match="is of other contents") as refusal:
            start_with_same_inputs(config, **how)
        return str(refusal.value).splitlines()[1:]


@pytest.fixture
def work(tmp_path, models) -> Work:
    return Work(tmp_path, models)


def grow(work: Work) -> None:
    with work.rows.open("a") as file:
        file.write('{"prompt": "5-2=", "answer": "3"}\n')


def turn_over(work: Work) -> None:
    work.rows.write_text("".join(ROWS[::-1]))


def rename_token(work: Work) -> None:
    file = work.models / "two" / "tokenizer.json"
    file.write_text(file.read_text().replace('"s"', '"t"'))


def add_template(work: Work) -> None:
    (work.models / "two" / "additional_chat_templates").mkdir()
    (work.models / "two" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")


def other_ends(work: Work) -> None:
    (work.models / "two" / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')


def other_reward(work: Work) -> None:
    work.own.write_text(FUNCTION.replace("float(", "-float("))


def other_weights(work: Work) -> None:
    """The same config.json and header, as another step of a training has them."""
    file = work.models / "one" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, {"format": "pt"})


KL = ("algorithm.kl_coef=0.1",)


@pytest.mark.parametrize(
    "change, key, what, overrides",
    [
        (grow, "data.files", "rows.jsonl is not what it was", ()),
        (turn_over, "data.files", "rows.jsonl is not what it was", ()),
        (rename_token, "agents.two.model", "tokenizer.json is not what it was", ()),
        (add_template, "agents.two.model", "additional_chat_templates/tool_use.jinja is not what it was", ()),
        (other_ends, "agents.two.model", "generation_config.json is not what it was", ()),
        (other_reward, "reward.kind", "own.py is not what it was", ()),
        (other_weights, "agents.one.model", "the weights are not what they were", KL),
    ],
)
def test_a_run_goes_on_with_other_contents_only_where_that_is_accepted(work, change, key, what, overrides):
    make_step(work.config(*overrides), 2, names=("one", "two"))
    change(work)
    (line,) = work.said(work.config(*overrides), accept=["seed"])
    key_and_what, _, way = line.partition(": go on all the same with ")
    assert key_and_what.startswith(f"{key}: ") and key_and_what.endswith(what)
    assert way == f"--accept {key}, or start anew with --fresh"
    start = start_with_same_inputs(work.config(*overrides), accept=[key])
    assert [str(found) for found in input_changes(start, work.config(*overrides))] == [key_and_what]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (grow, "data.files"),
        (rename_token, "agents.two.model"),
        (other_reward, "reward.kind"),
        (other_weights, "agents.one.model"),
    ],
)
def test_a_node_with_another_copy_has_other_contents(work, change, key):
    before = run_contents(work.config())
    assert run_contents(work.config()) == before
    change(work)
    after = run_contents(work.config())
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == {key}


def test_what_the_run_does_not_read_again_may_change(work):
    """Weights without a KL, a file's age, notes beside a tokenizer; held-out rows, which are said."""
    make_step(work.config(), 2, names=("one", "two"))
    other_weights(work)
    (work.models / "one" / "README.md").write_text("notes")
    work.rows.write_text(work.rows.read_text())
    start = start_with_same_inputs(work.config())
    assert (start.step, input_changes(start, work.config())) == (2, [])
    work.held_out.write_text(json.dumps({"prompt": "9-2=", "answer": "7"}) + "\n")
    start = start_with_same_inputs(work.config())
    assert [str(found) for found in input_changes(start, work.config())] == [
        f"evaluation.files: {work.held_out} is not what it was"
    ]


def test_what_a_judge_reads_by_its_options_is_an_input(work):
    template = work.folder / "judge.txt"
    template.write_text("{prompt} {answer} {gold}")
    judge = ("reward.kind=model", f"reward.options={{url='http://x.y', model='m', template='@{template}'}}")
    make_step(work.config(*judge), 2, names=("one", "two"))
    template.write_text("{answer} {gold} {prompt}")
    (line,) = work.said(work.config(*judge))
    assert line.startswith(
        f"reward.options: {template} is not what it was: go on all the same with --accept reward.opt"
    )


def test_a_module_is_an_input_by_its_name(work, monkeypatch):
    monkeypatch.chdir(work.folder)
    assert run_contents(work.config("reward.kind=own:count"))["reward.kind"].keys() == {"own"}
    make_step(work.config("reward.kind=own:count"), 2, names=("one", "two"))
    other_reward(work)
    (line,) = work.said(work.config("reward.kind=own:count"))
    assert line.startswith("reward.kind: own is not what it was: go on all the same with --accept reward.kind")


def test_a_kl_that_begins_later_has_nothing_to_compare_with(work):
    make_step(work.config(), 2, names=("one", "two"))
    other_weights(work)
    assert start_with_same_inputs(work.config(*KL), accept=["algorithm.kl_coef"]).step == 2


def test_a_step_of_an_older_version_goes_on(work):
    folder = make_step(work.config(), 2, names=("one", "two"))
    text = (folder / RECORD).read_text()
    table = json.loads(Checkpoint.parse(folder, text).text())
    assert table["state"].pop("inputs")
    table["state"]["config"]["algorithm"] |= {"band": "fixed", "band_share": 0.8, "band_smoothing": 0.8}
    table["state"]["agents"]["one"]["band"] = table["state"]["agents"]["two"]["band"] = {"low": [0.1, 1 / 3]}
    state = json.dumps(table["state"], sort_keys=True).encode()
    table["sha256"] = hashlib.sha256(state).hexdigest()
    (folder / RECORD).write_text(json.dumps(table))
    grow(work)
    assert start_with_same_inputs(work.config()).inputs == {}
