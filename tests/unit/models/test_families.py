"""The config.json of each family: transformers' own, published ones, and what asks for another model."""

import itertools
import json
import re
from pathlib import Path

import pytest
from repository import ROOT
from transformers import AutoConfig, PretrainedConfig

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.families.rope import ProportionalRope
from hacpo_mega.models.public import public_architecture

# As published, less the sizes of the vocabulary's special tokens: what a user's folder says word for word.
QWEN25 = """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
  "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
  "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.43.1", "use_cache": true, "use_sliding_window": false, "vocab_size": 152064}"""
DISTILLED = """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
  "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2",
  "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
  "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.44.0", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
  "vocab_size": 151936}"""
QWEN3 = """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
  "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36,
  "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 151936}"""
LLAMA32 = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
  "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
  "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0",
  "use_cache": true, "vocab_size": 128256}"""
MISTRAL_V03 = """{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
  "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": true,
  "vocab_size": 32768}"""
# A Phi-3 by its fields; those of a window and of longrope are null.
PHI4 = """{"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120,
  "initializer_range": 0.02, "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3",
  "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
  "original_max_position_embeddings": 16384, "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
  "rope_scaling": null, "rope_theta": 250000, "sliding_window": null, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.47.0", "use_cache": true, "vocab_size": 100352}"""
OLMO2 = """{"architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": false, "torch_dtype": "float32",
  "transformers_version": "4.47.0.dev0", "use_cache": true, "vocab_size": 100352}"""
GLM4 = """{"architectures": ["Glm4ForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
  "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
  "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
  "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
  "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0", "use_cache": true, "vocab_size": 151552}"""
OLMO3 = """{"architectures": ["Olmo3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 11008, "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
  "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
  "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000, "sliding_window": 4096,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 100278}"""
GEMMA3 = """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
  "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
  "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
  "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
  "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
  "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
  "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144}"""
QWEN3_MOE = """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
  "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
  "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 151936}"""
MIXTRAL = """{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
  "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": true,
  "vocab_size": 32000}"""
SMOLLM3 = """{"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": null, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 11008, "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": false,
  "model_type": "smollm3", "no_rope_layer_interval": 4, "num_attention_heads": 16, "num_hidden_layers": 36,
  "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null,
  "rope_theta": 5000000.0, "sliding_window": null, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0",
  "use_cache": false, "use_sliding_window": false, "vocab_size": 128256}"""
SEED_OSS = """{"architectures": ["SeedOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.1,
  "attention_out_bias": false, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648, "max_position_embeddings": 524288,
  "mlp_bias": false, "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64,
  "num_key_value_heads": 8, "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
  "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": true, "vocab_size": 155136}"""
GPT_OSS = """{"architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
  "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
  "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
  "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
  "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
  "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
  "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
  "full_attention"], "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
  "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
  "output_router_logits": false, "pad_token_id": 199999, "quantization_config": {"modules_to_not_convert":
  ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
  "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0,
  "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
  "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
  "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true, "vocab_size": 201088}"""
QWEN3_NEXT = """{"architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
  "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
  "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
  "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
  "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": false,
  "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000000,
  "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}"""
MINIMAX_M2 = """{"architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
  "mlp_intermediate_size": 8192, "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48,
  "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
  "num_mtp_modules": 3, "qk_norm_type": "per_layer", "quantization_config": {"activation_scheme": "dynamic",
  "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
  "quant_method": "fp8", "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
  "rotary_dim": 64,
  "scoring_func": "sigmoid", "shared_intermediate_size": 0, "sliding_window": null, "tie_word_embeddings": false,
  "use_mtp": true, "use_qk_norm": true, "use_routing_bias": true, "vocab_size": 200064}"""
HY3 = """{"architectures": ["HYV3ForCausalLM"], "enable_attention_fp32_softmax": true, "enable_lm_head_fp32": true,
  "enable_moe_fp32_combine": true, "expert_hidden_dim": 1536, "first_k_dense_replace": 1, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13312, "max_position_embeddings": 262144,
  "model_type": "hy_v3", "moe_intermediate_size": 1536, "moe_router_enable_expert_bias": true,
  "moe_router_use_sigmoid": true, "num_attention_heads": 64, "num_experts": 192, "num_experts_per_tok": 8,
  "num_hidden_layers": 80, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1,
  "qk_norm": true, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
  "route_norm": true, "router_scaling_factor": 2.826, "tie_word_embeddings": false, "use_cache": true,
  "use_grouped_mm": true, "vocab_size": 120832}"""
MOONLIGHT = """{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163586, "ep_size": 1, "first_k_dense_replace": 1,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11264,
  "kv_lora_rank": 512, "max_position_embeddings": 8192, "model_type": "deepseek_v3", "moe_intermediate_size": 1408,
  "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": true,
  "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
  "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.446,
  "scoring_func": "sigmoid", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1,
  "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128,
  "vocab_size": 163840}"""
DEEPSEEK_V3 = """{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
  "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
  "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
  "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
  "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": {
  "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
  "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
  "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
  "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4,
  "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128, "vocab_size": 129280}"""
GLM47_FLASH = """{"architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240, "max_position_embeddings": 202752,
  "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "topk_method": "noaux_tc", "norm_topk_prob": true,
  "num_attention_heads": 20, "n_group": 1, "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
  "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_hidden_layers": 47,
  "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": null, "rope_theta": 1000000, "tie_word_embeddings": false, "q_lora_rank": 768, "kv_lora_rank": 512,
  "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "vocab_size": 154880}"""
PUBLISHED = {"Qwen2.5-7B-Instruct": QWEN25, "DeepSeek-R1-Distill-Qwen-1.5B": DISTILLED, "Qwen3-8B": QWEN3,
             "Llama-3.2-1B-Instruct": LLAMA32, "Mistral-7B-Instruct-v0.3": MISTRAL_V03, "phi-4": PHI4,
             "OLMo-2-1124-7B": OLMO2, "GLM-4-9B-0414": GLM4, "Olmo-3-7B-Instruct": OLMO3,
             "gemma-3-1b-it": GEMMA3, "Qwen3-30B-A3B": QWEN3_MOE, "Mixtral-8x7B-Instruct-v0.1": MIXTRAL,
             "SmolLM3-3B": SMOLLM3, "Seed-OSS-36B-Instruct": SEED_OSS, "gpt-oss-20b": GPT_OSS,
             "MiniMax-M2": MINIMAX_M2, "Hy3-preview": HY3, "Qwen3-Next-80B-A3B-Instruct": QWEN3_NEXT,
             "Moonlight-16B-A3B-Instruct": MOONLIGHT, "DeepSeek-V3": DEEPSEEK_V3,
             "GLM-4.7-Flash": GLM47_FLASH}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
# Fields by which transformers' other models, or later members of these families, compute something else.
FOREIGN = {"logit_scale": 0.0625, "final_logit_softcapping": 30.0, "n_shared_experts": 1, "embedding_multiplier": 12.0,
           "no_rope_layers": [1, 0], "attn_temperature_tuning": True, "clip_qkv": 8.0}  # fmt: skip


def read(folder: Path, config: dict) -> Architecture:
    (folder / "config.json").write_text(json.dumps(config))
    return Architecture.from_folder(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folders_are_read_as_transformers_reads_them(tmp_path, name):
    config = json.loads(PUBLISHED[name])
    found, theirs = read(tmp_path, config), AutoConfig.for_model(**config)
    assert (found.num_kv_heads, found.num_heads) == (theirs.num_key_value_heads, theirs.num_attention_heads)
    own = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert found.head_dim == getattr(theirs, "qk_head_dim", own)
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert (found.norm_eps, found.rope_theta) == (theirs.rms_norm_eps, rope["rope_theta"])
    assert found.tied == theirs.tie_word_embeddings
    assert found.rotary_share == rope.get("partial_rotary_factor", 1.0)
    if name in BY_NAME:
        assert found == public_architecture(name)


BY_NAME = ("SmolLM3-3B", "Seed-OSS-36B-Instruct", "gpt-oss-20b", "MiniMax-M2", "Hy3-preview",
           "Qwen3-Next-80B-A3B-Instruct", "Moonlight-16B-A3B-Instruct", "DeepSeek-V3", "GLM-4.7-Flash")  # fmt: skip
# The one family that knows it.
KNOWN = {("SmolLM3-3B", "no_rope_layers"), *((name, "n_shared_experts") for name in BY_NAME[-3:])}


@pytest.mark.parametrize("name, field", sorted({*itertools.product(PUBLISHED, FOREIGN)} - KNOWN))
def test_a_field_that_a_family_does_not_know_is_a_refusal(tmp_path, name, field):
    config = json.loads(PUBLISHED[name]) | {field: FOREIGN[field]}
    with pytest.raises(
        ValueError, match=rf"config\.json: {field} = .* (is no field of {config['model_type']}|is not supported)"
    ):
        read(tmp_path, config)
    read(tmp_path, config | {field: None})  # which says nothing


def small_default(model_type: str) -> tuple[PretrainedConfig, dict[str, int]]:
    """transformers' configuration of a family, at its defaults but for these sizes."""
    family = FAMILIES[model_type]
    sizes = {"hidden_size": 512, "num_attention_heads": 32, "intermediate_size": 96, "num_hidden_layers": 2}
    # As many as heads; the first layers are dense.
    sizes |= {"num_key_value_heads": 32, "num_hidden_layers": 4} if family.latent else {}
    config = AutoConfig.for_model(model_type, **sizes, **family.new_config_fields)
    config.architectures = [family.architecture]
    return config, sizes


@pytest.mark.parametrize("model_type", FAMILIES)
def test_whatever_transformers_writes_is_known_and_its_defaults_are_ours(tmp_path, model_type):
    """Whole, and less every field at its default, as `save_pretrained` leaves them out."""
    config, sizes = small_default(model_type)
    whole = read(tmp_path, json.loads(config.to_json_string(use_diff=False)))
    stated = {"vocab_size": config.vocab_size, "max_position_embeddings": config.max_position_embeddings, **sizes}
    assert read(tmp_path, json.loads(config.to_json_string(use_diff=True)) | stated) == whole
    config.allow_global_per_layer_attribute_access = True
    assert whole.num_kv_heads == config.num_key_value_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert (whole.norm_eps, whole.rope_theta) == (config.rms_norm_eps, rope["rope_theta"])
    if whole.window_theta is not None:
        assert whole.window_theta == config.rope_parameters["sliding_attention"]["rope_theta"]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * 2
    windows = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert whole.windows == (windows if any(windows) else ())
    assert whole.tied == config.tie_word_embeddings
    turning = whole.rope.share if isinstance(whole.rope, ProportionalRope) else whole.rotary_share
    assert turning == rope.get("partial_rotary_factor", 1.0)
    assert whole.head_dim == getattr(config, "qk_head_dim", getattr(config, "head_dim", None) or 16)


@pytest.mark.parametrize("model_type", [name for name, one in FAMILIES.items() if "default" in one.rope_kinds])
def test_a_folder_without_angles_has_those_of_transformers(tmp_path, model_type):
    stated = json.loads(small_default(model_type)[0].to_json_string(use_diff=False))
    given = {key: value for key, value in stated.items() if "rope" not in key}
    rope = AutoConfig.for_model(**given).rope_parameters
    assert read(tmp_path, given).rope_theta == rope.get("full_attention", rope)["rope_theta"]


@pytest.mark.parametrize("published", [SMOLLM3, SEED_OSS, MISTRAL_V03])
def test_two_descriptions_of_the_angles_are_refused_unless_they_agree(tmp_path, published):
    """transformers takes rope_scaling, which people add to a folder that transformers 5 has written."""
    config = json.loads(published)
    table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2**20, "rope_theta": 1e6}
    plain = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(ValueError, match="are two descriptions, of which transformers takes the second"):
        read(tmp_path, config | {"rope_parameters": plain, "rope_scaling": table})
    for given in ({"rope_parameters": table, "rope_scaling": table}, {"rope_parameters": table, "rope_scaling": None}):
        assert read(tmp_path, config | given).rope.factor == 4.0


def test_one_table_for_two_kinds_of_layers_is_refused(tmp_path):
    """transformers passes over it."""
    flat = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    with pytest.raises(ValueError, match="has a table for 'full_attention' and 'sliding_attention' each"):
        read(tmp_path, json.loads(GEMMA3) | {"rope_parameters": flat})


@pytest.mark.parametrize("published", [GEMMA3, OLMO3])
def test_what_transformers_passes_over_in_scaling_of_two_kinds_is_refused(tmp_path, published):
    """It adds the table to one that has a rope_type, and vLLM takes what it makes of that."""
    config, older = json.loads(published), {"type": "linear", "factor": 8.0}
    theirs = AutoConfig.for_model(**config | {"rope_scaling": older}).rope_parameters["full_attention"]
    assert theirs["rope_type"] == "default"
    with pytest.raises(ValueError, match="passes over type = 'linear' in rope_scaling of"):
        read(tmp_path, config | {"rope_scaling": older})
    with pytest.raises(ValueError, match=r"passes over full_attention = \{.* in rope_scaling of"):
        read(tmp_path, config | {"rope_scaling": {"full_attention": {**older, "rope_type": "linear"}}})
    with pytest.raises(ValueError, match="rope_type 'linear' and type 'yarn' are two rope types"):
        read(tmp_path, config | {"rope_scaling": {**older, "rope_type": "linear", "type": "yarn"}})
    assert read(tmp_path, config | {"rope_scaling": {**older, "rope_type": "linear"}}).rope.factor == 8.0


@pytest.mark.parametrize(
    ("model_type", "given", "other"),
    [
        (
            "llama",  # SmolLM2
            {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
            {"rope_interleaved": True},
        ),
        (
            "qwen3_moe",  # Qwen3-Coder
            {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "qkv_bias": False},
            {"shared_expert_intermediate_size": 512},
        ),
    ],
)
def test_fields_that_name_what_a_family_has_anyway_are_accepted(tmp_path, model_type, given, other):
    config = AutoConfig.for_model(model_type, num_hidden_layers=2)
    config.architectures = [FAMILIES[model_type].architecture]
    stated = json.loads(config.to_json_string(use_diff=False))
    assert read(tmp_path, stated | given) == read(tmp_path, stated)
    with pytest.raises(ValueError, match=f"{next(iter(other))} = .* is not supported, only"):
        read(tmp_path, stated | given | other)


def test_no_word_of_a_window_is_the_familys_own_and_null_is_none(tmp_path):
    config = json.loads(MISTRAL_V03)
    assert read(tmp_path, config).windows == ()
    assert read(tmp_path, config | {"sliding_window": 512}).windows == (512,) * 32
    for kind in ("full_attention", "sliding_attention"):  # which transformers and vLLM follow
        with pytest.raises(ValueError, match="layer_types"):
            read(tmp_path, config | {"sliding_window": 512, "layer_types": [kind] * 32})
    del config["sliding_window"]  # a v0.1
    assert read(tmp_path, config).windows == (AutoConfig.for_model(**config).sliding_window,) * 32


def test_layers_with_a_window_are_those_of_transformers(tmp_path):
    config = json.loads(GEMMA3)
    found, theirs = read(tmp_path, config), AutoConfig.for_model(**config)
    assert [kind == "sliding_attention" for kind in theirs.layer_types] == [bool(window) for window in found.windows]
    assert set(found.windows) == {None, 512}
    with pytest.raises(ValueError, match=r"layer_types has 1 entries; num_hidden_layers is 26"):
        read(tmp_path, config | {"layer_types": ["full_attention"]})


def test_layers_that_do_not_turn_are_those_of_transformers(tmp_path):
    config = json.loads(SMOLLM3)
    theirs = AutoConfig.for_model(**config)
    assert read(tmp_path, config).nope_layers == tuple(n for n, turns in enumerate(theirs.no_rope_layers) if not turns)
    assert read(tmp_path, config | {"no_rope_layers": [0, 1] * 18}).nope_layers == tuple(range(0, 36, 2))
    with pytest.raises(ValueError, match=r"no_rope_layers must be a list of 36 times 0 or 1, found \[1, 0\]"):
        read(tmp_path, config | {"no_rope_layers": [1, 0]})


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("sliding_window", None, "no sliding_window is not supported with gpt_oss: vLLM gives layers a window by"),
        ("layer_types", ["full_attention"] * 24, r"layer_types \[.* is not supported with gpt_oss: vLLM gives"),
        ("quantization_config", {"quant_method": "fp8"}, "not supported with gpt_oss, only quant_method mxfp4"),
        ("swiglu_limit", 5.0, "swiglu_limit = 5.0 is not supported, only 7.0"),
        ("attention_bias", False, "attention_bias = False is not supported, only True"),
        ("rms_norm_eps", 1e-6, "rms_norm_eps = 1e-06 is not supported, only 1e-05"),
        ("rope_scaling", {"rope_type": "default"}, "rope type 'default' is not supported with gpt_oss"),
        ("rope_scaling", YARN | {"attention_factor": 1.0}, "attention_factor = 1.0 is no field of rope type 'yarn'"),
    ],
)  # fmt: skip
def test_what_vllms_gpt_oss_would_pass_over_is_refused(tmp_path, field, value, line):
    assert read(tmp_path, json.loads(GPT_OSS)).windows == (128, None) * 12
    with pytest.raises(ValueError, match=line):
        read(tmp_path, json.loads(GPT_OSS) | {field: value})


