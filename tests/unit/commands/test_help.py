"""Help and the table of keys show everything at 80 columns and in a pipe: what is cut cannot be copied."""

import importlib.metadata

import pytest
import typer
from typer.testing import CliRunner

from hacpo_grading.graders.registry import GRADERS
from hacpo_mega.cli.app import app
from hacpo_mega.config.describe import describe_fields

FIRST = typer.main.get_command(app).commands
OF_GROUPS = {name: getattr(group, "commands", {}) for name, group in FIRST.items()}
COMMANDS = FIRST | {f"{name} {sub}": command for name, subs in OF_GROUPS.items() for sub, command in subs.items()}


def shown(*arguments: str) -> str:
    """The output of a command on a terminal of 80 columns."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_names_and_explains_every_option(name):
    text = shown(*name.split(), "--help")
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    options = [p for p in COMMANDS[name].params if p.param_type_name == "option" and p.name != "help"]
    for option in options:
        assert all(spelling in text for spelling in (*option.opts, *option.secondary_opts)), option.name
        assert option.help, f"{name} {option.opts[0]} has no help"


def test_the_program_lists_its_commands_with_whole_sentences():
    text = " ".join(shown("--help").split())
    assert "Train different language models together, each learning from the others." in text
    for name, command in COMMANDS.items():
        if " " not in name:
            assert f"{name} {' '.join(command.help.split())}" in text


def test_packages_beside_the_product_register_their_commands():
    registered = importlib.metadata.entry_points(group="hacpo_mega.commands").names
    of_lab = {"bench", "chaos", "experiment", "plan", "screen"}
    assert registered == of_lab, "setup.py is newer than the installation: make env"
    assert registered <= FIRST.keys()


def test_a_judge_can_be_any_kind_that_there_is():
    text = " ".join(shown("eval", "--help").split())
    assert all(kind in text for kind in GRADERS)


def test_every_key_is_whole_in_80_columns():
    text = shown("config")
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    for field in describe_fields():
        assert field.name in text and field.sentence.split()[-1] in text


def test_the_version_is_the_packages():
    assert shown("--version").startswith(f"hacpo-mega {importlib.metadata.version('hacpo_mega')} (")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (
            "train c.toml --num_steps 5",
            "--num_steps: there is no such option; behind the configuration write num_steps=5",
        ),
        (
            "check c.toml --num-steps=5",
            "--num-steps: there is no such option; behind the configuration write num_steps=5",
        ),
        ("slurm c.toml --partition gpu", "write slurm.partition=gpu"),
        ("train c.toml --learning-rate 1e-5", "write 'agents.*.optimizer.lr=1e-5'"),
        ("plan c.toml --lanes", "write lanes=VALUE"),
        ("train --config x.toml", "--config: there is no such option; write hacpo-mega train x.toml"),
    ],
)
def test_a_key_that_is_given_as_an_option_is_spelt_as_it_should_be(arguments, says):
    result = CliRunner().invoke(app, arguments.split())
    assert isinstance(result.exception, ValueError) and says in str(result.exception)


@pytest.mark.parametrize("arguments", ["check c.toml --dat", "train c.toml --foo", "report --seed 3"])
def test_an_option_that_is_no_key_is_refused_as_before(arguments):
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2 and "No such option" in result.output
