"""Random faults of links between GPUs, and sources that meet them."""

from itertools import combinations

from tccl_py.errors import BrokenLinkError, MeasurementError
from tccl_py.model.links import LinkFact
from tccl_py.model.machine import Knowledge
from tccl_py.nccl.transport import pair_mechanism
from tccl_py.nccl.view import view
from tests.networked import MadeUp

WHAT = "nothing arrives"


def facts_on(pairs, *, state="broken", what=WHAT, verdict="hangs"):
    """Knowledge with facts on these pairs of GPUs."""
    more = {"state": state, "what": what, "verdict": verdict}
    return Knowledge(links=tuple(LinkFact(one=a, other=b, **more) for a, b in sorted(pairs)))


def random_faults(rng, machine):
    """Return pairs of GPUs without working P2P: some, all of a GPU or below a port, or all."""
    gpus = machine.gpu_indices
    pairs = list(combinations(sorted(gpus), 2))
    kind = rng.choice(("pairs", "gpus", "port", "all"))
    bad = set(rng.sample(gpus, rng.randint(1, max(1, len(gpus) // 3))))
    if kind == "pairs":
        return set(rng.sample(pairs, rng.randint(1, min(4, len(pairs)))))
    if kind == "port":
        port = rng.choice([port for gpu in machine.gpus for port in machine.ancestors(gpu.id)])
        bad = {gpu.index for gpu in machine.gpus if port in machine.ancestors(gpu.id)}
        outside = {pair for pair in pairs if len(bad & {*pair}) == 1}
        return outside or set(pairs)
    return {pair for pair in pairs if kind == "all" or bad & {*pair}}


def links_of(flow):
    """The pairs of GPUs in a flow of which one uses the other's memory, lower index first."""
    ends = [(part.source, part.destination) for part in flow.transfers]
    pairs = [sorted(end.index for end in pair) for pair in ends if {e.kind for e in pair} == {"G"}]
    return {tuple(pair) for pair in pairs}


def used_links(machine, knowledge, settings, gpus):
    """The pairs that a communicator of these GPUs, or of two of them, joins by P2P."""
    used = set()
    for some in (gpus, *combinations(gpus, 2)):
        topo = view(machine, knowledge, settings, gpus=some)
        for pair in combinations(some, 2):
            ways = {pair_mechanism(topo, *ends) for ends in (pair, pair[::-1])}
            used |= {pair} if ways & {"read", "write"} else set()
    return used


class Faulty(MadeUp):
    """Makes up rates, and refuses sets over faulty links."""

    def __init__(self, seed, faults=(), *, error="broken"):
        super().__init__(seed)
        self.faults, self.error = set(faults), error
        self.links, self.refused = set(), []

    def measure(self, sets):
        for transfers in sets:
            bad = [flow for flow in transfers.flows if links_of(flow) & self.faults]
            if bad:
                self.refused.append(str(transfers))
                if self.error == "broken":
                    raise BrokenLinkError(bad, WHAT, verdict="hangs")
                raise MeasurementError(f"{transfers}: {WHAT}")
            self.links |= {link for flow in transfers.flows for link in links_of(flow)}
        return super().measure(sets)
