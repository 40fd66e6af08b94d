"""What jobs/test_doctor.py runs: the doctor on a healthy project, and on one whose publishing forgets a packed copy.

`main` on three ranks writes every rank's findings to OUT/<rank>.json.
"""

import json
from dataclasses import asdict
from pathlib import Path

from job import TIMEOUT_S
from megatron.core import parallel_state

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.commands.doctor import diagnose
from hacpo_mega.commands.doctor_findings import worst_of
from hacpo_mega.config import load_config
from hacpo_mega.rollout.engine import Engine


def publish_names_as_they_come(self, weights, given):
    """Engine._recorded without its care for a tied output layer."""
    for name, tensor in weights:
        given.add(name)
        yield name, tensor


def main(config_file: Path, out: Path) -> None:
    config = load_config(config_file)
    with Place.join(RankMap.of(config), TIMEOUT_S) as place:
        healthy = diagnose(config, place)
        parallel_state.destroy_model_parallel()
        Engine._recorded = publish_names_as_they_come
        forgetful = diagnose(config, place)
        reports = {
            name: [{**asdict(finding), "is_good": finding.is_good} for finding in worst_of(findings)]
            for name, findings in (("healthy", healthy), ("forgetful", forgetful))
        }
        (out / f"{place.coordinate.global_rank}.json").write_text(json.dumps(reports))
