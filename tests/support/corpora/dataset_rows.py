"""Rows of data sets, as files of lines and as problems."""

import json
from collections.abc import Sequence
from pathlib import Path

from hacpo_mega.data.datasets import Problem
from hacpo_mega.data.reading.files import DataProblem, content_id, read_prompts


def write_lines(path: Path, *records: object) -> Path:
    """A file of JSON lines; texts and bytes are lines as they are."""
    lines = [record if isinstance(record, str | bytes) else json.dumps(record) for record in records]
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def check_data(files: Sequence[Path], prompt_field: str = "prompt", gold_field: str = "answer") -> list[DataProblem]:
    """Every problem of the files, in file and line order."""
    return read_prompts(files, prompt_field, gold_field)[1]


VERL = {
    "prompt": [{"role": "user", "content": "What is $1+1$?"}],
    "reward_model": {"style": "rule", "ground_truth": {"question": "q", "solution": "s", "target": "2"}},
}


def problem(prompt, answer="1", line=1):
    return Problem(content_id(prompt), prompt, answer, source="f", line=line)
