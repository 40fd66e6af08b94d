"""A step of a run, computed again from the run's files by transformers in float64: nothing of the product is imported.

Reads config.toml, rollouts/ with token ids, the initial models, and the main weights and moments of two checkpoints.
Covers HACPO with graded rewards, answers of one turn, a KL to the initial policy (k3), two tokenizers, several updates
of a step, decay of matrices, clipping by the global norm, AdamW. Equations are those of arXiv 2603.02604; the advantage
of graded rewards is in docs/guide/methods.md.
"""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM, AutoTokenizer

Weights = dict[str, torch.Tensor]
Texts = Sequence[tuple[list[int], list[int]]]  # tokens of prompt and answer


class State(NamedTuple):
    """Weights and Adam's moments of an agent, by the names of its Hugging Face model."""

    weights: Weights
    first: Weights
    second: Weights


class Answer(NamedTuple):
    """An answer in the tokens of a learner; its author's mean log-prob of it when it was written."""

    prompt: int
    author: int
    number: int
    tokens: tuple[list[int], list[int]]
    old_mean: torch.Tensor


def read_state(folder: Path) -> State:
    """Reads one agent's part of a checkpoint, in float64."""
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(of.size, dtype=of.properties.dtype)
        for name, of in stored.items()
        if isinstance(of, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    kinds = ("param.", "exp_avg.", "exp_avg_sq.")
    parts = ({k.removeprefix(of): t.double() for k, t in tensors.items() if k.startswith(of)} for of in kinds)
    return State(*parts)


def log_probs(model: torch.nn.Module, texts: Texts) -> list[torch.Tensor]:
    """Log-probs of the answers' tokens, at temperature 1."""
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    ids, mask = torch.zeros(2, len(texts), longest, dtype=torch.long)
    for row, (prompt, answer) in enumerate(texts):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[row, : len(prompt) + len(answer)] = 1
    of_next = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
    return [of_next[n, len(prompt) - 1 :, 0][: len(answer)] for n, (prompt, answer) in enumerate(texts)]


class RecomputedStep:
    """Step `step` of a run: `agents` has the state of each before it."""

    def __init__(self, run: Path, step: int, **changes: Any) -> None:
        """`changes` replace options of the algorithm: a step that the run did not make."""
        self.config = tomllib.loads((run / "config.toml").read_text())
        self.algorithm = self.config["algorithm"] | changes
        self.names = [agent["name"] for agent in self.config["agents"]]
        folders = [agent["model"] for agent in self.config["agents"]]
        self.models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval() for folder in folders]
        self.initial = [{name: w.detach().clone() for name, w in m.named_parameters()} for m in self.models]
        self.tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in folders]
        rows = [self._read_rows(run, n) for n in range(1, step + 1)]
        self.rows, self.step = rows[-1], step
        means = torch.stack([self._rewards(of).mean((0, 2)) for of in rows])
        self.capability = means[-self.algorithm["capability_window"] :].mean(0)
        self.agents = [read_state(run / f"checkpoints/step_{step - 1:06d}" / name) for name in self.names]
        self.old_means = [self._old_means(k) for k in range(len(self.names))]

    @staticmethod
    def _read_rows(run: Path, step: int) -> list[dict[str, Any]]:
        lines = (run / f"rollouts/step_{step:06d}.lane_0000.jsonl").read_text().splitlines()
        return sorted(map(json.loads, lines), key=lambda row: row["prompt_index"])

    def _rewards(self, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Rewards [P, N, G]."""
        num_answers = self.config["rollout"]["rollouts_per_prompt"]
        rewards_PNG = torch.full((len(rows), len(self.names), num_answers), math.nan, dtype=torch.float64)
        for p, row in enumerate(rows):
            for answer in row["answers"]:
                rewards_PNG[p, self.names.index(answer["agent"]), answer["rollout"]] = answer["reward"]
        return rewards_PNG

    def _load(self, k: int, weights: Weights) -> torch.nn.Module:
        self.models[k].load_state_dict(weights, strict=False)  # a tied head has no entry of its own
        return self.models[k]

    def _old_means(self, k: int) -> dict[tuple[int, int], torch.Tensor]:
        model, name = self._load(k, self.agents[k].weights), self.names[k]
        mine = [(p, a) for p, row in enumerate(self.rows) for a in row["answers"] if a["agent"] == name]
        with torch.no_grad():
            found = log_probs(model, [(self.rows[p]["prompt_token_ids"][name], a["token_ids"]) for p, a in mine])
        return {(p, a["rollout"]): of.mean() for (p, a), of in zip(mine, found, strict=True)}

    def _tokens(self, k: int, author: int, answer: Mapping[str, Any]) -> list[int]:
        """An answer in the learner's tokens."""
        own, other = self.tokenizers[k], self.tokenizers[author]
        if own.get_vocab() == other.get_vocab():
            return answer["token_ids"]
        ended = [own.eos_token_id] if answer["stop"] == "eos" else []
        return own(answer["text"], add_special_tokens=False)["input_ids"] + ended

    def advantages(self, k: int) -> torch.Tensor:
        """Advantages of all answers for learner k [P, N, G]: eq. 9 and 10, and omega of eq. 50 for others' answers."""
        rewards_PNG = self._rewards(self.rows)
        num = rewards_PNG[0].numel()
        omega_NN = self.capability[:, None] / self.capability[None, :]
        if not self.algorithm["omega_in_loss"]:
            omega_NN = torch.ones_like(omega_NN)
        mu_PN = torch.stack(
            [(rewards_PNG * (c / self.capability)[None, :, None]).mean((1, 2)) for c in self.capability], 1
        )
        sigma_P = rewards_PNG.flatten(1).std(1)
        advantages_PNG = torch.zeros_like(rewards_PNG)
        for j in range(len(self.names)):
            apart_PNG = rewards_PNG - mu_PN[:, j, None, None]
            exact_P = ((rewards_PNG == 0) | (rewards_PNG == 1)).flatten(1).all(1)
            divisor_P = torch.where(exact_P, sigma_P, apart_PNG.flatten(1).square().sum(1) / (num - 1) / sigma_P)
            omega = omega_NN[j, k] if j != k else 1.0
            advantages_PNG[:, j] = omega * apart_PNG[:, j] / divisor_P[:, None]
        return torch.where((sigma_P == 0)[:, None, None], 0.0, advantages_PNG)

    def _answers(self, k: int, prompts: range) -> list[Answer]:
        found = []
        for p in prompts:
            for answer in self.rows[p]["answers"]:
                j = self.names.index(answer["agent"])
                if answer["not_trained"].get(self.names[k], "outside_band") != "outside_band":
                    continue  # it has no text, or is too long in the learner's tokens
                text = self.rows[p]["prompt_token_ids"][self.names[k]], self._tokens(k, j, answer)
                found.append(Answer(p, j, answer["rollout"], text, self.old_means[j][p, answer["rollout"]]))
        return found

    def _gradient(self, k: int, weights: Weights, m: int) -> Weights:
        """The gradient of update m of the step: own answers by GSPO's clip, others' by eq. 47 to 50."""
        algorithm, num = self.algorithm, self.config["training"]["prompts_per_update"]
        answers, advantages_PNG = self._answers(k, range(m * num, (m + 1) * num)), self.advantages(k)
        texts = [answer.tokens for answer in answers]
        with torch.no_grad():
            references = log_probs(self._load(k, self.initial[k]), texts)
        model = self._load(k, weights)
        model.zero_grad()
        losses = []
        for answer, now, reference in zip(answers, log_probs(model, texts), references, strict=True):
            A = advantages_PNG[answer.prompt, answer.author, answer.number]
            s = (now.mean() - answer.old_mean).exp()
            if answer.author == k:
                clipped = s.clamp(1 - algorithm["eps_low"], 1 + algorithm["eps_high"])
                apart = reference - now
                kl = algorithm["kl_coef"] * (apart.exp() - apart - 1).mean()
                losses.append(-torch.minimum(s * A, clipped * A) + kl)
            else:
                c = s.clamp(1 - algorithm["delta"] + m * algorithm["delta_step"], 1.0)
                losses.append(-c * c.detach() ** algorithm["alpha"] * A)
        (sum(losses) / (num * self.config["rollout"]["rollouts_per_prompt"])).backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    def after(self, k: int) -> State:
        """Agent k after all updates of the step."""
        weights, first, second = ({name: t.clone() for name, t in part.items()} for part in self.agents[k])
        how, per_update = self.config["agents"][k]["optimizer"], self.config["training"]["prompts_per_update"]
        (beta, beta2), lr, num_updates = how["betas"], how["lr"], len(self.rows) // per_update
        for m in range(num_updates):
            gradient, t = self._gradient(k, weights, m), (self.step - 1) * num_updates + m + 1
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
            for name, w in weights.items():
                g = gradient[name] * min(1.0, how["clip_grad"] / norm)
                w *= 1 - lr * how["weight_decay"] * (w.dim() > 1)
                first[name].lerp_(g, 1 - beta)
                second[name].lerp_(g.square(), 1 - beta2)
                w -= lr * first[name] / (1 - beta**t) / ((second[name] / (1 - beta2**t)).sqrt() + how["eps"])
        return State(weights, first, second)
