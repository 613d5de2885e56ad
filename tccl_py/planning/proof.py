"""Evidence on the links of this host: kernels on each pair, and jobs of the installed NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import permutations

import msgspec

from tccl_py.model.links import PairProof
from tccl_py.nccl.asked import MOST_RANKS, AskedJob, JobsProof
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.transport import TRANSPORTS, candidates, pair_mechanism
from tccl_py.nccl.view import view
from tccl_py.nccl_conf import why_no_default
from tccl_py.plan.size_choices import SIZES
from tccl_py.planning.installed_nccl import why_not_asked
from tccl_py.planning.request import of_transports
from tccl_py.rank_processes.tasks import run_each
from tccl_py.readers.live import check_cupy
from tccl_py.sources.links import LinksProof, why_no_kernels
from tccl_py.sources.profiled import MeasuredMachine, several_processes_may_use

CONTROL: dict[str, str] = {"NCCL_P2P_DISABLE": "1"}


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of links, before it is judged."""

    pairs: tuple[PairProof, ...] = ()
    jobs: tuple[AskedJob, ...] = ()
    unable: str = ""
    """Why nothing can be proven, as who uses the GPUs; "" if something was."""
    notices: tuple[str, ...] = ()
    """What else failed, a sentence each."""


def gather_evidence(
    place: MeasuredMachine,
    gpus: Sequence[int],
    version: str | None,
    withheld: Collection[tuple[int, int]] = (),
    *,
    measures: bool = False,
    alone: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> Evidence:
    """Prove the links between GPUs of this host, each part in processes that are ended.

    Args:
        place: this host's machine.
        gpus: those whose links are proven, two or more.
        version: of the NCCL here as rules have it; None: there is none.
        withheld: ordered pairs that are not tried, nor any job of NCCL that would use them.
        measures: whether kernels are needed afterwards, too (InputError: cupy is missing).
        alone: once more, and no job of NCCL runs beside the kernels, which may slow it.
        ready: is called when other processes on the GPUs may start, unless it was before.

    Kernels prove each granted pair by itself. Jobs of NCCL compare values: the control without P2P
    first, then what the farthest level adds, then default NCCL. The same jobs, and one for each
    further way in which settings join the GPUs, tell what NCCL does there.
    """
    if measures:
        check_cupy()
    if not alone and (why := why_not_asked(gpus)):
        return Evidence(unable=why)
    machine, knowledge = place.machine, place.knowledge
    granted = [
        pair
        for pair in permutations(gpus, 2)
        if knowledge.can_access(machine, *pair) and pair not in withheld
    ]
    notices = []
    kernels: LinksProof | None = None
    if granted and (why := why_no_kernels()):
        notices.append(f"pairs of GPUs were not proven by kernels: {why}")
    elif granted:
        kernels = LinksProof(machine, gpus, granted)
    jobs: list[JobsProof] = []
    shared = several_processes_may_use(gpus)
    if why := "none was found here" if version is None else why_no_default():
        notices.append(f"NCCL was not run: {why}")
    else:
        wanted = _environments(place, gpus, version or "", withheld)
        # Beside the kernels' ranks.
        most = max(1, MOST_RANKS // len(gpus) - 1) if shared else 1
        parts = [wanted[at : at + most] for at in range(0, len(wanted), most)]
        jobs = [JobsProof(gpus, part, sizes=SIZES) for part in parts]
    if jobs and shared and not alone:
        ready()
    # 1. Kernels prove pairs while NCCL starts, where several processes may use a GPU.
    pairs: tuple[PairProof, ...] = ()
    answers: list[AskedJob] = []
    begun = time.time()
    if kernels is not None:
        beside = jobs[:1] if shared and not alone else []
        tasks = [task for part in beside for task in part.tasks]
        *outputs, output = run_each([*tasks, kernels.task])
        pairs, error = kernels.results(output)
        if error:
            notices.append(f"the proof by kernels ended early: {error}")
        answers += [job for part in beside for job in part.results(outputs, begun)]
        jobs = jobs[len(beside) :]
    # 2. The other jobs of NCCL.
    for part in jobs:
        answers += part.results(run_each(part.tasks), begun)
    return Evidence(pairs=pairs, jobs=tuple(answers), notices=tuple(notices))


def _environments(
    place: MeasuredMachine,
    gpus: Sequence[int],
    version: str,
    withheld: Collection[tuple[int, int]],
) -> list[tuple[Mapping[str, str], bool]]:
    """Return the variables of the jobs, and whether each compares values."""
    kinds = candidates(place.machine, place.knowledge, version, gpus=gpus)
    plain = Settings(version=version)
    wanted: dict[tuple[tuple[str, str], ...], frozenset[tuple[int, int]]] = {}
    for settings in (plain, *map(of_transports, kinds)):
        topo = view(place.machine, place.knowledge, settings, gpus=gpus)
        uses = frozenset(
            pair
            for pair in permutations(gpus, 2)
            if TRANSPORTS[pair_mechanism(topo, *pair)] == "P2P"
        )
        if not uses & set(withheld):
            wanted[tuple(environment(settings).items())] = uses
    default = wanted.get((), frozenset())
    compared = [CONTROL]
    # What plans recommend where default NCCL takes P2P for nearer pairs alone.
    farthest = max(wanted, key=lambda items: len(wanted[items]), default=())
    if len(wanted.get(farthest, ())) > len(default):
        compared.append(dict(farthest))
    if () in wanted:
        compared.append({})
    others = [dict(items) for items in wanted if dict(items) not in compared]
    return [*((of, True) for of in compared), *((of, False) for of in others)]
