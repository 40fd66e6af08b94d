"""Where things lie: the root of the repository, and the real files beside it (skip a test without them)."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
# Folders whose packages an installation makes importable.
SOURCES = (ROOT, ROOT / "kernels", *(ROOT / "packages").iterdir())
