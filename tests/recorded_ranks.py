"""Logs of calls as NCCL writes them, and calls of workloads."""

import json
import random
from collections import Counter

MADE = {
    "2.18": "comm {comm} rank {rank} nranks {n} cudaDev 0 busId {bus} commId {id} - Init COMPLETE",
    "2.22": "ncclCommSplit comm {comm} rank {rank} nranks {n} cudaDev 0 nvmlDev 0 busId {bus} "
    "parent 0x10 color {color} key 0 commId {id} - Init COMPLETE",
    "2.23": "ncclCommSplit comm {comm} rank {rank} nranks {n} cudaDev 0 nvmlDev 0 busId {bus} "
    "parent 0x10 color {color} key 0 - Init COMPLETE",
    "2.28": "ncclCommSplit comm {comm} rank {rank} nranks {n} cudaDev 0 nvmlDev 0 busId {bus} "
    "parent 0x10 splitCount {split} color {color} key 0 - Init COMPLETE",
    "2.30": "ncclCommSplit comm {comm} rank {rank} nranks {n} cudaDev 0 nvmlDev 0 busId {bus} "
    "parent 0x10 childCount {split} color {color} key 0 - Init COMPLETE",
}
"""How releases log a part of a communicator; the ids are those of a release that has one."""


class RankLog:
    """The log of one rank, in NCCL's words; communicator 0x10 has all ranks.

    With `frozen` the count of operations stays, as within a host since NCCL 2.27.
    """

    def __init__(self, rank, ranks, *, host="node", release="2.28", frozen=False):
        self.rank, self.release = rank, release
        self.where = f"{host}:{1000 + rank}:{2000 + rank} [0] NCCL INFO "
        self.frozen = frozen
        self.bus = f"{rank + 1:x}0"
        self.sizes, self.lines, self.counts = {"0x10": ranks}, [], Counter()
        self.say(
            f"ncclCommInitRank comm 0x10 rank {rank} nranks {ranks} cudaDev 0 nvmlDev 0 "
            f"busId {self.bus} commId 0xfeed - Init COMPLETE"
        )

    def say(self, text):
        self.lines.append(f"{self.where}{text}\n")

    def split(self, comm, members, number=1):
        """Join a part of all ranks."""
        self.sizes[comm] = len(members)
        words = {"comm": comm, "rank": members.index(self.rank), "n": len(members), "bus": self.bus}
        color = min(members) + 16 * number
        words |= {"color": color, "split": number, "id": f"0x{color:x}"}
        self.say(MADE[self.release].format(**words))

    def call(self, name, count, comm="0x10", *, dtype=7, root=0, stream="0x5", buffer="", same=0):
        """A call of its own, or, with `same`, one more of the group that the next ends."""
        buffer = buffer or f"0x{random.getrandbits(40):x}"
        self.say(
            f"{name}: opCount {self.counts[comm]:x} sendbuff 0x1 recvbuff {buffer} count {count} "
            f"datatype {dtype} op 0 root {root} comm {comm} [nranks={self.sizes[comm]}] "
            f"stream {stream}"
        )
        self.counts[comm] += not same and not self.frozen

    def group(self, transfers, comm="0x10"):
        """Sends and receives of one group, by (name, count, peer)."""
        for name, count, peer in transfers:
            self.call(name, count, comm, root=peer, same=True)
        self.counts[comm] += not self.frozen


def calls_of(workload):
    calls = Counter()
    for row in workload.rows:
        for group in row.groups:
            calls[row.collective, row.dtype, row.bytes, group] += row.calls
    return calls


def counted_by(folder):
    """The same as tests/gpu/recorded_job.py counted it; an all-to-all has its largest rank's."""
    calls, all_to_alls = {}, {}
    for path in folder.glob("*.json"):
        own = json.loads(path.read_text())
        for collective, dtype, size, ranks, count in own:
            if collective == "all_to_all":
                place = sum(
                    call[0] == "all_to_all"
                    for call in own[: own.index([collective, dtype, size, ranks, count])]
                )
                key = (*ranks,), place
                all_to_alls[key] = max(all_to_alls.get(key, 0), size)
            else:
                call = collective, dtype, size, (*ranks,)
                assert calls.setdefault(call, count) == count
    for (ranks, _), size in all_to_alls.items():
        calls["all_to_all", "int8", size, ranks] = 1
    return calls
