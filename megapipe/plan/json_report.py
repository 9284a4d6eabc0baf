"""The plan of a run as JSON: the figures of the text, in bytes and seconds."""

from typing import Any

from megapipe.layout.speeds import Speeds
from megapipe.plan.figures import PlanFigures
from megapipe.plan.memory_fit import MemoryDemand, fits
from megapipe.plan.report import held_by_process

ASSUMED = (
    *("time_factor", "factors", "intra_node_gb_s", "inter_node_gb_s", "link_latency_us"),
    *("links", "rank_speeds"),
)
"""Keys of the section `plan` that a plan repeats."""


def as_json(figures: PlanFigures) -> dict[str, Any]:
    """Return a plan as one object for :func:`json.dumps`; unknown figures are None."""
    config, layout, timeline = figures.units.config, figures.units.layout, figures.timeline
    return {
        "run": config.run.name,
        "processes": layout.world,
        "mesh": {name: getattr(layout, name) for name in ("pp", "dp", "cp", "tp", "ep", "etp")},
        "parameters": {
            "total": layout.model.num_parameters(),
            "active": layout.model.active_parameters(),
            "by_pipeline_rank": held_by_process(config, layout, layout.schedule),
        },
        "tokens_per_step": config.train.tokens_per_step,
        "microbatches": layout.microbatches,
        "schedule": layout.run_schedule.name,
        "bubble": max(0.0, float(timeline.bubble_makespan)),
        "memory": _memory(figures.memory, figures.speeds),
        "time": None
        if figures.time is None
        else {
            **figures.time._asdict(),
            "exposed_gather": float(timeline.exposed_gather),
            "exposed_reduce": float(timeline.exposed_reduce),
        },
        "assumed": {
            "device": figures.speeds.name,
            "peak_tflops": figures.speeds.tflops,
            "ranks_per_node": config.parallel.ranks_per_node,
            **config.plan.model_dump(include=set(ASSUMED)),
        },
        "wire_bytes": {axis: round(size) for axis, size in sorted(figures.wire.items())},
    }


def _memory(found: MemoryDemand, speeds: Speeds) -> dict[str, Any]:
    memory_gb = speeds.memory_gb
    return {
        "fits": fits(found.most.total, speeds),
        "device_bytes": None if memory_gb is None else round(memory_gb * 1e9),
        "margin_bytes": round(speeds.margin_gb * 1e9),
        "by_pipeline_rank": [
            {"total": each.total, "device": each.device, "host": each.host}
            for each in found.processes
        ],
    }
