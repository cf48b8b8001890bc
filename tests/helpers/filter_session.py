"""A running client of the double, spoken to line by line, with the filter's control block at hand."""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock, FilterState
from counterpoint.launch_filter.rules import FilterRule
from helpers.build_filter import Built, environment

END_LIMIT_S = 60


@dataclass(frozen=True)
class Reached:
    """One launch as it reached the double; `priority` is 1 where it carries none."""

    api: str
    name: str
    shared: int
    stream: int
    priority: int
    attributes: int
    hold_ns: int
    argument: int
    grid: int
    block: int


@dataclass(frozen=True)
class Launched:
    """What the caller got, and what reached the double for it."""

    result: int
    reached: tuple[Reached, ...]

    @property
    def last(self) -> Reached:
        """The launch itself; a head start comes before it."""
        return self.reached[-1]


class Session:
    """Use as a context manager; leaving it ends the client, and a client that does not end well fails the test."""

    def __init__(
        self,
        built: Built,
        directory: Path | None,
        *,
        before: tuple[Path, ...] = (),
        behind: tuple[Path, ...] = (),
        variables: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.stderr = ""
        self._process = subprocess.Popen(
            [*prefix, str(built.client)],
            env=environment(built, directory, before=before, behind=behind) | dict(variables or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._block: ControlBlock | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._block is not None:
            self._block.close()
        status = self.end(is_killed=kind is not None)
        assert kind is not None or status == 0, self.stderr

    def end(self, *, is_killed: bool = False) -> int:
        """Let the client go, and return its exit status."""
        if is_killed:
            self._process.kill()
        try:
            with suppress(BrokenPipeError):
                _, self.stderr = self._process.communicate(timeout=END_LIMIT_S)
        finally:
            self._process.kill()
        return self._process.returncode

    def ask(self, command: str) -> list[str]:
        """The lines of the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        lines = []
        while (line := self._process.stdout.readline()) != "ok\n":
            if not line:
                status = self.end()
                raise AssertionError(f"the client ended at '{command}' with {status}: {self.stderr}")
            lines.append(line.rstrip("\n"))
        return lines

    def find(self, route: str = "dlsym") -> bool:
        return self.ask(f"find {route}") == ["found"]

    def make(self, name: str, static: int = 0, registers: int = 32, *, is_kernel: bool = False) -> str:
        """Make a kernel; returns its handle."""
        return self.ask(f"make {name} {static} {registers}{' kernel' if is_kernel else ''}")[0]

    def launch(self, name: str, shared: int = 0, stream: int = 7, how: str = "", *, command: str = "launch") -> Launched:
        lines = self.ask(f"{command} {name} {shared} {stream} {how}".rstrip())
        assert lines, f"no answer to a launch of {name}"
        return Launched(result=int(lines[0].split()[1]), reached=tuple(map(_reached, lines[1:])))

    def attributes(self, name: str) -> tuple[int, int]:
        """Largest dynamic shared memory and carveout that the double holds for a kernel."""
        _, largest, carveout = self.ask(f"attributes {name}")[0].split()
        return int(largest), int(carveout)

    def block(self) -> ControlBlock:
        """The client's control block, once it has launched."""
        if self._block is None:
            assert self.directory is not None
            self._block = ControlBlock(self.directory / f"{self._process.pid}.block")
        return self._block

    def state(self) -> FilterState:
        return self.block().state()


def run_directory(folder: Path, *rules: FilterRule) -> Path:
    """A folder as `counterpoint run` prepares it."""
    directory = folder / "run"
    directory.mkdir()
    ControlBlock.write_initial(directory / INITIAL_BLOCK, rules)
    return directory


def session(built: Built, folder: Path, *rules: FilterRule) -> Session:
    """A client under the filter with these rules."""
    return Session(built, run_directory(folder, *rules))


def _reached(line: str) -> Reached:
    word, api, name, *rest = line.split()
    assert word == "reached"
    figures = dict(part.split("=") for part in rest)
    return Reached(api=api, name=name, **{key: int(value) for key, value in figures.items()})
