"""Random Hugging Face folders, small enough for a CPU test: config.json and model.safetensors, no tokenizer.

Every parameter is random, norms and biases too: a norm left at one or a bias left at zero would hide a wrong mapping.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.files.folder import has_tower
from hacpo_mega.models.files.weight_files import CORRECTION, LAYER_SCALE, SINGLE

# As Llama 3.2 has it, with an original length so short that a test's sequences reach all three frequency bands.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Three quarters of the positions of make_model's models are beyond the original ones.
YARN_ROPE = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16}
# As gpt-oss has it, less beta_fast and beta_slow, which vLLM's class looks for.
GPT_OSS_ROPE = {**YARN_ROPE, "truncate": False}
# As Ministral 3 has it: both of the first cancel, and queries grow.
SCALED_ROPE = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
# As DeepSeek-V3 has it: both of the last cancel in angles and scale scores.
LATENT_ROPE = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}
# Sizes of gated delta nets, none like another.
DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
             "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4}  # fmt: skip
# Sizes of latents, none like another.
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
# And the one for which vLLM has a kernel on the CPU; with another epsilon than that of latents' norms.
CPU_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 40,
              "rms_norm_eps": 1e-2}  # fmt: skip
# A vision tower of one layer, with its own names and types in both families.
TOWERS = {
    "Gemma3ForConditionalGeneration": {
        "mm_tokens_per_image": 4,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48,
                          "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    },
    "Gemma4ForConditionalGeneration": {
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
                          "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 4,
                          "position_embedding_size": 16},
    },
    "Qwen3_5ForConditionalGeneration": {
        "vision_config": {"model_type": "qwen3_5_vision", "hidden_size": 32, "intermediate_size": 48, "depth": 1,
                          "num_heads": 2, "patch_size": 4, "out_hidden_size": 64, "num_position_embeddings": 16},
    },
    "Qwen3_5MoeForConditionalGeneration": {
        "vision_config": {"model_type": "qwen3_5_moe_vision", "hidden_size": 32, "intermediate_size": 48, "depth": 1,
                          "num_heads": 2, "patch_size": 4, "out_hidden_size": 64, "num_position_embeddings": 16},
    },
    "Mistral3ForConditionalGeneration": {
        "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
                          "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    },
}  # fmt: skip


def make_model(
    folder: Path,
    family: str,
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    ffn_size: int = 96,
    vocab_size: int = 131,
    tied: bool | None = None,
    seed: int = 1,
    rope_scaling: dict | None = None,
    attention_bias: bool = False,
    window: int | None = None,
    num_experts: int = 4,
    experts_per_token: int = 2,
    max_positions: int = 256,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    said: dict | None = None,
    images: bool = False,
) -> Path:
    """Write a random model of `family`, one of FAMILIES, to `folder` and return the folder.

    The same arguments give the same weights. `rope_scaling` (for example LLAMA3_ROPE) is merged into rope_parameters.
    A `window` is that of all layers, or of every second one, as the family has it; experts are `ffn_size` wide.
    `said` are further fields of config.json. It is tied where it may be, unless `tied` says otherwise. With `images` it
    is the text model of an image checkpoint.
    Qwen2 derives its head size, so hidden_size must be num_heads * head_dim, and has its own fixed biases.
    """
    traits = FAMILIES[family]
    tied = "tie_word_embeddings" not in traits.only if tied is None else tied
    if traits.latent:  # which decide the size of heads
        num_kv_heads = num_heads
    config = _config(family, rope_scaling, head_dim, hidden_size // num_heads, attention_bias, said or {})
    if traits.windows != "none":
        config.sliding_window = window or (1024 if traits.windows in ("some", "pattern") else None)
    config.update(
        {
            "num_hidden_layers": num_layers,
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "intermediate_size": ffn_size,
            "vocab_size": vocab_size,
            "tie_word_embeddings": tied,
            "max_position_embeddings": max_positions,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
    )
    if traits.delta_net is not None:
        config.update(DELTA_NET)
    if (experts := traits.experts) is not None and (experts.switch is None or (said or {}).get(experts.switch)):
        config.update({experts.counts[-1]: num_experts, experts.per_token: experts_per_token})
        config.update({experts.width: ffn_size // 2 if experts.beside else ffn_size})
        if experts.shared_gate is not None:  # another width than that of the others
            config.update({experts.config_names["shared_ffn"]: ffn_size // 2})
    config.update(said or {})
    if hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["dense"] * (num_layers > 1) + ["sparse"] * (num_layers - (num_layers > 1))
    if hasattr(config, "layer_types"):
        kinds = ("full_attention", "sliding_attention" if window else "full_attention")
        kinds = ("sliding_attention", "full_attention") if traits.windows == "pattern" else kinds
        kinds = kinds if not traits.full_heads else ("sliding_attention", "full_attention")
        kinds = kinds if traits.delta_net is None else ("linear_attention", "full_attention")
        shift = num_layers if traits.full_heads else 0  # whose last layer has no window
        config.layer_types = [kinds[(layer - shift) % 2] for layer in range(num_layers)]
    if traits.full_heads:
        # Twice as large in layers without a window, and half as many; which layers these are a new config alone reads.
        fields = {name: value for name, value in config.to_dict().items() if name != "per_layer_config"}
        own = {"global_head_dim": 2 * head_dim, "num_global_key_value_heads": max(1, num_kv_heads // 2)}
        config = type(config)(**{**fields, **own, "attention_k_eq_v": True, **(said or {})})
    if images:
        kind = getattr(transformers, traits.image_class)
        config = kind.config_class(text_config=config, tie_word_embeddings=tied, **TOWERS[traits.image_class])
        config.architectures = [traits.image_class]
    model = auto_class(images).from_config(config, dtype=dtype)
    _randomize(model, seed, 0.0 if traits.offset_norms else 1.0)
    if traits.query_scalar == 1 and traits.query_scalar is not True:  # their norm has the scale of scores, too
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight") and "tower" not in name:
                parameter.data *= len(parameter) ** -0.5
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if images and traits.experts is not None and not traits.experts.beside:
        stack_experts(Path(folder))
    return Path(folder)


def stack_experts(folder: Path) -> None:
    """Gives a folder of one file its experts as published image checkpoints have them: [E, 2 F, H] and [E, H, F]."""
    stored, found = load_file(folder / SINGLE), {}
    experts = {name: tensor for name, tensor in stored.items() if ".experts." in name}
    for block in {name.rpartition(".experts.")[0] for name in experts}:
        count = sum(name.startswith(f"{block}.experts.") for name in experts) // 3
        gate, up, down = (
            torch.stack([experts[f"{block}.experts.{expert}.{part}_proj.weight"] for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        found |= {f"{block}.experts.gate_up_proj": torch.cat([gate, up], dim=1), f"{block}.experts.down_proj": down}
    plain = {name: tensor for name, tensor in stored.items() if name not in experts}
    save_file(plain | found, folder / SINGLE, metadata={"format": "pt"})


def pack_experts(folder: Path, seed: int = 2) -> dict[str, torch.Tensor]:
    """Give a gpt-oss folder other experts, random ones in MXFP4; returns the tensors that transformers loads of it."""
    stored, plain, generator = load_file(folder / SINGLE), {}, torch.Generator().manual_seed(seed)
    for name, tensor in stored.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            plain[name] = tensor
            continue
        shape = (len(tensor), tensor.shape[2], tensor.shape[1] // 32)
        plain[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        plain[f"{name}_scales"] = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        stored[name] = convert_moe_packed_tensors(plain[f"{name}_blocks"], plain[f"{name}_scales"])
    save_file(plain, folder / SINGLE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]  # as published
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return stored


def pack_fp8(folder: Path) -> set[str]:
    """Have a folder its projections in fp8, with a scale for each block of 128 x 128 numbers; returns their names."""
    stored, plain = load_file(folder / SINGLE), {}
    names = {name for name in stored if name.endswith(("proj.weight", "_mqa.weight")) or ".experts." in name}
    for name, tensor in stored.items():
        plain[name] = tensor
        if name in names:
            grid = [-(-size // 128) for size in tensor.shape]
            padded = torch.zeros(grid[0] * 128, grid[1] * 128)
            padded[: tensor.shape[0], : tensor.shape[1]] = tensor.float()
            blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            scales = blocks.abs().amax(dim=(1, 3)) / 448.0
            packed = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)
            plain[name] = packed[: tensor.shape[0], : tensor.shape[1]].to(torch.float8_e4m3fn).contiguous()
            plain[f"{name}_scale_inv"] = scales
    save_file(plain, folder / SINGLE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
                                     "weight_block_size": [128, 128]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return names


def reference_model(folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Hugging Face's model of a folder, by its plainest implementations; its grouped experts refuse float64."""
    experts = {"experts_implementation": "eager"} if Architecture.from_folder(folder).has_experts else {}
    kind = auto_class(has_tower(folder))
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=dtype, **experts)
    if has_tower(folder):  # Gemma 4 puts it in the place of images; an embedding built with it would not train its row
        model.config.text_config.pad_token_id = 0
    return model


