"""The sampling kernels of vLLM's CUDA runner (V2), run on the CPU by Triton's interpreter.

vLLM's own package switches Triton off without a GPU, so the two source files are executed by themselves, beside
stand-ins for what they import and these kernels do not use.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import triton
import triton.language as tl

SAMPLE = Path(importlib.util.find_spec("vllm").origin).parent / "v1" / "worker" / "gpu" / "sample"
UNUSED = {
    "vllm": (),
    "vllm.sampling_params": ("MAX_LOGPROB_TOKEN_IDS", "SamplingParams"),
    "vllm.v1": (),
    "vllm.v1.outputs": ("LogprobsTensors",),
    "vllm.v1.worker": (),
    "vllm.v1.worker.gpu": (),
    "vllm.v1.worker.gpu.buffer_utils": ("StagedWriteTensor", "UvaBackedTensor"),
}


def v2_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of V2's sampler as a module, its kernels interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module, names in UNUSED.items():
        stand_in = ModuleType(module)
        vars(stand_in).update(dict.fromkeys(names, object))
        monkeypatch.setitem(sys.modules, module, stand_in)
    utils = ModuleType("vllm.triton_utils")
    utils.triton, utils.tl = triton, tl
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", utils)
    spec = importlib.util.spec_from_file_location(f"v2_{name}", SAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
