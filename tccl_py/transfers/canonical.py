"""Transfer sets that a symmetry of the machine exchanges are one set: the canonical one."""

from __future__ import annotations

from collections.abc import Mapping

from tccl_py.topology.symmetry import Symmetry
from tccl_py.transfers.hops import Hop
from tccl_py.transfers.transfer import Flow, Place, TransferSet, elsewhere, transfer_set


def relabelled(flow: Flow, names: Mapping[str, str]) -> Flow:
    """The flow that a relabelling of the machine's devices makes of this one.

    A copy engine moves with its GPU.

    >>> from tccl_py.transfers.transfer import direct_write
    >>> str(relabelled(direct_write(0, 1), {"G0": "G3", "G1": "G2"}))
    'G3->G3->G2'
    """

    def moved(place: Place) -> Place:
        name = f"{'G' if place.kind == 'D' else place.kind}{place.index}"
        return Place(place.kind, int(names[name][1:]), place.host)

    return elsewhere(flow, moved)


def relabelled_hop(hop: Hop, names: Mapping[str, str]) -> Hop:
    """The hop that a relabelling of the machine's devices makes of this one.

    An end that it does not name stays: the world outside, of chains.
    """
    source, target = (int(names.get(f"G{gpu}", f"G{gpu}")[1:]) for gpu in (hop.source, hop.target))
    return Hop(source, target, relabelled(hop.flow, names))


def canonical(transfers: TransferSet, symmetry: Symmetry) -> TransferSet:
    """The image of the set under the symmetry's listed elements that comes first as text.

    Two sets have the same canonical set iff a listed element takes one to the other. Costs one
    relabelling of the set for each element; searches number their hops and use
    `tccl_py.search.hop_index` instead.
    """
    images = (_image(transfers, symmetry, row) for row in symmetry.elements.tolist())
    return min(images, key=lambda image: [str(flow) for flow in image.flows])


def _image(transfers: TransferSet, symmetry: Symmetry, row: list[int]) -> TransferSet:
    names = {symmetry.points[i]: symmetry.points[to] for i, to in enumerate(row)}
    return transfer_set(relabelled(flow, names) for flow in transfers.flows)
