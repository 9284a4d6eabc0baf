"""The section `activations` of the configuration: what layers save until the backward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.section import (
    SEARCHED,
    Needs,
    OnResume,
    Section,
    needs,
)

ActivationPolicy = Literal["keep", "selective", "full", "stage"]
StoredModule = Literal["norm", "attention", "mlp_activation"]
ActivationModule = Literal[StoredModule, "experts"]

NOT_BY_STAGE = Needs(
    "an activations.policy other than stage",
    lambda config: config.activations.policies != {"stage"},
)
BY_BLOCK = Needs(
    "activations.policy=selective or full, or activations.offload",
    lambda config: bool(
        config.activations.policies & {"selective", "full"} or config.activations.offload
    ),
)


class ActivationsConfig(Section):
    """Activations that layers save until the backward; the other activations are recomputed, or
    fetched from host memory. Results are bitwise equal, except with a recomputed norm that gives
    its input more than one gradient (the CPU's rmsnorm)."""

    ON_RESUME = OnResume.HARMLESS

    policy: Annotated[ActivationPolicy | list[ActivationPolicy], SEARCHED] = "keep"
    """Recomputation in the backward. keep: nothing, all that autograd saves stays; selective:
    `modules` (Korthikanti et al., 2205.05198); full: each block, from its input; stage: the whole
    stage, from its input. One value for all stages, or a list with one for each virtual stage.
    auto: keep, selective or full, whichever makes the fastest layout that fits (megapipe plan)."""
    modules: Annotated[list[ActivationModule], needs("activations.policy", "selective")] = Field(
        ["norm", "attention", "mlp_activation"]
    )
    """Modules that policy selective recomputes. norm: both norms; attention: everything between the
    projections; mlp_activation: the function between the matrices; experts: router, dispatch and up
    projection of routed experts, with saved choices. No other linear layer is recomputed."""
    keep_attention: bool = False
    """Whether recomputed blocks, modules and stages save attention's output and LSE (a number per
    head and position), so that attention itself is not recomputed; worth its memory for long
    sequences (DistFlashAttn, Li et al., 2310.03294)."""
    num_blocks: Annotated[int | list[int] | None, NOT_BY_STAGE, BY_BLOCK] = None
    """Number of blocks, counted from a stage's first, to which `policy` and `offload` apply; other
    blocks save all activations. Default: all. A list has one number for each virtual stage."""
    blocks_per_recompute: Annotated[int, needs("activations.policy", "full")] = Field(1, ge=1)
    """With policy=full: number of consecutive blocks that are recomputed together, from the input
    of the first one."""
    offload: Annotated[list[StoredModule], NOT_BY_STAGE] = Field([])
    """Modules whose saved activations are moved to host memory until the backward; of a recomputed
    module only the inputs are saved. norm includes the input of a block; under policy=full a block
    saves nothing else. Stages that a schedule recomputes as a whole are not offloaded."""

    @property
    def policies(self) -> set[ActivationPolicy]:
        """Set of the policies of all stages."""
        return {self.policy} if isinstance(self.policy, str) else {*self.policy}
