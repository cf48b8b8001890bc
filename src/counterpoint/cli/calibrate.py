"""The command `calibrate`: probes on the GPUs of this machine fill a calibration file.

Under torchrun every rank runs the command; rank 0 prints, and writes the file every few seconds of probes, so that an
interrupted calibration continues where it stopped.
"""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from counterpoint.cli.options import Command, output_option
from counterpoint.errors import INTERRUPTED, MachineError, say, shown, shown_path
from counterpoint.value import check_continued, check_outputs, require

if TYPE_CHECKING:
    from counterpoint.cuda.probes.runner import ProbeResult
    from counterpoint.machine import Machine
    from counterpoint.sim.calibration import Calibration, ProbeRecord

INSTEAD = "Without GPUs, the shipped constants are used: counterpoint machines."
SAVED_S = 5.0  # of probes, after which the file is written
# conditions that must not have changed when a calibration continues; "gpus" is only the number that took part last
KEPT_CONDITIONS = ("driver", "cuda", "torch", "nccl", "nvls")


@click.command(
    cls=Command,
    examples=(
        "counterpoint calibrate",
        "torchrun --nproc-per-node 2 -m counterpoint calibrate",
    ),
)
@output_option("The file to save or to continue (.toml).  [default: calibration_MACHINE.toml]")
@click.option("--again", is_flag=True, help="Measure everything again instead of continuing FILE.")
@click.option("--only", metavar="PROBE", multiple=True, help="Run this probe alone. May be repeated.  [default: all probes]")
def calibrate(output: Path | None, again: bool, only: tuple[str, ...]) -> None:
    """Measure the simulator's constants on the GPUs of this machine.

    This takes about a minute. One GPU gives the constants of launches, placement, memory and matmuls. Several GPUs give
    those of collectives and copies, too; torchrun starts the command on them. What FILE already holds is not measured again.
    """
    from counterpoint.cuda.ranks import run_and_leave  # noqa: PLC0415  a fast --help
    from counterpoint.sim.calibration_file import CALIBRATION  # noqa: PLC0415

    check_outputs(((output, CALIBRATION),))
    require(
        not (again and only),
        MachineError,
        "--again measures all probes anew, and --only measures those that it names. Leave one of them out.",
    )
    _check_probes(only)
    run_and_leave(lambda: _calibrate(output, again, only))


def _check_probes(names: Sequence[str]) -> None:
    """Raise `MachineError` for a name that no probe has."""
    from counterpoint.cuda.probes import PROBES  # noqa: PLC0415

    for name in names:
        require(name in PROBES, MachineError, f"There is no probe '{shown(name)}'. Name one of: {', '.join(PROBES)}.")


def _calibrate(output: Path | None, again: bool, only: tuple[str, ...]) -> None:
    from counterpoint.cuda.ranks import join_ranks, require_gpu  # noqa: PLC0415

    require_gpu(INSTEAD)
    from counterpoint.cuda.probes.runner import check_fit, open_nvml  # noqa: PLC0415

    nvml = open_nvml()
    state = None if nvml is None else check_fit(nvml)  # before this process uses it
    rank = join_ranks(INSTEAD)
    from counterpoint.cuda.conditions import measuring_conditions  # noqa: PLC0415
    from counterpoint.cuda.device_query import query_devices  # noqa: PLC0415
    from counterpoint.cuda.probes.runner import run_probes  # noqa: PLC0415
    from counterpoint.cuda.probing import shipped_machine  # noqa: PLC0415
    from counterpoint.sim.calibration_file import POWER_LIMIT  # noqa: PLC0415

    queried = query_devices()[0]
    machine = shipped_machine(queried)
    conditions = {name: str(value) for name, value in measuring_conditions().items() if name != "date"}
    if state is None:
        conditions["state"] = "NVML was not found, so the GPU was not checked for throttling or other processes"
    else:
        conditions[POWER_LIMIT] = f"{state.power_limit_w:.0f} W"
    collected = _Record(machine, queried.device_name, output or Path(f"calibration_{machine.name}.toml"), conditions)
    if rank == 0 and not again:
        collected.go_on()
    try:
        try:
            run_probes(machine, nvml, collected.done(), collected.add, only)
        finally:
            if rank == 0:
                collected.save()
    except KeyboardInterrupt:
        if rank == 0:
            say(f"Interrupted. What was measured is in {shown_path(collected.path)}; run again to go on.")
        raise SystemExit(INTERRUPTED) from None
    if rank == 0:
        collected.report()


