"""What commands print for people is plain English: easy to read, in short sentences, in tables whose headers stay whole."""

import re

import pytest

from helpers.command import TRACES, counterpoint
from helpers.readability import of_terminal

LEAST_READING_EASE = 50  # Flesch: plain English begins at 60, and 50 to 60 is fairly difficult
MOST_WORDS_PER_SENTENCE = 20
COMMANDS = {
    "tune a trace": ("tune", TRACES / "fsdp2.rank0.json.gz"),
    "tune a step without a plan": ("tune", TRACES / "tp.rank0.json.gz"),
    "tune a workload": ("tune", "cb_ar_opt2"),
    "simulate": ("simulate", TRACES / "ddp.rank0.json.gz"),
    "analyze": ("analyze", TRACES / "ddp.rank0.json.gz", TRACES / "ddp.rank1.json.gz"),
    "check": ("check", "--", "env", "CUDA_DEVICE_MAX_CONNECTIONS=1", "NCCL_MAX_CTAS=4", "python", "train.py"),
    "show a schedule": (
        *("schedule", "show", "all_gather_matmul", "--ranks", "4"),
        *("--rows", "16384", "--inner", "8192", "--columns", "2560"),
    ),
}
IDENTIFIER = re.compile(r"\S*(?:::|[a-z0-9]_[a-z0-9]|[<>/=])\S*")  # a kernel, a control, a variable, a path: no prose
HEADERS = {
    ("tune", "cb_ar_opt2"): ("makespan", "exposed", "overlap", "candidate (simulated)", "change"),
    ("analyze", TRACES / "ddp.rank0.json.gz"): ("intervals", "recovers", "computation", "communication"),
    ("machines",): ("shared/SM", "link, one way"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_output_is_easy_to_read(name: str) -> None:
    done = counterpoint(*COMMANDS[name], COLUMNS="100")
    assert done.returncode in (0, 1), done.stderr
    found = of_terminal(IDENTIFIER.sub("code", done.stdout))
    assert found.reading_ease > LEAST_READING_EASE, found.longest
    assert found.words_per_sentence < MOST_WORDS_PER_SENTENCE, found.longest


@pytest.mark.parametrize("command", HEADERS, ids=lambda command: command[0])
def test_no_header_is_broken_on_a_terminal_of_60_columns(command: tuple[str, ...]) -> None:
    printed = counterpoint(*command, COLUMNS="60").stdout.split()
    assert not [header for header in HEADERS[command] if not {*header.split()} <= {*printed}]
