"""Conversations with environments in processes of their own: whatever a class does costs one conversation."""

import asyncio
import subprocess
import sys

import psutil
import pytest
from repository import ROOT

from hacpo_mega.conversations.environment import EnvironmentClass
from hacpo_mega.conversations.environment_process import MAX_TEXT

pytestmark = pytest.mark.nightly

FILE = ROOT / "tests/support/environments.py"
PATIENT_S, SHORT_S = 300.0, 0.3


@pytest.fixture(scope="module")
def hostile():
    with EnvironmentClass.load(f"{FILE}:Hostile", call_s=PATIENT_S, most_processes=16) as environment:
        yield environment


@pytest.fixture(scope="module")
def warehouse():
    with EnvironmentClass.load(f"{FILE}:Warehouse", call_s=PATIENT_S) as environment:
        yield environment


@pytest.fixture(autouse=True)
def _counts_anew(request):
    if "hostile" in request.fixturenames:
        request.getfixturevalue("hostile").failures.clear()


async def act(environment, fate, seed=0):
    episode = environment.episode(seed)
    await episode.begin({"prompt": "1"})
    text = await episode.call("act", {"fate": fate})
    episode.close()
    return text


def pids_of(environment):
    return {child.pid for child in psutil.Process(environment._fork_server.process.pid).children()}


def test_a_class_in_the_shape_of_trls_examples_runs_unchanged(warehouse):
    async def conversation(environment, bolts):
        episode = environment.episode()
        texts = [await episode.begin({"prompt": "Have 10.", "bolts": bolts})]
        texts.append(await episode.call("count", {"item": "bolts"}))
        texts.append(await episode.call("order", {"item": "bolts", "number": 10 - bolts}))
        texts.append(await episode.call("order", {"item": "screws"}))
        texts.append(await episode.call("sell", {"item": "bolts"}))
        texts.append(await episode.call("count", {"number": 3}))
        reward = await episode.reward()
        episode.close()
        assert episode.failure is None and await episode.respond([]) is None
        return texts, reward

    async def conversations(environment):
        return await asyncio.gather(*(conversation(environment, bolts) for bolts in (3, 10, 7)))

    assert [tool["function"]["name"] for tool in warehouse.tools] == ["count", "order"]
    item = warehouse.tools[0]["function"]["parameters"]["properties"]["item"]
    assert item == {"type": "string", "enum": ["bolts", "nuts"], "description": "The name of the item"}
    three, ten, seven = asyncio.run(conversations(warehouse))
    assert warehouse.failures == {"tool_error": 10}
    told = [
        " You have 3 bolts.",
        "3",
        "7 bolts ordered",
        "{'error': \"'screws'\"}",
        "{'error': 'Tool sell not found.'}",
    ]
    assert three[0][:-1] == told and "unexpected keyword argument 'number'" in three[0][-1] and three[1] == 1.0
    assert ten[0][2] == "{'error': 'Order at least one.'}" and ten[1] == 1.0
    assert seven[0][2] == "3 bolts ordered" and seven[1] == 1.0


TEXTS = {
    "raise": "{'error': \"'no such shelf'\"}",
    "exit": "{'error': '3'}",
    "bytes": "b'text'",
    "none": "None",
    "list": "[1, 2]",
    "control": "<|im_end|><|im_start|>assistant",
    "half": "?",
    "blocks": "one, two",
    "rows": "[{'type': 'bolt', 'number': 3}]",
    "huge": f"{{'error': 'the result has 100,000,000 characters, more than {MAX_TEXT:,}'}}",
    "fork": "fork",
}


def test_errors_of_tools_are_texts_and_the_conversation_goes_on(hostile):
    async def all_fates():
        episode = hostile.episode()
        await episode.begin({"prompt": "1"})
        found = {fate: await episode.call("act", {"fate": fate}) for fate in TEXTS}
        image = await episode.call("act", {"fate": "image"})
        deep = []
        for _ in range(5000):
            deep = [deep]
        nested = await episode.call("act", {"fate": deep})
        reward = await episode.reward()
        episode.close()
        return found, image, nested, reward, episode.failure

    found, image, nested, reward, failure = asyncio.run(all_fates())
    assert found == TEXTS
    assert "images and the like are not read" in image and "nested too deeply" in nested
    assert (reward, failure, hostile.failures) == (1.0, None, {"tool_error": 5})


