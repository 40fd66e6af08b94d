"""An agent alone, trained by TRL's GRPOTrainer with sequence-level ratios (GSPO): work in, its cost out.

    build/peers-env/bin/python launch/peers/trl_gspo.py WORK.json MEASURED.json

Runs in an environment of its own (launch/lock/peers.txt) and imports nothing of hacpo_mega; bench.py starts it.
Before every measured step it says `ready` and waits for a line: others are measured beside it, or in turns.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from table import MEASURED, resident
from transformers import LogitsProcessor, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class MeasuredTrainer(GRPOTrainer):
    """GRPOTrainer that counts the tokens it has generated and those it has trained."""

    generated = trained = 0

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self.trained += int(inputs["completion_mask"].sum())
        return super()._compute_loss(model, inputs)


class EndsAt(LogitsProcessor):
    """Ends every answer of a generation after its own number of tokens, and none before."""

    def __init__(self, lengths: Sequence[int], num_prompt_tokens: int, eos_id: int) -> None:
        self._length_B, self._start, self._eos_id = torch.tensor(lengths), num_prompt_tokens, eos_id

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Before the next token of all answers is drawn."""
        is_last_B = self._length_B == input_ids.shape[1] - self._start + 1
        end_B = scores[:, self._eos_id].clone()
        scores = scores.masked_fill(is_last_B[:, None], -torch.inf)
        scores[:, self._eos_id] = torch.where(is_last_B, end_B, -torch.inf)
        return scores


def end_at(model: Any, steps: Sequence[Sequence[int]], eos_id: int) -> None:
    """Has every generation of the model, one per step, end its answers after these tokens."""
    generate, lengths = model.generate, iter(steps)

    def generate_so_long(*, input_ids: torch.Tensor, **given: Any) -> Any:
        ends = EndsAt(next(lengths), input_ids.shape[1], eos_id)
        return generate(input_ids=input_ids, logits_processor=[ends], **given)

    model.generate = generate_so_long


class Clock(TrainerCallback):
    """Notes of every measured step, a generation and all its updates, what MEASURED names; before it, it waits."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._updates, self._warm_up, self._last = work["updates_per_step"], work["warm_up"], work["steps"]
        self.trainer: MeasuredTrainer
        self.steps: list[dict[str, float]] = []
        self._began: tuple[float, float, int, int] | None = None

    def on_step_end(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer after every update."""
        if state.global_step < self._updates * self._warm_up or state.global_step % self._updates:
            return
        if self._began is not None:
            took = (now - then for now, then in zip(self._now(), self._began, strict=True))
            self.steps.append(dict(zip(MEASURED, took, strict=True)))
        print("ready", flush=True)
        if len(self.steps) < self._last and not sys.stdin.readline():
            sys.exit("nobody waits for this any more")
        self._began = self._now()

    def _now(self) -> tuple[float, float, int, int]:
        return time.perf_counter(), time.process_time(), self.trainer.generated, self.trainer.trained


def settings(work: dict[str, Any], folder: Path) -> GRPOConfig:
    """TRL's settings: the work fixes what is computed, the CPU how (docs/measurements/peers.md)."""
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=work["updates_per_step"] * (work["warm_up"] + work["steps"]),
        per_device_train_batch_size=work["answers_per_update"],
        gradient_accumulation_steps=1,
        steps_per_generation=work["updates_per_step"],
        num_generations=work["answers_per_prompt"],
        max_completion_length=work["answer_tokens"],
        temperature=work["temperature"],
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=work["eps_low"],
        epsilon_high=work["eps_high"],
        beta=0.0,
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        adam_beta1=work["betas"][0],
        adam_beta2=work["betas"][1],
        weight_decay=work["weight_decay"],
        max_grad_norm=work["clip_grad"],
        seed=work["seed"],
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(work: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Does the work; what it took, as table.py reads it."""
    imported_bytes, clock = resident("VmRSS"), Clock(work)
    # As its folder says; AutoTokenizer would take the model family's own.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work["model"])

    def every_second_is_right(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        clock.trainer.generated += sum(map(len, completion_ids))
        return [float(place % work["answers_per_prompt"] % 2) for place in range(len(completion_ids))]

    clock.trainer = MeasuredTrainer(
        model=work["model"],
        reward_funcs=every_second_is_right,
        args=settings(work, folder),
        train_dataset=Dataset.from_dict({"prompt": work["prompts"]}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    end_at(clock.trainer.model, work["lengths"], tokenizer.eos_token_id)
    clock.trainer.train()
    return {
        "steps": clock.steps,
        "imported_bytes": imported_bytes,
        "peak_bytes": resident("VmHWM"),
        "prompt_tokens": sum(map(len, tokenizer(work["prompts"]).input_ids)),
        "threads": torch.get_num_threads(),
        "dtype": str(clock.trainer.model.dtype).removeprefix("torch."),
    }


if __name__ == "__main__":
    asked, answered = map(Path, sys.argv[1:])
    found = train(json.loads(asked.read_text(encoding="utf-8")), answered.parent / "trl")
    answered.write_text(json.dumps(found), encoding="utf-8")
