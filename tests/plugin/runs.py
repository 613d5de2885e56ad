"""Runs of ranks with the plugin: a made-up plan, the run, and what each communicator must get."""

import functools
import itertools
import os
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from tccl_py.nccl.plugin.build import build_plugin
from tccl_py.nccl.plugin.index import INDEX_FILE, IndexedGpu, IndexedSet, PluginIndex
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.tuner import (
    COLLECTIVES,
    PROTOCOLS,
    TunerEntry,
    TunerTable,
    check_tables,
    tune_lines,
)
from tccl_py.nccl_library import NAME, installed_nccls
from tccl_py.plan.machine_files import graph_text
from tests.plugin.ranks import Made, Record, Spec
from tests.skips import needs

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGIES = ROOT / "tests" / "cases" / "topologies"
TOPOLOGY = "asus-esc8000a-e13p.xml"
VERSIONS = ("2.28.9", "2.30.7", "2.31.2", "2.32.3")


class Result(msgspec.Struct, kw_only=True):
    """The records of all ranks, by rank; None of a killed rank."""

    made: list[list[Made] | None]
    codes: dict[str, int]
    killed: list[int]
    errors: list[str]


class MadePlan(msgspec.Struct, kw_only=True):
    """A plan with a graph file of its own for each set of GPUs, so that none passes for another."""

    folder: Path
    orders: dict[tuple[int, ...], list[tuple[int, ...]]]

    @property
    def index(self):
        return self.folder / INDEX_FILE

    def file(self, gpus):
        return f"subsets/graph-{'-'.join(map(str, sorted(gpus)))}.xml"


@functools.cache
def releases():
    """Return the folders of NCCL's libraries by version: the installed one is in no folder.

    TCCL_TEST_NCCL names a folder with VERSION/libnccl.so.2 for other releases.
    """
    # Tests see none (conftest.py): this is the function as it was imported.
    folder, installed = os.environ.get("TCCL_TEST_NCCL"), next(installed_nccls(), None)
    found = {path.parent.name: path.parent for path in Path(folder or "/nowhere").glob(f"*/{NAME}")}
    return found | ({installed.version: None} if installed else {})


def needs_release(version):
    """Skip a test of a release that is not here."""
    if version not in releases():
        pytest.skip(f"NCCL {version} is not here: TCCL_TEST_NCCL names a folder of releases")


def bus_ids(topology=TOPOLOGY):
    """Bus ids by NVML index."""
    return {
        int(gpu.get("dev")): pci.get("busid").lower()
        for pci in ET.parse(TOPOLOGIES / topology).iter("pci")
        for gpu in pci.findall("gpu")
    }


def make_plan(
    folder, *, buses=None, sizes=range(2, 9), missing=(), nodes=None, tables=(), **fields
):
    """Write an index with graph files whose rings are random, and different in their channels.

    `nodes` has the NUMA node of each GPU's host buffers.
    """
    buses = buses or bus_ids()
    (folder / "subsets").mkdir(parents=True)
    sets, orders, settings = [], {}, Settings(version="2.28")
    for number, gpus in enumerate(
        found for size in sizes for found in itertools.combinations(sorted(buses), size)
    ):
        if gpus in missing:
            continue
        source = random.Random(number)
        orders[gpus] = [tuple(source.sample(gpus, len(gpus))) for _ in range(1 + number % 3)]
        text = graph_text(
            orders[gpus], settings, rate_gbps=12.0, type_intra="SYS", provenance="made up"
        ).encode()
        name = f"subsets/graph-{'-'.join(map(str, gpus))}.xml"
        (folder / name).write_bytes(text)
        places = {gpu: nodes[gpu] for gpu in gpus} if nodes else {}
        sets.append(IndexedSet(gpus=gpus, file=name, text=text, nodes=places))
    gpus = tuple(IndexedGpu(nvml=nvml, bus_id=bus) for nvml, bus in sorted(buses.items()))
    values = {"simulated": True, "gpus": gpus}
    index = PluginIndex(sets=tuple(sets), tables=tune_lines(tables), **(values | fields))
    (folder / INDEX_FILE).write_bytes(index.encode())
    return MadePlan(folder=folder, orders=orders)


