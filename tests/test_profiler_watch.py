"""Conditions that spoil measurements, from a stand-in for NVML and a procfs built for each test."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest

from tccl_profiler.watch import (
    GpuConditions,
    GpuProcess,
    changes,
    conditions_note,
    throttling_names,
    warm_links,
    warnings,
    watching,
)
from tccl_py.errors import MeasurementError

NOT_SUPPORTED, FUNCTION_NOT_FOUND, DRIVER_NOT_LOADED, GPU_IS_LOST = 3, 13, 9, 15
OF_HOST = "pid:[4026531836]"


class NvmlError(Exception):
    """Stands for pynvml.NVMLError: carries the number in `value`."""

    def __init__(self, value: int, text: str = "Not Supported") -> None:
        super().__init__(text)
        self.value = value


def gpu_answers(**others: Any) -> dict[str, Any]:
    """What NVML answers of a healthy GPU, by the name of the question without nvmlDevice."""
    return {
        "GetClockInfo": lambda clock: {1: 1980, 2: 3201}[clock],
        "GetMaxClockInfo": lambda clock: {1: 1980, 2: 3201}[clock],
        "GetCurrentClocksEventReasons": lambda: 0x1,
        "GetCurrentClocksThrottleReasons": lambda: 0x1,
        "GetCurrPcieLinkGeneration": lambda: 5,
        "GetMaxPcieLinkGeneration": lambda: 5,
        "GetCurrPcieLinkWidth": lambda: 16,
        "GetMaxPcieLinkWidth": lambda: 16,
        "GetTemperature": lambda sensor: 41,
        "GetTotalEccErrors": lambda kind, counter: 0,
        "GetPersistenceMode": lambda: 1,
        "GetComputeRunningProcesses_v3": lambda: [],
        "GetComputeRunningProcesses_v2": lambda: [],
    } | others


def fails(value: int, text: str = "Not Supported") -> Callable[..., Any]:
    def answer(*arguments: int) -> Any:
        raise NvmlError(value, text)

    return answer


def process(pid: int, used_bytes: int | None = 300 * 2**20) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used_bytes)


@dataclass
class FakeNvml:
    """NVML of a host with these GPUs; counts how often it is asked and whether it is open."""

    gpus: list[dict[str, Any]]
    unloaded: bool = False
    absent: tuple[str, ...] = ()
    """Functions that this pynvml does not have."""
    opened: int = 0
    asked: list[str] = field(default_factory=list)
    questions: set[tuple[Any, ...]] = field(default_factory=set)
    """Names with arguments."""
    NVMLError = NvmlError

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's names)
        if self.unloaded:
            raise NvmlError(DRIVER_NOT_LOADED, "Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= len(self.gpus):
            raise NvmlError(2, "Invalid Argument")
        return index

    def __getattr__(self, name: str) -> Callable[..., Any]:
        question = name.removeprefix("nvmlDevice")
        if question in self.absent or question == name:
            raise AttributeError(name)

        def answer(gpu: int, *arguments: int) -> Any:
            self.asked.append(question)
            self.questions.add((question, *arguments))
            return self.gpus[gpu].get(question, fails(FUNCTION_NOT_FOUND))(*arguments)

        return answer


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A procfs in the host's PID namespace, with process 100, python3."""
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to(OF_HOST)
    add_process(tmp_path, 100, "python3")
    return tmp_path


def add_process(proc: Path, pid: int, name: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "comm").write_text(f"{name}\n")


def into_container(proc: Path) -> None:
    (proc / "self" / "ns" / "pid").unlink()
    (proc / "self" / "ns" / "pid").symlink_to("pid:[4026532999]")


def look_at(proc: Path, *gpus: dict[str, Any], own: frozenset[int] = frozenset(), **nvml: Any):
    with watching(range(len(gpus)), own, FakeNvml(list(gpus), **nvml), proc=proc) as look:
        return look()


HEALTHY = GpuConditions(
    gpu=0,
    sm_mhz=1980,
    sm_max_mhz=1980,
    memory_mhz=3201,
    throttling=(),
    pcie_generation=5,
    pcie_generation_max=5,
    pcie_width=16,
    pcie_width_max=16,
    temperature_c=41,
    ecc_uncorrected=0,
    persistence=True,
    other_processes=(),
)


