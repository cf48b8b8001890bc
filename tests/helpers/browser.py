"""Headless Chromium over its debugging pipe, with the standard library alone: pages tested as people use them."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from select import select
from types import TracebackType
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
LIMIT_S = 60.0
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
)


class Browser:
    """One page in Chromium. `failures` are exceptions and refusals that the page reported."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        read_there, self._out = os.pipe()
        self._in, write_there = os.pipe()
        self._log = (folder / "chromium.log").open("wb")
        pipes = f'exec "$@" 3<&{read_there} 4>&{write_there}'
        profile = f"--user-data-dir={folder / 'profile'}"
        self._process = subprocess.Popen(
            ["bash", "-c", pipes, "bash", CHROMIUM, *OPTIONS, profile, "about:blank"],
            pass_fds=(read_there, write_there),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        os.close(read_there)
        os.close(write_there)
        self._rest, self._number, self._session = b"", 0, ""
        self.failures: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session = ""
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._log.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while (answer := self._next(deadline)).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left_s = deadline - time.monotonic()
            assert left_s > 0, "Chromium did not answer"
            if select([self._in], [], [], left_s)[0]:
                piece = os.read(self._in, 1 << 20)
                assert piece, "Chromium ended"
                self._rest += piece
        text, self._rest = self._rest.split(b"\0", maxsplit=1)
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.failures.append(str(parameters["exceptionDetails"].get("exception", parameters)))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.failures.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """The size of the window in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)

    def scheme(self, name: str) -> None:
        """What the system prefers: "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, path: Path) -> float:
        """Open a file and wait until its script has run; seconds."""
        start = time.monotonic()
        self.call("Page.navigate", url=path.as_uri())
        while not self.run("document.documentElement?.dataset.ready === 'yes'"):
            assert time.monotonic() - start < LIMIT_S, f"not ready: {self.failures}"
        return time.monotonic() - start

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def key(self, key: str, *, shift: bool = False) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: "Moved", "Pressed", "Released", "Wheel"."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)