def auto_class(images: bool) -> type:
    """transformers' door to a text model, or to an image checkpoint."""
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def _config(
    family: str, rope_scaling: dict | None, head_dim: int, derived_head_dim: int, attention_bias: bool, said: dict
) -> PreTrainedConfig:
    rope = {"rope_theta": 10_000.0, "rope_type": "default", **(rope_scaling or {})}
    if family == "qwen2":
        assert (head_dim, attention_bias) == (derived_head_dim, False), (head_dim, derived_head_dim, attention_bias)
        return AutoConfig.for_model(family, rope_parameters=rope)
    if FAMILIES[family].two_ropes:
        if FAMILIES[family].full_heads:
            rope = {"partial_rotary_factor": 0.25, **rope, "rope_type": "proportional"}
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    sizes = {"head_dim": head_dim, "attention_bias": attention_bias}
    if FAMILIES[family].latent:
        sizes = {**LATENT, **{name: said[name] for name in LATENT if name in said}}
    if FAMILIES[family].query_scalar is True:
        sizes["query_pre_attn_scalar"] = 24
    if FAMILIES[family].softcap:
        sizes["final_logit_softcapping"] = 2.0  # logits are of the order of one
    return AutoConfig.for_model(family, rope_parameters=rope, **sizes, **FAMILIES[family].new_config_fields)


def _randomize(model: torch.nn.Module, seed: int, of_norms: float) -> None:
    """Normal draws, scaled so that logits are of the order of one and no parameter is trivial; norms about theirs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or name.endswith("scale"):
                value = (1.0 if "linear_attn" in name else of_norms) + 0.3 * draw
            elif name.endswith((".bias", "_bias", ".sinks")):
                value = 0.3 * draw
            else:
                value = draw * parameter.shape[-1] ** -0.5
            parameter.copy_(value)
        for name, buffer in model.named_buffers():
            if name.endswith(LAYER_SCALE):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
            if name.endswith(CORRECTION):  # less than scores differ by
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
