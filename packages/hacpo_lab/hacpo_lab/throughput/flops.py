"""FLOPs of a step's phases, as a benchmark reports them; what one forward pass counts is in models/flops.py."""

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.flops import forward_flops, learning_flops
from hacpo_mega.models.sharding.lora import Lora


def phase_flops(
    model: Architecture,
    *,
    num_prompts_answered: float,
    num_scored: float,
    num_trained: float,
    length: float,
    trained_length: float,
    lora: Lora | None = None,
) -> dict[str, float]:
    """FLOPs of the phases of a step in which the model computes.

    Lengths are of prompt and answer together, on average: of the agent's own answers, and of those that it trains. A
    prompt is counted for each of its answers: the engine's cached prefixes and training.share_prompts are gains.

    roll_out  every token once     score   a forward pass over what is scored     learn   a forward and a backward pass
    """
    return {
        "roll_out": forward_flops(model, num_prompts_answered, length),
        "score": forward_flops(model, num_scored, length),
        "learn": learning_flops(model, num_trained, trained_length, lora),
    }