def gpu(number: int = 0, **others: Any) -> GpuConditions:
    return msgspec.structs.replace(HEALTHY, gpu=number, **others)


# Looking


def test_a_look_has_every_figure_of_every_gpu(proc):
    busy = gpu_answers(GetCurrentClocksEventReasons=lambda: 0x44, GetTemperature=lambda sensor: 88)
    first, second = look_at(proc, gpu_answers(), busy)
    assert first == HEALTHY
    assert second == gpu(1, throttling=("sw_power_cap", "hw_thermal_slowdown"), temperature_c=88)


def test_gpus_are_those_asked_for_by_index(proc):
    nvml = FakeNvml([gpu_answers(), gpu_answers(), gpu_answers()])
    with watching([2, 0], set(), nvml, proc=proc) as look:
        assert [seen.gpu for seen in look()] == [2, 0]


def test_an_old_driver_answers_under_the_old_names(proc):
    old = gpu_answers(
        GetCurrentClocksEventReasons=fails(FUNCTION_NOT_FOUND),
        GetCurrentClocksThrottleReasons=lambda: 0x8,
        GetComputeRunningProcesses_v3=fails(FUNCTION_NOT_FOUND),
        GetComputeRunningProcesses_v2=lambda: [process(100)],
    )
    (seen,) = look_at(proc, old)
    assert seen.throttling == ("hw_slowdown",)
    assert seen.other_processes == (GpuProcess(pid=100, name="python3", used_mib=300),)


def test_a_new_driver_answers_under_the_new_names(proc):
    new = gpu_answers(GetTemperature=fails(FUNCTION_NOT_FOUND), GetTemperatureV=lambda sensor: 55)
    assert look_at(proc, new)[0].temperature_c == 55


def test_a_pynvml_without_the_new_names_is_no_error(proc):
    missing = ("GetCurrentClocksEventReasons",)
    (seen,) = look_at(proc, gpu_answers(), absent=missing)
    assert seen == gpu()


@pytest.mark.parametrize("error", [3, 4, 13, 22, 26])
def test_what_the_driver_does_not_answer_is_none_and_no_complaint(proc, error):
    silent = dict.fromkeys(gpu_answers(), fails(error))
    seen = look_at(proc, silent)
    assert seen == (GpuConditions(gpu=0),)
    assert warnings(seen, loaded=True) == ()
    assert changes(seen, (HEALTHY,)) == changes((HEALTHY,), seen) == ()


def test_a_lost_gpu_is_an_error_that_names_it(proc):
    nvml = FakeNvml([gpu_answers(), gpu_answers()])
    with watching([0, 1], set(), nvml, proc=proc) as look:
        nvml.gpus[1]["GetClockInfo"] = fails(GPU_IS_LOST, "GPU is lost")
        with pytest.raises(MeasurementError) as caught:
            look()
    assert "GPU 1: does not" in str(caught.value)
    assert nvml.opened == 0


def test_a_gpu_that_is_not_there_is_an_error_and_nvml_is_closed(proc):
    nvml = FakeNvml([gpu_answers()])
    with pytest.raises(MeasurementError) as caught, watching([0, 7], set(), nvml, proc=proc):
        pass
    assert "GPU 7: does not answer" in str(caught.value)
    assert nvml.opened == 0


def test_no_driver_is_an_error(proc):
    with (
        pytest.raises(MeasurementError) as caught,
        watching([0], set(), FakeNvml([], unloaded=True), proc=proc),
    ):
        pass
    assert "this machine: no NVIDIA" in str(caught.value)


def test_every_name_that_is_asked_for_exists_in_pynvml(proc):
    nvml = FakeNvml([{}])
    with watching([0], set(), nvml, proc=proc) as look:
        look()
    assert len(set(nvml.asked)) == 18
    assert all(hasattr(pynvml, f"nvmlDevice{question}") for question in nvml.asked)


