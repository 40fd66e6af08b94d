"""The exact numbers of docs/measurements/theory.md: enumerated again in plain Python, and found on the page."""

import itertools
import math
import re
import statistics
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from repository import ROOT

pytestmark = pytest.mark.nightly
PAGE = (ROOT / "docs" / "measurements" / "theory.md").read_text(encoding="utf-8")
G = 8
CHANCES = [[1 / (1 + math.exp(d - a)) for a in (-1.0, 0.7)] for d in (-2.0, 0.0, 2.0)]  # of weak and strong
MEANS = [statistics.fmean(level[n] for level in CHANCES) for n in range(2)]


def script():
    spec = spec_from_file_location("draw_theory", ROOT / "docs" / "images" / "draw_theory.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def binomial(k: int, p: float) -> float:
    return math.comb(G, k) * p**k * (1 - p) ** (G - k)


def outcomes():
    """(level, right answers of weak and strong, probability) of every outcome of a prompt."""
    for level, right in itertools.product(range(3), itertools.product(range(G + 1), repeat=2)):
        yield level, right, math.prod(map(binomial, right, CHANCES[level])) / 3


def by_hand(name: str) -> dict[str, list[float]]:
    omega_1 = name == "omega = 1"
    omega = [[1.0 if omega_1 else MEANS[k] / MEANS[j] for j in range(2)] for k in range(2)]
    found = {"R - mu": [], "advantage": [], "variance": []}
    for learner, source in itertools.product(range(2), repeat=2):
        moments, plain, surplus = [0.0, 0.0], [0.0, 0.0], 0.0
        for _, right, chance in outcomes():
            own = [k / G for k in right]
            mu = [sum(omega[b][j] * own[j] for j in range(2)) / 2 for b in range(2)]
            if name == "oracle, authors":
                mu = [own[b] if mu[b] > 1 else mu[b] for b in range(2)]
            mean, total = sum(own) / 2, sum(right)
            sigma = math.sqrt((total * (1 - mean) ** 2 + (2 * G - total) * mean**2) / (2 * G - 1))
            for reward, share in ((1.0, own[source]), (0.0, 1 - own[source])):
                of = mu[learner if name == "oracle, authors" else source]
                difference = omega[source][learner] * (reward - of)
                surplus += chance * share * difference
                A = 0.0 if sigma == 0 else difference / (sigma + 1e-6)
                joint = 0.0 if sigma == 0 else (reward - mean) / (sigma + 1e-6)
                for sums, value in ((moments, A), (plain, joint)):
                    sums[0] += chance * share * value
                    sums[1] += chance * share * value**2
        found["R - mu"].append(surplus)
        found["advantage"].append(moments[0])
        found["variance"].append((moments[1] - moments[0] ** 2) / (plain[1] - plain[0] ** 2))
    return found


def shown(values: list[float]) -> str:
    """As the page has them: four digits, no zero before the point, no sign of zero."""
    texts = [f"{value + 0.0:.4f}" for value in (round(v, 4) for v in values)]
    return ", ".join(re.sub(r"^(-?)0\.", r"\1.", text) for text in texts)


@pytest.mark.parametrize("name", ["oracle", "omega = 1", "oracle, authors"])
def test_the_table_is_the_enumeration(name):
    draw = script()
    options, knows_omega = draw.EXACT[name]
    found, expected = draw.exact_numbers(options, knows_omega=knows_omega), by_hand(name)
    # 243 outcomes of numbers below 10 over a deviation of at least 1/4
    for what, values in expected.items():
        assert found[what] == pytest.approx(values, abs=243 * 40 * 2.0**-53), what
    row = next(line for line in PAGE.splitlines() if line.replace("`paper`", "").startswith(f"| {ROWS[name]} |"))
    assert [cell.strip() for cell in row.split("|")[2:5]] == [shown(values) for values in found.values()]


ROWS = {"oracle": "oracle, ", "omega = 1": "omega = 1", "oracle, authors": "oracle, `authors`"}


def test_what_is_said_by_difficulty_is_the_enumeration():
    mu = {b: [sum(MEANS[b] / MEANS[j] * k[j] / G for j in range(2)) / 2 for _, k, _ in outcomes()] for b in range(2)}
    found = script().exact_by_difficulty()
    for b, name in enumerate(("weak", "strong")):
        surplus, above = [0.0] * 3, [0.0] * 3
        for m, (level, right, chance) in zip(mu[b], outcomes(), strict=True):
            surplus[level] += 3 * chance * (right[b] / G - m)
            above[level] += 3 * chance * (m > 1.0 + 1e-12)
        assert found[f"{name} R - mu"] == pytest.approx(surplus, abs=1e-13)  # 81 terms of size one
        assert found[f"{name} mu > 1"] == pytest.approx(above, abs=1e-13)
    text = " ".join(PAGE.split())
    assert (
        f"the strong agent is at {shown(found['strong R - mu'])}, the weak one at {shown(found['weak R - mu'])}."
        in text
    )
    easy, medium, _ = found["strong mu > 1"]
    assert f"a chance of {shown([easy])} on an easy prompt ({shown([medium])} on a medium one)" in text
