"""A call beside the main thread: what it gives, what it dies of, how it is stopped; answers that are ready, on disk.

jobs/test_engine.py runs a real engine in the thread, jobs/test_answers_ahead.py whole runs.
"""

import ctypes
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recorded_cuda import Memory, RecordedCuda, told

from hacpo_mega.checkpoint.files import plain
from hacpo_mega.config import Config
from hacpo_mega.records import Completion, Prompt, Stop
from hacpo_mega.rollout.ready_answers import ReadyAnswers, read_answers
from hacpo_mega.rollout.vllm.engine_thread import EngineThread
from hacpo_mega.trainer.trainer import RolloutSchedule


def completion(number: int) -> Completion:
    ids = np.arange(number % 4, dtype=np.int32) + number
    return Completion(ids, Stop(number % 4), -np.arange(len(ids), dtype=np.float32) / 7)


def test_the_answers_of_a_call_come_with_the_seconds_that_were_hidden():
    thread, may_end = EngineThread(), threading.Event()
    for number in (1, 2):
        may_end.clear()
        answers = [completion(number)]
        thread.begin(lambda is_unwanted, answers=answers: answers if may_end.wait() else [])
        assert thread.is_busy
        may_end.set()
        assert thread.finish() is answers
        assert thread.hidden_s >= 0.0 and not thread.is_busy


