"""Runs with an environment: two agents of other tokenizers, one of them on two ranks, share their conversations."""

import inspect
import itertools
import json
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from environments import Chatter
from job import run_command, run_here, start_command
from repository import ROOT
from run_cases import CHARACTERS, PAIRS, agent_table, require_same_in_two_parts, train, write_watched_config
from transformers import AutoModelForCausalLM

from hacpo_mega.checkpoint.files import folder_of
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts
from hacpo_mega.logbook.run.provenance import read_starts

pytestmark = pytest.mark.nightly

NAMES = ("wide", "small")
ENVIRONMENTS = ROOT / "tests/support/environments.py"
TEMPERATURE = 0.8
ROLLOUT = {"rollouts_per_prompt": 4, "max_prompt_tokens": 8, "max_answer_tokens": 6, "temperature": TEMPERATURE}


def conversing(name: str, **more) -> dict:
    return {"environment": f"{ENVIRONMENTS}:{name}", "max_turns": 3, "max_total_tokens": 24} | more


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2),
        agent_table(folder, "small", "llama", CHARACTERS + PAIRS),
    ]
    return write_watched_config(
        folder,
        agents,
        algorithm={"delta": 0.9, "eos_in_loss": False},
        rollout=ROLLOUT,
        conversation=conversing("Chatter"),
        logging={"rollout_tokens": True},
    )


@pytest.fixture(scope="module")
def run(config_file) -> Path:
    train(config_file)
    return config_file.parent / "run"


def answers_of(run: Path, step: int) -> list[tuple[dict, dict]]:
    return [(prompt, answer) for prompt in read_rollouts(run, step) for answer in prompt["answers"]]


