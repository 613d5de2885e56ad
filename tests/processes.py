"""Processes of this machine, as /proc has them."""

from pathlib import Path


def children(pid):
    """Processes that a process has started and that are still there."""
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text().split()]


def alive(pid):
    """Whether a process runs still."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
