"""Divisor and size of an optimizer update as an agent is given them, by hand: no model is loaded."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from repository import ROOT

import hacpo_mega.agent.agent as agent_module
from hacpo_mega.config.load import load_unchecked

HEAVY = ("agent_budget", "architecture_of", "require_fit", "_build_actor", "RolloutClient", "in_turn", "device_policy")


@pytest.mark.parametrize(
    "overrides, prompts, divisor",
    [
        # the quickstart: 2 agents, 64 prompts in a step, 16 in an update, 8 answers of each agent to each of them
        (["algorithm.method=gspo"], 16, 16 * 8),
        (["algorithm.method=hacpo"], 16, 16 * 8),  # own and others' answers each by their own number
        (["algorithm.method=hacpo", "algorithm.aggregation=mean"], 16, 16 * 8 * 2),
        (["algorithm.method=gspo_x2"], 8, 8 * 16),  # twice the answers, half the prompts
        (["algorithm.method=gspo_x2", "rollout.rollouts_per_prompt=3"], 8, 8 * 6),
        (["algorithm.method=gspo_x2", "training.prompts_per_update=32"], 16, 16 * 16),
        (["algorithm.method=gspo_x2", "lanes=2"], 4, 8 * 16),  # a lane's half of the prompts, all lanes' divisor
    ],
)
def test_an_answer_weighs_one_of_all_answers_of_its_update(overrides, prompts, divisor, monkeypatch):
    for name in HEAVY:
        monkeypatch.setattr(agent_module, name, MagicMock())
    loss = MagicMock()
    monkeypatch.setattr(agent_module, "PolicyLoss", loss)
    config = load_unchecked(ROOT / "configs/quickstart.toml", overrides)
    agent = agent_module.Agent(config.agents[0], MagicMock(agent=0), config)
    asked = [SimpleNamespace(index=n) for n in range(64 // config.lanes)]
    updates = agent.plan(
        asked, [SimpleNamespace(prompt_index=n, is_self=True, source=0, rollout_index=0) for n in range(len(asked))]
    )
    assert [len(update) for update in updates] == [prompts] * (len(asked) // prompts)
    agent.learn([], 0, 1)
    assert loss.call_args.args[1] == 1 / divisor
