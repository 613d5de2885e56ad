"""The index of the plugin, as Python writes it."""

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.nccl.plugin.index import IndexedGpu, IndexedSet, PluginIndex

GPUS = tuple(IndexedGpu(nvml=gpu, bus_id=f"0000:{gpu + 1:02x}:00.0") for gpu in (0, 1, 4))
PAIR = IndexedSet(gpus=(4, 0), file="a.xml", text=b"text")


def index(**fields):
    return PluginIndex(**({"simulated": True, "gpus": GPUS} | fields))


def lines(found):
    return found.encode().decode().splitlines()


def test_sets_are_in_the_order_of_their_masks():
    sets = (
        PAIR,
        IndexedSet(gpus=(0, 1, 4), file="b.xml", text=b""),
        IndexedSet(gpus=(1, 0), file="c.xml", text=b"", nodes={1: 2, 0: 3}),
    )
    found = [line.split() for line in lines(index(sets=sets)) if line.startswith("set")]
    assert [line[1:3] for line in found] == [["0,1", "c.xml"], ["0,4", "a.xml"], ["0,1,4", "b.xml"]]
    assert found[0][4:] == ["NODES=3,2"]


@pytest.mark.parametrize(
    "fields",
    [
        {"nccl": "v2.30"},
        {"nccl": "2.30-rc1"},
        {"gpus": ()},
        {"gpus": GPUS[::-1]},
        {"gpus": (IndexedGpu(nvml=0, bus_id="1:2"),)},
        {"gpus": (IndexedGpu(nvml=0, bus_id="0000:01:00.0", uuid="MIG-1"),)},
        {"needed": {"NCCL_NET_PLUGIN": "x"}},
        {"given": {"NCCL_GRAPH_FILE": "x"}},
        {"given": {"NCCL_BUFFSIZE": "1 2"}},
        {"must": {"LD_PRELOAD": "x"}},
        {"forbid": ("NCCL_A B",)},
        {"sets": (PAIR, PAIR)},
        {"sets": (msgspec.structs.replace(PAIR, gpus=(0,)),)},
        {"sets": (msgspec.structs.replace(PAIR, gpus=(0, 3)),)},
        {"sets": (msgspec.structs.replace(PAIR, file="../a.xml"),)},
        {"sets": (IndexedSet(gpus=(0, 1)),)},
        {"sets": (msgspec.structs.replace(PAIR, text=bytes(1 << 19)),)},
        {"sets": (msgspec.structs.replace(PAIR, nodes={0: 1}),)},
        {"sets": (msgspec.structs.replace(PAIR, nodes={0: 1, 4: 1024}),)},
    ],
)
def test_what_the_plugin_would_not_read_is_not_written(fields):
    with pytest.raises(InputError):
        index(**fields).encode()