def random_tables(seed, gpus):
    """Return a table for each set of two or more of some GPUs, with ranges of all collectives."""
    source, found = random.Random(seed), []
    for size in range(2, gpus + 1):
        for chosen in itertools.combinations(range(gpus), size):
            entries = []
            for collective in COLLECTIVES:
                edges = sorted(source.sample([1 << n for n in range(41)], source.choice((0, 4, 8))))
                for first, last in zip(edges[::2], edges[1::2], strict=True):
                    entry = TunerEntry(
                        collective=collective,
                        from_bytes=first,
                        to_bytes=last,
                        algorithm="tree" if collective == "all_reduce" and last % 3 else "ring",
                        protocol=source.choice(PROTOCOLS),
                        channels=source.choice((0, 1, 8, 64)),
                    )
                    entries.append(entry)
            found.append(TunerTable(gpus=chosen, measured_on=chosen, entries=tuple(entries)))
    check_tables(found, range(gpus), where="random")
    return tuple(found)


def plugin_library():
    """Return the built plugin, or skip the test where there is no compiler."""
    needs("a C compiler")
    return build_plugin(ROOT / "build" / "plugin")


def run_ranks(folder, scenario, size, *, plan, version="2.28.9", **options):
    """Run a scenario; `env` and `rank_env` come on top of what loads the plugin."""
    folder.mkdir(parents=True)
    env = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        # All channels of virtual GPUs are on one real GPU at the same time.
        "NCCL_MAX_NCHANNELS": str(128 // size),
        "NCCL_MAX_P2P_NCHANNELS": str(128 // size),
        "NCCL_CGA_CLUSTER_SIZE": "0",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    if plan is not None:
        env |= {"NCCL_ENV_PLUGIN": str(plugin_library()), "TCCL_INDEX": str(plan.index)}
    env |= options.pop("env", {})
    wrapper = options.pop("wrapper", [])
    spec = Spec(
        scenario=scenario, size=size, folder=str(folder), version=version, env=env, **options
    )
    path = folder / "spec.json"
    path.write_bytes(msgspec.json.encode(spec))
    environ, release = dict(os.environ), releases()[version]
    if release is not None:
        environ["LD_LIBRARY_PATH"] = f"{release}:{environ.get('LD_LIBRARY_PATH', '')}"
    command = [*wrapper, sys.executable, "-m", "tests.plugin.ranks", str(path)]
    subprocess.run(command, env=environ, cwd=ROOT, check=True, timeout=spec.timeout + 60)
    return _collect(folder, size)


def _collect(folder, size):
    made, errors = [], []
    for rank in range(size):
        path = folder / f"result.{rank}"
        if not path.exists():
            made.append(None)
            continue
        found = msgspec.json.decode(path.read_bytes(), type=Record)
        made.append(found.made)
        errors += [f"rank {rank}: {found.error}"] if found.error else []
    codes = msgspec.json.decode((folder / "codes").read_bytes())
    return Result(made=made, errors=errors, **codes)


def differences(result, plan, *, default=()):
    """Return where communicators did not get exactly the file of their GPUs, as lines.

    Names of `default`, shared children and single GPUs have to get default NCCL; True: all.
    """
    found = list(result.errors)
    found += [f"rank {rank}: exit {code}" for rank, code in result.codes.items() if code]
    for rank, records in enumerate(result.made):
        if records is None:
            found.append(f"rank {rank}: no result")
            continue
        for made in records:
            where = f"rank {rank}, {made.name} {made.gpus}"
            if made.code:
                found.append(f"{where}: code {made.code}")
            plain = default is True or made.name in default
            found += [f"{where}: {what}" for what in complaints(made, plan, default=plain)]
    return found


def complaints(made, plan, *, default=False):
    """Yield how a communicator differs from the file of its GPUs, or from default NCCL."""
    plain = default or made.shared
    if made.group:
        sets = [tuple(sorted(gpus)) for gpus in made.group]
        right = [] if plain else sorted(plan.file(gpus) for gpus in sets if gpus in plan.orders)
        if sorted(made.graph.split()) != right:
            yield f"got {made.graph or 'default NCCL'}, not {right}"
        return
    wanted = None if plain else plan.orders.get(tuple(sorted(made.gpus)))
    if not made.gpus or (not made.rings and not made.files and made.graph == ""):
        # Records of groups have no log of their own; single GPUs have no rings.
        return
    if wanted is None:
        if made.graph or any(file.startswith("/proc/self/fd/") for file in made.files):
            yield f"got {made.graph or made.files}, not default NCCL"
        return
    # One process with several ranks has a line of the log for each.
    if set(made.graph.split()) != {plan.file(made.gpus)} or not made.files:
        yield f"got {made.graph or 'default NCCL'} ({made.reason}), {made.files}"
    for channel, following in made.rings.items():
        order = wanted[channel % len(wanted)]
        own = order.index(made.gpus[made.rank])
        right = made.gpus.index(order[(own + 1) % len(order)])
        if following != right:
            yield f"channel {channel}: next is {following}, not {right}"
