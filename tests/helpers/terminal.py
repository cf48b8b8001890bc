"""An interactive shell at a terminal, for tests of what a command does there."""

import os
import pty
import time
from select import select
from types import TracebackType

PROMPT = "PROMPT> "
LIMIT_S = 40


class Shell:
    """`bash` in a session of its own, with a terminal; what it and its jobs print is in `output`."""

    def __init__(self) -> None:
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            environment = os.environ | {"PS1": PROMPT, "TERM": "dumb", "HISTFILE": ""}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], environment)
        self.output = ""
        self._seen = 0
        self.expect(PROMPT)

    def __enter__(self) -> "Shell":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._terminal)  # its jobs get SIGHUP
        os.waitpid(self._pid, 0)

    def send(self, text: str) -> None:
        """Type."""
        os.write(self._terminal, text.encode())

    def expect(self, text: str) -> None:
        """Wait until a text has come that was not waited for before."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.output[self._seen :]:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {text!r} in {self.output!r}"
            if select([self._terminal], [], [], left_s)[0]:
                self.output += os.read(self._terminal, 65536).decode(errors="replace")
        self._seen = self.output.index(text, self._seen) + len(text)
