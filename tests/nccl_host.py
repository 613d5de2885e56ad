"""NCCL's own host code on a machine without GPUs: ../shared/nccl-host, where it is."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "nccl-host"
TOPOLOGIES = FOLDER.parent / "data" / "topologies"

SMALL_BUFFERS = {
    "NCCL_BUFFSIZE": "65536",
    "NCCL_LL_BUFFSIZE": "65536",
    "NCCL_LL128_BUFFSIZE": "61440",
}
"""No byte is moved, and to clear the pages of NCCL's usual buffers takes most of a start's time."""


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
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{FOLDER / version}:{FOLDER / 'cuda'}")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    variables = {"NCCL_RAS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_TOPO_FILE": str(path)}
    return variables | SMALL_BUFFERS
