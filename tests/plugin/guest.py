"""A guest with two NUMA nodes under QEMU, without KVM: Debian's kernel over this host's files.

The guest reads the host's file system over 9p; /run and /dev/shm are its own.
"""

import lzma
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

MODULES = ("virtio_pci", "9pnet_virtio", "9p")
"""The drivers with which the guest reads the host's files; some kernels have them inside."""
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc p /proc
for module in $(cat /modules); do insmod /$module; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,ro,cache=loose host /host
mount -t proc p /host/proc
mount -t sysfs s /host/sys
mount -t devtmpfs d /host/dev
mkdir -p /host/dev/shm
mount -t tmpfs t /host/dev/shm
mount -t tmpfs t /host/run
ifconfig lo 127.0.0.1 up
timeout SECONDS chroot /host /bin/sh JOB 2>&1
echo "guest: exit $?"
poweroff -f
"""


def _kernel():
    found = sorted(Path("/boot").glob("vmlinuz-*"))
    programs = ("qemu-system-x86_64", "busybox", "cpio")
    missing = [name for name in programs if shutil.which(name) is None]
    if missing or not found or not os.access(found[-1], os.R_OK):
        pytest.skip(f"no {', '.join(missing) or 'kernel in /boot'}")
    return found[-1]


def _unpacked(kernel, folder):
    """Write the kernel unpacked, which takes the guest seconds; return the path QEMU shall boot."""
    image = kernel.read_bytes()
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = offset + 512 * (image[0x1F1] + 1)
    try:
        found = lzma.LZMADecompressor().decompress(image[start : start + length])
    except lzma.LZMAError:
        return kernel
    path = folder / "vmlinux"
    path.write_bytes(found)
    return path


def _modules(folder):
    """Return the paths of MODULES and of those they need, in the order of loading."""
    needs = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, needed = line.partition(":")
        # The last one needed is loaded first.
        needs[Path(path).name.partition(".")[0]] = [*reversed(needed.split()), path]
    paths = dict.fromkeys(path for name in MODULES for path in needs.get(name, ()))
    return [folder / path for path in paths]


def _first_files(folder, kernel, job, seconds):
    """Write the guest's first file system; return its path."""
    root = folder / "root"
    for name in ("bin", "proc", "host"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox"), root / "bin" / "busybox")
    modules = _modules(Path("/lib/modules", kernel.name.partition("-")[2]))
    for path in modules:
        shutil.copy(path, root)
    (root / "modules").write_text("\n".join(path.name for path in modules))
    (root / "init").write_text(INIT.replace("JOB", str(job)).replace("SECONDS", str(seconds)))
    (root / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    done = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"],
        input=names.encode(),
        cwd=root,
        stdout=subprocess.PIPE,
        check=True,
    )
    path = folder / "first.cpio"
    path.write_bytes(done.stdout)
    return path


def run_in_guest(folder, script, *, timeout=120):
    """Run a shell script in the guest; return its output."""
    kernel = _kernel()
    job = folder / "job.sh"
    job.write_text(script)
    command = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", "2048"]
    for node in range(2):
        command += ["-object", f"memory-backend-ram,id=m{node},size=1G"]
        command += ["-numa", f"node,nodeid={node},cpus={node},memdev=m{node}"]
    command += [
        "-kernel",
        _unpacked(kernel, folder),
        "-initrd",
        _first_files(folder, kernel, job, timeout - 20),
    ]
    command += [
        "-append",
        "console=ttyS0 quiet mitigations=off panic=-1",
        "-no-reboot",
        "-nodefaults",
    ]
    command += ["-display", "none", "-serial", "stdio"]
    host = "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"
    command += ["-fsdev", host, "-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    assert "guest: exit 0" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
