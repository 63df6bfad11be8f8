"""The number of CPU cores that this process may use."""

import os


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use; in a container it may be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
