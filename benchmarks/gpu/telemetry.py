"""Clock, power and temperature of the GPU while something is measured: a throttled card explains a slow figure."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from types import TracebackType

_FIELDS = "utilization.gpu,clocks.sm,power.draw,temperature.gpu"
_QUERY = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
_NAMES = ("sm_mhz", "watts", "celsius")
# A process spends seconds on imports before it gives the GPU work.
_BUSY_PERCENT = 50
_EVERY_MS = 500


class Telemetry:
    """Reads nvidia-smi twice a second beside a job; where there is none it knows nothing."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._process: subprocess.Popen[str] | None = None
        self._samples: list[list[float]] = []

    def __enter__(self) -> Telemetry:
        """Begins to read."""
        if shutil.which(_QUERY[0]):
            command = [*_QUERY, "-i", "0", "-lms", str(_EVERY_MS)]
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops nvidia-smi."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def since_last(self) -> dict[str, float]:
        """Medians since this was last asked, of the times when the GPU was busy; empty where it never was."""
        samples, self._samples = self._samples, []
        columns = zip(*samples, strict=True)
        return {name: statistics.median(values) for name, values in zip(_NAMES, columns, strict=False)}

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                numbers = [float(word) for word in line.split(",")]
            except ValueError:  # "[N/A]"
                continue
            if len(numbers) == 1 + len(_NAMES) and numbers[0] >= _BUSY_PERCENT:
                self._samples.append(numbers[1:])
