"""The contract of an environment class is TRL's (grpo_trainer.py 1.16): tools, schemas, and what loads.

The expected tools and texts are written by hand from TRL's source and a run of its discovery.
"""

import asyncio
import json
import os
import re
from typing import Optional

import pytest

from hacpo_mega.config.user_code import environment_problem
from hacpo_mega.conversations import AgentProgram, Responder
from hacpo_mega.conversations.builtin import Calculator, NumberGame
from hacpo_mega.conversations.environment import EnvironmentClass, prompt_messages, with_observation
from hacpo_mega.conversations.environment_process import HeldEnvironment, tool_names


class Base:
    def reset(self, **row):
        pass

    def inherited(self, x: int) -> str:
        """Doc.

        Args:
            x: a number
        """


class Many(Base):
    short = lambda self: 0  # noqa: E731

    def __init__(self):
        self.attribute = lambda: 0

    def get_reward(self):
        return 1.0

    def _hidden(self):
        pass

    @property
    def computed(self):
        raise RuntimeError("a property was evaluated")

    @staticmethod
    def static(x: int) -> int:
        """Doc.

        Args:
            x: a number
        """

    @classmethod
    def of_class(cls, x: int) -> int:
        """Doc."""

    async def later(self, x: Optional[int] = None) -> str:  # noqa: UP045 as users write it
        """Doc.

        Args:
            x: a number (choices: [1, 2])
        """

    def respond(self, messages):
        """Not ours: a tool."""


class Talks(Many, Responder):
    pass


def test_functions_of_the_class_are_tools_by_trls_rule():
    assert tool_names(Many) == ["inherited", "later", "respond", "short", "static"]
    assert tool_names(Talks) == ["inherited", "later", "short", "static"]


def class_with(**members):
    return type("Shop", (Base,), members)


def undescribed(self, x: int):
    pass


def without_hint(self, x):
    """Doc.

    Args:
        x: a number
    """


def without_arguments(self, x: int):
    """Doc."""


def with_any_number(self, *numbers: int):
    """Doc.

    Args:
        numbers: to add
    """


def by_place(self, number: int, /):
    """Doc.

    Args:
        number: to double
    """


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (class_with(tool=with_any_number), r"tool Shop.tool takes \*numbers: int, and a model gives each argument by"),
        (class_with(tool=by_place), "tool Shop.tool takes number: int, and a model"),
        (class_with(tool=undescribed), "tool Shop.tool cannot be described: .*no docstring"),
        (class_with(tool=without_hint), "tool Shop.tool cannot be described: .*missing a type hint"),
        (class_with(tool=without_arguments), "tool Shop.tool cannot be described: .*no description for the argument"),
        (type("Shop", (), {"reset": 3}), r"Shop has no method reset\(\*\*row\)"),
        (type("Shop", (), {"reset": classmethod(lambda cls: 0)}), r"Shop has no method reset\(\*\*row\)"),
        (type("Shop", (Base, Responder), {}), r"Shop derives from Responder and has no method respond\(messages\)"),
    ],
)
def test_a_class_out_of_the_contract_is_refused(kind, said):
    with pytest.raises(ValueError, match=re.compile(said, re.DOTALL)):
        HeldEnvironment(kind).describe()


class Plays(AgentProgram):
    def reset(self, **row):
        pass

    def play(self, base_url, api_key):
        self.seen = os.environ["NO_PROXY"], os.environ["no_proxy"]


@pytest.mark.parametrize(
    ("before", "after"), [("", "127.0.0.1"), (".corp, 10.1.1.1", ".corp, 10.1.1.1,127.0.0.1"), ("*", "*")]
)
def test_an_agent_programs_own_servers_stay_outside_of_the_proxy(before, after, monkeypatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "no_proxy"):
        monkeypatch.setenv(name, "")  # all are as before afterwards
    monkeypatch.setenv("NO_PROXY", before)
    program = Plays()
    for _ in range(2):
        HeldEnvironment(lambda: program).answer({"do": "play", "url": "http://127.0.0.1:1", "key": "k"})
        assert program.seen == (after, after)


