"""Lock of this machine for `make env`: prints cuda, cuda12 or cpu, and on stderr the reason.

    python3 launch/lock/flavour.py

Exits with 1, and prints nothing, for an NVIDIA driver that runs none of the locks.
"""

import importlib
import sys
from pathlib import Path

# the file alone: its package needs an environment
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hacpo_mega" / "cluster" / "machine"))
driver = importlib.import_module("driver")


def main() -> int:
    """0 when a lock was printed."""
    if (found := driver.installed_driver()) is None:
        print("cpu")
        return 0
    try:
        lock = driver.lock_for(found)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{found}: launch/lock/{lock.name}.txt, of CUDA {lock.cuda}", file=sys.stderr)
    print(lock.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
