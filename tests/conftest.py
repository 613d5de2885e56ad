"""What all tests share: an environment of their own, and skipping by name what cannot run here."""

import gc
import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.gpu.ranks import REAL
from tests.skips import is_listed, mark_needs

# Tests start hundreds of Python processes: each would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Open MPI asks libfabric for networks, which takes a second of every job; none of it is used here.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")

# How long an example takes is the machine's affair, and machines are busy.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

MEASURING = (
    "test_planning_over_hosts.py",
    "test_planning_along_cables.py",
    "test_measuring_over_hosts.py",
    "test_profiler_faults.py",
    "test_profiler_cluster.py",
    "test_under_slurm.py",
    "test_profiler_network.py",
    "test_profiler_pool.py",
)
"""What moves bytes for a while, by processes that do not sleep. Beside other tests they take
several times as long, and rates differ: scripts/test runs them by themselves (`-m measuring`)."""

PLANNING = (
    "test_kept.py",
    "test_plan.py",
    "test_reference_plans.py",
    "test_plans.py",
    "test_cli_plan.py",
    "test_plan_study.py",
    "test_tccl_database.py",
)
"""What looks at plans of whole machines: one worker has them all, and makes each plan once."""

TOGETHER = dict.fromkeys(MEASURING, "measuring") | dict.fromkeys(PLANNING, "planning")

SLOWEST_FIRST = (
    "test_verification_jobs.py",
    "test_verifying_over_hosts.py",
    "test_profiler_nccl.py",
    *PLANNING,
    "test_docs.py",
    "test_asking_nccl.py",
    "test_cli_hardware.py",
    "test_jobs_against_nccl.py",
    "test_size_tuning.py",
    "test_stand_in.py",
    "test_graph_files_against_nccl.py",
    "test_children.py",
    "test_readme.py",
    "test_nccl_defaults.py",
    "test_cli_check.py",
    "test_cluster_planner.py",
    "test_table_jobs.py",
    "test_simulator_measured.py",
    "test_profiler_kernels.py",
    "test_search_on_machines.py",
    "test_examples.py",
    "test_scenarios.py",
    "test_verification_tuning.py",
    "test_reference_plans_against_nccl.py",
    "test_timing.py",
    "test_check.py",
    "test_merge.py",
    "test_tuner.py",
    "test_advise.py",
    "test_profiler_program.py",
    "test_search.py",
    "test_verification.py",
    "test_killed.py",
    "test_profiler_lone_lanes.py",
    "test_profiler_host_device.py",
    "test_growth.py",
    "test_nccl_tests.py",
    "test_cli_frame.py",
    "test_placed_buffers.py",
    "test_plan_directory.py",
)
"""Workers take file after file: what takes longest begins first, so that all end together."""


def _sound_evidence(*_, **_options):
    """Stands for the proof of links where a test plans as on sound GPUs."""
    from tccl_py.model.links import JobProof  # noqa: PLC0415 (slow)
    from tccl_py.nccl.asked import AskedJob  # noqa: PLC0415
    from tccl_py.planning.installed_nccl import CONTROL, Evidence  # noqa: PLC0415

    proofs = [JobProof(environment=of, verdict="sound", seconds=1.0) for of in (CONTROL, {})]
    return Evidence(jobs=tuple(AskedJob(environment=of.environment, proof=of) for of in proofs))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch, tmp_path_factory):
    """No setting of the caller's shell changes what is printed or planned."""
    # Nor does a signal end the process where a command that ran in it has set that: `tccl run`
    # gives the program that replaces it the usual SIGPIPE.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    monkeypatch.delenv("COLUMNS", raising=False)
    for name in ("NCCL_GRAPH_FILE", "NCCL_TOPO_FILE"):
        monkeypatch.delenv(name, raising=False)
    # Nor which NCCL is installed.
    monkeypatch.setattr("tccl_py.nccl_library.installed_nccls", lambda: iter(()))
    # Nor whether the plugin's library was built.
    monkeypatch.setattr("tccl_py.nccl.plugin.INSTALLED", tmp_path_factory.getbasetemp())
    # Nor what it does on this machine's GPUs.
    monkeypatch.setattr("tccl_py.planning.installed_nccl.rings_here", lambda *_: None)
    monkeypatch.setattr("tccl_py.health.proving.gather_evidence", _sound_evidence)


VIRTUAL_TIMEOUT_S = 150
"""A test that hangs leaves time for the others on a GPU that is here for minutes; `virtual_s` of a
mark is for one that needs more. Ranks of 16 virtual GPUs take twice as long to start as those of 8.
"""


def _gpus():
    """Return how many GPUs are here, and what they are."""
    try:
        import pynvml  # noqa: PLC0415

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception:
        return 0, "no GPU"
    return count, f"{count} {'' if REAL else 'virtual '}GPUs ({name})"


def _skip_without_gpus(item, markers, count, gpus):
    item.user_properties.append(("gpus", gpus))
    wanted = max(marker.kwargs.get("count", 1) for marker in markers)
    if wanted > count:
        item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPU(s), {count} here"))
    elif not REAL:
        seconds = [marker.kwargs.get("virtual_s", VIRTUAL_TIMEOUT_S) for marker in markers]
        limit = max(seconds) * max(1.0, count / 8)
        item.add_marker(pytest.mark.timeout(limit), append=False)
        if any(marker.kwargs.get("real") for marker in markers):
            item.add_marker(pytest.mark.skip(reason="needs real GPUs: virtual ones share one"))


def pytest_report_teststatus(report):
    """Say of each test on GPUs, where tests are listed, which it had, how long, and what failed.

    A run whose time is over never comes to the summary.
    """
    gpus = dict(getattr(report, "user_properties", ())).get("gpus")
    if gpus and not report.skipped and (report.when == "call" or report.failed):
        words = f"{report.outcome.upper()} in {report.duration:.0f} s on {gpus}"
        if crash := getattr(report.longrepr, "reprcrash", None):
            words += f" ({' '.join(crash.message.split())[:500]})"
        kind = report.outcome if report.when == "call" else "error"
        return kind, ".F"[report.failed], words
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Fail a test that is skipped for a reason which is not listed, or not true here."""
    report = yield
    if report.skipped and not is_listed(reason := report.longrepr[2]):
        report.outcome, report.longrepr = "failed", f"{reason}: not a reason of tests/skips.py"
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Deal out files, and as one those that belong together."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 (only where workers are asked for)

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return TOGETHER.get(Path(file).name, file)

    return Scheduling(config, log)


def pytest_collection_finish():
    """Leave the modules and tests alone in later collections, which are rarer than usual."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_collection_modifyitems(items):
    """Skip what needs GPUs or MPI where there are none."""
    place = {name: number for number, name in enumerate((*MEASURING, *SLOWEST_FIRST))}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    count, gpus = _gpus() if any(item.get_closest_marker("gpu") for item in items) else (0, "")
    for item in items:
        if item.path.name in MEASURING:
            item.add_marker("measuring")
        if markers := list(item.iter_markers("gpu")):
            _skip_without_gpus(item, markers, count, gpus)
        if item.get_closest_marker("mpi"):
            item.add_marker(mark_needs("mpirun"))