def test_schemas_are_those_of_transformers():
    found = HeldEnvironment(type("Shop", (Base,), {"later": Many.later})).describe()
    assert [tool["function"]["name"] for tool in found["tools"]] == ["inherited", "later"]
    number = found["tools"][1]["function"]["parameters"]
    assert number["properties"] == {
        "x": {"type": "integer", "nullable": True, "enum": [1, 2], "description": "a number"}
    }
    assert "required" not in number and (found["responds"], found["rewards"]) == (False, False)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class Shop:\n    def order(self): pass\n", "has no method reset"),
        ("class Store: pass\n", "has no class 'Shop'"),
        ("Shop = 3\n", "Shop is 3, and a class is needed"),
        ("class Shop:\n    def __init__(self): 1 / 0\n    def reset(self): pass\n", "ZeroDivisionError: division by"),
        (
            "import os\nclass Shop:\n    def __init__(self): os._exit(0)\n    def reset(self): pass\n",
            "ends the process",
        ),
        ("import sys\nclass Shop:\n    def reset(self): pass\nsys.exit(5)\n", "SystemExit: 5"),
        pytest.param(
            "import os\nclass Shop:\n    def reset(self): pass\nos.fork() or os._exit(0)\nraise KeyError(7)\n",
            "KeyError: 7",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "import threading\nclass Shop:\n    def reset(self): pass\n"
            "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
            "its import starts threads",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_class_that_cannot_be_loaded_is_one_line(tmp_path, source, said):
    (tmp_path / "shop.py").write_text(source)
    with pytest.raises(ValueError, match=said) as raised:
        EnvironmentClass.load(f"{tmp_path}/shop.py:Shop")
    assert "\n" not in str(raised.value)


def test_names_of_environments_are_looked_up():
    assert environment_problem("calculator") is None
    assert "did you mean 'calculator'?" in environment_problem("calculater")
    assert "does not exist" in environment_problem("nowhere/shop.py:Shop")
    assert "is unknown" in environment_problem("shop.py:")


def test_an_observation_ends_the_last_user_message():
    messages = prompt_messages({"prompt": "1+1="})
    assert with_observation(messages, " Go.") == [{"role": "user", "content": "1+1= Go."}]
    assert with_observation(messages, None) == messages == [{"role": "user", "content": "1+1="}]
    chat = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "1+1="}]
    text = '[{"role":"system","content":"Brief."},{"role":"user","content":"1+1="}]'
    assert prompt_messages({"prompt": text}) == prompt_messages({"prompt": chat}) == chat


def test_the_calculator_computes_numbers_alone():
    calculate = Calculator().calculate
    assert [calculate(text) for text in ("12*(3+4)", "-7//2", "7/2", "8/2", " 1 ")] == ["84", "-4", "3.5", "4", "1"]
    for text in ("2**9", "x", "__import__('os')", "1+", "'a'*9", "(" * 190, "True", "9*" * 300 + "9", ""):
        with pytest.raises(ValueError, match=r"computed|expression|characters"):
            calculate(text)
    with pytest.raises(ValueError, match="too long"):
        calculate("*".join(["99999999"] * 22))
    with pytest.raises(ZeroDivisionError):
        calculate("1/0")


def said(text):
    return [{"role": "assistant", "content": text}]


def test_the_number_game_ends_with_the_number_and_shares_its_reward():
    game = NumberGame()
    game.reset(gold="37", prompt="")
    assert [game.respond(said(text)) for text in ("20", " 40\n")] == [
        [{"role": "user", "content": "+"}],
        [{"role": "user", "content": "-"}],
    ]
    assert game.get_reward() == 0.0
    assert game.respond(said("37")) is None and game.get_reward() == pytest.approx(1 / 3)
    game.reset(gold="5")
    assert game.respond(said("five")) is None and game.get_reward() == 0.0


@pytest.mark.nightly
def test_a_program_that_is_slow_over_many_cases_is_judged_in_its_turn():
    """Each case is within its limits, and all together are not within the turn's."""
    cases = json.dumps([{"stdin": "", "stdout": "1"}] * 40)
    slow = "```python\nimport time\ntime.sleep(0.4)\nprint(1)\n```"

    async def conversation(repair):
        episode = repair.episode()
        await episode.begin({"prompt": "Print 1.", "gold": cases})
        told = await episode.respond(said(slow))
        outcome = told, await episode.reward(), episode.failure
        episode.close()
        return outcome

    with EnvironmentClass.load("repair", call_s=3.0) as repair:
        (told,), reward, failure = asyncio.run(conversation(repair))
    assert "\nending: out of wall time\n" in told["content"] and (reward, failure) == (0.0, None)


def test_a_program_is_repaired_after_its_tests_fail():
    cases = '[{"stdin": "2 3", "stdout": "5"}, {"stdin": "1 1", "stdout": "2"}]'
    wrong = "```python\na, b = map(int, input().split())\nprint(a * b)\n```"
    right = "```python\nprint(sum(map(int, input().split())))\n```"

    async def conversation(repair):
        episode = repair.episode()
        await episode.begin({"prompt": "Add.", "gold": cases})
        told = [await episode.respond(said(text)) for text in ("I cannot.", wrong)]
        early = await episode.reward()
        told.append(await episode.respond(said(right)))
        outcome = told, early, await episode.reward(), episode.failure
        episode.close()
        return outcome

    with EnvironmentClass.load("repair", call_s=300.0) as repair:
        assert (repair.tools, repair.responds, repair.rewards) == ([], True, True)
        (none, failed, passed), early, late, failure = asyncio.run(conversation(repair))
    assert "No program was found" in none[0]["content"] and passed is None
    text = "The program fails case 1.\nending: exit status 0\nexpected: 5\nprinted: 6\n"
    assert failed == [{"role": "user", "content": f"{text}Write the whole program again, corrected."}]
    assert (early, late, failure) == (0.0, 1.0, None)