def test_numbers_written_out_are_those_of_pynvml(proc):
    nvml = FakeNvml([gpu_answers()])
    with watching([0], set(), nvml, proc=proc) as look:
        look()
    assert {asked for asked in nvml.questions if len(asked) > 1} == {
        ("GetClockInfo", pynvml.NVML_CLOCK_SM),
        ("GetClockInfo", pynvml.NVML_CLOCK_MEM),
        ("GetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        ("GetApplicationsClock", pynvml.NVML_CLOCK_GRAPHICS),
        ("GetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        (
            "GetTotalEccErrors",
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
    }


@pytest.mark.parametrize(
    "number",
    [
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
        pynvml.NVML_ERROR_DEPRECATED,
    ],
)
def test_a_question_that_a_gpu_does_not_answer_is_left_open(number, proc):
    nvml = FakeNvml([gpu_answers(GetPersistenceMode=fails(number))])
    with watching([0], set(), nvml, proc=proc) as look:
        (seen,) = look()
    assert (seen.persistence, seen.sm_mhz) == (None, 1980)


# Throttling by name


REASONS = {
    "None": (),
    "GpuIdle": (),
    "ApplicationsClocksSetting": (),
    "SwPowerCap": ("sw_power_cap",),
    "HwSlowdown": ("hw_slowdown",),
    "SyncBoost": ("sync_boost",),
    "SwThermalSlowdown": ("sw_thermal_slowdown",),
    "HwThermalSlowdown": ("hw_thermal_slowdown",),
    "HwPowerBrakeSlowdown": ("hw_power_brake_slowdown",),
    "DisplayClockSetting": ("display_clocks_setting",),
    "BoardLimit": ("board_limit",),
    "Reliability": ("reliability",),
}


def test_reasons_have_names_and_one_nobody_described_keeps_its_number():
    for constant, names in REASONS.items():
        assert throttling_names(getattr(pynvml, f"nvmlClocksThrottleReason{constant}")) == names
    assert throttling_names(0x1804) == ("sw_power_cap", "reason 0x1800")


# Processes


def test_own_processes_are_left_out_and_others_have_their_names(proc):
    add_process(proc, 200, "evil\x1b[2J")
    found = [process(300, None), process(200), process(100), process(200)]
    answers = gpu_answers(GetComputeRunningProcesses_v3=lambda: found)
    (seen,) = look_at(proc, answers, own=frozenset({100}))
    assert seen.other_processes == (
        GpuProcess(pid=200, name="evil?[2J", used_mib=300),
        GpuProcess(pid=300, name=None, used_mib=None),
    )


def test_clients_of_an_mps_server_stand_for_it(proc):
    add_process(proc, 50, "nvidia-cuda-mps")
    add_process(proc, 200, "train")
    answers = gpu_answers(
        GetComputeRunningProcesses_v3=lambda: [process(50)],
        GetMPSComputeRunningProcesses_v3=lambda: [process(100), process(200)],
    )
    (seen,) = look_at(proc, answers, own=frozenset({100}))
    assert seen.other_processes == (GpuProcess(pid=200, name="train", used_mib=300),)


def test_own_processes_may_be_added_while_watching(proc):
    own: set[int] = set()
    answers = gpu_answers(GetComputeRunningProcesses_v3=lambda: [process(100)])
    with watching([0], own, FakeNvml([answers]), proc=proc) as look:
        assert len(look()[0].other_processes) == 1
        own.add(100)
        assert look()[0].other_processes == ()


def test_in_a_container_our_own_processes_under_host_pids_are_no_others(proc):
    into_container(proc)
    answers = gpu_answers(GetComputeRunningProcesses_v3=lambda: [process(9001), process(9002)])
    assert look_at(proc, answers, own=frozenset({7, 8}))[0].other_processes == ()


def test_in_a_container_more_host_pids_than_own_processes_are_others(proc):
    into_container(proc)
    found = [process(100), process(9001), process(9002)]
    answers = gpu_answers(GetComputeRunningProcesses_v3=lambda: found)
    (seen,) = look_at(proc, answers, own=frozenset({100, 8}))
    assert seen.other_processes == (GpuProcess(pid=9002, used_mib=300),)


def test_on_the_host_a_hidden_process_is_another(proc):
    answers = gpu_answers(GetComputeRunningProcesses_v3=lambda: [process(9001)])
    (seen,) = look_at(proc, answers, own=frozenset({7}))
    assert seen.other_processes == (GpuProcess(pid=9001, used_mib=300),)


# Complaints


QUIET = ("sync_boost", "display_clocks_setting", "board_limit", "reliability", "reason 0x800")
OTHERS = (GpuProcess(pid=100, name="python3", used_mib=300), GpuProcess(pid=9001))
COMPLAINTS = [
    # What a GPU is like, and parts of the sentences: of an idle one, and of a loaded one.
    ({}, [], []),
    ({"pcie_generation": 1}, [], ["its PCIe link runs at generation 1 x16, its best is gen.*BIOS"]),
    ({"pcie_width": 8}, *[["generation 5 x8, its best is generation 5 x16.*the board shares"]] * 2),
    # A slot older than the GPU, and links of virtual machines that tell nothing.
    ({"pcie_generation": 4, "pcie_generation_max": 4}, [], []),
    ({"pcie_width": 0}, [], []),
    ({"pcie_width": None}, [], []),
    ({"pcie_width": 8, "pcie_width_max": 0}, [], []),
    ({"pcie_generation": 0, "pcie_width": 0}, [], []),
    ({"pcie_generation": 1, "pcie_generation_max": None}, [], []),
    (
        {"throttling": ("hw_slowdown", "hw_thermal_slowdown")},
        *[["hw_th.* 41 C; .*fan"]] * 2,
    ),
    (
        {"throttling": ("sw_thermal_slowdown",)},
        *[["by sw_thermal_slowdown at 41 C; .*the airflow"]] * 2,
    ),
    ({"throttling": ("hw_slowdown", "hw_power_brake_slowdown")}, *[["power_brake.*supply"]] * 2),
    ({"throttling": ("hw_slowdown",)}, *[["lowered by hw_slowdown at 41 C; check its cool"]] * 2),
    ({"throttling": ("sw_power_cap",), "temperature_c": None}, [], ["sw_power_cap; raise"]),
    ({"throttling": QUIET}, [], []),
    (
        {"other_processes": OTHERS},
        *[["100 .python3, 300 MiB. uses", "9001 .name unk"]] * 2,
    ),
    ({"ecc_uncorrected": 2}, *[["had 2 uncorrected ECC errors"]] * 2),
]


@pytest.mark.parametrize(("others", "idle", "loaded"), COMPLAINTS)
def test_what_spoils_measurements_is_complained_about(others, idle, loaded):
    for wanted, is_loaded in ((idle, False), (loaded, True)):
        told = warnings((gpu(0), gpu(2, **others)), loaded=is_loaded)
        assert len(told) == len(wanted)
        for sentence, part in zip(told, wanted, strict=True):
            assert re.match(f"GPU 2: .*{part}", sentence)


# Changes


def changed(**after: Any) -> tuple[str, ...]:
    return changes((gpu(0), gpu(1)), (gpu(0), gpu(1, **after)))


def test_two_equal_looks_have_no_changes():
    assert changed() == ()


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        ({"sm_mhz": 1700}, "its SM clock fell from 1980 to 1700 MHz"),
        ({"memory_mhz": 810}, "its memory clock fell from 3201 to 810 MHz"),
        ({"pcie_width": 8}, "its PCIe link went from generation 5 x16 to generation 5 x8"),
        ({"pcie_generation": 3}, "its PCIe link went from generation 5 x16 to generation 3 x16"),
        ({"throttling": ("sw_power_cap",)}, "its clocks are lowered by sw_power_cap at 41 C"),
        ({"ecc_uncorrected": 3}, "its memory had 3 uncorrected ECC errors"),
        (
            {"other_processes": (GpuProcess(pid=100, name="python3", used_mib=300),)},
            "process 100 (python3, 300 MiB) uses it too",
        ),
    ],
)
def test_what_makes_rates_incomparable_is_a_change(after, sentence):
    (told,) = changed(**after)
    assert told.startswith(f"GPU 1: {sentence}")
    assert told.endswith("; measure again what was measured before")


