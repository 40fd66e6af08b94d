"""Updates that were skipped because a number was not finite: too many in a row end the run, with their samples on disk.

A skipped update changes no weight, so from a broken weight or a broken objective every later one is skipped as well: a
run that went on would sample and train nothing. Elsewhere: the skip itself (megatron/train/optimizer.py).

`logs/<agent>.cell_<c>.skipped_updates.json` is written once, when the run stops:
    {"agent", "cell", "updates": [{"step", "update", "loss", "grad_norm", "num_samples", "samples": [
        {"prompt_index", "source", "rollout", "advantage", "source_logprob", "ratio", "num_trained",
         "prompt_ids", "answer_ids", "text"}]}]}
`updates` are those since the run was last started; `samples` are those of this cell with a ratio, an advantage or a
log-prob that is not finite; all of the cell where none of these shows it. A number that is not finite is written as
"nan", "inf" or "-inf", the `source_logprob` of an answer that its own update scores as null.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.logbook.files.metrics import json_number
from hacpo_mega.models.files.visible import say
from hacpo_mega.records import Sample, UpdateStats


class SkippedUpdates:
    """Watches the updates of this process's agent.

    most      skipped updates in a row that end the run
    folder    where the samples are written then
    cell      whose samples this process writes, as the leader of that cell; None on the other ranks
    decode    the text of an answer's ids
    gather    a collective over the agent's ranks, after which all cells have written
    """

    def __init__(
        self,
        most: int,
        folder: Path,
        agent: str,
        cell: int | None,
        decode: Callable[[Sequence[int]], str],
        gather: Callable[[bytes], object],
    ) -> None:
        self._most, self._folder, self._agent, self._cell = most, folder, agent, cell
        self._decode, self._gather = decode, gather
        self._skipped: list[dict[str, Any]] = []
        self._num_before = 0

    @property
    def num_in_row(self) -> int:
        """Number of the agent's latest updates that were skipped in a row."""
        return self._num_before + len(self._skipped)

    def go_on(self, num_in_row: int) -> None:
        """Continues from the `num_in_row` of a checkpoint, which has no samples of these updates."""
        self._num_before = num_in_row

    def see(self, step: int, update: int, samples: Sequence[Sample], stats: UpdateStats) -> None:
        """Counts update number `update` of a step, given this cell's samples of it.

        RunStopped, on all ranks of the agent, when it is the last one of `most` skipped updates in a row.
        """
        if not stats.skipped:
            self._skipped.clear()
            self._num_before = 0
            return
        self._skipped.append(self._record(step, update, samples, stats))
        if self.num_in_row < self._most:
            return
        if self._cell is not None:
            self._write()
        self._gather(b"written")  # a rank that raises ends the others soon
        raise RunStopped(
            f"{self._agent}: the last {self._most} updates in a row were skipped (training.max_skipped_updates), up to "
            f"update {update + 1} of step {step}: loss {stats.loss:g}, gradient norm {stats.grad_norm:g}. Their "
            f"samples are in {self._folder / self._agent}.cell_*.skipped_updates.json"
        )

    def _write(self) -> None:
        """Writes the samples into the run's folder of logs, unless that has gone."""
        record = {"agent": self._agent, "cell": self._cell, "updates": self._skipped}
        file = self._folder / f"{self._agent}.cell_{self._cell}.skipped_updates.json"
        try:
            self._folder.mkdir(exist_ok=True)
            file.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:  # the end of the run and its reason are reported all the same
            say(f"warning: {file} is not written: {error.strerror}", file=sys.stderr)

    def _record(self, step: int, update: int, samples: Sequence[Sample], stats: UpdateStats) -> dict[str, Any]:
        ratios = {
            tuple(key): ratio
            for report in stats.reports
            for key, ratio in zip(report.key_B3.tolist(), report.terms.ratio_B.tolist(), strict=True)
        }
        # An answer without a trained token is in no micro-batch (samples/packing.py), so it has no numbers.
        keys = [(sample.prompt_index, sample.source, sample.rollout_index) for sample in samples]
        with_ratio = [(sample, ratios[key]) for sample, key in zip(samples, keys, strict=True) if key in ratios]
        broken = [
            (s, ratio) for s, ratio in with_ratio if not math.isfinite(ratio + s.advantage + (s.source_logprob or 0.0))
        ]
        return {
            "step": step,
            "update": update + 1,
            "loss": json_number(stats.loss),
            "grad_norm": json_number(stats.grad_norm),
            "num_samples": len(samples),
            "samples": [self._sample(sample, ratio) for sample, ratio in broken or with_ratio],
        }

    def _sample(self, sample: Sample, ratio: float) -> dict[str, Any]:
        return {
            "prompt_index": sample.prompt_index,
            "source": sample.source,
            "rollout": sample.rollout_index,
            "advantage": json_number(sample.advantage),
            "source_logprob": None if sample.source_logprob is None else json_number(sample.source_logprob),
            "ratio": json_number(ratio),
            "num_trained": sample.num_trained,
            "prompt_ids": sample.prompt_ids.tolist(),
            "answer_ids": sample.answer_ids.tolist(),
            "text": self._decode(sample.answer_ids),
        }
