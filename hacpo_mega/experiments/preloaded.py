"""What the server of an experiment's runs imports once, so that a rank forked from it starts in no time.

The first four lines are what vLLM imports when its first engine starts.
"""

import gc

import torch.distributed.checkpoint  # noqa: F401
import vllm.model_executor.models.llama
import vllm.model_executor.models.qwen2
import vllm.model_executor.models.qwen3
import vllm.v1.engine.llm_engine
import vllm.v1.worker.gpu_worker  # noqa: F401
from transformers import AutoModelForCausalLM  # noqa: F401

import hacpo_mega.trainer  # noqa: F401

# Two million objects that every collection of a child would walk, and whose pages it would copy.
gc.collect()
gc.freeze()
