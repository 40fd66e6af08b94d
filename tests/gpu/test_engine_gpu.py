"""On CUDA the engine scores like Hugging Face, frees its memory while it sleeps, and wakes to published weights."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from job import run_job
from safetensors.torch import load_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hacpo_mega.cluster.machine.environment import prepare_environment
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.records import Stop
from hacpo_mega.rollout.vllm.engine_stream_guard import worker_of
from hacpo_mega.rollout.vllm.engine_thread import EngineThread
from hacpo_mega.samples.routing import unknown_expert

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EOS = 7
MAX_MODEL_LEN = 256
MANY_ENDS = range(64)  # about half of the vocabulary: answers end by themselves, after a token or a few


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """The same small model twice, with other weights."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 256, "num_heads": 4, "head_dim": 64, "dtype": torch.bfloat16}
    return [make_model(root / str(seed), "qwen3", tied=True, seed=seed, **sizes) for seed in (1, 2)]


@pytest.fixture(scope="module")
def engine(folders, tmp_path_factory):
    prepare_environment()
    # vLLM reads its environment when it is imported, so this import cannot stand above.
    from hacpo_mega.rollout.engine import Engine
    from hacpo_mega.rollout.vllm.engine_spec import EngineSpec

    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    options = {"gpu_memory_utilization": 0.3}
    spec = EngineSpec(folders[0], max_model_len=MAX_MODEL_LEN, dtype=torch.bfloat16, eos_ids=[EOS], options=options)
    engine = Engine(spec)
    yield engine
    engine.close()
    assert dist.is_initialized()
    dist.destroy_process_group()


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 131, size).tolist() for size in (2, 17, 140, MAX_MODEL_LEN - 1)]


@torch.no_grad()
def hugging_face(folder: Path, tokens: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    logits_TV = model(torch.tensor([tokens], device="cuda")).logits[0, :-1]
    return logits_TV.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]].cpu().numpy()


def assert_scores(engine, folder: Path) -> None:
    """bf16 against fp32: 0.1 nats; the other model's log-probs are off by more than one."""
    for tokens, found in zip(sequences(), engine.logprobs(sequences()), strict=True):
        np.testing.assert_allclose(found, hugging_face(folder, tokens), atol=0.1, rtol=0)


def test_the_engine_runs_on_the_runner_that_was_read(engine):
    """docs/guide/gpus.md describes the sampling of vLLM's second model runner."""
    with engine._guard.open() as llm:
        assert llm.llm_engine.vllm_config.use_v2_model_runner


def test_scores_and_published_weights(engine, folders):
    assert_scores(engine, folders[0])
    engine.load({name: tensor.cuda() for name, tensor in load_file(folders[1] / "model.safetensors").items()}.items())
    assert_scores(engine, folders[1])


def test_sampling_repeats_and_brings_its_logprobs(engine):
    prompts, seeds = [tokens[:100] for tokens in sequences()], [11, 12, 13, 14]
    before = torch.cuda.get_rng_state()
    first = engine.generate(prompts, seeds, max_tokens=30, temperature=0.7, return_logprobs=True)
    again = engine.generate(prompts[::-1], seeds[::-1], max_tokens=30, temperature=0.7)[::-1]
    assert [answer.token_ids.tolist() for answer in first] == [answer.token_ids.tolist() for answer in again]
    assert torch.equal(torch.cuda.get_rng_state(), before), "the trainer's generator is where it was"
    greedy = engine.generate(prompts, seeds, max_tokens=30, temperature=0.0)
    assert [answer.token_ids.tolist() for answer in first] != [answer.token_ids.tolist() for answer in greedy]


def test_answers_of_a_second_thread_are_those_of_the_first(engine):
    """One step off: tokens that were read before they exist would be others. The main thread keeps the device busy."""
    prompts, seeds = [tokens[:100] for tokens in sequences()], [21, 22, 23, 24]
    how = {"max_tokens": 30, "temperature": 0.7, "return_logprobs": True}
    at_once = engine.generate(prompts, seeds, **how)
    matrix = torch.randn(2048, 2048, device="cuda")
    mine = torch.cuda.current_stream()
    for _ in range(5):
        thread = EngineThread()
        thread.begin(partial(engine.generate, prompts, seeds, **how))
        for _ in range(200):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        for now, beside in zip(at_once, thread.finish(), strict=True):
            assert beside.token_ids.tolist() == now.token_ids.tolist()
            assert beside.logprobs.tolist() == now.logprobs.tolist()
        assert torch.cuda.current_stream() == mine


