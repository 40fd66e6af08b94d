"""Documents are short: the README two screens and a half, and the documents do not grow."""

from repository import ROOT

GENERATED = {
    ROOT / "docs" / name
    for name in (
        "evidence/README.md",
        "evidence_equals/README.md",
        "evidence_gap/README.md",
        "evidence_unequals/README.md",
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
