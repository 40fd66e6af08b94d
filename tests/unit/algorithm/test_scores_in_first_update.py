"""Where a step's first update gives its answers their scores by itself: wherever nobody waits for them."""

import pytest
from repository import ROOT

from hacpo_mega.config import load_config

QUICKSTART = ROOT / "configs" / "quickstart.toml"  # two agents that share answers
ALONE = "algorithm.method=gspo"


@pytest.mark.parametrize(
    "overrides, chosen",
    [
        ((), False),
        ((ALONE,), True),
        ((ALONE, "rollout.engine_correction=token"), False),
        ((ALONE, "rollout.engine_correction=ratio"), False),
        ((ALONE, "rollout.one_step_off=true"), False),
        ((ALONE, "training.score_in_first_update=false"), False),
        ((ALONE, "training.score_in_first_update=true"), True),
    ],
)
def test_auto_is_on_where_nobody_waits_for_the_scores(overrides, chosen):
    assert load_config(QUICKSTART, overrides).scores_in_first_update is chosen


@pytest.mark.parametrize("value", ["'yes'", "1", "'true'"])
def test_another_word_is_refused(value):
    with pytest.raises(ValueError, match=r"training\.score_in_first_update: needs true, false or 'auto', found "):
        load_config(QUICKSTART, [f"training.score_in_first_update={value}"])
