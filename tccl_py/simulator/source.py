"""The simulator: a BandwidthSource that answers from a machine model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from tccl_py.errors import InputError
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import TransferSet
from tccl_py.simulator.engine import Engine
from tccl_py.simulator.model import MachineModel, Parameters, bundled_parameters

NOISY_REPEATS = 9
"""Default repeats of a noisy measurement; without noise the default is one."""


class Simulator:
    """Answers transfer sets from `model`; every answer says it is simulated.

    Args:
        model: the machine and the capacities of its parts.
        noise: standard deviation of a sample in log terms, 0.05 being about 5 %.
        seed: the same seed gives the n-th measurement of a set the same samples, whatever was
            measured before; measuring a set again gives new samples.
        repeats: samples a flow; 1 without noise, else 9, unless given.
        parameters: values of the shared parameters, the bundled ones unless given.

    Raises:
        InputError: noise, seed or repeats out of range.
    """

    simulated = True

    def __init__(
        self,
        model: MachineModel,
        *,
        noise: float = 0.0,
        seed: int = 0,
        repeats: int | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        # The comparison is written so that NaN fails it.
        if not 0.0 <= noise <= 1.0:
            raise InputError("noise", f"is {noise}", "0 to 1, the standard deviation of a sample")
        self.repeats = repeats if repeats is not None else (NOISY_REPEATS if noise else 1)
        if not 1 <= self.repeats <= 10_000:
            raise InputError("repeats", f"are {self.repeats}", "1 to 10000 samples a flow")
        self.model = model
        self.noise = noise
        self.seed = seed
        self._asked: dict[TransferSet, int] = {}
        self._before: Callable[[TransferSet], int] = lambda _: 0
        self._engine = Engine(model, parameters or bundled_parameters())

    def resume(self, times: Callable[[TransferSet], int]) -> None:
        """Continue an earlier run, in which each set was measured `times(set)` times."""
        self._before = times

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Answer each set, in the order given.

        Raises:
            InputError: a set names a place the machine does not have.
            MeasurementError: a set cannot run: another host, no direct access, no known figure.
        """
        return [self._measure(one) for one in sets]

    def _measure(self, transfers: TransferSet) -> Measurement:
        rates = self._engine.rates(transfers)
        return Measurement(
            transfers=transfers,
            samples_gbps=self._samples(transfers, rates.gbps),
            simulated=True,
            assumed=rates.assumed,
            source=f"simulator:{self.model.name}",
        )

    def _samples(
        self, transfers: TransferSet, gbps: tuple[float, ...]
    ) -> tuple[tuple[float, ...], ...]:
        if not self.noise:
            return tuple((rate,) * self.repeats for rate in gbps)
        if transfers not in self._asked:
            self._asked[transfers] = self._before(transfers)
        self._asked[transfers] += 1
        key = f"{self.seed} {self._asked[transfers]} {transfers}"
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        generator = np.random.default_rng(int.from_bytes(digest, "big"))
        factors = np.exp(generator.normal(0.0, self.noise, (len(gbps), self.repeats)))
        return tuple(
            tuple(float(rate * factor) for factor in row)
            for rate, row in zip(gbps, factors, strict=True)
        )
