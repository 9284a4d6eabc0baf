"""Assumed speeds of devices and links, for plans."""

from dataclasses import dataclass, field, replace
from fractions import Fraction

from megapipe.config.config import Config
from megapipe.config.plan import PlanConfig, PlanFactors
from megapipe.errors import ConfigError
from megapipe.layout.devices import CPU, Device, device, local_device
from megapipe.layout.p2p import ranks_of_stage
from megapipe.schedule.placement import Placement

SPEED_KEYS = "plan.device (as in H100) or plan.peak_tflops=TFLOP/S"
"""Keys to set if the device's speed is needed and unknown, for messages."""

MARGIN = 0.03
"""Share of a device's memory that a plan leaves free for what it cannot count: fragmentation of the
allocator and workspaces of kernels. Published planners keep 5 to 10%; here the listed sizes of
devices are already 2 to 7% below the real ones."""

USUAL_NODE_GB_S = 300.0
"""GB/s of a process to others of its node if the device's links are unknown, as over NVLink."""


@dataclass(frozen=True)
class Speeds:
    """Assumed speed and memory of a device; None if unknown."""

    name: str | None
    """Name of the device."""
    memory_gb: float | None
    """Memory that processes on the device can take, in GB (10^9 bytes)."""
    margin_gb: float
    """Part of the memory that a plan leaves free, in GB: none of ``plan.device_gb``, otherwise
    :data:`MARGIN`."""
    device: Device | None
    """Peak and speeds of the device."""
    factor: float
    """Factor of the time of all kernels (``plan.time_factor``)."""
    factors: PlanFactors = field(default_factory=PlanFactors)
    """Further factors, by category of kernels (``plan.factors``)."""

    @classmethod
    def of(cls, config: Config) -> "Speeds":
        """Read the speeds from the configuration, or else from the table of known devices. Of a
        device that is not in the table, ``plan.peak_tflops`` is the only speed."""
        plan, kind = config.plan, config.parallel.device
        name = plan.device or (None if kind == "cpu" else local_device())
        if name is None and kind != "cuda" and plan.peak_tflops is None:
            name = CPU
        known = None if name is None else device(name)
        if plan.peak_tflops is not None:
            known = replace(known or Device(0), tflops=plan.peak_tflops)
        own_gb = known.memory_gb if known else None
        return cls(
            name=name,
            memory_gb=plan.device_gb or own_gb,
            margin_gb=0.0 if plan.device_gb else MARGIN * (own_gb or 0.0),
            device=known,
            factor=plan.time_factor,
            factors=plan.factors,
        )

    @property
    def known(self) -> Device:
        """The device; raises :class:`ConfigError` if its peak is unknown."""
        if self.device is None:
            raise ConfigError(f"the speed of the device is not known: set {SPEED_KEYS}")
        return self.device

    @property
    def plannable_bytes(self) -> float | None:
        """Bytes that a plan may use: the memory without the margin; None if unknown."""
        return None if self.memory_gb is None else (self.memory_gb - self.margin_gb) * 1e9

    @property
    def tflops(self) -> float | None:
        """Peak of the device in TFLOP/s."""
        return self.device.tflops if self.device else None


def resolved_plan(config: Config) -> PlanConfig:
    """Return the section `plan` with the bandwidth within nodes of its device filled in, and
    without the number of GPUs: ``parallel.dp`` is resolved from it."""
    known = Speeds.of(config).device
    own = (known.link_gb_s if known else None) or USUAL_NODE_GB_S
    given = config.plan.intra_node_gb_s
    return config.plan.model_copy(update={"intra_node_gb_s": given or own, "gpus": None})


def known_speeds(config: Config) -> Speeds:
    """Return the configured device's speeds; raise :class:`ConfigError` if its peak is unknown."""
    speeds = Speeds.of(config)
    _ = speeds.known
    return speeds


def pipeline_speeds(config: Config) -> list[Fraction]:
    """Return the relative speed of each pipeline rank: that of its slowest process."""
    given, ranks = config.plan.rank_speeds, range(config.parallel.pp)
    if given is None:
        return [Fraction(1) for _ in ranks]
    return [
        min(Fraction(str(given[process])) for process in ranks_of_stage(config, rank))
        for rank in ranks
    ]


def stage_speeds(config: Config, placement: Placement) -> list[float]:
    """Return the relative speed of each stage: of the slowest rank that holds it."""
    speeds = pipeline_speeds(config)
    return [
        float(min(speeds[rank] for rank in placement.holders(stage)))
        for stage in range(placement.stages)
    ]
