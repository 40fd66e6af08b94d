"""Random folders with experts."""
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from tiny_models import _randomize
EXPERTS = 8
def make_expert_model(folder: Path, family: str, *, expert_ffn: int = 48, seed: int = 1, num_heads=4, num_kv_heads=2, tied=False, dtype=torch.float32, hidden=64, num_layers=2, experts=EXPERTS, topk=2, vocab=131) -> Path:
    common = dict(num_hidden_layers=num_layers, hidden_size=hidden, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=32, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None, num_experts_per_tok=topk, rope_parameters={"rope_theta":10000.0,"rope_type":"default"})
    if family == "qwen3_moe":
        config = AutoConfig.for_model(family, intermediate_size=96, moe_intermediate_size=expert_ffn, num_experts=experts, norm_topk_prob=True, **common)
    else:
        config = AutoConfig.for_model(family, intermediate_size=expert_ffn, num_local_experts=experts, sliding_window=None, **common)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _randomize(model, seed, 1.0)
    model.save_pretrained(folder)
    return folder
