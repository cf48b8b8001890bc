"""At a terminal a supervised command behaves as one that is not: pipelines, reading, the background, stopping."""

import shlex
import sys
from collections.abc import Callable

import pytest

from helpers.command import COUNTERPOINT
from helpers.terminal import PROMPT, Shell

Prefix = Callable[[str], str]
PASSWORD = (  # quotes keep the words that are waited for out of the command line's echo
    "import getpass; print('got' + 'ten', len(getpass.getpass('Pass' + 'word:')))"
)


def shell(script: str) -> str:
    return shlex.join(["sh", "-c", script])


@pytest.fixture(params=["bare", "supervised"])
def run(request: pytest.FixtureRequest) -> Prefix:
    """A command line as it is, or under us: both must do the same."""
    prefix = "" if request.param == "bare" else f"{COUNTERPOINT} run -- "
    return lambda command: prefix + command


def test_a_password_is_read_from_the_terminal_whatever_standard_input_is(run: Prefix) -> None:
    for redirection in ("", " < /dev/null"):
        with Shell() as at:
            at.send(run(shlex.join([sys.executable, "-c", PASSWORD])) + redirection + "\n")
            at.expect("Password:")
            at.send("hello\n")
            at.expect("gotten 5")


def test_the_other_end_of_a_pipeline_reads_the_terminal_while_the_command_runs(run: Prefix) -> None:
    with Shell() as at:
        pager = shell("echo ke''y?; read key < /dev/tty; echo ke''y=$key; cat")
        at.send(f"{run(shell('read go < /dev/tty; echo from $go'))} | {pager}; echo st''atus $?\n")
        at.expect("key?")
        at.send("one\ntwo\n")  # one for each of them, in whatever order they come to it
        at.expect("key=")
        at.expect("from ")
        at.expect("status 0")
    assert "Stopped" not in at.output


def test_a_command_in_the_background_that_reads_is_stopped_and_goes_on_in_the_foreground(run: Prefix) -> None:
    with Shell() as at:
        at.send(run(shell("read x; echo g''ot=$x; read x")) + " & wait %1 2>/dev/null; jobs; fg; echo st''atus $?\n")
        at.expect("Stopped")
        at.expect("read x")  # fg names what it continues
        at.send("hey\n")
        at.expect("got=hey")
        at.send("\x03")
        at.expect(PROMPT)
        at.send("echo en''d\n")
        at.expect("end")


def test_a_command_in_the_background_that_may_not_write_is_stopped_until_it_is_in_front(run: Prefix) -> None:
    with Shell() as at:
        at.send("stty tostop; " + run(shell("echo wr''ote")) + " & wait %1 2>/dev/null; jobs; fg; echo st''atus $?\n")
        at.expect("Stopped")
        at.expect("wrote")
        at.expect("status 0")


def test_ctrl_z_stops_it_and_it_goes_on_behind_and_in_front(run: Prefix) -> None:
    with Shell() as at:
        at.send(run(shell("echo g''o; read x; echo g''ot=$x")) + "\n")
        at.expect("go\r")
        at.send("\x1a")
        at.expect("Stopped")
        at.expect(PROMPT)
        at.send("bg; wait %1 2>/dev/null; fg\n")  # behind it is stopped again, because it reads
        at.expect("fg\r")
        at.send("hey\n")
        at.expect("got=hey")


def test_ctrl_c_reaches_a_command_with_a_trap_each_time_once(run: Prefix) -> None:
    code = (
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        "print('rea' + 'dy', flush=True)\n"
        "for number in range(2):\n"
        "    signal.sigwait({signal.SIGINT})\n"
        "    print('tra' + 'pped', number, signal.sigtimedwait({signal.SIGINT}, 0.2), flush=True)\n"
        "sys.exit(7)\n"
    )
    with Shell() as at:
        at.send(run(shlex.join([sys.executable, "-c", code])) + "; echo st''atus $?\n")
        at.expect("ready")
        for number in range(2):
            at.send("\x03")
            at.expect(f"trapped {number} None")
        at.expect("status 7")


def test_size_and_streams_are_the_terminals(run: Prefix) -> None:
    with Shell() as at:
        at.send("stty rows 33 cols 77; " + run(shell("stty size; test -t 0 && test -t 1 && test -t 2 && echo al''l")) + "\n")
        at.expect("33 77")
        at.expect("all")
