"""The paper's configurations against the paper's table and the published sizes of their models, without any weights."""

import json
from pathlib import Path

import pytest
from hollow_models import write_hollow_weights
from repository import ROOT

from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import load_config
from hacpo_mega.models.architecture import Architecture

FOLDER = ROOT / "configs" / "paper"

# Hyper-parameters of each pair in the paper's appendix: alpha, delta, delta_step.
TABLE = {
    "qwen-4b_qwen-4b-instruct": (3.0, 0.2, 0.01),
    "qwen-1b7-base_qwen-4b-base": (1.0, 0.2, 0.025),
    "qwen-4b-base_qwen-8b-base": (3.0, 0.2, 0.025),
    "llama-1b-instruct_llama-3b-instruct": (1.0, 0.1, 0.01),
    "qwen-1b7-base_llama-1b-instruct": (1.0, 0.2, 0.025),
    "qwen-4b-base_llama-3b-instruct": (1.0, 0.2, 0.025),
}

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


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A folder with what the configurations name: models without weights, and data files."""
    for name, (architecture, layers, hidden, heads, kv_heads, ffn, positions, tied) in PUBLISHED.items():
        folder = tmp_path / "models" / name
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
        (folder / "tokenizer.json").write_text("{}")
        write_hollow_weights(folder, Architecture.from_folder(folder))
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "data").mkdir()
    for name in ("math_train", "math500"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_one_for_every_pair():
    assert {file.stem for file in FOLDER.glob("*.toml")} == set(TABLE)


@pytest.mark.parametrize("pair", TABLE)
def test_it_is_the_paper_on_one_node_of_eight(pair, workplace):
    config = load_config(FOLDER / f"{pair}.toml")
    algorithm, training, rollout = config.algorithm, config.training, config.rollout
    assert (algorithm.alpha, algorithm.delta, algorithm.delta_step) == TABLE[pair]
    assert (algorithm.method, algorithm.cross_baseline, algorithm.capability_window) == ("hacpo", "source", 5)
    assert (algorithm.eps_low, algorithm.eps_high) == (3e-4, 4e-4)
    assert (training.prompts_per_step, training.prompts_per_update, rollout.rollouts_per_prompt) == (128, 64, 8)
    assert (rollout.max_prompt_tokens, rollout.max_answer_tokens, rollout.temperature) == (1024, 4096, 1.0)
    assert config.num_steps == 7500 // 128
    assert RankMap.of(config).world_size == 8
    assert "_".join(agent.name for agent in config.agents) == pair
    assert [agent.optimizer.lr for agent in config.agents] == [1e-6, 1e-6]
    assert all(agent.prompting.chat_template for agent in config.agents)
    assert config.agents[0].prompting.filled("x").endswith(r"within \boxed{}.")


@pytest.mark.parametrize("pair", TABLE)
def test_a_layout_that_does_not_fit_is_refused(pair, workplace):
    agent = load_config(FOLDER / f"{pair}.toml").agents[1]
    with pytest.raises(ValueError, match="must divide the model's"):
        load_config(FOLDER / f"{pair}.toml", [f"agents.{agent.name}.tp=7"])


def test_an_agent_thinks_only_where_its_template_can(workplace):
    """Qwen3's template takes enable_thinking; those of Instruct-2507 and Llama 3.2 know no such argument."""
    for file in FOLDER.glob("*.toml"):
        for agent in load_config(file).agents:
            can_think = agent.model.name.startswith("Qwen3") and "Instruct" not in agent.model.name
            assert dict(agent.prompting.template_kwargs) == ({"enable_thinking": False} if can_think else {})
