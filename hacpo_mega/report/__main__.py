"""`python -m hacpo_mega.report RUN`: writes the report of a run that goes on, beside its ranks."""

import sys
from pathlib import Path

from hacpo_mega.report import write_report

write_report(Path(sys.argv[1]))