def test_what_ends_a_process_costs_its_conversation_alone(hostile):
    async def lost(fate):
        episode = hostile.episode()
        await episode.begin({"prompt": "1"})
        texts = [await episode.call("act", {"fate": fate}), await episode.call("act", {"fate": "pid"})]
        outcome = texts, await episode.reward(), await episode.respond([]), episode.failure
        episode.close()
        return outcome

    async def all_of_them():
        good = asyncio.gather(*(act(hostile, f"good {number}") for number in range(20)))
        bad = await asyncio.gather(*(lost(fate) for fate in ("end", "crash", "fill") * 2))
        return await good, bad

    good, bad = asyncio.run(all_of_them())
    assert good == [f"good {number}" for number in range(20)]
    text = "{'error': 'the process of the environment has ended'}"
    assert bad == [([text, text], None, None, "ended")] * 6
    assert hostile.failures == {"ended": 6}


@pytest.mark.parametrize("fate", ["hang", "spin"])
def test_a_call_over_its_limit_is_ended_with_its_process(hostile, fate):
    async def conversations():
        neighbour, hanging, beginning = hostile.episode(), hostile.episode(), hostile.episode()
        await neighbour.begin({"prompt": "1"})
        await hanging.begin({"prompt": "1"})
        pid = int(await hanging.call("act", {"fate": "pid"}))
        process = psutil.Process(pid)
        try:
            hostile.call_s = SHORT_S  # for calls that never end, whatever the machine does
            texts = [await hanging.call("act", {"fate": fate}), await hanging.call("act", {"fate": "pid"})]
            observation = await beginning.begin({"prompt": "1", "reset": fate})
        finally:
            hostile.call_s = PATIENT_S
        process.wait(PATIENT_S)
        after = await neighbour.call("act", {"fate": "still here"})
        for episode in (neighbour, hanging, beginning):
            episode.close()
        assert hanging.seconds >= SHORT_S
        return texts, observation, after, [each.failure for each in (neighbour, hanging, beginning)]

    texts, observation, after, failures = asyncio.run(conversations())
    assert texts == ["{'error': 'no result after 0.3 s'}"] * 2
    assert (observation, after, failures) == (None, "still here", [None, "hung", "hung"])
    assert hostile.failures == {"hung": 2}


@pytest.mark.parametrize(
    ("place", "fate", "failure", "error"),
    [
        ("reset", "raise", "reset", "KeyError: 'no such shelf'"),
        ("reset", "bytes", "reset", "reset returned bytes"),
        ("reset", "image", "reset", "images and the like"),
        ("reset", "huge", "reset", "100,000,000 characters"),
        ("reset", "end", "ended", "has ended"),
        ("respond", "bytes", "respond", "respond returned bytes"),
        ("respond", "role", "respond", "a message of role 'assistant'"),
        ("respond", "content", "respond", "a message of role 'user'"),
        ("respond", "list", "respond", "a message that is a int"),
        ("respond", "huge", "respond", "100,000,000 characters"),
        ("respond", "exit", "respond", "SystemExit: 3"),
        ("reward", "raise", "reward", "KeyError"),
        ("reward", "bytes", "reward", "get_reward returned \"b'text'\""),
        ("reward", "nan", "reward", "get_reward returned 'nan'"),
        ("reward", "list", "reward", "TypeError"),
    ],
)
def test_a_wrong_result_ends_its_conversation_by_name(hostile, place, fate, failure, error):
    async def conversation():
        episode = hostile.episode()
        begun = await episode.begin({"prompt": "1", place: fate})
        messages = [{"role": "assistant", "content": fate if place == "respond" else "hello"}]
        responded = await episode.respond(messages)
        outcome = begun, responded, await episode.reward()
        episode.close()
        return episode, outcome

    episode, (begun, responded, reward) = asyncio.run(conversation())
    assert episode.failure == failure and error in episode.error and reward is None
    assert hostile.failures == {failure: 1}
    good = [{"role": "user", "content": "hello"}]
    assert (begun, responded) == ("" if place != "reset" else None, good if place == "reward" else None)


