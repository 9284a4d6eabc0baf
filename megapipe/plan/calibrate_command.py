"""The tables and the file of ``megapipe plan --calibrate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megapipe import text
from megapipe.config.plan import PlanConfig
from megapipe.config.plan_file import write_plan_file
from megapipe.errors import ConfigError
from megapipe.plan.calibrate import Calibration, TimeSample, calibrate
from megapipe.plan.measured_run import MeasuredRun
from megapipe.plan.memory_fit import milliseconds

ASSUMED = ("device", "peak_tflops", "time_factor", "intra_node_gb_s", "inter_node_gb_s")
"""Keys for which the factors were fitted, and which are written with them."""
LATENCY = "link_latency_us"
RARE = 0.01
"""Part of a step's time below which a factor is not worth a fit."""


def run_calibration(folders: Sequence[Path], keys: Sequence[str], output: Path | None) -> None:
    """Fit factors to runs, print them, and write them to `output`. `keys`: words of the section
    `plan`.

    Raises:
        ConfigError: other keys, runs that cannot be used, a factor that is out of range.
    """
    for word in keys:
        if not word.startswith("plan."):
            raise ConfigError(f"{word}: --calibrate takes only keys of the section plan")
    runs = [MeasuredRun.read(folder, keys) for folder in folders]
    found = calibrate(runs)
    print("\n".join([text.table(list(_factors(found)), left=1), ""]))
    print(text.table(list(_times(found.samples)), left=2))
    if output is not None:
        plan = runs[0].units.config.plan
        origin = f"fitted by megapipe plan --calibrate {' '.join(map(str, folders))}"
        write_plan_file(output, origin, written(plan, found))
        print(f"\nwritten to {output}: use it with megapipe plan --calibration {output}")


def written(plan: PlanConfig, found: Calibration) -> dict[str, object]:
    """Return the keys of the section that a calibration writes: the factors, and what they are
    factors of."""
    assumed = plan.model_dump(include={*ASSUMED, LATENCY}, exclude_none=True)
    return {**assumed, "factors": found.factors.model_dump()}


def _factors(found: Calibration) -> Iterator[list[str]]:
    yield ["category", "factor", "part of a step"]
    for name, factor in found.factors.model_dump().items():
        share = found.shares[name]
        remark = "" if share >= RARE else " (hardly depends on it)"
        yield [name, f"{factor:.3g}", f"{share:.1%}{remark}"]


def _times(samples: Sequence[TimeSample]) -> Iterator[list[str]]:
    yield ["run", "operation", "measured ms", "planned before", "after", "ratio before", "after"]
    for each in samples:
        stage_of = "step" if each.which is None else f"{each.which[1]} of stage {each.which[0]}"
        ratios = (f"{planned / each.measured:.3f}" for planned in (each.before, each.after))
        times = map(milliseconds, (each.measured, each.before, each.after))
        yield [each.run, stage_of, *times, *ratios]
