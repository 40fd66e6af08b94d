"""The models of the paper's six pairs by their published sizes, as folders with headers and without weights."""

import json
from pathlib import Path

from hollow_models import write_hollow_weights, write_smallest_tokenizer

from hacpo_mega.models.families.architecture import Architecture

# From the config.json of Qwen/<name> and meta-llama/<name> on the Hugging Face Hub:
# architecture, layers, hidden, heads, key-value heads, feed-forward, positions, tied embeddings.
PUBLISHED = {
    "Qwen3-1.7B-Base": ("Qwen3ForCausalLM", 28, 2048, 16, 8, 6144, 32768, True),
    "Qwen3-4B-Base": ("Qwen3ForCausalLM", 36, 2560, 32, 8, 9728, 32768, True),
    "Qwen3-8B-Base": ("Qwen3ForCausalLM", 36, 4096, 32, 8, 12288, 32768, False),
    "Qwen3-4B": ("Qwen3ForCausalLM", 36, 2560, 32, 8, 9728, 40960, True),
    "Qwen3-4B-Instruct-2507": ("Qwen3ForCausalLM", 36, 2560, 32, 8, 9728, 262144, True),
    "Llama-3.2-1B-Instruct": ("LlamaForCausalLM", 16, 2048, 32, 8, 8192, 131072, True),
    "Llama-3.2-3B-Instruct": ("LlamaForCausalLM", 28, 3072, 24, 8, 8192, 131072, True),
}


def make_paper_workplace(here: Path) -> None:
    """Fills a folder with what configs/paper names, relative to it."""
    for name, (architecture, layers, hidden, heads, kv_heads, ffn, positions, tied) in PUBLISHED.items():
        folder = here / ("Qwen" if "Qwen3" in architecture else "meta-llama") / name
        folder.mkdir(parents=True)
        table = {
            "architectures": [architecture],
            "model_type": {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}[architecture],
            "vocab_size": 151936 if "Qwen3" in architecture else 128256,
            "head_dim": 64 if name == "Llama-3.2-1B-Instruct" else 128,
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": ffn,
            "max_position_embeddings": positions,
            "tie_word_embeddings": tied,
        }
        (folder / "config.json").write_text(json.dumps(table))
        write_smallest_tokenizer(folder)
        write_hollow_weights(folder, Architecture.from_folder(folder))
        (folder / "chat_template.jinja").write_text(
            "{% if enable_thinking %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
        )
    (here / "data").mkdir()
    for name in ("math_train", "math500"):
        (here / "data" / f"{name}.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