@pytest.mark.parametrize(
    "after",
    [
        {"sm_mhz": 1800},
        {"temperature_c": 80},
        {"throttling": ("sync_boost",)},
        {"throttling": None},
        {"pcie_generation": None},
        {"ecc_uncorrected": None},
        {"other_processes": None},
    ],
)
def test_what_leaves_rates_comparable_is_no_change(after):
    assert changed(**after) == ()


def test_what_was_there_before_is_no_change():
    same = {
        "throttling": ("hw_thermal_slowdown",),
        "other_processes": (GpuProcess(pid=100, name="python3", used_mib=300),),
        "ecc_uncorrected": 2,
    }
    grown = same | {"other_processes": (GpuProcess(pid=100, name="python3", used_mib=400),)}
    assert changes((gpu(**same),), (gpu(**grown),)) == ()
    assert changes((gpu(**same),), (gpu(),)) == ()


def test_a_link_that_rose_is_a_change_because_it_was_slow_before():
    (sentence,) = changes((gpu(pcie_generation=1),), (gpu(),))
    assert sentence.startswith("GPU 0: ")
    assert "from generation 1 x16 to generation 5 x16" in sentence


# Warming


class Warming:
    """Links of two GPUs that rise with bursts of 1/8 s each, on a clock that only bursts move."""

    def __init__(self, *generations: tuple[int | None, int | None], best: int | None = 5) -> None:
        self.generations, self.best, self.bursts, self.now_s = generations, best, 0, 100.0

    def load(self) -> None:
        self.bursts += 1
        self.now_s += 0.125

    def look(self) -> tuple[GpuConditions, ...]:
        now = self.generations[min(self.bursts, len(self.generations)) - 1]
        return tuple(
            gpu(i, pcie_generation=generation, pcie_generation_max=self.best)
            for i, generation in enumerate(now)
        )

    def warm(self, limit_s: float = 2.0) -> tuple[GpuConditions, ...]:
        return warm_links(self.look, self.load, limit_s=limit_s, clock=lambda: self.now_s)