def test_conversations_are_logged_turn_by_turn(run):
    answers = answers_of(run, 1)
    assert any(len(answer["turns"]) > 2 for _, answer in answers), "some model ended a turn by itself"
    for _, answer in answers:
        assert answer["opening"] == "7"
        roles = [turn["role"] for turn in answer["turns"]]
        assert roles == ["assistant", "user"] * (len(roles) // 2) + ["assistant"]
        own = [turn for turn in answer["turns"] if turn["role"] == "assistant"]
        said = [turn["content"] for turn in answer["turns"] if turn["role"] == "user"]
        assert said == [str(len(turn["content"])) for turn in own[: len(said)]]
        assert sum(turn["num_tokens"] for turn in answer["turns"]) == answer["num_tokens"] <= 24
        assert answer["text"] == own[-1]["content"]
        if len(own) == 3 and own[-1]["stop"] == "eos":
            text = "".join(turn["content"] for turn in own)
            low = sum(map(text.count, "01234")) / max(1, len(text))
            assert answer["reward"] == pytest.approx(3 / 6 + low / 2)
    values = read_metrics(run / "metrics.jsonl")[1].values
    assert values["agent/wide/view/num_compared"] <= values["agent/wide/from/small/view/num_answers"], "one has turns"
    assert values["agent/wide/conversation/turns_mean"] > 1 and values["agent/wide/conversation/failed_mean"] == 0
    timing = read_metrics(run / "metrics.jsonl")[1].timing
    for name in ("wide", "small"):
        talk = {key.rpartition("/")[2]: v for key, v in timing.items() if key.startswith(f"agent/{name}/conversation")}
        assert talk.keys() == {"environment_s", "engine_busy_s", "engine_idle_s", "prefix_hits"}
        assert min(talk.values()) >= 0 and talk["engine_busy_s"] > 0 and talk["prefix_hits"] < 1


def test_held_out_rewards_of_an_environment_are_no_accuracy(run):
    """Chatter gives parts of a reward, of which the grader of [reward] knows nothing."""
    first = read_metrics(run / "metrics.jsonl")[0].values
    for name in NAMES:
        assert f"agent/{name}/accuracy" not in first
        mean, square = (first[f"agent/{name}/eval/reward_{what}"] for what in ("mean", "square"))
        assert mean**2 <= square < mean, "between 0 and 1"


def test_engine_and_actor_agree_and_first_ratios_are_one(run):
    require_engine_and_actor_agree(run)


def require_engine_and_actor_agree(run: Path) -> None:
    metrics = read_metrics(run / "metrics.jsonl")
    for name, other in (NAMES, NAMES[::-1]):
        for values in (metrics[1].values, metrics[2].values):
            assert 0 < values[f"agent/{name}/engine_gap_max"] < 1e-4
            assert values[f"agent/{name}/from/{other}/view/num_trained"] > 0
            assert values[f"agent/{name}/self/first_ratio_error"] == 0.0


@pytest.mark.parametrize("name", ["wide", "small"])
def test_log_probs_are_hugging_faces_on_what_the_agent_read(run, config_file, name):
    require_hugging_faces_logprobs(run, config_file.parent / name)


def require_hugging_faces_logprobs(run: Path, folder: Path) -> None:
    """Float64, one whole conversation at a time: prompt with its opening, own turns, and what was said between them."""
    name = folder.name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    compared = 0
    for prompt, answer in answers_of(run, 1):
        if answer["agent"] != name or "token_logprob" not in answer or len(answer["turns"]) < 3:
            continue
        opening = answer.get("opening", "")
        opened = [*prompt["prompt_token_ids"][name], *(CHARACTERS.index(sign) + 2 for sign in opening)]
        tokens = [*opened, *answer["token_ids"]]
        places = answer["trained_places"]
        start, own, begins = 0, [], [-len(opened)]
        for turn in answer["turns"]:
            ended = turn.get("stop") == "eos"
            own += range(start, start + turn["num_tokens"] - ended) if turn["role"] == "assistant" else ()
            begins += [start] if turn["role"] == "history" else []
            start += turn["num_tokens"]
        expected = np.full(start, np.nan)
        for begin, end in itertools.pairwise([*begins, start]):
            segment = tokens[begin + len(opened) : end + len(opened)]
            with torch.no_grad():
                logits = model(torch.tensor([segment])).logits[0] / TEMPERATURE
            logprobs = logits.log_softmax(-1)[np.arange(len(segment) - 1), segment[1:]].numpy()
            expected[max(0, begin) : end][-len(logprobs) :] = logprobs[-(end - max(0, begin)) :]
        assert places == own
        assert np.abs(expected[places] - np.array(answer["token_logprob"])).max(initial=0) < 2e-5
        compared += 1
    assert compared


KILLS = """
import os, signal, time
from pathlib import Path

class Kills(Chatter):
    def respond(self, messages):
        lines = Path({metrics!r}).read_text().splitlines() if Path({metrics!r}).exists() else ()
        try:
            if len(lines) < 2:  # steps 0 and 1
                raise FileNotFoundError
            os.unlink({mark!r})
        except FileNotFoundError:
            return super().respond(messages)
        server = Path(f"/proc/{{os.getppid()}}/stat").read_text()
        os.kill(int(server.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(60)
"""


def test_a_rank_killed_between_two_turns_costs_no_bit(config_file, run, tmp_path):
    """The environment kills the rank that it talks to in step 2, once."""
    mark, run_dir, own = tmp_path / "mark", tmp_path / "run", tmp_path / "kills.py"
    mark.touch()
    own.write_text(
        f"from hacpo_mega.conversations import Responder\n{inspect.getsource(Chatter)}"
        + KILLS.format(metrics=str(run_dir / "metrics.jsonl"), mark=str(mark))
    )
    command = ("train", config_file, f"run_dir={run_dir}", f"conversation.environment={own}:Kills")
    command += ("checkpoint.asynchronous=false",)  # step 1 is on disk when step 2 begins
    killed = start_command(*command)
    _, told = killed.communicate()
    assert killed.returncode != 0 and not mark.exists() and "died in phase roll_out of step 2" in told, told[-3000:]
    train(*command[1:])
    assert [start["steps_done"] for start in read_starts(run_dir)] == [0, 1]
    one, other = ([path.read_bytes() for path in sorted(folder_of(d, 2).rglob("*.distcp"))] for d in (run, run_dir))
    assert one == other and len(one) == 3


def test_an_environment_that_says_nothing_changes_no_bit(config_file, tmp_path):
    """A conversation of one turn is the answer of a run without an environment: metrics, rollouts and weights."""
    found = {}
    for name, table in (("silent", conversing("Silent", max_total_tokens=6)), ("none", {})):
        run_dir, file = tmp_path / name, tmp_path / f"{name}.toml"
        file.write_text(tomli_w.dumps(tomllib.loads(config_file.read_text()) | {"conversation": table}))
        train(file, f"run_dir={run_dir}", "num_steps=1")
        values = read_metrics(run_dir / "metrics.jsonl")[1].values
        answers = [{k: a[k] for k in ("text", "token_ids", "ratio", "advantage")} for _, a in answers_of(run_dir, 1)]
        shards = sorted(path.read_bytes() for path in folder_of(run_dir, 1).rglob("*.distcp"))
        found[name] = {k: v for k, v in values.items() if "/conversation/" not in k}, answers, shards
    assert found["silent"][1] == found["none"][1]
    assert found["silent"][0] == found["none"][0]
    assert found["silent"][2] == found["none"][2]


@pytest.fixture(scope="module")
def debate_file(config_file) -> Path:
    """Both agents in one conversation: `right`, the second role, is the first agent, on two ranks."""
    roles = [{"name": "left", "agent": "small"}, {"name": "right", "agent": "wide"}]
    file = config_file.parent / "debate/debate.toml"
    file.parent.mkdir()
    table = {
        "conversation": conversing("Debate", max_turns=2, max_total_tokens=100),
        "roles": roles,
        "rollout": ROLLOUT | {"max_prompt_tokens": 64, "max_answer_tokens": 24},
        "run_dir": str(file.parent / "run"),
    }
    file.write_text(tomli_w.dumps(tomllib.loads(config_file.read_text()) | table))
    return file


@pytest.fixture(scope="module")
def debate(debate_file) -> Path:
    train(debate_file)
    return debate_file.parent / "run"


def test_two_agents_play_one_conversation_and_each_learns_from_its_turns(debate, debate_file):
    """Log-probs of both against Hugging Face in float64, on the tokens that each read; the texts are the same."""
    by_place, compared = {}, Counter()
    models = {
        name: AutoModelForCausalLM.from_pretrained(
            debate_file.parent.parent / name, dtype=torch.float64, attn_implementation="eager"
        )
        for name in ("wide", "small")
    }
    for place, (prompt, answer) in enumerate(answers_of(debate, 1)):
        name, turns = answer["agent"], answer["turns"]
        by_place.setdefault((prompt["id"], answer["rollout"]), {})[name] = answer
        assert sum(turn["num_tokens"] for turn in turns) == answer["num_tokens"], place
        if "token_logprob" not in answer:
            continue
        codes = {sign: CHARACTERS.index(sign) + 2 for sign in CHARACTERS}
        opened = prompt["prompt_token_ids"][name] + [codes[sign] for sign in answer.get("opening", "")]
        tokens = [*opened, *answer["token_ids"]]
        with torch.no_grad():
            logits = models[name](torch.tensor([tokens])).logits[0] / TEMPERATURE
        expected = logits.log_softmax(-1)[np.arange(len(tokens) - 1), tokens[1:]].numpy()[len(opened) - 1 :]
        places = answer["trained_places"]
        assert np.abs(expected[places] - np.array(answer["token_logprob"])).max(initial=0) < 2e-5
        compared[name] += len(places)
    assert min(compared.values()) > 0 and len(compared) == 2
    reached = 0
    for both in by_place.values():
        left, right = both["small"], both["wide"]
        first = left["turns"][0]["content"]
        if right["num_tokens"]:
            reached += 1
            assert right["opening"].startswith(f"7{first}") and left["text"] == right["text"]
            heard = [
                turn["content"] for turn in left["turns"] if turn["role"] == "user" and turn.get("name") == "right"
            ]
            own = [turn["content"] for turn in right["turns"] if turn["role"] == "assistant"]
            assert heard[: len(own)] == own[: len(heard)]
    assert reached
    values = read_metrics(debate / "metrics.jsonl")[1].values
    for name in ("wide", "small"):
        assert values[f"agent/{name}/self/first_ratio_error"] == 0.0
        assert 0 < values[f"agent/{name}/engine_gap_max"] < 1e-4


def test_a_debate_resumes_bit_by_bit(debate_file, debate):
    require_same_in_two_parts(debate_file, debate, num_shards=3)


def test_roles_in_two_lanes_a_step_ahead_with_two_engines_of_one_agent(debate_file, tmp_path):
    """All that says where the other role is; nothing of a conversation without roles knows of lanes or is ahead."""
    mode = ("rollout.one_step_off=true", "agents.wide.engine_tp=1", "lanes=2")
    metrics = train(debate_file, f"run_dir={tmp_path / 'run'}", *mode)
    assert metrics[2].values["agent/wide/conversation/turns_mean"] > 0  # where the other fills all there is, none
    turns = [metrics[step].values[f"agent/{name}/conversation/turns_max"] for step in (1, 2) for name in NAMES]
    assert max(turns) > 1


def test_roles_that_nobody_can_play_are_refused(debate_file):
    for override, told in {
        "roles.right.agent=small": "roles: the agent 'small' plays 2 roles",
        "roles.right.agent=nobody": "roles: there is no agent 'nobody'",
        "roles.right.name=left": "roles: the name 'left' occurs 2 times",
        "placement=shared": "roles: agents that take turns on a device cannot answer each other",
        "conversation={}": "roles: nothing plays them without conversation.environment",
    }.items():
        done = run_here("check", debate_file, override)
        assert done.returncode == 2 and told in done.stderr, (override, done.stderr)


def test_agents_that_take_turns_on_a_device_converse(config_file, tmp_path):
    """One of them has gated delta nets, whose convolution is a linear layer of vLLM's that multiplies nothing."""
    agent_table(tmp_path, "small", "qwen3_5_text", CHARACTERS + PAIRS, {"said": {"rms_norm_eps": 1e-2}})
    changed = f"run_dir={tmp_path / 'run'}", f"agents.small.model={tmp_path / 'small'}"
    metrics = train(config_file, *changed, "placement=shared")
    turns = [metrics[step].values[f"agent/{name}/conversation/turns_max"] for step in (1, 2) for name in NAMES]
    assert max(turns) > 1


def test_a_conversation_that_cannot_be_held_is_refused(config_file):
    for override, told in {
        "conversation.environment=nothing": "environment 'nothing' is unknown",
        "agents.wide.router_replay=true": "conversation",
        "conversation.max_total_tokens=3": "conversation.max_total_tokens",
    }.items():
        done = run_here("check", config_file, override)
        assert done.returncode == 2 and told in done.stderr, (override, done.stderr)


def test_a_conversation_is_shown_with_what_holds_of_its_bits(config_file):
    done = run_here("check", "--data", config_file, "conversation.history=as_rendered")
    assert done.returncode == 0 and ":Chatter: no tools" in done.stdout, done.stderr
    for name in ("wide", "small"):
        assert f"{name} reads turns by plain; with the gold as each of its turns:" in done.stdout
        assert f"{name} on the CPU: the order of arrival " in done.stdout


@pytest.fixture(scope="module")
def programs_file(config_file) -> Path:
    """A program written with the package `openai` converses with each agent, and sets nothing up."""
    file = config_file.parent / "programs/programs.toml"
    file.parent.mkdir()
    program = f"{ENVIRONMENTS.with_name('openai_program.py')}:Shopper"
    talk = conversing("", history="as_rendered") | {"environment": program}
    # Each conversation makes a client of its own, a tenth of a second of work.
    few = {"rollout": ROLLOUT | {"rollouts_per_prompt": 2}, "evaluation": {"num_prompts": 2}}
    table = {"conversation": talk, "run_dir": str(file.parent / "run"), **few}
    file.write_text(tomli_w.dumps(tomllib.loads(config_file.read_text()) | table))
    return file


def test_an_agent_program_written_with_openai_is_trained(config_file, programs_file):
    train(programs_file)
    run = programs_file.parent / "run"
    num_segments = Counter()
    for prompt, answer in answers_of(run, 1):
        first, said, second, *further = answer["turns"]
        assert [turn["role"] for turn in (first, said, second)] == ["assistant", "user", "assistant"]
        assert said["content"] == str(len(first["content"])) and answer["text"] == answer["turns"][-1]["content"]
        text = first["content"] + second["content"]
        num_segments[1 + len(further) // 2] += 1
        if further:
            history, last = further
            assert json.loads(history["content"]) == [[], f"{len(text)}{prompt['prompt']}"]
            assert (history["role"], last["role"]) == ("history", "assistant")
            text += last["content"]
            assert answer["reward"] == pytest.approx(sum(map(text.count, "01234")) / max(1, len(text)))
    assert num_segments.keys() == {1, 2}, "some further segments have no room"
    require_engine_and_actor_agree(run)
    metrics = read_metrics(run / "metrics.jsonl")
    for name in ("wide", "small"):
        talk = {key.rpartition("/")[2]: v for key, v in metrics[1].values.items() if f"{name}/conversation/" in key}
        assert talk["failed_mean"] == 0 and talk["segments_mean"] + talk["untrained_segments_mean"] == 1
        require_hugging_faces_logprobs(run, config_file.parent / name)


def test_a_run_of_agent_programs_resumes_bit_by_bit(programs_file):
    require_same_in_two_parts(programs_file, programs_file.parent / "run", num_shards=3)


def test_an_agent_is_evaluated_in_its_runs_environment(run, tmp_path):
    """By an engine over two ranks. An environment that says nothing, and none, give the same answers by one."""
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(10, 16)))
    found = {}
    for name, keys in {
        "own": ["temperature=1.0", "num_answers=4"],
        "silent": [f"environment={ENVIRONMENTS}:Silent", "temperature=1.0", "num_answers=2", "seed=3"],
        "none": ["environment=none", "temperature=1.0", "num_answers=2", "seed=3"],
    }.items():
        tp = 2 if name == "own" else 1
        asked = (run / "agents/wide", file, "--out", tmp_path / name, "--trust", f"tp={tp}", "max_answer_tokens=6")
        run_command(tp, "eval", *asked, *keys)
        lines = [line for path in (tmp_path / name / "answers").iterdir() for line in path.read_text().splitlines()]
        found[name] = sorted(map(json.loads, lines), key=lambda answer: (answer["id"], answer["rollout"]))
    assert [(a["text"], a["num_tokens"]) for a in found["silent"]] == [
        (a["text"], a["num_tokens"]) for a in found["none"]
    ]
    assert len(found["none"]) == 12 and len({answer["text"] for answer in found["none"]}) > 6
    assert max(answer["num_tokens"] for answer in found["own"]) > 6, "some conversation has a second turn"
    assert {answer["prompt_seen"] for answer in found["own"]} == {f"{n}+{n}=7" for n in range(10, 16)}
    for answer in found["own"]:  # a turn that was cut is not heard
        assert (1 / 6 if answer["num_tokens"] > 6 else 0.0) <= answer["reward"] <= 1.0, answer
    refused = run_here("eval", run / "agents/wide", file, "--out", tmp_path / "refused")
    assert refused.returncode == 2 and "conversation.environment" in refused.stderr