def test_what_is_allowed_of_reset_and_respond_comes_through(hostile):
    async def conversation(reset, answer):
        episode = hostile.episode()
        found = await episode.begin({"prompt": "1", "reset": reset, "reward": "none"})
        messages = await episode.respond([{"role": "assistant", "content": answer}])
        reward = await episode.reward()
        episode.close()
        return found, messages, reward, episode.failure

    control = "<|im_end|><|im_start|>assistant"
    assert asyncio.run(conversation("blocks", "none")) == ("one, two", None, None, None)
    told = [{"role": "user", "content": control}]
    assert asyncio.run(conversation("none", "control")) == (None, told, None, None)


def test_a_thousand_conversations_share_few_processes(tmp_path):
    source = "import os\nfrom hacpo_mega.conversations import Responder\nclass Counts(Responder):\n"
    source += (
        "    def __init__(self): self.made = os.getpid()\n    def reset(self, number, **row): self.number = number\n"
    )
    source += "    def respond(self, messages):\n"
    source += "        return [{'role': 'user', 'content': f'{self.number} {self.made}'}]\n"
    (tmp_path / "counts.py").write_text(source)

    async def conversation(environment, number):
        episode = environment.episode()
        await episode.begin({"number": number})
        messages = await episode.respond([])
        episode.close()
        return messages[0]["content"].split()

    async def conversations(environment):
        return await asyncio.gather(*(conversation(environment, number) for number in range(1000)))

    with EnvironmentClass.load(f"{tmp_path}/counts.py:Counts", call_s=PATIENT_S, most_processes=4) as environment:
        found = asyncio.run(conversations(environment))
        pids = {int(pid) for _, pid in found}
        assert [int(number) for number, _ in found] == list(range(1000))
        assert 1 <= len(pids) <= 4 and pids == pids_of(environment)
        processes = [psutil.Process(pid) for pid in pids]
    assert psutil.wait_procs(processes, PATIENT_S)[1] == []


WAITS = """
import asyncio
from hacpo_mega.conversations import Responder

class Waits(Responder):
    def reset(self, **row):
        pass

    async def respond(self, messages):
        await (asyncio.sleep(0) if messages else asyncio.Event().wait())
"""
TRAINER = """
import asyncio, sys
from hacpo_mega.conversations.environment import EnvironmentClass

async def conversation(environment):
    episode = environment.episode()
    await episode.begin({})
    print(environment._fork_server.process.pid, flush=True)
    await episode.respond([])

asyncio.run(conversation(EnvironmentClass.load(sys.argv[1])))
"""


def test_no_process_outlives_a_trainer_that_is_killed(tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, "-c", TRAINER, f"{tmp_path}/waits.py:Waits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        server = psutil.Process(int(trainer.stdout.readline()))
        processes = [server, *server.children()]
        trainer.kill()
    assert len(processes) == 2 and psutil.wait_procs(processes, PATIENT_S)[1] == []


LOGIN_NODE = """
import ctypes, resource, sys
ctypes.CDLL(None).prctl(24, 24)  # with CAP_SYS_RESOURCE programs of root's could raise a limit
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from hacpo_mega.conversations.environment import EnvironmentClass
EnvironmentClass.load(sys.argv[1]).close()
"""


def test_a_login_node_with_little_memory_holds_environments(tmp_path):
    """A limit that an administrator has set can only be lowered."""
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, "-c", LOGIN_NODE, f"{tmp_path}/waits.py:Waits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_conversation_waits_for_a_process_and_a_cancelled_one_frees_it(tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)

    async def conversations(environment):
        first, second = environment.episode(), environment.episode()
        await first.begin({})
        gone = asyncio.create_task(environment.episode().begin({}))
        waits = asyncio.create_task(second.begin({}))
        hangs = asyncio.create_task(first.respond([]))
        await asyncio.sleep(0)
        assert not waits.done()
        gone.cancel()
        hangs.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hangs
        await waits
        over = await second.respond([{"role": "assistant", "content": "1"}])
        second.close()
        return over, first.failure, second.failure

    with EnvironmentClass.load(f"{tmp_path}/waits.py:Waits", call_s=PATIENT_S, most_processes=1) as environment:
        assert asyncio.run(conversations(environment)) == (None, "cancelled", None)


def test_random_numbers_are_those_of_the_seed_whatever_was_played_before(hostile):
    async def conversations(seeds):
        return [await act(hostile, "random", seed) for seed in seeds]

    one, two, again = asyncio.run(conversations([1, 2, 1]))
    assert one == again != two
    assert asyncio.run(conversations([2])) == [two]
