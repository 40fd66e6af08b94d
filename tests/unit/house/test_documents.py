"""Documents are short: the README two screens and a half, and the documents do not grow."""

import re

from repository import ROOT

from hacpo_grading.graders.registry import GRADERS
from hacpo_mega.config import RewardConfig

GENERATED = {
    ROOT / "docs" / name
    for name in (
        "evidence/README.md",
        "evidence_equals/README.md",
        "evidence_gap/README.md",
        "evidence_unequals/README.md",
        "evidence_ways/README.md",
        "evidence_conversations/README.md",
    )
}
# A document that needs more words takes them from another one.
MOST_WORDS, MOST_README_LINES = 31_400, 120


def test_the_readme_is_short_and_the_documents_do_not_grow():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_README_LINES
    pages = [page for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if page not in GENERATED]
    grows = ROOT / "CHANGELOG.md"  # with every version
    written = [page.read_text(encoding="utf-8") for page in pages if page.parent.name != "reference" and page != grows]
    assert len(written) > 30 and sum(len(text.split()) for text in written) <= MOST_WORDS


def test_page_and_key_name_the_kinds_that_workers_judge():
    """The other built-in kinds are judged in the process that asks, so workers and while_sampling change nothing."""
    page = (ROOT / "docs" / "guide" / "data-and-rewards.md").read_text(encoding="utf-8")
    key = RewardConfig.model_fields["while_sampling"].description
    (named,), (also,) = re.findall(r"each\) judge ([^.]*) and functions\.", page), re.findall(r"do \((.*), and", key)
    kinds = {name for name, grader in GRADERS.items() if not grader.is_linear}
    assert set(re.findall(r"`(\w+)`", named)) == set(also.split(", ")) == kinds
