"""`python -m hacpo_mega.report RUN`: writes the report of a run, beside its ranks."""

import sys
from pathlib import Path

from hacpo_mega.models.files.visible import one_line
from hacpo_mega.report import write_report

try:
    write_report(Path(sys.argv[1]))
except Exception as error:
    sys.exit(one_line(f"{type(error).__name__}: {error}"))