def test_what_a_call_dies_of_is_raised_where_its_answers_are_asked_for():
    thread = EngineThread()
    thread.begin(lambda is_unwanted: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        thread.finish()


def test_a_call_that_is_stopped_hears_of_it_and_has_ended():
    thread, ended = EngineThread(), threading.Event()

    def generate(is_unwanted) -> list[Completion]:
        while not is_unwanted():
            pass
        ended.set()
        return []

    thread.stop()  # nothing runs
    thread.begin(generate)
    thread.stop()
    assert ended.is_set()


def test_a_call_computes_with_as_many_threads_as_its_caller():
    """OpenMP is asked as vLLM's kernels ask it: of a new thread it knows what it was told when it was loaded."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    # torch's own, and one of every other library that brings its own, which torch does not tell
    openmp = [ctypes.CDLL(path) for path in mapped if re.search(r"/lib[gi]?omp[^/]*$", path)]
    before, thread = torch.get_num_threads(), EngineThread()
    torch.set_num_threads(before + 1)
    try:
        thread.begin(lambda is_unwanted: max(library.omp_get_max_threads() for library in openmp))
        assert thread.finish() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dies", [False, True])
def test_a_cuda_thread_is_on_its_callers_device_behind_the_queued_work(dies):
    """A new thread of torch is on device 0 and its default stream, which is the trainer's."""
    with RecordedCuda().installed() as cuda:
        weights, tokens, thread = Memory("weights"), Memory("tokens"), EngineThread()

        def generate(is_unwanted) -> None:
            cuda.ask("generate", reads=(weights,), writes=(tokens,))
            if dies:
                raise ValueError("inside")

        for _ in range(2):
            cuda.ask("publish", writes=(weights,))
            thread.begin(generate)
            assert told(thread.finish) == ("ValueError: inside" if dies else "no error")
            cuda.read_on_host(tokens)
        assert cuda.races == []
        published, generated = ({done.stream for done in cuda.operations[first::2]} for first in (0, 1))
        assert published == {"trainer"} and len(generated) == 1 and generated.isdisjoint(published)


PROMPTS = tuple(Prompt(index, str(index), f"{index}+1=\ud800", "") for index in range(6))
GROUP = 3


def ids_of(prompts, template: str = "{}") -> list[list[int]]:
    """The prompts' tokens, a character each."""
    return [[ord(character) for character in template.format(prompt.text)] for prompt in prompts]


@pytest.fixture
def files(tmp_path):
    """Files that two cells have written of two prompts and of four."""
    written = []
    for number, prompts in enumerate((PROMPTS[:2], PROMPTS[2:])):
        completions = [completion(prompt.index * GROUP + g) for prompt in prompts for g in range(GROUP)]
        written.append(tmp_path / f"__{number}_answers")
        ReadyAnswers(prompts, ids_of(prompts), completions).write(written[-1])
    return written


def test_answers_are_read_by_any_number_of_cells(files):
    for share in (PROMPTS, PROMPTS[:3], PROMPTS[3:]):
        found = read_answers(files, share, ids_of(share), GROUP)
        assert found.prompts == share
        for number, answer in enumerate(found.completions, start=share[0].index * GROUP):
            expected = completion(number)
            assert answer.stop is expected.stop
            assert answer.token_ids.tolist() == expected.token_ids.tolist()
            assert answer.logprobs.tolist() == expected.logprobs.tolist()
    assert len(read_answers(files, PROMPTS, ids_of(PROMPTS), GROUP - 1).completions) == 12


def test_answers_to_other_prompts_or_too_few_are_none(files):
    other = Prompt(1, "1", "1+2=", "")
    pair, ids = (PROMPTS[0], other), ids_of(PROMPTS)
    assert read_answers(files, pair, ids_of(pair), GROUP) is None
    assert read_answers(files, PROMPTS, ids, GROUP + 1) is None
    assert read_answers(files[:1], PROMPTS, ids, GROUP) is None
    assert read_answers([], PROMPTS, ids, GROUP) is None


def test_answers_in_the_layout_of_an_older_version_are_none(files):
    """A checkpoint of version 0.2 has them in layout 3: its run goes on, and answers that step anew."""
    message = bytearray(files[1].read_bytes())
    message[8:12] = (3).to_bytes(4, "little")
    files[1].write_bytes(message)
    assert read_answers(files, PROMPTS, ids_of(PROMPTS), GROUP) is None
    assert read_answers(files, PROMPTS[:2], ids_of(PROMPTS[:2]), GROUP) is not None


@pytest.mark.parametrize(
    "template, changed, told, is_taken",
    [
        ("{}", {}, b"ready", True),
        ("in French: {}", {}, b"ready", False),
        ("{}", {"conversation": {"environment": "relay"}}, b"ready", False),
        ("{}", {}, b"", False),  # another agent of the job has none
    ],
)
def test_a_resumed_run_takes_answers_to_the_same_prompt_alone(files, tmp_path, template, changed, told, is_taken):
    """Under another template or conversation the log-probs of old answers are of other prompts."""
    tables = {"run_dir": "r", "num_steps": 4, "agents": [{"name": "a", "model": "x/a"}]}
    rollout = {"one_step_off": True, "rollouts_per_prompt": GROUP}
    config = Config.model_validate(tables | {"data": {"generator": "arithmetic"}, "rollout": rollout})
    place = SimpleNamespace(
        rank_map=SimpleNamespace(share_of_lane=lambda _: slice(None)), coordinate=None, lane=0,
        gather_job=lambda payload: [payload, told],
    )  # fmt: skip
    codec = SimpleNamespace(encode_prompt=lambda text: [ord(character) for character in template.format(text)])
    prompts = SimpleNamespace(at=lambda *_: PROMPTS)
    schedule = RolloutSchedule(prompts, SimpleNamespace(place=place, name="a", codec=codec), config, None)
    stored = {f"a/{file.name}": None for file in files}
    (tmp_path / "a").mkdir()
    for file in files:
        file.rename(tmp_path / "a" / file.name)
    start = SimpleNamespace(config=plain(config) | changed, folder=tmp_path, files=stored, step=1)
    line = schedule.restore(start)
    assert (schedule.ready is not None) == is_taken
    assert line is None if is_taken else line.startswith("answers prefetched for step 2, of other settings")
    start.files = {}  # rollout.one_step_off is new: nothing is lost
    assert schedule.restore(start) is None
