"""The XML file that the TCCL fork's runtime loads (TCCL_XML_FILE)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

from tccl_py.tccl_fork.checks import check_database
from tccl_py.tccl_fork.database import Database, GpuRing, NodeChain, NodeChains, TypedTransfer


def tccl_xml(database: Database, *, notes: Sequence[str] = ()) -> str:
    """The text of a database; `notes` stand in a comment on top.

    `tccl_py.tccl_fork.reader.parse_tccl_xml` gives an equal database back.

    Raises:
        InputError: a ring or chain that the fork could not load or use.
    """
    return "".join(_lines(check_database(database), notes))


def _lines(database: Database, notes: Sequence[str]) -> Iterator[str]:
    yield "<root>\n"
    yield from (f"  <!-- {_comment(note)} -->\n" for note in notes)
    yield (
        f'  <metadata num_gpus="{database.num_gpus}" num_numa="{database.num_numa}" '
        f'num_bits_idx="{database.num_bits}"/>\n'
    )
    yield "  <intra>\n"
    for ring in database.intra:
        yield from _subset(ring.mask, _ring(ring))
    yield "  </intra>\n  <inter>\n"
    for part in database.inter:
        yield from _subset(part.mask, _chains(part))
    yield "  </inter>\n</root>\n"


def _subset(mask: int, inside: Iterable[str]) -> Iterator[str]:
    yield f'    <subset gpus="{mask}">\n'
    yield from inside
    yield "    </subset>\n"


def _ring(ring: GpuRing) -> Iterator[str]:
    # repr gives the shortest text that is read as the same number.
    yield f'      <transfers gbps="{ring.gbps!r}">\n'
    yield from _transfers(ring.transfers)


def _chains(part: NodeChains) -> Iterator[str]:
    for chain in part.chains:
        yield f'      <transfers gbps="{chain.gbps!r}" {_ends(chain)}>\n'
        yield from _transfers(chain.transfers)


def _ends(chain: NodeChain) -> str:
    return " ".join(
        f'{name}_type="{one.type}" {name}_src_idx="{one.source}" {name}_dst_idx="{one.destination}"'
        for name, one in (("head", chain.head), ("tail", chain.tail))
    )


def _transfers(transfers: Sequence[TypedTransfer]) -> Iterator[str]:
    for one in transfers:
        yield (
            f'        <transfer type="{one.type}" src_idx="{one.source}" '
            f'dst_idx="{one.destination}"/>\n'
        )
    yield "      </transfers>\n"


def _comment(note: str) -> str:
    """A note as one line of a comment: two hyphens would end it for the fork's parser."""
    text = " ".join(escape(note).split())
    while "--" in text:
        text = text.replace("--", "- -")
    return "".join(one if one.isprintable() else "?" for one in text).rstrip("-")
