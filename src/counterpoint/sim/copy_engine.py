"""Copy engines serve first come, first served, and take no SM; stream priority does not reach them."""

from collections import deque


class CopyEngines:
    """Which copies are being served: the oldest `num_engines` of those handed in. Holds operation numbers only."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._active: list[int] = []
        self._waiting: deque[int] = deque()

    def submit(self, index: int) -> None:
        """Queue operation `index` behind those already handed in."""
        self._waiting.append(index)

    def start_next(self) -> list[int]:
        """Move waiting copies onto free engines, in order; return those that start now."""
        started = []
        while self._waiting and len(self._active) < self._num_engines:
            started.append(self._waiting.popleft())
            self._active.append(started[-1])
        return started

    def finish(self, index: int) -> None:
        """Free the engine that served operation `index`."""
        self._active.remove(index)
