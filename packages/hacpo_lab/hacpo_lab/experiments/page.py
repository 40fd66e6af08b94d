"""The files of an experiment's work folder: evidence.json, its tables in Markdown, report.html, PNG curves."""

import json
from collections.abc import Mapping
from pathlib import Path

from hacpo_lab.experiments.curves import draw_curves
from hacpo_lab.experiments.evidence import RegimeEvidence, as_table, evidence_of
from hacpo_lab.experiments.grid import Cell, Grid
from hacpo_lab.experiments.order import num_cells, num_done
from hacpo_lab.experiments.result import Result
from hacpo_lab.experiments.table import Table, facts_of, summary_line, tables_of, to_markdown
from hacpo_mega.models.files.replacing import replace_file
from hacpo_mega.report.html import Html, join, table, tag
from hacpo_mega.report.page import facts_grid, render_picture, whole_page
from hacpo_mega.report.plots import Picture


def write_evidence(grid: Grid, results: Mapping[Cell, Result]) -> list[Path]:
    """Writes all files, each whole or not at all, and returns them."""
    evidence = evidence_of(grid, results)
    ablation_of = {name: method.learning_rate_of for name, method in grid.methods.items() if method.learning_rate_of}
    pictures = {name: draw_curves(name, regime, ablation_of) for name, regime in evidence.items()}
    scores = {cell: result.score for cell, result in results.items()}
    used = num_done(grid, scores)
    missing = num_cells(grid, scores) - used
    files = {
        "evidence.json": json.dumps(as_table(grid, results), indent=1).encode() + b"\n",
        "evidence.md": to_markdown(grid, evidence, used, missing).encode(),
        "report.html": render_page(grid, evidence, pictures, summary_line(used, missing)).encode(),
    }
    files |= {f"curves/{picture.stem}.png": picture.png for found in pictures.values() for picture in found}
    for name, content in files.items():
        path = grid.work_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return [grid.work_dir / name for name in files]


def render_page(
    grid: Grid, evidence: Mapping[str, RegimeEvidence], pictures: Mapping[str, list[Picture]], state: str
) -> str:
    """The whole page as text: it opens from disk and refers to nothing outside."""
    title = ", ".join(evidence) or "no finished regime yet"
    parts = [tag("h1", "Experiment"), tag("div", state, class_="sub")]
    for name, regime in evidence.items():
        parts += [tag("h2", name), facts_grid(facts_of(regime))]
        parts += [_section(content) for content in tables_of(regime, grid)]
        parts += [render_picture(picture, "h3") for picture in pictures[name]]
    return whole_page(title, parts)


def _section(content: Table) -> Html:
    rows = [[_cell(text) for text in row] for row in content.rows]
    note = tag("p", " ".join(content.notes), class_="note")
    return join(tag("h3", content.title), note, table(list(content.head), rows, class_="numbers"))


def _cell(text: str) -> str:
    return tag("b", text.strip("*")) if text.startswith("**") else text
