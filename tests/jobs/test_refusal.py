"""Faults for a user to mend that only a running job finds: one text in the whole job, exit code 2, no traceback."""

import json
from pathlib import Path

import pytest
import refusing_job
from job import PROCESSES, new_job, start_command
from run_cases import CHARACTERS, PAIRS, agent_table, write_config

DEADLINE_S = 120.0


def play(folder: Path, phase: str, complaints: dict[int, str]) -> tuple[list[int], list[str]]:
    """The exit status of every rank, and the lines that any of them wrote."""
    ranks = [
        PROCESSES.Process(target=refusing_job.play, args=(rank, told, folder, phase, complaints))
        for rank, told in enumerate(new_job(4))
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=DEADLINE_S)
    statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return statuses, [line for rank in range(4) for line in (folder / f"{rank}.err").read_text().splitlines()]


@pytest.mark.parametrize("phase", ["start", pytest.param("load", marks=pytest.mark.nightly)])
def test_a_problem_of_the_input_ends_every_rank_with_2_and_is_said_once(tmp_path, phase):
    """Both ranks of an agent find the same in its folder; a problem with two lines keeps both."""
    statuses, lines = play(tmp_path, phase, dict.fromkeys((0, 1), "a/config.json: torn\na/tokenizer.json: gone"))
    assert statuses == [2, 2, 2, 2], lines
    assert lines == ["a/config.json: torn", "a/tokenizer.json: gone"]


@pytest.mark.nightly
def test_problems_of_two_agents_are_both_said(tmp_path):
    statuses, lines = play(tmp_path, "load", {1: "a: torn", 2: "b: gone"})
    assert statuses == [2, 2, 2, 2], lines
    assert sorted(lines) == ["a: torn", "b: gone"]


PLAIN = {"seed": 1, "agents": [{"name": "a", "model": "org/name@aa"}]}
MOVED = {"seed": 2, "agents": [{"name": "a", "model": "org/name@bb"}]}
FILES = {"data.files": {"x.jsonl": "1"}, "agents.a.model": {"tokenizer.json": "2", "the weights": "3"}}
OTHERS = {"data.files": {"x.jsonl": "1"}, "agents.a.model": {"tokenizer.json": "2", "the weights": "4"}}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("of_2", "of_3", "said"),
    [
        ((PLAIN, OTHERS), (PLAIN, None), "rank 2 has other contents of agents.a.model (the weights) than rank 0"),
        (
            (PLAIN, FILES),
            (MOVED, None),
            'rank 3 has seed = 2 where rank 0 has 1; agents.a.model = "org/name@bb" where rank 0 has "org/name@aa"',
        ),
    ],
    ids=["weights", "keys"],
)
def test_a_node_with_other_keys_files_or_weights_is_named(tmp_path, of_2, of_3, said):
    """Ranks 0 and 2 look at the files of a node each."""
    ranks = (PLAIN, FILES), (PLAIN, None), of_2, of_3
    statuses, lines = play(tmp_path, "inputs", dict(enumerate(map(json.dumps, ranks))))
    assert statuses == [2, 2, 2, 2], lines
    assert lines == [f"{said}: give all nodes the same keys and files, and models by their commit (NAME@COMMIT)"]


@pytest.mark.nightly
def test_in_training_the_same_error_is_a_fault_with_its_traceback(tmp_path):
    statuses, lines = play(tmp_path, "learn", {2: "negative dimensions"})
    assert statuses == [1, 1, 1, 1]
    assert lines.count("Traceback (most recent call last):") == 1
    cause = "stops: rank 2 (agent B, lane 0, cell 0, pp 0, tp 0) failed in phase learn of step 1: ValueError: negative"
    assert sum(cause in line for line in lines) == 4


def agents(folder: Path) -> list[dict]:
    return [agent_table(folder, "a", "qwen3", CHARACTERS, tp=2), agent_table(folder, "b", "llama", CHARACTERS + PAIRS)]


TOO_LONG = (
    "rollout.max_prompt_tokens (3) leaves 0 of 2457 prompts of 'sub', and 4 are needed; the shortest has 6 tokens"
)


@pytest.mark.nightly
def test_prompts_that_no_agent_can_read_end_a_job_before_it_loads_a_model(tmp_path):
    """Tokenizers are looked at by the ranks; the exit code of the job and its one line are theirs."""
    config = write_config(tmp_path, agents(tmp_path))
    process = start_command("train", config, "rollout.max_prompt_tokens=3")
    _, errors = process.communicate()
    (line,) = errors.splitlines()
    assert process.returncode == 2 and "max_prompt_tokens" in line and TOO_LONG in line
