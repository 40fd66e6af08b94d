"""A trained agent in FP8 or NVFP4 for vLLM, by NVIDIA ModelOpt. No other file imports modelopt.

The scales of weights and activations are calibrated on the agent's last logged prompts and answers, which run through
the model once. Embedding, output layer and norms stay in 16 bits. The change of log-probs on the same sequences is
measured and written into the model card. Elsewhere: copying an agent as it is (export.py).
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from hacpo_mega.commands.export import CARD, TrainedAgent, draft_of, model_card
from hacpo_mega.logbook.files.rollout_log import logged_steps, prompt_text, read_rollouts
from hacpo_mega.megatron.weights.hf_writer import copy_files
from hacpo_mega.models.files.folder import copied_files
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer

try:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
except ModuleNotFoundError as error:
    raise ValueError(
        f"--quantize needs nvidia-modelopt, which is not installed here (no module {error.name}): "
        "`pip install nvidia-modelopt` (launch/lock/ has its version), or export without"
    ) from error

FORMATS: Mapping[str, Mapping[str, Any]] = {"fp8": mtq.FP8_DEFAULT_CFG, "nvfp4": mtq.NVFP4_DEFAULT_CFG}
# Devices on which ModelOpt can simulate a format: its kernel for NVFP4's blocks of 16 needs CUDA.
SIMULATED_ON = {"fp8": ("cpu", "cuda"), "nvfp4": ("cuda",)}
MAX_SEQUENCES = 128


def export_quantized(agent: TrainedAgent, out: Path, number_format: str) -> None:
    """Writes the agent in `number_format` ("fp8" or "nvfp4") with its tokenizer and its model card.

    Raises ValueError for another format, for a run without logged answers, and when `out` exists.
    """
    if number_format not in FORMATS:
        raise ValueError(f"--quantize {number_format!r} is unknown; there are: {', '.join(FORMATS)}")
    sequences = calibration_sequences(agent)
    with draft_of(out) as draft:
        model = _load(agent.folder)
        before = mean_logprobs(model, sequences)
        mtq.quantize(model, dict(FORMATS[number_format]), lambda calibrated: mean_logprobs(calibrated, sequences))
        cost = _cost(model, before, sequences) if model.device.type in SIMULATED_ON[number_format] else ""
        export_hf_checkpoint(model, export_dir=draft)
        copy_files(copied_files(agent.folder), agent.folder, draft)
        by = f"nvidia-modelopt {importlib.metadata.version('nvidia-modelopt')}"
        weights = f"{number_format} by {by}, calibrated on {len(sequences)} answers of the run"
        card = model_card(agent, weights + cost)
        (draft / CARD).write_text(card, encoding="utf-8")


def calibration_sequences(agent: TrainedAgent) -> list[list[int]]:
    """Token ids of the last logged prompts, each with an answer of the agent. ValueError if the run logged none."""
    codec = TextCodec(load_tokenizer(agent.folder, agent.agent.trust_remote_code), agent.agent.prompting)
    steps = logged_steps(agent.run_dir)
    sequences: list[list[int]] = []
    while steps and len(sequences) < MAX_SEQUENCES:
        for prompt in read_rollouts(agent.run_dir, steps.pop()):
            own = [answer["text"] for answer in prompt["answers"] if answer["agent"] == agent.agent.name]
            if own:  # the first alone: the others have the same prompt
                sequences.append([*codec.encode_prompt(prompt_text(prompt)), *codec.encode_answer(own[0], ended=True)])
    if not sequences:
        raise ValueError(f"{agent.run_dir}/rollouts holds no answers of {agent.agent.name} to calibrate with")
    return sequences[:MAX_SEQUENCES]


@torch.no_grad()
def mean_logprobs(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[float]:
    """The mean log-prob (nats) of the tokens after the first, of every sequence."""
    means = []
    for ids in sequences:
        tokens_1T = torch.tensor([ids], device=model.device)
        logits_TV = model(tokens_1T).logits[0, :-1].float()
        chosen_T = torch.log_softmax(logits_TV, dim=-1).gather(1, tokens_1T[0, 1:, None])
        means.append(chosen_T.mean().item())
    return means


def _cost(model: PreTrainedModel, before: Sequence[float], sequences: Sequence[Sequence[int]]) -> str:
    change = fmean(abs(b - a) for a, b in zip(before, mean_logprobs(model, sequences)))
    return f"; mean change of an answer's mean log-prob: {change:.2g} nats"


def _load(folder: Path) -> PreTrainedModel:
    """The model in the 16 bits that vLLM's quantized layers compute in, on the GPU if there is one."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
