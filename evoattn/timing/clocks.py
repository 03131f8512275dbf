"""Clocks, temperature, power, energy and throttle reasons of a device by NVML, where `pynvml` (nvidia-ml-py) and
the driver's library are there."""

import time
from dataclasses import asdict, dataclass
from typing import Any

THROTTLE_REASONS = {
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
"""nvmlClocksThrottleReason* of nvml.h; 0x1, an idle GPU, is no throttling."""
FRESH_SECONDS = 0.2
"""A screening takes 3 ms and a reading may take one: neighbours in time share a reading."""


@dataclass(frozen=True)
class Reading:
    """The device at one moment."""

    sm_mhz: int
    memory_mhz: int
    temperature_c: int
    power_w: float
    throttled_by: tuple[str, ...]


class Clocks:
    """Reads one device. Where it cannot be read, `absent` says why in one sentence, and every reading is None."""

    def __init__(self, uuid: str) -> None:
        """`uuid` as torch gives it, with or without `GPU-` before it."""
        self.absent = ""
        self._last: tuple[float, Reading] | None = None
        try:
            import pynvml
        except ImportError:
            self.absent = "nvidia-ml-py is not installed."
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            self.absent = f"NVML: {error}."
        self.read()

    def read(self, at_most_old: float = 0.0) -> Reading | None:
        """The device now, or a reading at most `at_most_old` seconds old. A device that stops answering is absent from
        then on."""
        now = time.monotonic()
        if not self.absent and (self._last is None or now - self._last[0] > at_most_old):
            try:
                self._last = now, self._ask()
            except (self._nvml.NVMLError, AttributeError) as error:  # AttributeError: a binding that lacks a call
                self.absent = f"NVML: {error}."
        return None if self.absent or self._last is None else self._last[1]

    def energy_mj(self) -> int | None:
        """Energy that the board has taken since its driver was loaded, in mJ; None where it does not count."""
        if self.absent:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except (self._nvml.NVMLError, AttributeError):  # boards before Volta have no counter
            return None

    def _ask(self) -> Reading:
        n, handle = self._nvml, self._handle
        throttled = n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return Reading(
            n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
            n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM),
            n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
            n.nvmlDeviceGetPowerUsage(handle) / 1e3,
            tuple(words for bit, words in THROTTLE_REASONS.items() if throttled & bit),
        )

    def record(self, at_most_old: float = FRESH_SECONDS) -> dict[str, Any]:
        """JSON-ready: a reading, or `{"absent": why}`."""
        reading = self.read(at_most_old)
        return (
            {"absent": self.absent}
            if reading is None
            else asdict(reading) | {"throttled_by": list(reading.throttled_by)}
        )
