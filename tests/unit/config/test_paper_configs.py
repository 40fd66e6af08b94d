"""The paper's configurations against the paper's table and the published sizes of their models, without any weights."""

import re
from pathlib import Path

import pytest
from paper_models import make_paper_workplace
from repository import ROOT

from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import load_config
from hacpo_mega.config.checks.device_memory import agent_budget
from hacpo_mega.memory.budget import GIB
from hacpo_mega.models.families.architecture import Architecture

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


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A folder with what the configurations name: models without weights, and data files."""
    make_paper_workplace(tmp_path)
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
    models = [(agent, Architecture.from_folder(agent.model)) for agent in config.agents]
    budgets = [agent_budget(config, agent, model, on_cpu=False) for agent, model in models]
    said = re.findall(r"The fullest phase of the larger agent takes (\d+);", (FOLDER / f"{pair}.toml").read_text())
    assert said == [str(round(max(budget.peak for budget in budgets) / GIB))]


@pytest.mark.nightly
@pytest.mark.parametrize("pair", TABLE)
def test_it_can_answer_one_step_ahead(pair, workplace):
    """An engine over several ranks would be refused there, so one that is not given has one device."""
    config = load_config(FOLDER / f"{pair}.toml", ["rollout.one_step_off=true"])
    assert {agent.engine_tensor_parallel for agent in config.agents} == {1}
    assert {agent.engine_tp for agent in config.agents if agent.cell_size > 1} <= {1}


@pytest.mark.nightly
@pytest.mark.parametrize("pair", TABLE)
def test_a_layout_that_does_not_fit_is_refused(pair, workplace):
    agent = load_config(FOLDER / f"{pair}.toml").agents[1]
    with pytest.raises(ValueError, match="must divide the model's"):
        load_config(FOLDER / f"{pair}.toml", [f"agents.{agent.name}.tp=7"])


@pytest.mark.nightly
def test_an_agent_thinks_only_where_its_template_can(workplace):
    """Qwen3's template takes enable_thinking; those of Instruct-2507 and Llama 3.2 know no such argument."""
    for file in FOLDER.glob("*.toml"):
        for agent in load_config(file).agents:
            can_think = agent.model.name.startswith("Qwen3") and "Instruct" not in agent.model.name
            assert dict(agent.prompting.template_kwargs) == ({"enable_thinking": False} if can_think else {})
