"""Update rules over flat shards: what a step does to master weights and optimizer state.

Elementwise rules do not care how parameters are cut. LARS and LAMB need norms of whole parameters,
and Muon needs whole matrices: they communicate, and give what a single process would.
"""

from __future__ import annotations

from megapipe.config import OptimizerConfig
from megapipe.distributed.mesh import Axis
from megapipe.ops.adam import AdamKernel, torch_adam
from megapipe.optim.rules.elementwise import SGD, Adam, AdamW, Lion
from megapipe.optim.rules.layerwise import LAMB, LARS
from megapipe.optim.rules.muon import Muon
from megapipe.optim.rules.rule import Rule

__all__ = ["Rule", "build_rule"]


def build_rule(config: OptimizerConfig, tp: Axis, kernel: AdamKernel = torch_adam) -> Rule:
    """The rule that `optimizer.rule` names; `tp` are the ranks that hold parts of one tensor.

    `kernel` does the step of adamw and adam.
    """
    match config.rule:
        case "adamw":
            return AdamW(config, kernel)
        case "adam":
            return Adam(config, kernel)
        case "sgd":
            return SGD(config)
        case "lion":
            return Lion(config)
        case "lars":
            return LARS(config, tp)
        case "lamb":
            return LAMB(config, tp)
        case "muon":
            return Muon(config, tp, kernel)
