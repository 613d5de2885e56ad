"""NCCL's own host code on a machine without GPUs: ../shared/nccl-host, where it is."""

import functools
import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "shared" / "nccl-host"
TOPOLOGIES = FOLDER.parent / "data" / "topologies"


@functools.cache
def patience():
    """Return the library to preload that makes waiting ranks leave others the cores."""
    folder = HERE.parent / "build" / "plugin"
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"patience.{os.getpid()}"
    source = str(HERE / "plugin" / "patience.c")
    command = ["cc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", str(fresh), source, "-ldl"]
    subprocess.run(command, check=True)
    return fresh.rename(folder / "patience.so")


def nccl_host(monkeypatch, version, topology):
    """Make children find this NCCL and the GPUs of a topology; returns variables that it needs."""
    if not (FOLDER / version / "libnccl.so.2").is_file():
        pytest.skip(f"NCCL {version}'s host code is not in {FOLDER}")
    path = TOPOLOGIES / topology
    buses = {
        int(gpu.get("dev")): pci.get("busid").lower()
        for pci in ET.parse(path).iter("pci")
        for gpu in pci.findall("gpu")
    }
    monkeypatch.setenv("FAKE_GPUS", str(len(buses)))
    monkeypatch.setenv("FAKE_BUSES", ",".join(buses[gpu] for gpu in sorted(buses)))
    if shutil.which("cc"):
        monkeypatch.setenv("LD_PRELOAD", str(patience()))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{FOLDER / version}:{FOLDER / 'cuda'}")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    return {"NCCL_RAS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_TOPO_FILE": str(path)}
