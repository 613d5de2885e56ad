"""One rank of an unmodified torch program with many communicators; started by the tests.

usage: python -m tests.gpu.plugin_rank lazy|eager|background RANK SIZE FOLDER
Prints "all sums are right" at the end, or fails.
"""

import ctypes
import faulthandler
import signal
import sys

from tccl_py.nccl_library import find_library
from tests.gpu.ranks import groups_of, leave, splits_of


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Program:
    """A rank of the program; ranks are GPUs."""

    def __init__(self, way, rank, size, folder):
        # Not above: the tests are collected where there is no torch.
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        self.torch, self.dist = torch, dist
        self.way, self.rank, self.size, self.folder = way, rank, size, folder
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        bound = {} if way == "lazy" else {"device_id": self.device}
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=size, **bound
        )

    def summed(self, group, ranks):
        """Check sums of several sizes, where every element differs from its neighbours."""
        for count in (1, 1027, 1 << 20):
            index = self.torch.arange(count, device=self.device) % 97
            values = (index + self.rank).float()
            self.dist.all_reduce(values, group=group)
            self._compare(values, (index * len(ranks) + sum(ranks)).float())

    def _compare(self, found, wanted):
        if not self.torch.equal(found, wanted):
            sys.exit(f"rank {self.rank}: a sum is wrong")

    def groups(self):
        """All ranks again, and some of them."""
        self.summed(None, list(range(self.size)))
        for ranks in groups_of(self.size):
            group = self.dist.new_group(ranks)
            if self.rank in ranks:
                self.summed(group, ranks)

    def splits(self):
        """ncclCommSplit, which needs the device of each rank before."""
        for parts in splits_of(self.size):
            group = self.dist.split_group(split_ranks=parts)
            self.summed(group, next(part for part in parts if self.rank in part))

    def meshes(self):
        """DeviceMeshes of data and tensor parallel groups: as 2x4 and 4x2 of 8 GPUs."""
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

        rows = [n for n in range(2, self.size) if self.size % n == 0]
        for count in (rows[0], rows[-1]) if rows else (1,):
            shape = (count, self.size // count)
            mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
            row, column = divmod(self.rank, shape[1])
            self.summed(mesh.get_group("tp"), [row * shape[1] + at for at in range(shape[1])])
            self.summed(mesh.get_group("dp"), [at * shape[1] + column for at in range(count)])

    def pipeline(self):
        """Micro-batches that go through a stage on each GPU and back, by sends and receives."""
        torch, dist, last = self.torch, self.dist, self.size - 1
        for number in range(4):
            values = torch.arange(1 << 16, device=self.device) % 97 + number
            for forth in (True, False):
                before = self.rank - 1 if forth else self.rank + 1
                after = self.rank + 1 if forth else self.rank - 1
                if 0 <= before <= last:
                    dist.recv(values, before)
                if forth:
                    values += self.rank
                if 0 <= after <= last:
                    dist.send(values, after)
            wanted = torch.arange(1 << 16, device=self.device) % 97 + number
            self._compare(values, wanted + last * self.size // 2)

    def sharded(self):
        """FullyShardedDataParallel trains as one process does with all batches."""
        from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415

        torch = self.torch
        torch.manual_seed(0)
        made = [torch.nn.Linear(64, 64, bias=False).to(self.device) for _ in range(2)]
        made[1].load_state_dict(made[0].state_dict())
        batches = torch.randn(self.size, 8, 64, device=self.device)
        model = FullyShardedDataParallel(made[1], device_id=self.device)
        for each, batch in ((made[0], batches.reshape(-1, 64)), (model, batches[self.rank])):
            optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
            each(batch).square().mean().backward()
            optimizer.step()
        with FullyShardedDataParallel.summon_full_params(model):
            weight = next(model.parameters()).reshape(64, 64)
            if not torch.allclose(weight, made[0].weight, atol=1e-4):
                sys.exit(f"rank {self.rank}: training comes to something else")

    def by_ctypes(self):
        """A communicator through NCCL's library itself, as inference servers make theirs."""
        nccl, unique = ctypes.CDLL(find_library()), UniqueId()
        store = self.dist.FileStore(f"{self.folder}/ctypes", self.size)
        if self.rank == 0:
            self._call(nccl.ncclGetUniqueId(ctypes.byref(unique)))
            store.set("id", bytes(unique).hex())
        unique = UniqueId.from_buffer_copy(bytes.fromhex(store.get("id").decode()))
        comm, torch = ctypes.c_void_p(), self.torch
        self._call(nccl.ncclCommInitRank(ctypes.byref(comm), self.size, unique, self.rank))
        values = torch.full((1 << 20,), float(self.rank), device=self.device)
        place, stream = values.data_ptr(), torch.cuda.current_stream().cuda_stream
        floats, total = 7, 0
        self._call(
            nccl.ncclAllReduce(
                ctypes.c_void_p(place),
                ctypes.c_void_p(place),
                ctypes.c_size_t(values.numel()),
                floats,
                total,
                comm,
                ctypes.c_void_p(stream),
            )
        )
        torch.cuda.synchronize()
        self._compare(values, torch.full_like(values, float(sum(range(self.size)))))
        self._call(nccl.ncclCommDestroy(comm))

    def _call(self, code):
        if code:
            sys.exit(f"rank {self.rank}: NCCL's code is {code}")

    def run(self):
        self.groups()
        if self.way != "lazy":
            self.splits()
        self.meshes()
        self.pipeline()
        self.sharded()
        self.by_ctypes()
        self.torch.cuda.synchronize()
        self.dist.barrier()
        if self.way == "lazy":
            self.dist.destroy_process_group()


if __name__ == "__main__":
    _, way, rank, size, folder = sys.argv
    # Sent to ranks that hang.
    faulthandler.register(signal.SIGUSR1)
    Program(way, int(rank), int(size), folder).run()
    print("all sums are right")
    leave()
