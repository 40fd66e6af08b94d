"""Effects of vLLM's own code on streams, from several threads, with and without the project's guard.

`visit` runs inside cuda_engine_job.py, where vLLM may be imported. A device is recorded, not there (recorded_cuda.py);
vLLM's cached `main_stream`, its copy of a step's tokens and its `current_stream` are the installed ones.
"""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from recorded_cuda import Memory, RecordedCuda, TensorThere, told
from vllm.platforms import current_platform
from vllm.utils import torch_utils
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_stream_guard import EngineStreamGuard
from hacpo_mega.rollout.vllm.engine_thread import EngineThread


class Runner:
    """As much of vLLM's second runner as a step's end needs."""

    main_stream = GPUModelRunner.__dict__["main_stream"]

    def __init__(self, cuda: RecordedCuda) -> None:
        self.device, self.output_copy_stream = torch.device("cuda", cuda.index), torch.cuda.Stream()


class VllmOnDevice:
    """As much of an LLM: weights come in, a step reads them and samples tokens, which the host reads at its end."""

    def __init__(self, cuda: RecordedCuda) -> None:
        self.cuda, self.weights, self.runner = cuda, Memory("the engine's weights"), Runner(cuda)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(
                driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=self.runner))
            ),
            engine_core=SimpleNamespace(shutdown=lambda: None),
        )

    def generate(self, steps: int = 3) -> None:
        for _ in range(steps):
            ids, count = Memory("the sampled tokens"), Memory("their number")
            self.cuda.ask("sample", reads=(self.weights,), writes=(ids, count))
            sampled = SimpleNamespace(
                sampled_token_ids=TensorThere(self.cuda, ids, [[7]]),
                logprobs_tensors=None, num_nans=None, sampling_mask_tensors=None,
            )  # fmt: skip
            output = ModelRunnerOutput(req_ids=["0"], req_id_to_index={"0": 0}, sampled_token_ids=None)
            output.prompt_token_id_logprobs_dict = {}
            number = TensorThere(self.cuda, count, [1])
            streams = self.runner.main_stream, self.runner.output_copy_stream
            assert AsyncOutput(output, sampled, number, *streams, False, None).get_output().sampled_token_ids == [[7]]

    def load(self, parameters: Memory) -> None:
        self.cuda.ask("load", reads=(parameters,), writes=(self.weights,))


@contextmanager
def by_nobodys_door(llm: VllmOnDevice):
    """Calls vLLM without a guard."""
    yield llm


def learn(cuda: RecordedCuda, parameters: Memory) -> None:
    cuda.ask("learn", writes=(parameters,))


def play(make_door: Callable[[VllmOnDevice], Callable], *, first: str = "main") -> dict[str, object]:
    """Two steps one step off: the first answers by the thread of `first`, then answers beside learning, and a load."""
    with RecordedCuda().installed(torch_utils) as cuda:
        llm, parameters, thread = VllmOnDevice(cuda), Memory("the parameters"), EngineThread()
        open_door, seen = make_door(llm), []

        def generate(is_unwanted) -> None:
            with open_door() as inside:
                inside.generate()

        learn(cuda, parameters)
        with open_door() as inside:
            inside.load(parameters)
        if first == "main":
            generate(lambda: False)
        for _ in range(2):
            thread.begin(generate)
            learn(cuda, parameters)
            thread.finish()
            seen.append(cuda.current_stream().name)
            with open_door() as inside:
                inside.load(parameters)
            learn(cuda, parameters)
        by_thread = {done.stream for done in cuda.operations if done.thread == "engine" and done.what == "sample"}
        learnt = {done.stream for done in cuda.operations if done.what == "learn"}
        return {"races": cuda.races, "thread samples on": by_thread, "learns on": learnt, "main is on": set(seen)}


def with_door(llm: VllmOnDevice) -> Callable:
    return EngineStreamGuard(lambda: llm).open


def without_door(llm: VllmOnDevice) -> Callable:
    return lambda: by_nobodys_door(llm)


def unordered_door(llm: VllmOnDevice) -> Callable:
    """A stream of its own, which neither waits nor is waited for."""
    own = torch.cuda.Stream()

    @contextmanager
    def opened():
        with torch.cuda.stream(own):
            yield llm

    return opened


def fail_inside() -> dict[str, object]:
    """An error inside, in the main thread and in one that has chosen no device."""
    with RecordedCuda().installed(torch_utils) as cuda:
        llm, found, parameters = VllmOnDevice(cuda), {}, Memory("the parameters")
        door = EngineStreamGuard(lambda: llm)

        def fail() -> None:
            with door.open() as inside:
                inside.load(parameters)
                raise RuntimeError("inside")

        def look(name: str) -> None:
            before = cuda.current_stream(), cuda.current_device()
            found[name] = told(fail), (cuda.current_stream(), cuda.current_device()) == before

        look("main")
        learn(cuda, parameters)
        other = threading.Thread(target=look, args=("other",))
        other.start()
        other.join()
        thread = EngineThread()
        thread.begin(lambda is_unwanted: fail())
        found["engine thread"] = told(thread.finish)
        learn(cuda, parameters)
        return found | {"races": cuda.races}


def remember_another() -> str:
    """vLLM has been called beside the door, and remembers that stream."""
    with RecordedCuda().installed(torch_utils) as cuda:
        llm = VllmOnDevice(cuda)
        door = EngineStreamGuard(lambda: llm)
        llm.runner.main_stream  # noqa: B018

        def opened() -> None:
            with door.open():
                pass

        return told(opened)


def ask_for_the_current_stream(make_door: Callable[[VllmOnDevice], Callable]) -> tuple[str, str]:
    """Where a thread is inside and after vLLM's `current_stream()`, which moves one that has set none."""
    with (
        RecordedCuda().installed(torch_utils) as cuda,
        mock.patch.object(type(current_platform), "is_cuda", return_value=True),
    ):
        door, names = make_door(VllmOnDevice(cuda)), []

        def ask() -> None:
            cuda.set_device(cuda.index)
            with door():
                names.append(torch_utils.current_stream().name)
            names.append(cuda.current_stream().name)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return tuple(names)


def through_the_engine(engine: Engine, calls: dict[str, Callable[[], object]]) -> dict[str, set[tuple[str, str]]]:
    """Where a live CPU engine calls vLLM in each of `calls`: (function of vLLM, stream), and what is current after."""
    with engine._guard.open() as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
    asked = [(worker, "execute_model"), (worker, "reload_weights"), (worker, "get_model"), (llm, "reset_prefix_cache")]
    asked += [(llm, "sleep"), (llm, "wake_up"), (llm.llm_engine.engine_core, "shutdown")]
    with (
        RecordedCuda().installed(torch_utils) as cuda,
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        engine._guard._stream, found, noted = torch.cuda.Stream(), {}, set()
        engine._guard._stream.name = "engine"

        def noting(name: str, original: Callable) -> Callable:
            def call(*arguments, **options):
                noted.add((name, cuda.current_stream().name))
                return original(*arguments, **options)

            return call

        for owner, name in asked:
            setattr(owner, name, noting(name, getattr(owner, name)))
        for name, call in calls.items():
            call()
            found[name] = {*noted, ("after", cuda.current_stream().name)}
            noted.clear()
    return found


def visit() -> dict[str, object]:
    return {
        "before": play(without_door),
        "with": play(with_door),
        "with, thread first": play(with_door, first="thread"),
        "unordered": play(unordered_door),
        "error": fail_inside(),
        "another": remember_another(),
        "moved": ask_for_the_current_stream(without_door),
        "stayed": ask_for_the_current_stream(with_door),
    }
