"""A supervised command behaves as without us: streams, exit status, signals; and nothing of it is left behind."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from select import select

import pytest

from counterpoint.plan import load_plan
from helpers.command import COUNTERPOINT

LIMIT_S = 60
PASSED_ON = [
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
    *(signal.SIGTSTP, signal.SIGRTMIN, signal.SIGRTMAX),
]


def start(*command: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [COUNTERPOINT, "run", "--", *command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COUNTERPOINT, "run", "--", *command], capture_output=True, text=True, timeout=LIMIT_S, check=False, **options
    )


def await_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while (found := process.stdout.readline()) != f"{line}\n":
        assert found, "the command ended first"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def await_end_of(pid: int) -> None:
    """Wait, within a limit, for a process that is not ours; a pidfd is readable when it has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select([descriptor], [], [], LIMIT_S)[0], f"process {pid} is still there"
    finally:
        os.close(descriptor)


@pytest.fixture
def sleeping() -> Iterator[list[int]]:
    """Numbers of processes that a test leaves to be ended; those that are still there at its end are ended here."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("status", [0, 1, 2, 3, 77, 255])
def test_the_exit_status_is_the_commands_own(status: int) -> None:
    assert run("bash", "-c", f"exit {status}").returncode == status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_command_ended_by_a_signal_has_the_status_of_a_shell(number: int) -> None:
    assert run("bash", "-c", f"kill -{int(number)} $$").returncode == 128 + number


def test_streams_pass_through_untouched() -> None:
    ended = run("bash", "-c", "cat; echo to stderr >&2", input="one\ntwo")
    assert (ended.stdout, ended.stderr) == ("one\ntwo", "to stderr\n")


@pytest.mark.parametrize("options", [[], ["--tune"]])
def test_what_was_opened_for_the_command_stays_open_and_nothing_of_ours_is(options: list[str]) -> None:
    listing = "for each in /proc/$$/fd/*; do test -e $each && echo $each; done; cat <&9"
    script = 'exec 9< <(echo through); "$@"'
    found = []
    for prefix in ([], [str(COUNTERPOINT), "run", *options, "--"]):
        command = ["bash", "-c", script, "bash", *prefix, "bash", "-c", listing.replace("$$", "self")]
        found.append(subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout)
    assert found[0] == found[1]
    assert found[0].endswith("through\n")


def test_the_environment_is_as_it_was_without_a_plan() -> None:
    ended = run(sys.executable, "-c", "import os; print(sorted(os.environ.items()))")
    bare = subprocess.run(
        [sys.executable, "-c", "import os; print(sorted(os.environ.items()))"], capture_output=True, text=True, check=True
    )
    assert ended.stdout == bare.stdout


def test_options_behind_the_command_are_the_commands() -> None:
    assert run("echo", "--plan", "x", "--help").stdout == "--plan x --help\n"


@pytest.mark.parametrize("number", PASSED_ON)
def test_a_signal_reaches_the_command_once_and_its_status_counts(number: int) -> None:
    code = (
        "import signal, sys\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, {{{int(number)}}})\n"
        "print('ready', flush=True)\n"
        f"signal.sigwait({{{int(number)}}})\n"
        f"print(signal.sigtimedwait({{{int(number)}}}, 0.2), flush=True)\n"
        "sys.exit(7)\n"
    )
    as_at_a_terminal = lambda: signal.signal(number, signal.SIG_DFL)  # noqa: E731  tests may run under nohup
    with start(sys.executable, "-c", code, preexec_fn=as_at_a_terminal) as process:
        await_line(process, "ready")
        process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, output) == (7, "None\n")


def test_what_nohup_ignores_stays_ignored() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, signal.getsignal(signal.SIGTERM) == 0)"
    ended = run(sys.executable, "-c", code, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert ended.stdout == "True True\n"


def test_a_background_job_of_a_shell_can_handle_what_the_shell_has_it_ignore() -> None:
    code = "import signal, sys; signal.signal(2, lambda *_: sys.exit(9)); print('ready', flush=True); signal.pause()"
    with start(sys.executable, "-c", code, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) as process:
        await_line(process, "ready")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 9


def test_ctrl_c_ends_processes_in_sessions_of_their_own(sleeping: list[int]) -> None:
    """As torchrun's workers are when torchrun itself is killed: no signal of a group reaches them."""
    script = "setsid sleep 600 & echo $!; echo ready; trap 'exit 130' INT; while true; do wait; done"
    with start("bash", "-c", script) as process:
        assert process.stdout is not None
        sleeping.append(int(process.stdout.readline()))
        await_line(process, "ready")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert not is_running(sleeping[0])
    assert "1 process that it left behind" in errors


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT, signal.SIGALRM])
def test_further_signals_cost_neither_the_plan_found_nor_the_exit_status(
    second: signal.Signals, tmp_path: Path, sleeping: list[int]
) -> None:
    """They come while what the command left behind is being ended, which may take 10 s."""
    found = tmp_path / "found.toml"
    record = '{"stage":"decided","plan":{"verdict":"GAIN","summary":"found"}}'
    folder = "$COUNTERPOINT_FILTER_DIRECTORY"
    script = (
        f"printf %s '{record}' > {folder}/record.json; echo {folder}\n"
        "(trap 'echo told' TERM; echo $BASHPID; while true; do sleep 0.05; done) & wait"
    ).replace("\\n", "\n")
    command = [COUNTERPOINT, "run", "--tune", "-o", found, "--", "bash", "-c", script]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        control = Path(process.stdout.readline().strip())
        sleeping.append(int(process.stdout.readline()))
        assert control.is_dir()
        process.send_signal(signal.SIGTERM)
        await_line(process, "told")  # the command has ended, and its leftover ignores what it was asked
        process.send_signal(second)
        if second != signal.SIGINT:  # which shortens the waiting
            process.send_signal(second)
            os.kill(sleeping[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert load_plan(found).summary == "found"
    assert not control.exists()
    assert not is_running(sleeping[0])


def begin_with_folder(command: str, **options: object) -> tuple[subprocess.Popen[str], Path]:
    """A tuned command that has told its control folder, and runs on."""
    script = f"echo $COUNTERPOINT_FILTER_DIRECTORY; {command}"
    arguments = [COUNTERPOINT, "run", "--tune", "--", "bash", "-c", script]
    process = subprocess.Popen(arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_supervisor_that_was_killed_is_removed_by_the_next_one_and_no_other_is() -> None:
    killed, abandoned = begin_with_folder("exec sleep 600")
    living, in_use = begin_with_folder("read -r", stdin=subprocess.PIPE)
    foreign = in_use.with_name("counterpoint-of-something-else")
    foreign.mkdir(exist_ok=True)
    with killed, living:
        killed.kill()
        killed.wait(LIMIT_S)
        assert abandoned.is_dir(), "nobody could remove it"
        next_one, last = begin_with_folder("exit 0")
        with next_one:
            assert next_one.wait(LIMIT_S) == 0
        assert not abandoned.exists()
        assert not last.exists()
        assert in_use.is_dir()
        assert foreign.is_dir()
        living.communicate("\n", timeout=LIMIT_S)
    foreign.rmdir()
    assert not in_use.exists()


def test_a_umask_that_takes_our_own_rights_does_not_keep_us_from_our_files() -> None:
    script = "stat -c %a $COUNTERPOINT_FILTER_DIRECTORY $COUNTERPOINT_FILTER_DIRECTORY/*[bj]*[kn]; umask"
    command = [COUNTERPOINT, "run", "--tune", "--", "bash", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, umask=0o777)
    assert ended.stdout.split() == ["700", "600", "600", "0777"], ended.stderr


def test_a_killed_command_leaves_no_orphan_even_one_that_ignores_sigterm(sleeping: list[int]) -> None:
    script = "(trap '' TERM; echo $BASHPID; exec setsid sleep 600) & sleep 0; read -r; kill -9 $$"
    with start("bash", "-c", script, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        sleeping.append(int(process.stdout.readline()))
        process.communicate("\n", timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert not is_running(sleeping[0])


def test_a_process_that_outlives_a_command_on_purpose_is_left_alone(sleeping: list[int]) -> None:
    ended = run("bash", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!")
    sleeping.append(int(ended.stdout))
    assert ended.returncode == 0
    assert is_running(sleeping[0])


def test_the_command_ends_when_we_are_killed(sleeping: list[int]) -> None:
    with start("bash", "-c", "echo $$; exec sleep 600") as process:
        assert process.stdout is not None
        sleeping.append(int(process.stdout.readline()))
        process.kill()
        await_end_of(sleeping[0])


def test_at_a_terminal_the_command_is_in_the_foreground_and_ctrl_c_reaches_it_alone() -> None:
    code = (
        "import os, signal, sys\n"
        "print('foreground', os.tcgetpgrp(0) == os.getpgrp(), flush=True)\n"
        "try:\n"
        "    line = sys.stdin.readline()\n"
        "    print('read', line.strip(), flush=True)\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(9)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(COUNTERPOINT, [str(COUNTERPOINT), "run", "--", sys.executable, "-c", code])
    output = b""
    sent = [(b"foreground True", b"hello\n"), (b"read hello", b"\x03")]
    while select([terminal], [], [], LIMIT_S)[0]:
        try:
            output += os.read(terminal, 4096)
        except OSError:  # the other side is closed
            break
        if sent and sent[0][0] in output:
            os.write(terminal, sent.pop(0)[1])
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert not sent, output
    assert os.waitstatus_to_exitcode(status) == 9, output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["no-such-command-here"], "was not found"),
        (["./no/such/file"], "was not found"),
        (["/"], "is a folder"),
        ([""], "no command to run"),
    ],
)
def test_a_command_that_cannot_run_is_one_line_and_exit_code_2(command: list[str], words: str) -> None:
    ended = run(*command)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_script_without_its_interpreter_is_one_line_that_says_how_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print(1)")
    ended = run("train.py")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "as in python train.py" in ended.stderr


def test_a_file_that_is_no_program_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    plain, odd = tmp_path / "plain", tmp_path / "odd"
    plain.write_text("data")
    odd.write_text("data")
    odd.chmod(0o755)
    for path, words in ((plain, "is not executable"), (odd, "cannot be started")):
        ended = run(str(path))
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
        assert words in ended.stderr
