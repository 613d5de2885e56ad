"""Which NCCL is found, by packages laid out as pip does, and a library built here."""

import subprocess
import sys

import pytest

from tccl_py.health.doctor import examine
from tccl_py.health.host import HostState
from tccl_py.nccl_library import InstalledNccl, installed_nccls
from tccl_py.planning.installed_nccl import version_to_plan
from tests.commands import tccl
from tests.skips import mark_needs

needs_cc = mark_needs("a C compiler")
TORCH = "the package nvidia-nccl-cu12, which torch 2.11.0 loads"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages that come before those that are installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    # No NCCL of the machine that the tests run on counts.
    install(tmp_path, "torch", "0.0.0")
    return tmp_path


def install(site, name, version, *needs):
    folder = site / f"{name.replace('-', '_')}-0.dist-info"
    folder.mkdir(exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in needs]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def with_torch(site, *needs):
    install(site, "torch", "2.11.0", "filelock", *needs)


def library(folder, number, result=0):
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "nccl.c"
    source.write_text(f"int ncclGetVersion(int *v) {{ *v = {number}; return {result}; }}\n")
    target = folder / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", target, source], check=True)


def first():
    return next(installed_nccls(), None)


def test_the_package_that_torch_needs_is_what_torch_loads(site):
    with_torch(site, "nvidia-nccl-cu12==2.28.9; platform_system == 'Linux'")
    install(site, "nvidia-nccl-cu12", "2.28.9")
    found = first()
    assert found == InstalledNccl(version="2.28.9", source=f"of {TORCH}")
    assert found.minor == "2.28"


def test_a_package_counts_without_torch(site):
    install(site, "nvidia-nccl-cu13", "2.30.7.post1")
    assert first() == InstalledNccl(version="2.30.7", source="of the package nvidia-nccl-cu13")


@needs_cc
def test_where_two_packages_share_the_file_the_library_says_which_it_is(site):
    with_torch(site, "nvidia-nccl-cu12==2.28.9")
    install(site, "nvidia-nccl-cu12", "2.28.9")
    install(site, "nvidia-nccl-cu13", "2.30.7")
    library(site / "nvidia" / "nccl" / "lib", 23007)
    assert first().version == "2.30.7"


@needs_cc
def test_a_library_in_the_place_of_a_packages_own_says_which_it_is(site):
    with_torch(site, "nvidia-nccl-cu12==2.28.9")
    install(site, "nvidia-nccl-cu12", "2.28.9")
    library(site / "nvidia" / "nccl" / "lib", 23203)
    assert first() == InstalledNccl(version="2.32.3", source=f"of {TORCH}")


def test_a_torch_with_nccl_in_its_own_is_asked_in_a_process_of_its_own(site):
    with_torch(site)
    (site / "torch" / "lib").mkdir(parents=True)
    (site / "torch" / "lib" / "libtorch_cuda.so").touch()
    (site / "torch" / "__init__.py").write_text(
        "class cuda:\n class nccl:\n  version = lambda: (2, 27, 3)\n"
    )
    before = sys.modules.get("torch")
    assert first() == InstalledNccl(version="2.27.3", source="in torch 2.11.0")
    assert sys.modules.get("torch") is before


@needs_cc
@pytest.mark.parametrize(("number", "version"), [(22809, "2.28.9"), (2708, "2.7.8")])
def test_the_systems_library_tells_its_number(site, monkeypatch, number, version):
    library(site / "lib", number)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(site / "lib"))
    assert [(one.version, one.source) for one in installed_nccls()] == [
        (version, "libnccl.so.2 as the system finds it")
    ]


@needs_cc
def test_a_library_that_fails_and_versions_that_are_none_are_nothing(site, monkeypatch):
    library(site / "lib", 22809, result=1)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(site / "lib"))
    with_torch(site, "nvidia-nccl-cu12==x")
    install(site, "nvidia-nccl-cu12", "unknown")
    assert list(installed_nccls()) == []


# What commands make of it


def found_here(monkeypatch, *found):
    name = "tccl_py.nccl_library.installed_nccls"
    monkeypatch.setattr(name, lambda: iter(found))


def test_a_plan_of_this_machine_is_for_what_is_installed(monkeypatch):
    found_here(monkeypatch, InstalledNccl(version="2.28.9", source=f"of {TORCH}"))
    said = []
    assert version_to_plan(said.append) == "2.28"
    assert "planned for NCCL 2.28: 2.28.9" in said[0]


def test_without_any_a_plan_is_for_the_newest_and_says_so(monkeypatch):
    found_here(monkeypatch)
    said = []
    assert version_to_plan(said.append) == "2.30"
    assert "planned for NCCL 2.30" in said[0]


@pytest.mark.parametrize(
    ("told", "version", "said"),
    [
        ("2.28.9", "2.28", "2.28.9 is on all hosts"),
        ("none", "2.30", "the hosts have none"),
    ],
)
def test_a_plan_of_hosts_is_for_what_they_told(told, version, said):
    notices = []
    assert version_to_plan(notices.append, told) == version
    assert said in notices[0]


def test_a_simulated_plan_is_for_the_newest_whatever_is_installed(monkeypatch, tmp_path):
    found_here(monkeypatch, InstalledNccl(version="2.18.3", source="x"))
    words = ["plan", str(tmp_path / "p"), "--simulate", "h200x4-vm", "--max-sets", "5"]
    result = tccl(*words, "--gpus", "0,1", "--json")
    assert result.exit_code == 0, result.output
    assert '"version": "2.30"' in result.stdout
    assert "2.18" not in result.output


def test_the_doctor_says_which_versions_are_there():
    found = (
        InstalledNccl(version="2.21.5", source="of one"),
        InstalledNccl(version="2.30.7", source="another"),
        InstalledNccl(version="2.21.4", source="the same to a plan"),
    )
    notes = [one for one in examine(HostState(nccl=found)).findings if one.check == "nccl"]
    assert [(one.severity, one.what.split()[1], one.where) for one in notes] == [
        ("note", "2.21.5", "of one"),
        ("note", "2.30.7", "another"),
    ]
    assert "is taken for 2.18" in notes[0].what
    assert "--nccl 2.30" in notes[1].fix


def test_the_doctor_says_where_no_nccl_was_found():
    unseen = [one for one in examine(HostState(nccl=())).unseen if one.check == "nccl"]
    assert len(unseen) == 1
    assert "--nccl" in unseen[0].why


LOADED = """
import ctypes, sys
from types import SimpleNamespace
from tccl_py.nccl_library import loaded_nccl
torch = SimpleNamespace(cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 27, 5))))
print(loaded_nccl(torch))
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
print(loaded_nccl(torch))
"""


@needs_cc
def test_the_nccl_that_a_process_loaded_counts_and_not_the_one_that_torch_was_built_with(tmp_path):
    library, source = tmp_path / "mine.so", tmp_path / "nccl.c"
    source.write_text("int ncclGetVersion(int *version) { return *version = 23203, 0; }\n")
    name = "-Wl,-soname,libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", name, "-o", library, source], check=True)
    command = [sys.executable, "-c", LOADED, library]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["2.27.5", "2.32.3"]
