"""How much memory of the machine this process may still take: the kernel's estimate, or less under a cgroup limit."""

from __future__ import annotations

from pathlib import Path

from branchline.engine.errors import LoadError


def free_memory() -> int:
    """Bytes that this process may still take."""
    return min([_meminfo("MemAvailable"), *_cgroup_room()])


def total_memory() -> int:
    """Bytes of the machine."""
    return _meminfo("MemTotal")


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise LoadError(f"/proc/meminfo has no {key}: give max-total-tokens")


def _cgroup_room() -> list[int]:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return []
    return [max(0, int(limit) - used)] if limit.isdigit() else []
