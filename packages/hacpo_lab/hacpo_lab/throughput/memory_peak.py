"""The most memory that this process has had since it was last asked, without stopping it or its device.

On the CPU that is its resident set: of an allocator that keeps what was given back, an earlier phase's memory is in a
later one's peak, and pages that processes of one server share are in each of theirs.
"""

from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def take_peak() -> int | None:
    """Bytes since the last call; None where this machine does not let a process reset its peak.

    On CUDA of torch's allocator, which counts on the host: what an engine asleep could take back is in it.
    """
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    try:
        RESET.write_text("5")  # proc(5): the peak of the resident set is then what it is now
    except OSError:
        return None
    return 1024 * int(line.split()[1])
