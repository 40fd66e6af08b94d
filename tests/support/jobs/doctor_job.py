"""The doctor for jobs/test_doctor.py: on a healthy project, and on one whose publishing forgets a packed copy.

`main` on three ranks writes every rank's findings to OUT/<rank>.json.
"""

import json
from dataclasses import asdict
from pathlib import Path

from job import TIMEOUT_S
from megatron.core import parallel_state

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.commands.doctor import diagnose, worst_of
from hacpo_mega.config import load_config
from hacpo_mega.rollout.weights import engine_weights
from hacpo_mega.rollout.weights.held_weights import EMBEDDING


def forget_the_tied_copy(packed_by_weight):
    """engine_weights without its care for an output layer that multiplies with a packed copy of the embedding."""
    return lambda model: {
        weight: layers
        for weight, layers in packed_by_weight(model).items()
        if weight != id(model.get_submodule(EMBEDDING).weight)
    }


def main(config_file: Path, out: Path) -> None:
    config = load_config(config_file)
    with Place.join(RankMap.of(config), TIMEOUT_S) as place:
        healthy = diagnose(config, place)
        parallel_state.destroy_model_parallel()
        engine_weights._packed_by_weight = forget_the_tied_copy(engine_weights._packed_by_weight)
        forgetful = diagnose(config, place)
        reports = {
            name: [{**asdict(finding), "is_good": finding.is_good} for finding in worst_of(findings)]
            for name, findings in (("healthy", healthy), ("forgetful", forgetful))
        }
        (out / f"{place.coordinate.global_rank}.json").write_text(json.dumps(reports))