def test_a_woken_cache_is_zero(engine, folders):
    engine.sleep()
    engine.wake()
    with engine._guard.open() as llm:
        caches = worker_of(llm).model_runner.kv_caches
        assert caches and not any(bool(layer.any()) for layer in caches)
    engine.load(load_file(folders[0] / "model.safetensors").items())


def test_sleep_frees_the_device_and_publishing_wakes_it(engine, folders):
    free_awake, _ = torch.cuda.mem_get_info()
    engine.sleep()
    free_asleep, total = torch.cuda.mem_get_info()
    assert free_asleep - free_awake > 0.15 * total, "weights and key-value cache were about 0.3 of the device"
    engine.wake(cache=False)
    engine.load(load_file(folders[0] / "model.safetensors").items())
    assert torch.cuda.mem_get_info()[0] > free_awake + 0.1 * total, "the cache is still asleep"
    engine.wake()
    assert_scores(engine, folders[0])


def test_sleep_gives_back_what_no_module_names(engine, folders):
    """As workspaces of vLLM's kernels are: made with the model, neither parameter nor buffer."""
    from vllm.device_allocator import get_mem_allocator_instance

    from hacpo_mega.rollout.engine import WEIGHTS, KeptTensors, pooled_weights

    with engine._guard.open() as llm:
        # Not the worker's own context for weights, which refuses a process that has some already.
        with get_mem_allocator_instance().use_memory_pool(tag=WEIGHTS):
            workspace = torch.arange(1000, device="cuda")
        engine._kept = KeptTensors(worker_of(llm).get_model(), pooled_weights())
    engine.sleep()
    engine.wake()
    engine.load(load_file(folders[0] / "model.safetensors").items())
    assert workspace.tolist() == list(range(1000))


def test_the_trainers_kernels_are_not_watched(engine):
    """vLLM warns of what is compiled after its start."""
    from triton import knobs
    from vllm.utils import jit_monitor

    assert not jit_monitor.is_active()
    assert knobs.runtime.jit_post_compile_hook is None and not knobs.autotuning.print


def in_flight(engine) -> int:
    with engine._guard.open() as llm:
        queue = llm.llm_engine.engine_core.engine_core.batch_queue
    assert queue is not None, "vLLM begins no step ahead here: this tests nothing"
    return len(queue)


def test_nothing_is_in_flight_after_the_last_answer(engine, monkeypatch):
    monkeypatch.setattr(engine, "eos_ids", tuple(MANY_ENDS))
    prompts = [tokens[:100] for tokens in sequences()]
    answers = engine.generate(prompts, [11, 12, 13, 14], max_tokens=60)
    assert {answer.stop for answer in answers} == {Stop.EOS}
    assert in_flight(engine) == 0
    engine.logprobs(prompts)
    assert in_flight(engine) == 0


def routed_twice(folder: Path, _place, _ranks) -> list:
    """Answers with their routing, before and after weights were published, and the steps in flight after each."""
    from hacpo_mega.rollout.engine import Engine
    from hacpo_mega.rollout.vllm.engine_spec import EngineSpec

    options = {"gpu_memory_utilization": 0.2, "enforce_eager": True, "enable_return_routed_experts": True}
    asked = {"max_model_len": MAX_MODEL_LEN, "dtype": torch.bfloat16, "eos_ids": MANY_ENDS}
    engine, seen = Engine(EngineSpec(folder, options=options, **asked)), []
    with engine._guard.open() as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 512
    prompts = [tokens[:100] for tokens in sequences()]
    for _ in range(2):
        answers = engine.generate(prompts, [11, 12, 13, 14], max_tokens=60, return_logprobs=True)
        told = [(len(answer.token_ids), int(answer.stop), answer.routing) for answer in answers]
        seen.append((told, in_flight(engine)))
        engine.load(load_file(folder / "model.safetensors").items())
    engine.close()
    return seen


def test_experts_say_their_routing_again_after_publishing(tmp_path):
    """Router replay over two steps. A process of its own: vLLM lets one engine of a process sleep."""
    sizes = {"hidden_size": 256, "num_heads": 4, "head_dim": 64, "ffn_size": 128, "dtype": torch.bfloat16}
    folder = make_model(tmp_path / "experts", "qwen3_moe", tied=False, **sizes)
    (seen,) = run_job(RankMap(1, (AgentShape("experts"),)), partial(routed_twice, folder))
    prompts = [tokens[:100] for tokens in sequences()]
    for told, num_in_flight in seen:
        assert num_in_flight == 0
        for prompt, (length, stop, routing) in zip(prompts, told, strict=True):
            assert Stop(stop) is Stop.EOS
            assert routing.shape == (len(prompt) + length - 1, 2, 2), "tokens that were read, layers, experts"
            assert (routing < 4).all(), f"of each it is known ({unknown_expert(routing.dtype)}: it is not)"
