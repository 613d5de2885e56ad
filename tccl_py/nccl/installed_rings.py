"""NCCL's own rings on this machine: asked of the installed NCCL, or computed by its rules."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.nccl.asked import NcclAnswer, ask_nccl, minor_version
from tccl_py.nccl.default_rings import StockChoice, stock_choice
from tccl_py.nccl.log import same_rings
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.transport import TRANSPORTS, pair_mechanism, view

_SHOWN = 3


class InstalledRings:
    """NCCL's own rings under settings: the installed NCCL's answer where it can be asked.

    An instance is called with settings, and gives the emulation's choice with what NCCL does
    otherwise. Each choice of settings is asked for once. `notices` say where the two differ, or why
    NCCL was not asked; `able` says whether it can be.

    Args:
        machine: this machine, which the emulation takes.
        knowledge: what is known of it.
        gpus: NVML indices of the communicator's GPUs.
        library: file of NCCL's library; None is the installed one.
    """

    def __init__(
        self,
        machine: Machine,
        knowledge: Knowledge,
        gpus: Sequence[int],
        *,
        library: str | None = None,
    ) -> None:
        self.notices: list[str] = []
        self._machine, self._knowledge, self._gpus = machine, knowledge, tuple(gpus)
        self.library = library
        self.able = True
        self._known: dict[Settings, StockChoice] = {}

    def __call__(self, settings: Settings) -> StockChoice:
        """Return NCCL's own choice under settings of transports.

        Raises:
            InputError: from the emulation.
        """
        if settings not in self._known:
            emulated = stock_choice(self._machine, self._knowledge, settings, gpus=self._gpus)
            found = self._answer(settings) if self.able else None
            self._known[settings] = (
                emulated if found is None else self._corrected(emulated, found, settings)
            )
        return self._known[settings]

    def unable(self, why: str) -> None:
        """Ask no more, and say why."""
        self.able = False
        self.notices.append(
            "the NCCL here was asked neither for its own rings, which are computed by its rules, "
            f"nor to load a graph file: {why}"
        )

    def _answer(self, settings: Settings) -> NcclAnswer | None:
        try:
            found = ask_nccl(environment(settings), self._gpus, library=self.library)
        except MeasurementError as error:
            self.unable(str(error))
            return None
        if minor_version(found.version) != minor_version(settings.version):
            self.unable(f"it is {found.version}, and the plan is for {settings.version}")
            return None
        return found

    def _corrected(
        self, emulated: StockChoice, found: NcclAnswer, settings: Settings
    ) -> StockChoice:
        named = " ".join(f"{name}={value}" for name, value in environment(settings).items())
        under = f"NCCL {found.version} with {named or 'its defaults'}"
        self._compare_ways(found, settings, under)
        # Final channels are the searched ones twice, and no more of them than the tree has.
        rings = found.rings[: max(1, len(found.rings) // 2)]
        expected = emulated.rings[: max(1, emulated.channels // 2)]
        if (
            len(rings) == len(expected)
            and all(map(same_rings, rings, expected))
            and (len(found.rings), found.fallback) == (emulated.channels, emulated.fallback)
        ):
            return emulated
        self.notices.append(
            f"{under} runs {ring_words(found)}, and its rules as tccl has them give "
            f"{_ring_words(expected, emulated.channels, fallback=emulated.fallback)}: the plan "
            "takes what it runs"
        )
        return msgspec.structs.replace(
            emulated,
            rings=rings,
            nchannels=found.graph.nchannels,
            bw_intra=found.graph.speedintra,
            type_intra=found.graph.typeintra,
            channels=len(found.rings),
            hops=(),
            fallback=found.fallback,
        )

    def _compare_ways(self, found: NcclAnswer, settings: Settings, under: str) -> None:
        """Note hops that go by another transport than their rates are of."""
        seen = view(self._machine, self._knowledge, settings, gpus=self._gpus)
        other = [
            f"GPU {way.source} -> {way.target} by {way.via}, not {expected}"
            for way in found.ways
            if way.transport
            != (expected := TRANSPORTS[pair_mechanism(seen, way.source, way.target).kind])
        ]
        if other:
            more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
            self.notices.append(
                f"{under} connects {', '.join(other[:_SHOWN])}{more}: their rates are of the latter"
            )


def ring_words(found: NcclAnswer) -> str:
    """Return the channels and rings of an answer as part of a sentence."""
    return _ring_words(found.rings, len(found.rings), fallback=found.fallback)


def _ring_words(rings: Sequence[tuple[int, ...]], channels: int, *, fallback: bool) -> str:
    distinct: list[tuple[int, ...]] = []
    for ring in rings:
        if not any(same_rings(ring, other) for other in distinct):
            distinct.append(ring)
    shown = ", ".join(" ".join(map(str, ring)) for ring in distinct[:_SHOWN])
    more = ", ..." if len(distinct) > _SHOWN else ""
    order = " in its simple order" if fallback else ""
    return f"{channels} channels over {shown}{more}{order}"
