"""Hugging Face folders of a public model's sizes with random weights, for measuring where no model can be fetched.

    python launch/gpu/sized_models.py Qwen/Qwen3-1.7B-Base runs/models/qwen-1b7

The tokenizer has as many tokens as the model's vocabulary: strings of one, two and some of three printable characters
and nothing else, so that any sampled answer is text, and text of one agent has other tokens than the same text of
another.
"""

import argparse
import itertools
from pathlib import Path

import tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hacpo_mega.models.public import public_architecture

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = [chr(code) for code in range(33, 127)]
# Pairs whose order is an agent's own, of those that are part of a token of three: few others are merged in its place.
SHUFFLED = 1000


def make_tokenizer(folder: Path, size: int, seed: int) -> None:
    """Merges of printable characters, some shuffled by `seed`, as many as `size` asks for."""
    pairs = [a + b for a, b in itertools.product(CHARACTERS, repeat=2)]
    order = torch.randperm(SHUFFLED, generator=torch.Generator().manual_seed(seed)).tolist()
    pairs[:SHUFFLED] = [pairs[i] for i in order]
    merges = [(pair[0], pair[1]) for pair in pairs]
    merges += [(pair, c) for pair, c in itertools.product(pairs, CHARACTERS)]
    merges = merges[: size - len(CHARACTERS) - 2]
    words = [PAD, EOS, *CHARACTERS, *(a + b for a, b in merges)]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.decoder = tokenizers.decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS).save_pretrained(folder)


def make_sized_model(name: str, folder: Path, seed: int = 1) -> None:
    """Writes config.json, random bf16 weights and the tokenizer of `name`, a public model's (models/public.py)."""
    sizes = public_architecture(name)
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, sizes.vocab_size, seed)
    config = AutoConfig.for_model(
        sizes.family,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.max_positions,
        tie_word_embeddings=sizes.tied,
        rms_norm_eps=1e-6,
        rope_theta=sizes.rope_theta,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    make_sized_model(given.name, given.folder, given.seed)
