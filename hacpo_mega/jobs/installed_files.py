"""Folders that belong to the package and hold no code of it: launch/ and configs/. A checkout has them beside the
package, an installation inside it."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def installed_files(name: str) -> Path:
    """The folder `launch` or `configs`."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name
