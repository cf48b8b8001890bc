"""A control block that is cut short or scribbled on while the job launches: the job goes on, and readers get one line."""

import os
import random
from contextlib import suppress
from ctypes import sizeof
from pathlib import Path

import pytest

from counterpoint.errors import LaunchFilterError
from counterpoint.launch_filter.control_block import ControlBlock
from counterpoint.launch_filter.layout import BlockRecord, CounterRecord, FunctionRecord, SlotRecord
from counterpoint.launch_filter.rules import FilterRule
from helpers.build_filter import Built
from helpers.filter_session import Session, session

RULES = (
    FilterRule(pattern="cap*", dynamic_shared_bytes=60_000),
    FilterRule(pattern="nccl*", priority=-5, is_collective=True),
    FilterRule(pattern="gemm", hold_us=5.0),
)
KERNELS = ("capped", "ncclDevKernel", "gemm", "other")
CUT = "counterpoint: the control block was cut short; no plan is applied here any more.\n"
SIGBUS = 7


def begin(client: Session) -> Path:
    client.find()
    for name in KERNELS:
        client.make(name)
        client.launch(name)
    return client.block()._path


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000, sizeof(BlockRecord) - 300_000])
def test_a_block_that_is_cut_short_leaves_launches_as_they_were(built: Built, tmp_path: Path, size: int) -> None:
    with session(built, tmp_path, *RULES) as client:
        path = begin(client)
        client.make("unseen")
        os.truncate(path, size)
        for number in range(3):
            for name in (*KERNELS, "unseen"):
                launched = client.launch(name, number)
                assert launched.result == 0
                if size < 100_000 and number:  # a decision made before is used once more
                    assert launched.last.shared == number
                    assert launched.last.priority == 1
        assert client.ask("fork capped")[0].split()[2] == "0"
        assert client.ask("stress 4 2000") == ["failed 0"]
        with pytest.raises(LaunchFilterError, match=r"is damaged: it was cut short; start the job again"):
            client.block().swap([])
        with pytest.raises(LaunchFilterError, match=r"bytes, but a control block has"):
            ControlBlock(path)
    assert client.stderr in (CUT, "")
    assert size > 100_000 or client.stderr == CUT


def test_a_cut_block_stops_nobody_who_handles_sigbus_and_raises_it_again(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, *RULES) as client:
        path = begin(client)
        client.ask("reraise_bus")  # as Python's faulthandler does
        os.truncate(path, 0)
        assert [client.launch(name).result for name in KERNELS] == [0] * len(KERNELS)
    assert client.stderr == CUT


@pytest.mark.parametrize(("first", "status"), [("find dlsym", -SIGBUS), ("handle_bus", 5)])
def test_another_bus_error_is_the_programs(built: Built, tmp_path: Path, first: str, status: int) -> None:
    client = session(built, tmp_path, *RULES)
    client.ask(first)
    begin(client)
    with pytest.raises(AssertionError, match=f"ended at 'plant bus' with {status}:"):
        client.ask("plant bus")
    client.block().close()


@pytest.mark.parametrize("number", [5000, 0xFFFF_FFFF])
def test_a_number_of_functions_that_there_cannot_be_leads_nowhere(built: Built, tmp_path: Path, number: int) -> None:
    with session(built, tmp_path, *RULES) as client:
        path = begin(client)
        write(path, BlockRecord.num_functions.offset, number.to_bytes(4, "little"))
        client.state()
        client.make("late")
        assert client.launch("late").result == 0
        assert [seen.name for seen in client.state().functions] == [*KERNELS, "late"]


@pytest.mark.parametrize("seed", range(6))
def test_scribbles_change_no_result_and_readers_get_one_line(built: Built, tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    slot = BlockRecord.slots.offset
    spots = (
        (0, BlockRecord.slots.offset),
        (slot, slot + 4 * sizeof(SlotRecord)),
        (slot + sizeof(SlotRecord), slot + sizeof(SlotRecord) + 4000),
        (BlockRecord.functions.offset, BlockRecord.functions.offset + 8 * sizeof(FunctionRecord)),
    )
    with session(built, tmp_path, *RULES) as client:
        path = begin(client)
        for number in range(40):
            size = chosen.choice((1, 8, 64, 4096))
            write(path, chosen.randrange(*spots[number % len(spots)]), chosen.randbytes(size))
            if number % 8 == 0:
                client.make(f"late{number}")
                assert client.launch(f"late{number}").result == 0
            assert [client.launch(name).result for name in KERNELS] == [0] * len(KERNELS)
            with suppress(LaunchFilterError):
                client.state()
            if number % 10 == 9:
                client.block().swap(RULES)


def test_what_no_version_writes_is_named(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, *RULES) as client:
        path = begin(client)
        at = BlockRecord.slots.offset + sizeof(SlotRecord) + SlotRecord.counters.offset + CounterRecord.refusal.offset
        write(path, at, (99 << 32).to_bytes(8, "little"))
        assert client.state().counters[0].refusal == "reason 99, which this version does not know"
        write(path, BlockRecord.driver.offset, (77).to_bytes(4, "little"))
        with pytest.raises(LaunchFilterError, match="names an unknown driver, 77"):
            client.state()
        write(path, BlockRecord.driver.offset, (1).to_bytes(4, "little"))
        write(path, BlockRecord.slots.offset + sizeof(SlotRecord) + SlotRecord.num_rules.offset, b"\xff" * 4)
        with pytest.raises(LaunchFilterError, match="holds no table of generation 1; start the job again"):
            client.state()


def write(path: Path, offset: int, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY)
    os.pwrite(file, content[: max(0, sizeof(BlockRecord) - offset)], offset)
    os.close(file)
