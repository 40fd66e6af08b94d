"""A run folder with made-up numbers through the real writers, and a reader of the page that reports it."""

import html.parser
import math
import random
from pathlib import Path

import numpy as np
import torch

from hacpo_mega.logbook.console import PHASES
from hacpo_mega.logbook.files.metrics import Metrics, MetricsWriter
from hacpo_mega.logbook.files.rollout_log import AnswerNotes, RolloutLog
from hacpo_mega.records import Pool, Prompt, Rollout, Stop, Trajectory, Verdict

NUM_EVALUATED = 600


def alone(payload: bytes) -> list[bytes]:
    """The gather of a job of one rank."""
    return [payload]


def write_run(
    folder: Path, agents: tuple[str, ...], num_steps: int, evaluate_every: int, answer: str = "7+5=12;12"
) -> None:
    """A run with made-up numbers through the real writers: curves that rise, bands that fill, phases that take time."""
    draw = random.Random(3)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config_toml(agents, num_steps), encoding="utf-8")
    log = RolloutLog(folder, 0, agents, 0, alone, writes=True)
    with MetricsWriter(folder) as writer:
        for step in range(num_steps + 1):
            metrics = Metrics(agents[0], alone)
            if evaluate_every and step % evaluate_every == 0:
                add_evaluation(metrics, agents, step / num_steps)
            if step:
                add_step(metrics, agents, step / num_steps, draw)
                pool = make_pool(agents, step, answer)
                shape = (len(pool.prompts), len(agents), len(pool.trajectories_PNG[0][0]))
                advantages_PNG = torch.randn(shape, generator=torch.Generator().manual_seed(step))
                log.write(step, pool, advantages_PNG, notes_of(pool, advantages_PNG))
            writer.write(step, metrics.reduce())


def notes_of(pool: Pool, advantages_PNG: torch.Tensor) -> AnswerNotes:
    """All answers but the last of every group were trained: those are too long."""
    keys = [(p.index, n, g) for p in pool.prompts for n in range(len(pool.trajectories_PNG[0])) for g in range(4)]
    ratios = dict(zip(keys, (0.9 + 0.01 * advantages_PNG).flatten().tolist(), strict=True))
    lost = {key: "too_long" for key in keys if key[2] == 3}
    trained = {key: ratio for key, ratio in ratios.items() if key not in lost}
    return AnswerNotes(trained, tuple(prompt.text for prompt in pool.prompts), not_trained=lost)


def config_toml(agents: tuple[str, ...], num_steps: int) -> str:
    lines = [f"num_steps = {num_steps}", "seed = 7", "lanes = 1"]
    for agent in agents:
        lines += ["[[agents]]", f'name = "{agent}"', f'model = "models/{agent}"', "tp = 1"]
    lines += ["[algorithm]", 'method = "hacpo"', 'preset = "paper"', "delta = 0.2"]
    lines += ["[training]", "prompts_per_step = 64", "[rollout]", "rollouts_per_prompt = 4"]
    return "\n".join(lines) + "\n"


def add_evaluation(metrics: Metrics, agents: tuple[str, ...], progress: float) -> None:
    for n, agent in enumerate(agents):
        right = round(NUM_EVALUATED * (0.55 + 0.05 * n + 0.12 * progress))
        metrics.add(f"agent/{agent}/accuracy", right, NUM_EVALUATED)
        metrics.count(f"agent/{agent}/num_evaluated", NUM_EVALUATED)
        metrics.add(f"agent/{agent}/accuracy/add", right / 4, NUM_EVALUATED / 4)
        metrics.count(f"agent/{agent}/num_evaluated/add", NUM_EVALUATED / 4)


def add_step(metrics: Metrics, agents: tuple[str, ...], progress: float, draw: random.Random) -> None:
    for n, learner in enumerate(agents):
        name = f"agent/{learner}"
        metrics.add(f"{name}/reward_mean", 256 * (0.4 + 0.06 * n + 0.2 * progress + draw.gauss(0, 0.02)), 256)
        metrics.count(f"{name}/num_answers", 256)
        metrics.gauge(f"{name}/grad_norm", 1.0 + draw.random())
        metrics.gauge(f"{name}/lr", 4e-4 * (1 - progress))
        metrics.add(f"{name}/answer_tokens_mean", 256 * (15 + draw.random()), 256)
        metrics.gauge(f"capability/{learner}", 0.4 + 0.06 * n + 0.2 * progress)
        for k, phase in enumerate(PHASES):
            metrics._accumulate("seconds", f"{name}/phase/{phase}_s", (k % 3 + 0.4) * (1 + 0.2 * draw.random()))
        for source in set(agents) - {learner}:
            pair = f"{name}/from/{source}"
            inside = 0.35 + 0.3 * progress
            metrics.add(f"{pair}/ratio_mean", 256 * (0.8 + 0.08 * progress + 0.02 * draw.random()), 256)
            metrics.add(f"{pair}/below", 256 * (0.9 - inside), 256)
            metrics.add(f"{pair}/inside", 256 * inside, 256)
            metrics.add(f"{pair}/above", 256 * 0.1, 256)
            metrics.add_weights(f"{pair}/weight", 200, 200 + 60 * draw.random(), 256)
            metrics.add(f"{pair}/positive_share", 80 + 20 * draw.random(), 180)
            for what, number in (("answers", 256), ("trained", 256)):
                metrics.count(f"{pair}/view/num_{what}", number)
            metrics.gauge(f"{pair}/grad_cosine", 0.6 * draw.random() - 0.1)
            metrics.gauge(f"omega/{learner}/{source}", 1 + 0.1 * (n - agents.index(source)) + 0.02 * draw.random())


def make_pool(agents: tuple[str, ...], step: int, answer: str) -> Pool:
    """Three prompts, four answers per agent: right, wrong, cut, and one the judge could not finish."""
    prompts = tuple(Prompt(p, f"id-{p}", f"4{p}+8{step % 10}=", "132", ("add", "sub", "mul")[p]) for p in range(3))
    kinds = (
        (Verdict.CORRECT, 1.0, Stop.EOS),
        (Verdict.WRONG, 0.0, Stop.EOS),
        (Verdict.NO_ANSWER, 0.0, Stop.LENGTH),
        (Verdict.TIMEOUT, math.nan, Stop.EOS),
    )
    ids = np.arange(12, dtype=np.int32)
    cube = tuple(
        tuple(
            tuple(
                Trajectory(n, Rollout(p, g, ids, f"{answer} {g}", stop), verdict, reward, -0.2, 12)
                for g, (verdict, reward, stop) in enumerate(kinds)
            )
            for n in range(len(agents))
        )
        for p in range(3)
    )
    return Pool(prompts, cube)


class Page(html.parser.HTMLParser):
    """A page as a browser would see it: elements, text, and every reference."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        for key, value in attributes:
            if key in ("src", "srcset", "href", "xlink:href", "data", "action"):
                self.references.append(value or "")
            if key == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data
