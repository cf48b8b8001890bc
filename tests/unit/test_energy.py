"""The energy counter: what NVML is asked, what its errors become, and power from the counter's jumps."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from counterpoint.cuda.energy import mean_watts, open_counter, watch
from counterpoint.errors import DeviceError


class NvmlDouble:
    """NVML with one GPU, whose counter moves on by `step_mj` whenever it is read; `failing` names a call that fails."""

    def __init__(self, step_mj: int = 0, failing: dict[str, int] | None = None) -> None:
        self.millijoules, self.step_mj = 5_000, step_mj
        self.asked_for: list[bytes] = []
        self._failing = failing or {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self._failing.get(name) or self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name == "nvmlDeviceGetHandleByPciBusId_v2":
            self.asked_for.append(arguments[0])
            arguments[1]._obj.value = 77
        elif name == "nvmlDeviceGetTotalEnergyConsumption":
            assert arguments[0].value == 77, "asked of the GPU that was found"
            arguments[1]._obj.value = self.millijoules
            self.millijoules += self.step_mj
        else:
            assert name == "nvmlInit_v2"
        return 0


def test_the_counter_is_that_of_the_gpu_at_this_place_and_is_read_in_joules() -> None:
    nvml = NvmlDouble()
    assert open_counter("0000:18:00.0", nvml).joules() == 5.0
    assert nvml.asked_for == [b"0000:18:00.0"]


@pytest.mark.parametrize(
    ("call", "code", "reason"),
    [
        ("nvmlInit_v2", 9, "driver not loaded"),
        ("nvmlDeviceGetHandleByPciBusId_v2", 6, "GPU not found"),
        ("nvmlDeviceGetTotalEnergyConsumption", 3, "not supported by this GPU"),
    ],
)
def test_a_gpu_without_a_counter_is_one_line_that_says_why(call: str, code: int, reason: str) -> None:
    with pytest.raises(DeviceError, match=reason) as refused:
        open_counter("0000:18:00.0", NvmlDouble(failing={call: code}))
    assert str(refused.value).endswith("Leave --energy out.")


def ticks(step_s: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step_s


def test_only_jumps_of_the_counter_are_noted() -> None:
    counter, clock = open_counter("0000:18:00.0", NvmlDouble()), ticks(0.01)
    left = iter([False] * 5 + [True])
    assert watch(counter, lambda: next(left), lambda: next(clock)) == [(0.0, 5.0)]
    moving = open_counter("0000:18:00.0", NvmlDouble(step_mj=1000))
    left = iter([False] * 3 + [True])
    assert [joules for _, joules in watch(moving, lambda: next(left), lambda: next(clock))] == [6.0, 7.0, 8.0, 9.0]


def test_power_is_that_between_settled_jumps_whatever_the_start_was() -> None:
    # 300 W at first, then 700 W, in jumps of 0.1 s; the first reading lies within a jump
    readings = [(0.03, 0.0), *((round(0.1 * number, 1), 300 * 0.1 * number) for number in (1, 2))]
    readings += [(round(0.2 + 0.1 * number, 1), 60 + 70.0 * number) for number in range(1, 9)]
    assert mean_watts(readings) == pytest.approx(700.0)
    assert mean_watts([(0.0, 1.0), (0.5, 2.0)]) is None
