"""The proof of links by the profiler's kernels: its task, and what its ranks' results say."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from importlib.util import find_spec

from tccl_py.files import encode_json
from tccl_py.model.links import PairProof
from tccl_py.model.machine import Machine
from tccl_py.rank_processes.tasks import RankOutput, RanksError, Task, decode_results

_TIMEOUT_S = 60.0


class LinksProof:
    """Proves access of GPUs to each other's memory, in a process for each GPU."""

    def __init__(
        self, machine: Machine, gpus: Sequence[int], pairs: Collection[tuple[int, int]]
    ) -> None:
        from tccl_profiler.links import LinksSpec  # noqa: PLC0415 (the profiler is imported late)

        places = {gpu: rank for rank, gpu in enumerate(gpus)}
        linked = [pair for pair in pairs if machine.has_nvlink(*pair)]
        self._spec = LinksSpec(
            gpus=tuple(gpus),
            bus_ids=tuple(machine.gpu(gpu).bus_id for gpu in gpus),
            pairs=tuple((places[one], places[other]) for one, other in pairs),
            # NCCL's rules allow LL128 over NVLink.
            ll128=tuple((places[one], places[other]) for one, other in linked),
        )

    @property
    def task(self) -> Task:
        """The task of all ranks."""
        from tccl_profiler.links import MEETING, PROGRAM, meeting_bytes  # noqa: PLC0415

        count = len(self._spec.gpus)
        environment = dict(os.environ)
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        return Task(
            program=PROGRAM,
            spec=encode_json(self._spec),
            ranks=tuple(range(count)),
            environment=environment,
            timeout=_TIMEOUT_S,
            files={MEETING: "\0" * meeting_bytes(count)},
        )

    def results(self, output: RankOutput | RanksError) -> tuple[tuple[PairProof, ...], str]:
        """Return what was shown of each pair by each mapping, and what ended the proof early."""
        from tccl_profiler.links import LinksResult, pair_proofs  # noqa: PLC0415

        if isinstance(output, RanksError):
            return pair_proofs(self._spec, []), str(output)
        ranks = decode_results(output, range(len(self._spec.gpus)), LinksResult)
        errors = [
            f"GPU {gpu}, at {rank.at}: {rank.error}"
            for gpu, rank in zip(self._spec.gpus, ranks, strict=True)
            if rank.error
        ]
        # A rank that waits for another one tells less than the other.
        errors.sort(key=lambda text: text.endswith("did not come"))
        return pair_proofs(self._spec, ranks), errors[0] if errors else ""


def why_no_kernels() -> str:
    """Return why no kernel can run here; "" if cupy is installed."""
    return "" if find_spec("cupy") else "cupy is not installed"
