"""The section `plan` of the configuration: devices and links that a plan assumes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.section import ExpectedText, OnResume, Section


class PlanFactors(Section):
    """Factors of planned times by category. ``megapipe plan --calibrate`` fits them to runs."""

    ON_RESUME = OnResume.HARMLESS

    gemm: float = Field(1.0, gt=0)
    """Factor of the time of matrix products."""
    attention: float = Field(1.0, gt=0)
    """Factor of the time of attention kernels."""
    bytes: float = Field(1.0, gt=0)
    """Factor of the time of kernels that only move bytes: norms, sums, copies, the update."""
    host: float = Field(1.0, gt=0)
    """Factor of the time in which the host starts kernels."""
    link: float = Field(1.0, gt=0)
    """Factor of the time of messages and collectives, their latency included."""


class PlanConfig(Section):
    """Assumed devices and links: for the dry run, and for every `auto` that minimizes time."""

    ON_RESUME = OnResume.HARMLESS

    system: Literal["megapipe", "megatron-2021"] = "megapipe"
    """System whose kernels are planned, for comparisons with published figures. megatron-2021:
    attention that stores its scores, as Megatron-LM had before flash attention."""
    device: str | None = None
    """Device that --dry-run plans for: torch's name of it or a part of the name (H100,
    A100-SXM4-80GB); default: this machine's device. A real run reports on its real device."""
    device_gb: float | None = Field(None, gt=0)
    """Memory that a process may take, in GB (10^9 bytes): a plan may use all of it, so leave a few
    GB for fragmentation and the workspaces of kernels. Default: the memory of the device, known for
    common GPUs, of which a plan leaves 3% free."""
    gpus: int | None = Field(None, ge=1)
    """Number of processes that are planned without a launcher; parallel.dp follows from it.
    Default: the fewest that the layout needs. A run has the number that its launcher starts, and
    does not store this key."""
    peak_tflops: float | None = Field(None, gt=0)
    """Dense peak of one device in TFLOP/s, for plans and for the MFU of a run; default: known for
    common GPUs. Without it a run reports no MFU."""
    time_factor: float = Field(1.0, gt=0)
    """Factor of the time of all kernels. To calibrate plans, set the measured time of a run on one
    device, divided by its planned time."""
    factors: PlanFactors = PlanFactors()
    """Factors of planned times by category, in addition to `time_factor`: `gemm`, `attention`,
    `bytes`, `host`, `link`. `megapipe plan --calibrate RUN` fits them to a run on the device."""
    intra_node_gb_s: float | None = Field(None, gt=0)
    """Bandwidth from a process to processes of the same node, in GB/s. Default: that of the
    device's links, or 300, as over NVLink, if the links are not known."""
    inter_node_gb_s: float = Field(25.0, gt=0)
    """Bandwidth from a process to other nodes, in GB/s, as over a port of 200 Gbit/s."""
    links: Annotated[
        dict[str, Annotated[float, Field(gt=0)]],
        ExpectedText("GB/s above 0 between two processes, as in plan.links.0-3=2.5"),
    ] = Field(default_factory=dict)
    """Links that are slower than the others: plan.links.A-B is the bandwidth in GB/s between the
    processes A and B, in both directions. It counts for messages of the pipeline and for
    collectives of groups with both processes (`pipeline.rank_order`)."""
    rank_speeds: list[Annotated[float, Field(gt=0, le=1)]] | None = None
    """Speed of each process's device relative to the fastest one, from 0 to 1. Kernels of a device
    at 0.5 take twice as long. Without `pipeline.stage_layout`, its pipeline rank gets fewer layers.
    Default: all are equal."""
    link_latency_us: float = Field(20.0, ge=0)
    """Latency in microseconds: the time of a message or collective without bytes. Every further
    expert chunk adds such times (`experts.overlap_chunks`)."""
