"""Errors a user can act on: each says where, what, and what would be right."""

from __future__ import annotations


class TcclError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(TcclError):
    """Input that cannot be used; the command line turns it into exit code 2.

    Args:
        where: file and place in it, option, or name (`topo.xml:12 <pci>`).
        what: what is wrong there.
        right: what would be right instead.
    """

    def __init__(self, where: str, what: str, right: str) -> None:
        super().__init__(f"{where}: {what}; {right}")
        self.where = where
        self.what = what
        self.right = right


class MeasurementError(TcclError):
    """A transfer set could not be measured."""


class SourceLostError(TcclError):
    """Nothing can be measured any more; unlike MeasurementError, trying other sets is no use."""


class SearchError(TcclError):
    """A search cannot give a ring (no hop into a GPU, unknown strategy, ...)."""
