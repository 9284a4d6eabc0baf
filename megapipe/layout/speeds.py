"""Assumptions on devices and links, for plans."""

from dataclasses import dataclass

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.devices import device, local_device

SPEED_KEYS = "log.device (as in H100) or log.peak_tflops=TFLOP/S"
"""Keys to set where a speed is needed and not known."""


@dataclass(frozen=True)
class Speeds:
    """Assumptions on devices and links; None where nothing is known."""

    name: str | None
    """Name of the device."""
    memory_gb: float | None
    tflops: float | None
    """Peak of the device in TFLOP/s."""
    efficiency: float
    """Share of the peak that is reached."""

    @classmethod
    def of(cls, config: Config) -> "Speeds":
        """From the configuration, or where that says nothing from known figures of the device."""
        log, cpu = config.log, config.parallel.device == "cpu"
        name = log.device or (None if cpu else local_device())
        known = None if name is None else device(name)
        return cls(
            name=name,
            memory_gb=log.device_gb or (known and known.memory_gb),
            tflops=log.peak_tflops or (known and known.tflops),
            efficiency=log.efficiency,
        )

    @property
    def reached(self) -> float:
        """FLOP/s that the device reaches; raises :class:`ConfigError` if its peak is not known."""
        if self.tflops is None:
            raise ConfigError(f"the speed of the device is not known: set {SPEED_KEYS}")
        return self.tflops * 1e12 * self.efficiency


def known_speeds(config: Config) -> Speeds:
    """Those of a device whose peak is known; raises :class:`ConfigError` if it is not."""
    speeds = Speeds.of(config)
    _ = speeds.reached
    return speeds
