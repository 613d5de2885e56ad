"""A torch whose process groups make communicators as NCCL does, and note what each one saw.

One rank of a job runs; what the others tell is put into the store before.
"""

import os
from datetime import timedelta
from types import SimpleNamespace

import msgspec

GRAPH = "NCCL_GRAPH_FILE"
SEEN = (GRAPH, "NCCL_P2P_LEVEL", "NCCL_TOPO_FILE")
"""Variables of which each communicator keeps what it saw."""


class FakeGroup:
    """A group; its communicator exists once `seen` is set."""

    def __init__(self, ranks):
        self.ranks = tuple(ranks)
        self.seen = None


class FakeStore:
    """The store of one rank: `others` are what the other ranks tell, by rank."""

    def __init__(self, others, rank):
        self.others, self.rank, self.own, self.prefixes = others, rank, None, []
        self.timeout = timedelta(seconds=1)

    def set(self, key, value):
        """Keep what this rank tells."""
        if key.endswith(f"/member/{self.rank}"):
            self.own = msgspec.json.decode(value)
        elif key.endswith("/members"):
            self.everybody = value.encode()

    def add(self, key, amount):
        """Count: each other rank has reported once."""
        return 1

    def set_timeout(self, timeout):
        """How long `get` waits; here all is there."""

    def get(self, key):
        """What another rank tells, or rank 0 of all."""
        if key.startswith(("nonce/", "session/")):
            return b"x"
        if not key.endswith("/members"):
            return msgspec.json.encode(self.others[int(key.rpartition("/")[2])])
        if self.rank == 0:
            return self.everybody
        told = {**self.others, self.rank: self.own}
        return msgspec.json.encode([told[rank] for rank in sorted(told)])


class FakeDistributed:
    """torch.distributed over NCCL.

    `when` is when communicators are made: `at once` (device_id given), with the first `collective`,
    or in the `background`, which only ends with the first collective. `fails` is what raises.
    """

    def __init__(self, size, rank, others, when="collective"):
        self.size, self.rank, self.when = size, rank, when
        self.store = FakeStore(others, rank)
        self.group = SimpleNamespace(WORLD=None)
        self.made, self.fails, self.options = [], None, []

    def PrefixStore(self, prefix, store):  # noqa: N802 (torch's name)
        """A part of a store."""
        store.prefixes.append(prefix)
        return store

    def rendezvous(self, url, rank, world_size, **more):
        """Let the ranks meet."""
        yield self.store, self.rank, self.size

    def init_process_group(self, backend=None, **options):
        """Make the default group."""
        self.options.append(options)
        self.group.WORLD = self._made(range(self.size))

    def new_group(self, ranks=None, **options):
        """Make a group; None where this rank is no member."""
        self.options.append(options)
        order = list(range(self.size)) if ranks is None else list(ranks)
        return self._made(order if options.get("sort_ranks") is False else sorted(order))

    def split_group(self, parent, split_ranks, **options):
        """Split a group by ncclCommSplit, which makes the communicator at once."""
        parents = (parent or self.group.WORLD).ranks
        for part in split_ranks:
            ranks = [parents[one] for one in sorted(part)]
            if self.rank in ranks:
                return self._made(ranks, at_once=True)
        return None

    def get_process_group_ranks(self, group):
        """Global ranks of a group."""
        return list(group.ranks)

    def get_rank(self):
        """This rank."""
        return self.rank

    def all_reduce(self, token, group=None):
        """A collective; it makes the communicator if that is not there."""
        if group.seen is None:
            self._communicator(group)

    def _made(self, ranks, *, at_once=False):
        if self.fails == "group":
            raise RuntimeError("group failed")
        group = FakeGroup(ranks)
        if self.rank not in group.ranks:
            return None
        self.made.append(group)
        if at_once or self.when == "at once":
            self._communicator(group)
        return group

    def _communicator(self, group):
        if self.fails == "communicator":
            raise RuntimeError("ncclSystemError")
        group.seen = {name: os.environ.get(name) for name in SEEN}


class FakeTorch:
    """The parts of torch that are used; a device is its index."""

    def __init__(self, distributed, *, available=True, version=(2, 30, 7), current=0):
        self.distributed = distributed
        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            current_device=lambda: current,
            synchronize=lambda device: None,
            nccl=SimpleNamespace(version=lambda: version, unique_id=lambda: b""),
        )

    def device(self, kind, index):
        """A device."""
        return SimpleNamespace(type=kind, index=index)

    def zeros(self, count, device=None):
        """A tensor."""
        return [0.0] * count
