"""Files that belong to the package and are no code: launch/ and configs/, in a checkout beside the package, in an
installation inside it."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def installed_files(name: str) -> Path:
    """The folder `launch` or `configs`."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name
