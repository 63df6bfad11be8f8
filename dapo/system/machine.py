"""Resources of this machine: CPU cores, memory, and free disk space."""

import os
import shutil
from pathlib import Path


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use; in a container it may be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_disk(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def size_text(count: float) -> str:
    """Return bytes in the unit that a person would use."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1000:.0f} kB"


def memory(meminfo: Path = Path("/proc/meminfo")) -> tuple[int | None, int | None]:
    """Return total and available bytes; None for what the system does not report."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        return total, available
    except (OSError, KeyError, ValueError):
        pass  # not Linux
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    except (AttributeError, ValueError, OSError):
        return None, None
