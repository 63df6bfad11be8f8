"""Resources of this machine: CPU cores, memory, and free disk space."""

import os
import shutil
from collections.abc import Iterator
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


def memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int | None]:
    """Return total and available bytes, within the limits of a container; None for what the system does not report."""
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):  # not Linux
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
        except (AttributeError, ValueError, OSError):
            return None, None
    for limit, used in _group_limits(proc, groups):
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def _group_limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group that this process is in, from its own up; file caches do not count."""
    try:
        lines = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers == "":  # version 2
            root, limit_file, used_file, cache = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache = groups / "memory", "total_inactive_file"
            limit_file, used_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        # A container may see its own group as the root, under another path than the host's.
        for each in (folder, *folder.parents) if folder.is_dir() else (root,):
            try:
                stat = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
                limit, used = (int((each / name).read_text()) for name in (limit_file, used_file))
                yield limit, used - int(stat.get(cache, 0))
            except (OSError, ValueError):  # no limit, or not a group
                pass
            if each == root:
                break
