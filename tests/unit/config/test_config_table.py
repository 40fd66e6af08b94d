"""`hacpo-mega config`: every field of the schema has its sentence, and the table says what the schema does."""

import io
import subprocess
import sys

import pytest
from repository import ROOT
from rich.console import Console

from hacpo_mega.config import AlgorithmConfig, Config, OptimizerConfig
from hacpo_mega.config.describe import describe, describe_fields, keys_of, nearest_key
from hacpo_mega.config.tables.choices import SYNONYMS
from hacpo_mega.config.tables.section import Section

FIELDS = {field.key: field for field in describe_fields()}


def shown(key: str | None, width: int = 400) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(describe(key))
    return console.file.getvalue()


def row(key: str) -> list[str]:
    """The cells of a field's line in its table."""
    lines = [line for line in shown(key).splitlines() if line.startswith(f"│ {key.rpartition('.')[2]} ")]
    assert len(lines) == 1
    return [cell.strip() for cell in lines[0].strip("│").split("│")]


def sections(cls: type = Section) -> set[type]:
    return {deeper for below in cls.__subclasses__() for deeper in (below, *sections(below))}


def test_every_field_of_every_table_is_found():
    """Sections are also counted as Python classes, which does not go through the walk that is tested."""
    of_a_run = [cls for cls in sections() if cls.__module__.startswith("hacpo_mega.config.")]  # not an experiment's
    tables = [cls for cls in of_a_run if not cls.__subclasses__() or cls is OptimizerConfig]  # others are bases alone
    names = sorted(name for cls in tables for name in cls.model_fields)
    assert sorted(key.rpartition(".")[2] for key in FIELDS) == names
    assert len(FIELDS) > 85


@pytest.mark.parametrize("key", FIELDS)
def test_no_field_lacks_its_sentence(key):
    sentence = FIELDS[key].sentence
    assert len(sentence.split()) >= 2, "a sentence, not a word"
    assert sentence[0].isupper() and sentence.endswith(".")
    assert "\n" not in sentence
    twins = [other for other in FIELDS.values() if other.sentence == sentence and other.name != FIELDS[key].name]
    assert not twins, "its own sentence"


def test_a_class_without_a_sentence_would_be_seen():
    class Bare(Section):
        said: int = 1
        """How many there are."""
        bare: int = 1

    assert [field.sentence for field in describe_fields(Bare)] == ["How many there are.", ""]


@pytest.mark.parametrize(
    "key, cells",
    [
        ("seed", ["seed", "whole number, >= 0", "1"]),
        ("run_dir", ["run_dir", "path", "required"]),
        ("agents.tp", ["tp", "whole number, >= 1", "1"]),
        ("agents.engine_tp", ["engine_tp", "whole number, >= 1", "not given"]),
        ("agents.optimizer.betas", ["betas", "[number, >= 0 and < 1, number, >= 0 and < 1]", "[0.9, 0.95]"]),
        ("agents.optimizer.schedule", ["schedule", "constant | linear | cosine", '"constant"']),
        ("agents.init.warm_start.optimizer.lr", ["lr", "number, > 0 and <= 1", "0.003"]),
        ("agents.vllm", ["vllm", "table", "{}"]),
        ("agents.init.tied_embeddings", ["tied_embeddings", "true or false", "required"]),
        ("agents.init.warm_start.skills.NAME.share", ["share", "number, >= 0 and <= 1", "required"]),
        ("data.skills", ["skills", "list of add | sub | mul | srt | sum | chain", '["add", "sub", "mul", "srt"]']),
        ("data.files", ["files", "list of path", "[]"]),
        ("reward", ["reward", "table", "its defaults"]),
        ("algorithm.delta", ["delta", "number, >= 0 and <= 1", "0.2", "0.2"]),
        (
            "algorithm.omega_clip",
            [
                "omega_clip",
                "[number, >= 1e-12 and <= 1e+12, number, >= 1e-12 and <= 1e+12]",
                "not given",
                "[0.1, 10.0]",
            ],
        ),
        ("algorithm.eos_in_loss", ["eos_in_loss", "true or false", "true", "false"]),
        ("algorithm.kl_coef", ["kl_coef", "number, >= 0 and <= 1000", "0.0", "0.001"]),
    ],
)
def test_a_row_says_values_defaults_and_the_sentence(key, cells):
    assert row(key) == [*cells, FIELDS[key].sentence]


def test_a_table_shows_all_that_is_in_it_and_the_whole_shows_everything():
    assert all(f"│ {name} " in shown("algorithm") for name in AlgorithmConfig.model_fields)
    assert "[agents.optimizer]" in shown("agents") and "[data]" not in shown("agents")
    assert "preset paper" in shown("algorithm") and "preset authors" in shown("algorithm")
    everything = shown(None)
    assert all(field.sentence in everything for field in FIELDS.values())


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("algorithm.deltta", "algorithm.delta"),
        ("rolout", "rollout"),
        ("agents.qwen.tp", "agents.tp"),
        ("learning_rate", "agents.optimizer.lr"),
        ("temperature", "rollout.temperature"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(ValueError, match=f"^{key}: unknown key; did you mean '{nearest}'"):
        describe(key)


@pytest.mark.nightly
def test_the_command_prints_it_without_torch():
    code = "import sys\nfrom hacpo_mega import cli\ntry:\n    cli.main()\nfinally:\n    print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "config"]
    good = subprocess.run([*command, "algorithm.alpha"], capture_output=True, text=True, cwd=ROOT)
    assert good.returncode == 0 and good.stdout.endswith("False\n") and "alpha" in good.stdout
    bad = subprocess.run([*command, "algorithm.alfa"], capture_output=True, text=True, cwd=ROOT)
    assert (bad.returncode, bad.stdout) == (2, "False\n")
    assert bad.stderr.startswith("algorithm.alfa: unknown key; did you mean 'algorithm.alpha'?")


@pytest.mark.parametrize(
    "key, meant",
    [
        # another trainer's word, the same table first
        ("data.train", "data.files"),
        ("data.gold", "data.gold_field"),
        ("algorithm.kl", "algorithm.kl_coef"),
        ("agents.lora.r", "agents.lora.rank"),
        ("agents.learning_rate", "agents.optimizer.lr"),
        ("rollout.max_tokens", "rollout.max_answer_tokens"),
        # a word of another table, the outermost first, and a spelling
        ("training.num_steps", "num_steps"),
        ("partition", "slurm.partition"),
        ("lr", "agents.optimizer.lr"),
        ("agents.optimizer.beta", "agents.optimizer.betas"),
        ("rollout.temprature", "rollout.temperature"),
        ("agents.temprature", "rollout.temperature"),
        ("zzz", None),
    ],
)
def test_an_unknown_key_leads_to_the_one_that_was_meant(key, meant):
    assert nearest_key(key) == meant


def test_every_word_of_another_trainer_leads_to_a_key_that_there_is():
    passed_on = "agents.vllm.gpu_memory_utilization"
    assert {key for keys in SYNONYMS.values() for key in keys} <= {*keys_of(Config), passed_on}
    assert list(keys_of(Config)) == [field.key for field in describe_fields()]
