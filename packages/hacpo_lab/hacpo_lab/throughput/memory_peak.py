"""The peak of this process's memory since the last call, read without stopping the process or its device.

On the CPU it is the peak of the resident set. The allocator keeps freed memory, so that of an earlier phase is in a
later one's peak; pages that forks of one server share are in the peak of each.
"""

from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def take_peak() -> int | None:
    """The peak since the last call, in bytes; None where this machine does not let a process reset its peak.

    On CUDA it is that of torch's allocator, which counts on the host: memory that a sleeping engine gave back is in it.
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
