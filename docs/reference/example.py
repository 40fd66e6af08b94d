"""Trains from Python and looks on: python docs/reference/example.py configs/quickstart.toml num_steps=4."""

import sys

import hacpo_mega


def main(file: str, *overrides: str) -> None:
    """A run as `hacpo-mega train` makes it; what the callbacks get can be read and not changed."""
    config = hacpo_mega.load_config(file, overrides)
    names = [agent.name for agent in config.agents]

    def on_step(step: int, metrics: dict[str, float]) -> None:
        print(step, *(f"{name} {metrics.get(f'agent/{name}/reward_mean', 0.0):.3f}" for name in names))

    def on_answers(step: int, prompts: list[dict]) -> None:
        print(step, "first answer:", prompts[0]["answers"][0]["text"])

    run = hacpo_mega.train(config, on_step=on_step, on_answers=on_answers)
    for name, folder in run.agents.items():
        print(name, "is in", folder, "and loads with transformers or vLLM")


if __name__ == "__main__":
    main(*sys.argv[1:])
