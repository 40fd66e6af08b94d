"""Known kinds of devices and their nodes: numbers of their makers, and the shares of these that work reaches.

    h100     NVIDIA H100 SXM in a DGX H100: 80 GB, 989 TFLOP/s bf16 dense (1,979 with sparsity), 3.35 TB/s, NVLink
             900 GB/s both ways, eight 400 Gb/s adapters and 2 TB of host memory a node (data sheets H100, DGX H100)
    h200     NVIDIA H200 SXM: 141 GB, 4.8 TB/s, the rest as H100 (data sheets H200, DGX H200)
    a100-80  NVIDIA A100 80 GB SXM: 312 TFLOP/s bf16 dense, 2,039 GB/s, NVLink 600 GB/s both ways, eight 200 Gb/s
             adapters (data sheets A100, DGX A100)
    b200     NVIDIA B200 in a DGX B200: 1,440 GB, 64 TB/s and 72 PFLOP/s fp8 with sparsity for eight, so 180 GB, 8 TB/s
             and 2,250 TFLOP/s bf16 dense for one; NVLink 1.8 TB/s both ways, 400 Gb/s adapters (data sheet DGX B200)
    cpu      the 2 cores of docs/measurements/throughput.md, one process each: 2.5 GHz x 2 units x 16 float32 x 2
             operations by its type; 3.0 GB/s is what a copy took there, read and written, both cores busy; links are
             what gloo's gathers and scatters of 4 KB to 2 MB between two of its processes take of a processor

memory_gib of a GPU is what torch sees of it, rounded down. The rates of `cpu` are from a measured benchmark
(docs/measurements/planning.md says how). `learn` and `score` of GPUs are the low end of the model FLOP utilisation that
Megatron-LM's README reports on H100 (41 to 48 %), below what our actor alone reached on an H200
(docs/measurements/throughput.md), `experts` what its PR 5728 reports of Qwen3-30B-A3B there (240.5 TFLOP/s, 24 %) over
that, the others are assumptions.
"""

from collections.abc import Mapping
from typing import Any, Literal

from hacpo_mega.models.flops import PEAK_TFLOPS

KindName = Literal["h100", "h200", "a100-80", "b200", "cpu"]

# Rates of GPUs without a measurement or a published number.
ASSUMED = ("prefill", "decode", "memory", "link", "round_s", "token_s", "answer_s", "view_s", "publish_s", "step_s")
_GPU_RATES: Mapping[str, float] = {
    "learn": 0.41,
    "score": 0.41,
    "prefill": 0.41,
    "decode": 0.41,
    "experts": 0.59,
    "memory": 0.7,
    "link": 0.7,
    "learn_passes": 0.0,  # the utilisation is that of whole steps: traffic of activations is in it
    "score_passes": 0.0,
    "round_s": 0.003,
    "request_s": 0.0,
    "token_s": 0.00001,
    "answer_s": 0.001,
    "batch_s": 0.0,  # hidden behind the device's work
    "pool_s": 0.0,
    "view_s": 0.001,
    "view_token_s": 0.000002,
    "publish_s": 0.5,
    "tensor_s": 0.0,
    "step_s": 1.0,
}
# From processor seconds of the quickstart at 4, 12 and 15 tokens, 256 and 512 answers, and of half its prompts left
# out; passes from its hacpo step at 8b986cd; of requests, views, tensors from layouts of docs/measurements/planning.md.
_CPU_RATES: Mapping[str, float] = {
    "learn": 0.6,
    "score": 0.6,
    "prefill": 0.6,
    "decode": 0.6,
    "experts": 1.0,  # not measured
    "memory": 1.0,
    "link": 1.0,
    "learn_passes": 4.0,
    "score_passes": 1.85,
    "round_s": 0.0105,
    "request_s": 0.00055,
    "token_s": 0.000066,
    "answer_s": 0.000017,
    "batch_s": 0.022,
    "pool_s": 0.00005,
    "view_s": 0.00035,
    "view_token_s": 0.000001,
    "publish_s": 0.0,
    "tensor_s": 0.0013,
    "step_s": 0.065,
}


def _nvidia(memory_gib: float, tflops: float, memory_gb_per_s: float, nvlink_gb_per_s: float, adapter_gb_per_s: float,
            requests: int = 1024) -> dict[str, Any]:  # fmt: skip
    """Links are GB/s of one device in one direction: half of what NVLink's two directions have together."""
    return {
        "processor": "cuda",
        "devices_per_node": 8,
        "device": {
            "memory_gib": memory_gib,
            "peak_tflops": tflops,
            "memory_gb_per_s": memory_gb_per_s,
            "max_requests": requests,
        },
        "links": {"inside_gb_per_s": nvlink_gb_per_s, "between_gb_per_s": adapter_gb_per_s, "latency_us": 10.0},
        "host": {"memory_gib": 2000.0},
        "rates": dict(_GPU_RATES),
    }


KINDS: Mapping[KindName, Mapping[str, Any]] = {
    "h100": _nvidia(79.0, PEAK_TFLOPS["NVIDIA H100 80GB HBM3"], 3350.0, 450.0, 50.0),
    "h200": _nvidia(139.0, PEAK_TFLOPS["NVIDIA H200"], 4800.0, 450.0, 50.0),
    # vLLM takes fewer requests at once by default on an A100.
    "a100-80": _nvidia(79.0, PEAK_TFLOPS["NVIDIA A100-SXM4-80GB"], 2039.0, 300.0, 25.0, requests=256),
    "b200": _nvidia(178.0, PEAK_TFLOPS["NVIDIA B200"], 8000.0, 900.0, 50.0),
    "cpu": {
        "processor": "cpu",
        "devices_per_node": 2,
        "device": {"memory_gib": 11.0, "peak_tflops": 0.16, "memory_gb_per_s": 3.0, "max_requests": 512},
        "links": {"inside_gb_per_s": 0.45, "between_gb_per_s": 0.45, "latency_us": 150.0},
        "host": {"memory_gib": 22.0},
        "rates": dict(_CPU_RATES),
    },
}
