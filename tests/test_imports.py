"""What is loaded for what: packages that a command does not need stay unread."""

import pkgutil
import subprocess
import sys

import pytest

import tccl_py.plan


def loaded(program):
    """The modules of tccl-py that are loaded after a program."""
    program += "\nimport sys\nprint(*(name for name in sys.modules if name.startswith('tccl_')))"
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300
    )
    return ran.stdout.splitlines()[-1].split()


def packages(names):
    return {name.split(".")[1] for name in names if "." in name}


def test_planning_a_simulated_machine_loads_no_package_for_what_comes_after(tmp_path):
    words = ["plan", str(tmp_path / "plan"), "--simulate", "h200x4-vm", "--max-sets", "8"]
    found = loaded(f"from tccl_py.cli.main import app\napp({words!r}, standalone_mode=False)")
    later = {"experiments", "report", "merge", "explanation", "health", "readers", "rank_processes"}
    assert not packages(found) & later
    assert len(found) <= 68, found


MODULES = sorted(module.name for module in pkgutil.iter_modules(tccl_py.plan.__path__))


@pytest.mark.parametrize("module", MODULES)
def test_a_plan_its_checks_files_and_staging_load_no_search(module):
    found = packages(loaded(f"import tccl_py.plan.{module}"))
    assert not found & {"planning", "search", "merge", "sources", "simulator", "cli"}
