"""What NCCL would choose by a description of a machine, and what that is worth on the machine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import ring_from_order, ring_set
from tccl_py.model.symmetry import Symmetry, canonical
from tccl_py.model.transfer import TransferSet
from tccl_py.nccl.default_rings import StockChoice, stock_choice
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import hop_space
from tccl_py.plan.tasks import condensed

Order = tuple[int, ...]


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's own choice for some GPUs, and its rate on the machine, GB/s.

    `believed_gbps` is what NCCL expects of it; `fallback` whether its search had found nothing.
    """

    rate_gbps: float
    believed_gbps: float
    fallback: bool


class OutOfSetsError(Exception):
    """More sets would have to be measured than were allowed."""


class StockJudge:
    """Judges descriptions by one source; equal ring sets are asked for once.

    Args:
        knowledge: of the machine.
        settings: those that every communicator will have.
        source: of the true machine's rates.
        symmetry: ring sets that it exchanges have one rate; None to ask for each.
        sets: how many the source may be asked for; None is any number.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        settings: Settings,
        source: BandwidthSource,
        *,
        symmetry: Symmetry | None = None,
        sets: int | None = None,
    ) -> None:
        self._knowledge, self._settings, self._source = knowledge, settings, source
        self._symmetry, self._left = symmetry, sets
        self._rates: dict[str, float] = {}
        self._canonical: dict[str, TransferSet] = {}

    def worth(self, machine: Machine, gpus: Sequence[int]) -> Worth | None:
        """What NCCL's own choice over these GPUs is worth if it sees `machine`.

        None where it would use its network, or where the set cannot be measured.

        Raises:
            OutOfSetsError: nothing more may be measured.
        """
        choice = stock_choice(machine, self._knowledge, self._settings, gpus=gpus)
        rate = self._rate(machine, choice, gpus)
        if rate is None:
            return None
        return Worth(
            rate_gbps=rate,
            believed_gbps=choice.nchannels * choice.bw_intra,
            fallback=choice.fallback,
        )

    def _rate(self, machine: Machine, choice: StockChoice, gpus: Sequence[int]) -> float | None:
        orders = condensed(choice.rings)
        # A file's channels are doubled by `hop_space`; those of the search are so already.
        settings = msgspec.structs.replace(self._settings, channels=max(1, choice.channels // 2))
        try:
            space = hop_space(
                machine, self._knowledge, settings, gpus=gpus, rings_in_set=len(orders)
            )
            rings = ring_set([ring_from_order(space, order) for order in orders])
            return len(orders) * self.slowest(rings.flows)
        except (SearchError, MeasurementError):
            return None

    def slowest(self, flows: TransferSet) -> float:
        """The rate of the slowest flow of a set, GB/s.

        Raises:
            MeasurementError: the source cannot measure it.
            OutOfSetsError: nothing more may be measured.
        """
        text = str(flows)
        if self._symmetry is not None:
            if text not in self._canonical:
                self._canonical[text] = canonical(flows, self._symmetry)
            flows = self._canonical[text]
            text = str(flows)
        if text not in self._rates:
            if self._left is not None:
                if self._left <= 0:
                    raise OutOfSetsError
                self._left -= 1
            (measurement,) = self._source.measure([flows])
            self._rates[text] = measurement.rate_gbps
        return self._rates[text]
