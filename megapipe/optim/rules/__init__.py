"""Update rules over flat shards: what a step does to master weights and optimizer state.

Elementwise rules do not depend on how parameters are sharded. LARS and LAMB need norms of whole
parameters, and Muon needs whole matrices. They communicate, so the result does not depend on the
sharding either.
"""

from __future__ import annotations

from megapipe.config.config import OptimizerConfig
from megapipe.config.update_rules import ARGUMENTS, Declaration, RuleOptions, user_rule
from megapipe.ops.adam import AdamKernel, torch_adam
from megapipe.optim.rules.adaptive import AdaBelief, Adam3, NAdamW, RMSprop
from megapipe.optim.rules.elementwise import SGD, Adam, AdamW, Elementwise, Lion
from megapipe.optim.rules.layerwise import LAMB, LARS
from megapipe.optim.rules.muon import Muon
from megapipe.optim.rules.rule import Rule, StateSlice

__all__ = ["Declaration", "Elementwise", "Rule", "RuleOptions", "StateSlice", "build_rule"]

_REGISTERED: dict[str, type[Rule]] = {
    rule.declaration.name: rule
    for rule in (AdamW, Adam, SGD, Lion, Muon, LARS, LAMB, RMSprop, NAdamW, AdaBelief, Adam3)
}


def build_rule(config: OptimizerConfig, kernel: AdamKernel = torch_adam) -> Rule:
    """Make the rule that `optimizer.rule` names.

    `kernel` computes Adam steps. Raises :class:`ConfigError` for an unusable user-defined class.
    """
    if config.rule in _REGISTERED:
        return _REGISTERED[config.rule](config, kernel)
    arguments = {"config": config, "kernel": kernel}
    rule: Rule = user_rule(config.rule).call(arguments, ARGUMENTS)
    return rule
