"""A GPU's device without a GPU: what it asks of CUDA, which answers as it is told to."""

import sys
from unittest import mock

import msgspec
import pytest

from tccl_profiler import cuda_device
from tccl_profiler.compiler import program_for
from tccl_profiler.messages import Pace, Run, Share, Start
from tccl_profiler.session import pool_of
from tccl_profiler.shared_memory import MAX_LANES, Control
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import parse_set
from tests.toy import toy_machine

MIB = 1 << 20


class RefusedError(Exception):
    """Stands for CUDA's error."""


def test_a_copy_to_memory_out_of_reach_is_refused_before_anything_is_queued(monkeypatch):
    cupy, waits = mock.MagicMock(), mock.Mock()
    cupy.cuda.runtime.CUDARuntimeError = RefusedError
    cupy.cuda.runtime.ipcOpenMemHandle.side_effect = RefusedError("peer access is not supported")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda_device, "stream_waits", waits)
    control = Control.create(1)
    start = Start(backend="cuda", slot=0, device="G0", arena_bytes=MIB, user_bytes=MIB)
    device = cuda_device.CudaDevice(start, control)
    device.open()
    device.share(Share(space="G1", handle=b"of another machine"))
    program = program_for(parse_set("G0->D0->G1"), lanes={"G0": 64, "G1": 64})
    run = Run(
        program=program.devices["G0"],
        epoch=1,
        repeats=1,
        warm_ns=0,
        window_ns=10**6,
        patience_ns=10**9,
        paces=(Pace(groups=1),),
    )
    with pytest.raises(MeasurementError, match=r"^GPU 0 cannot reach G1's memory"):
        device.run(run)
    waits.assert_not_called()
    device.close()
    control.close()


@pytest.mark.parametrize(
    ("percentage", "threads", "lanes"),
    [("", 2048, 132), ("100", 2048, 132), ("12", 2048, 264), ("12", 1024, 132)],
)
def test_where_mps_shares_a_gpu_two_blocks_fit_on_a_multiprocessor(
    monkeypatch, percentage, threads, lanes
):
    cupy = mock.MagicMock()
    properties = {"multiProcessorCount": 132, "maxThreadsPerMultiProcessor": threads}
    cupy.cuda.runtime.getDeviceProperties.return_value = properties
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage)
    control = Control.create(1)
    start = Start(backend="cuda", slot=0, device="G0", arena_bytes=MIB, user_bytes=MIB)
    device = cuda_device.CudaDevice(start, control)
    assert device.open()[0].lanes == min(lanes, MAX_LANES)
    (compiled,) = cupy.RawModule.call_args_list
    assert compiled.kwargs["code"] == cuda_device.kernel_source(1 if lanes == 132 else 2)
    device.close()
    control.close()


@pytest.mark.parametrize(
    ("status", "advice"), [(2, "; end what else uses it"), (46, "; end what else uses it"), (3, "")]
)
def test_a_gpu_that_other_programs_fill_is_named_with_what_to_do(monkeypatch, status, advice):
    cupy, refused = mock.MagicMock(), RefusedError("no queue is free")
    cupy.cuda.runtime.CUDARuntimeError = RefusedError
    refused.status = status
    cupy.cuda.runtime.setDevice.side_effect = refused
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    control = Control.create(1)
    start = Start(backend="cuda", slot=0, device="G0", arena_bytes=MIB, user_bytes=MIB)
    device = cuda_device.CudaDevice(start, control)
    with pytest.raises(MeasurementError, match=f"^GPU 0: no queue is free{advice}$"):
        device.open()
    device.close()
    control.close()


def test_a_gpu_on_a_numa_node_whose_cpus_are_hidden_gets_a_worker():
    machine = toy_machine(gpus=2)
    nodes = [msgspec.structs.replace(node, numa_id=900) for node in machine.numa_nodes]
    hidden = msgspec.structs.replace(machine, numa_nodes=tuple(nodes))
    pool_of(hidden, "cuda", ["G0", "G1"]).close()
