"""A trace of some steps, host and device, by torch's profiler."""

from typing import Any


class Trace:
    """Records the steps `first` to `last` of a run into `path`, once; None: records nothing."""

    def __init__(self, path: str | None, steps: tuple[int, int]) -> None:
        self._path = path
        self._first, self._last = steps
        self._profiler: Any = None

    def after_step(self, done: int) -> None:
        """So many steps are over."""
        if self._path is None:
            return
        if self._profiler is None and done >= self._first - 1:
            from torch.profiler import profile

            self._profiler = profile()  # of the host, and of a GPU if there is one
            self._profiler.start()
        elif self._profiler is not None and done >= self._last:
            self.close()

    def close(self) -> None:
        """Write what was recorded. Harmless when repeated."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(self._path)
        self._profiler = self._path = None
