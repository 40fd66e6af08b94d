"""Prefetched answers in a checkpoint: those to the prompts of a step that has not begun (rollout.one_step_off).

One file per cell that generated them, in the agent's folder, in the byte layout of wire.py. A resumed run collects the
answers to its own prompts from all files of the agent, so it may have other cells and lanes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hacpo_mega.records import Completion, Prompt
from hacpo_mega.rollout import wire

SUFFIX = "_answers"
ROW = np.dtype([("prompt_index", "<i8"), ("rollout_index", "<i4"), ("stop", "u1"), ("prompt", "S16")])


@dataclass(frozen=True)
class ReadyAnswers:
    """A cell's answers to its prompts of a step, by prompt, then by rollout, with log-probs and routing.

    prompt_ids   the tokens of each prompt as the engine read them
    """

    prompts: Sequence[Prompt]
    prompt_ids: Sequence[Sequence[int]]
    completions: Sequence[Completion]

    def write(self, file: Path) -> None:
        """Writes all answers; the caller syncs the file."""
        group = len(self.completions) // len(self.prompts)
        digests = [_digest(ids) for ids in self.prompt_ids]
        rows = np.array(
            [
                (self.prompts[n // group].index, n % group, completion.stop, digests[n // group])
                for n, completion in enumerate(self.completions)
            ],
            ROW,
        )
        file.write_bytes(wire.encode(wire.completion_table(rows, self.completions)))


def read_answers(
    files: Sequence[Path], prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], answers_per_prompt: int
) -> ReadyAnswers | None:
    """Answers to `prompts` from the files of all cells; None unless all are there, for exactly these tokens.

    An older version's file, in another layout or with digests of texts, has none of them.
    """
    wanted = {
        (prompt.index, g, _digest(ids)): n * answers_per_prompt + g
        for n, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True))
        for g in range(answers_per_prompt)
    }
    completions: list[Completion | None] = [None] * len(wanted)
    for file in files:
        try:
            table = wire.decode(file.read_bytes(), ROW, sender=str(file))
        except wire.OtherLayout:
            continue
        for row, completion in zip(table.rows, wire.completions_of(table), strict=True):
            index = wanted.get((int(row["prompt_index"]), int(row["rollout_index"]), row["prompt"]))
            if index is not None:
                completions[index] = completion
    return None if None in completions else ReadyAnswers(prompts, prompt_ids, completions)


def _digest(prompt_ids: Sequence[int]) -> bytes:
    """Digest of a prompt's tokens, in hexadecimal, since NumPy would cut trailing zero bytes.

    Digests of texts would not change with the prompt template or the tokenizer, which change log-probs.
    """
    return hashlib.blake2b(np.asarray(prompt_ids, "<i8").tobytes(), digest_size=8).hexdigest().encode()