@pytest.mark.parametrize(
    ("published", "change", "line"),
    [
        (OLMO3, {"sliding_window_pattern": 2}, "sliding_window_pattern = 2 is not supported, only 4"),
        (MINIMAX_M2, {"tie_word_embeddings": True}, "with minimax_m2: vLLM gives it a head of its own"),
        (GPT_OSS, {"tie_word_embeddings": True}, "with gpt_oss: vLLM gives it a head of its own"),
        (MINIMAX_M2, {"quantization_config": {"quant_method": "fp8"}}, "only quant_method fp8 and weight_block_size"),
        (HY3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .* is not supported, only None"),
        (MINIMAX_M2, {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only 'sigmoid'"),
        (MINIMAX_M2, {"use_routing_bias": False}, "use_routing_bias = False is not supported, only True"),
        (QWEN3_NEXT, {"tie_word_embeddings": True}, "with qwen3_next: vLLM gives it a head of its own"),
        (QWEN3_NEXT, {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not supported, only \[\]"),
        (QWEN3_NEXT, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported, only 1"),
        (MOONLIGHT, {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only 'sigmoid'"),
        (MOONLIGHT, {"rope_interleave": False}, "with deepseek_v3: vLLM turns neighbours"),
        (MOONLIGHT, {"tie_word_embeddings": True}, "with deepseek_v3: vLLM gives it a head of its own"),
        (MOONLIGHT, {"num_key_value_heads": 4}, "num_key_value_heads = 4 is not supported, only that of num_attention"),
        (GLM47_FLASH, {"head_dim": 128}, "head_dim = 128 is not supported, only that of qk_rope_head_dim, 64"),
        (GLM47_FLASH, {"v_head_dim": 512}, r"v_head_dim \(512\) is more than qk_nope_head_dim \+ qk_rope_head_dim"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"mscale": 1.0}}, "must both be given or neither, found 1.0 and 0.0"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"truncate": False}}, "truncate = False of rope type 'yarn' is not"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "vLLM passes over it"),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear' is not supported with"),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "awq"}}, "only quant_method fp8 and weight_block_size"),
        (HY3, {"route_norm": False}, "route_norm = False is not supported, only True"),
        (HY3, {"first_k_dense_replace": 2}, "mlp_layer_types must be 2 times 'dense', as first_k_dense_replace says"),
        (HY3, {"mlp_layer_types": ["sparse"] * 79 + ["dense"]}, "mlp_layer_types must be 1 times 'dense'"),
    ],
)  # fmt: skip
def test_what_transformers_and_vllm_would_read_differently_is_refused(tmp_path, published, change, line):
    with pytest.raises(ValueError, match=line):
        read(tmp_path, json.loads(published) | change)


def test_a_flag_that_is_null_is_false(tmp_path):
    """Both libraries only ask whether it is true, also where true is the default."""
    config = json.loads(DEEPSEEK_V3)
    null, false = ({"norm_topk_prob": value} for value in (None, False))
    assert AutoConfig.for_model(**config | null).norm_topk_prob is None
    assert read(tmp_path, config | null) == read(tmp_path, config | false) != read(tmp_path, config)


def test_dense_layers_are_those_of_transformers(tmp_path):
    config = json.loads(HY3)
    assert read(tmp_path, config).dense_layers == AutoConfig.for_model(**config).mlp_layer_types.count("dense")
    kinds = {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 77}
    assert read(tmp_path, config | kinds | {"first_k_dense_replace": 3}).dense_layers == 3
    assert read(tmp_path, config | kinds | {"first_k_dense_replace": None}).dense_layers == 3


def test_no_other_file_knows_a_family_by_name():
    named = re.compile(rf"""["']({"|".join(FAMILIES)})["']""")
    files = [file for file in (ROOT / "hacpo_mega").rglob("*.py") if file.name != "families.py"]
    assert [str(file) for file in files if named.search(file.read_text())] == []
