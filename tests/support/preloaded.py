"""Imports of the server of job.py, so that a process forked from it starts in no time."""

from contextlib import suppress

from hacpo_mega.cli.start import no_garbage_collection

# Objects that every collection of a child would walk, and whose pages it would copy.
with no_garbage_collection():
    import megatron.core.models.mimo  # noqa: F401
    import torch.distributed.checkpoint
    import torch.utils.serialization.config  # noqa: F401
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.model_executor.models.qwen3
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker
    from transformers import AutoModelForCausalLM  # noqa: F401
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms.cpu import CpuPlatform

    with suppress(ModuleNotFoundError):  # 0.33 has it elsewhere
        import vllm.entrypoints.launchers.cli_args  # noqa: F401

    import hacpo_mega.cli.app
    import hacpo_mega.commands.doctor
    import hacpo_mega.commands.warm_start
    import hacpo_mega.evaluation.evaluate
    import hacpo_mega.evaluation.table
    import hacpo_mega.trainer.trainer  # noqa: F401

    # Every engine looks through all modules for Triton kernels to replace, a second of work: done for all children.
    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    # Another half second of every engine, which asks all loggers of all modules.
    configure_logging_if_needed(LoggingConfig())