def test_bursts_run_until_every_link_is_at_its_best():
    links = Warming((1, 1), (1, 5), (3, 5), (5, 5), (1, 1))
    conditions = links.warm()
    assert links.bursts == 4
    assert [seen.pcie_generation for seen in conditions] == [5, 5]


def test_one_burst_runs_where_links_are_at_their_best_or_tell_nothing():
    for links in (Warming((5, 5)), Warming((None, 0)), Warming((1, 1), best=None)):
        links.warm()
        assert links.bursts == 1


def test_links_that_rise_no_more_are_not_waited_for():
    links = Warming((1, 5), (3, 5))
    conditions = links.warm()
    assert links.bursts == 6
    assert warnings(conditions, loaded=True) != ()


def test_a_link_that_goes_up_and_down_does_not_rise():
    links = Warming((3, 5), *[(1, 5), (3, 5)] * 20)
    links.warm()
    assert links.bursts == 5


def test_waiting_ends_at_the_limit():
    links = Warming((1, 5), (2, 5), (3, 5), (4, 5))
    conditions = links.warm(limit_s=0.3)
    assert links.bursts == 3
    assert conditions[0].pcie_generation == 3


# The note


def test_the_note_of_equal_gpus_is_short():
    assert "SM 1980 of 1980" in conditions_note((gpu(0), gpu(1)))


def test_the_note_says_which_gpus_differ():
    slow = gpu(
        2, sm_mhz=1710, pcie_generation=1, temperature_c=88, throttling=("sw_power_cap", "x")
    )
    assert conditions_note((gpu(0), gpu(1), slow)) == (
        "SM 1710-1980 of 1980 MHz, memory 3201 MHz, PCIe 5 x16 (GPU 0,1) / 1 x16 of 5 x16 (GPU 2),"
        " 41-88 C, throttling none (GPU 0,1) / sw_power_cap+x (GPU 2)"
    )


def test_the_note_of_a_silent_driver_says_so():
    assert "SM ? MHz, memory" in conditions_note((GpuConditions(gpu=0),))


def test_conditions_survive_a_journal():
    seen = (gpu(other_processes=(GpuProcess(pid=100),)), GpuConditions(gpu=1))
    text = msgspec.json.encode(seen)
    assert msgspec.json.decode(text, type=tuple[GpuConditions, ...]) == seen