class _Record:
    """The measurements so far, on rank 0. They are saved at the end, and whenever `SAVED_S` seconds of probes have passed:
    deriving the constants takes seconds, while the GPUs wait.
    """

    def __init__(self, machine: "Machine", device_name: str, path: Path, conditions: dict[str, str]) -> None:
        self._machine, self._device_name, self._conditions = machine, device_name, conditions
        self.path = path
        self._probes: dict[str, ProbeRecord] = {}
        self._calibration: Calibration | None = None
        self._file: Calibration | None = None
        self._earlier: Calibration | None = None  # as derived from the file's points
        self._unsaved_s: float | None = None
        self._problem = ""

    def go_on(self) -> None:
        """Load what the file holds. Raises `CounterpointError` if it is of another GPU, or of other versions."""
        from counterpoint.sim.calibration import read_file  # noqa: PLC0415

        if not self.path.exists():
            return
        found = read_file(str(self.path))
        require(
            found.device_name == self._device_name,
            MachineError,
            f"{shown_path(self.path)} was measured on '{shown(found.device_name)}', and this GPU is '{self._device_name}'. "
            "Name another file.",
        )
        if found.probes:
            remedy = "Name another file, or measure everything anew with --again"
            check_continued(self.path, KEPT_CONDITIONS, (found.conditions, self._conditions), remedy)
        self._probes = _succeeded(found)
        self._calibration = self._file = found
        if any(not record.is_derived for record in self._probes.values()):
            self._unsaved_s = 0.0
        if self._probes:
            print(f"Going on with {shown_path(self.path)}: {len(self._probes)} probes are done.", flush=True)

    def done(self) -> frozenset[str]:
        """Return the probes that need not run again."""
        return frozenset(self._probes)

    def add(self, result: "ProbeResult") -> None:
        """Add a probe's points, and save what is there if that has not been done for long."""
        from counterpoint.sim.calibration import ProbeRecord  # noqa: PLC0415

        self._probes[result.probe] = ProbeRecord(
            date=date.today().isoformat(), seconds=result.seconds, points=result.points, failure=result.failure
        )
        outcome = f"failed: {result.failure}" if result.failure else f"{len(result.points)} points"
        print(f"{result.probe:<24} {result.seconds:5.1f} s  {outcome}", flush=True)
        self._unsaved_s = (self._unsaved_s or 0.0) + result.seconds
        if self._unsaved_s >= SAVED_S:
            self.save()

    def save(self) -> None:
        """Save all points, and the constants that follow from them; nothing if no probe was added since.

        If deriving them fails, the points are saved beside the constants that were there before, and a line says so once.
        """
        from counterpoint.sim.calibration_file import save_calibration, with_points_alone  # noqa: PLC0415

        if self._unsaved_s is None:
            return
        try:
            self._calibration = self._derived()
        except Exception as problem:  # whatever failed, the points took the GPUs' time
            self._calibration = with_points_alone(self._file, self._device_name, self._conditions, self._probes)
            self._say_once(f"{type(problem).__name__}: {problem}")
        self._unsaved_s = None
        save_calibration(self._calibration, self.path)

    def _derived(self) -> "Calibration":
        """Return the constants that follow from all points, as the file has them where its points did not change."""
        from counterpoint.sim.calibration_file import derive, renewed  # noqa: PLC0415

        probes = {name: msgspec.structs.replace(record, is_derived=True) for name, record in self._probes.items()}
        derived = derive(self._machine, self._device_name, self._conditions, probes)
        if self._file is None:
            return derived
        if self._earlier is None:
            known = {name: record for name, record in _succeeded(self._file).items() if record.is_derived}
            self._earlier = derive(self._machine, self._device_name, self._conditions, known)
        return renewed(self._file, self._earlier, derived)

    def _say_once(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            say(
                f"The constants could not be derived from the points ({shown(problem, 200)}). They stay as they were; all "
                f"points are in {shown_path(self.path)}. Report this, and run again with a version that repairs it."
            )

    def report(self) -> None:
        """Print the result in a few lines."""
        from counterpoint.sim.calibration import constants_of  # noqa: PLC0415
        from counterpoint.sim.calibration_file import broken_rules  # noqa: PLC0415

        if self._calibration is None:
            return
        constants = constants_of(self._calibration)
        measured = sum(1 for each in constants.values() if each.status == "measured")
        print(f"{measured} of {len(constants)} constants were measured on {self._device_name}; the others are the H200's.")
        for rule in broken_rules(self._calibration):
            print(f"The simulator assumes a rule that this GPU does not follow: {rule}.")
        print(f"Saved to {self.path}. Use it: counterpoint simulate STEP --calibration {self.path}")


def _succeeded(file: "Calibration") -> "dict[str, ProbeRecord]":
    """Return the probes of a file that did not fail."""
    return {name: record for name, record in file.probes.items() if not record.failure}
