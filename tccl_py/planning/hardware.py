"""What limits a machine before NCCL does: links below their siblings, NVLinks, the chipset."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import median_high

import msgspec

from tccl_py.errors import InputError, MeasurementError, SearchError
from tccl_py.model.machine import Knowledge, Machine, PciLink
from tccl_py.model.rings import ring_like, ring_set
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.plan import Plan
from tccl_py.plan.text import has_stand_ins
from tccl_py.simulator.descriptions import model_for
from tccl_py.simulator.source import Simulator

_FEW_LANES = 4
_MUCH = 1.2
_AMD_CHIPSETS = ("0x43b1", "0x43c6", "0x43e9", "0x43f4", "0x57ad")
"""Upstream ports of chipsets of series 300 to 600 and of X570: pci.ids."""
CHIPSET = "whose few lanes to the CPU are shared with disks and networks"


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A part that limits a machine: a sentence with its effect, and another with the remedy."""

    where: str
    what: str
    fix: str


def hardware_limits(machine: Machine, knowledge: Knowledge) -> Iterator[Limit]:
    """Yield what is slower than like parts beside it; rates are simulated.

    A link counts as slow with half of its siblings' bandwidth or less, or with few lanes.
    """
    slow = list(_slow_links(machine))
    held = {gpu for _, gpus, _ in slow for gpu in gpus}
    rest = [gpu for gpu in machine.gpu_indices if gpu not in held]
    effect, leave_out = "", ""
    if held and len(rest) > 1:
        every, alone = (_ring_gbps(machine, knowledge, g) for g in (machine.gpu_indices, rest))
        if every and alone and alone > _MUCH * every:
            effect = f": every ring over it gets {every:.1f} GB/s; {_name_parts(rest)} alone get "
            effect += f"{alone:.1f} (simulated)"
            leave_out = f", or leave it out: CUDA_VISIBLE_DEVICES={','.join(map(str, rest))}"
    for where, gpus, link in slow:
        held_by = f"{where} has {link.lanes} lane{'s' * (link.lanes != 1)} of {link.speed_gts:g} "
        fix = "move the card to a slot with more lanes"
        if where != _name_parts(gpus):
            fix = "look at the cable or riser, and at how the board shares lanes"
        fix += leave_out
        if link.lanes == 1:
            fix += "; if a virtual machine only pretends this, NCCL believes it all the same"
        yield Limit(where=where, what=f"{held_by}GT/s ({link.gbps:.1f} GB/s){effect}", fix=fix)
    yield from _fewer_nvlinks(machine)
    for bridge in machine.bridges:
        below = _below(machine, bridge.id)
        if below and bridge.vendor == "0x1022" and bridge.device in _AMD_CHIPSETS:
            what = f"{_name_parts(below)}: behind the chipset, {CHIPSET}"
            yield Limit(where=_name_parts(below), what=what, fix="use a slot of the CPU")


def limit_sentences(plan: Plan) -> Iterator[str]:
    """Yield what limits the machines of a plan, and what to do."""
    for part in () if has_stand_ins(plan) else plan.cluster.classes:
        whose = f"{part.name}: " if len(plan.cluster.classes) > 1 else ""
        for limit in hardware_limits(part.machine, part.knowledge):
            yield f"{whose}{limit.what}. Remedy: {limit.fix}."


def _name_parts(gpus: Sequence[int]) -> str:
    return f"GPU{'s' * (len(gpus) > 1)} {', '.join(map(str, gpus))}"


def _slow_links(machine: Machine) -> Iterator[tuple[str, list[int], PciLink]]:
    """Yield the place of each slow link, the GPUs below it, and the link."""
    kinds: dict[object, list[tuple[str, list[int], PciLink]]] = defaultdict(list)
    for gpu in machine.gpus:
        kinds[gpu.sm, gpu.name].append((_name_parts([gpu.index]), [gpu.index], gpu.link))
    for bridge in machine.bridges:
        if gpus := _below(machine, bridge.id):
            where = f"the link above the PCI switch {bridge.id} ({_name_parts(gpus)})"
            kinds[len(machine.ancestors(bridge.id))].append((where, gpus, bridge.link))
    for links in kinds.values():
        known = [one for one in links if one[2].gbps]
        usual = median_high(link.gbps or 0.0 for *_, link in known) if known else 0.0
        for one in known:
            if (one[2].lanes or 0) <= _FEW_LANES or (one[2].gbps or 0.0) <= usual / 2:
                yield one


def _below(machine: Machine, bridge: str) -> list[int]:
    return [gpu.index for gpu in machine.gpus if bridge in machine.ancestors(gpu.id)]


def _ring_gbps(machine: Machine, knowledge: Knowledge, gpus: Sequence[int]) -> float | None:
    """Return the simulated bandwidth of one ring of default NCCL over GPUs in order, or None."""
    with suppress(InputError, MeasurementError, SearchError):
        space = hop_space(view(machine, knowledge, gpus=gpus))
        rings = ring_set([ring_like(space, tuple(gpus))])
        (answer,) = Simulator(model_for(machine, knowledge)).measure([rings.flows])
        return rings.rate(answer)
    return None


def _fewer_nvlinks(machine: Machine) -> Iterator[Limit]:
    """Yield GPUs with fewer NVLinks than others of their kind."""
    counts = Counter[str]()
    for link in machine.nvlinks:
        counts[link.source] += link.count * (link.kind == "nvlink")
    most: dict[object, int] = Counter()
    for gpu in machine.gpus:
        most[gpu.sm, gpu.name] = max(most[gpu.sm, gpu.name], counts[gpu.id])
    fewer: dict[tuple[int, int], list[int]] = defaultdict(list)
    for gpu in machine.gpus:
        count, best = counts[gpu.id], most[gpu.sm, gpu.name]
        # A bridge joins some of a machine's GPUs, a switch all.
        if count < best and (count or machine.nvswitches):
            fewer[count, best].append(gpu.index)
    for (count, best), gpus in fewer.items():
        where = _name_parts(gpus)
        what = f"{where}: {count} active NVLinks each, and others of the kind have {best}"
        fix = "`nvidia-smi nvlink -s` shows inactive ones; look at the bridge or the fabric"
        yield Limit(where=where, what=what, fix=fix)
