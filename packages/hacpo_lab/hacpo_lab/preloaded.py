"""Imports of the fork server of jobs, made once so that its forks start at once.

The modules of vLLM here are those that it would import itself when its first engine starts.
"""
# ruff: noqa: E402, F401, I001

from hacpo_mega.cluster.machine.environment import prepare_environment

prepare_environment()  # first: it silences what the others warn of when they are imported

import atexit
import gc
import os

from transformers import AutoModelForCausalLM
import vllm.model_executor.models.llama
import vllm.model_executor.models.qwen2
import vllm.model_executor.models.qwen3
import vllm.v1.engine.llm_engine
import vllm.v1.worker.gpu_worker

import hacpo_mega.trainer.trainer

# Else every garbage collection of a child would walk two million objects, and copy their pages.
gc.collect()
gc.freeze()
# The server ends without the interpreter's clean-up, in which Triton's bindings print their leaks on the user's
# terminal. Its children end otherwise.
atexit.register(os._exit, 0)
