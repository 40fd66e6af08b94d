"""What a Hugging Face folder's config.json says about a model, as one frozen record. No weights, no Megatron."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Llama3Rope:
    """Rotary scaling of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class Architecture:
    """A dense decoder with rotary positions, RMSNorm, a SwiGLU feed-forward and grouped key/value heads."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope: Llama3Rope | None
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool

    @classmethod
    def from_folder(cls, folder: Path) -> "Architecture":
        """Read `folder`/config.json. Raises ValueError for a folder without one or a model this project cannot run."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder} is not a Hugging Face model folder: it has no config.json")
        given = json.loads(path.read_text())
        family = given.get("model_type")
        if family not in SUPPORTED:
            raise ValueError(f"{path}: model_type {family!r} is not supported; supported are {', '.join(SUPPORTED)}")
        _refuse_variants(path, given)
        rope_theta, rope = _rope(path, given)
        num_heads = given["num_attention_heads"]
        attention_bias = bool(given.get("attention_bias", False))
        return cls(
            family=family,
            num_layers=given["num_hidden_layers"],
            hidden_size=given["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=given.get("num_key_value_heads") or num_heads,
            head_dim=given.get("head_dim") or given["hidden_size"] // num_heads,
            ffn_size=given["intermediate_size"],
            vocab_size=given["vocab_size"],
            max_positions=given["max_position_embeddings"],
            norm_eps=given.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope=rope,
            tied=given.get("tie_word_embeddings", False),
            qkv_bias=family == "qwen2" or attention_bias,
            # Qwen2 has no such field and no bias on its output projection.
            output_bias=family != "qwen2" and attention_bias,
            qk_norm=family == "qwen3",
        )


def _refuse_variants(path: Path, given: dict[str, Any]) -> None:
    """Raise ValueError for members of a supported family that compute something else."""
    wanted = {"hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False}
    for key, value in wanted.items():
        if given.get(key, value) != value:
            raise ValueError(f"{path}: {key} = {given[key]!r} is not supported, only {value!r}")


def _rope(path: Path, given: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """(theta, scaling): transformers 5 keeps both in rope_parameters, older folders in rope_theta and rope_scaling."""
    table = given.get("rope_parameters") or given.get("rope_scaling") or {}
    theta = float(table.get("rope_theta") or given.get("rope_theta") or 10_000.0)
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{path}: rope type {kind!r} is not supported; supported are default, llama3")
    return theta, Llama3Rope(
        factor=float(table["factor"]),
        low_freq_factor=float(table["low_freq_factor"]),
        high_freq_factor=float(table["high_freq_factor"]),
        original_positions=int(table["original_max_position_embeddings"]),
    )
