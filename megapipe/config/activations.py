"""The section `activations` of the configuration: what layers keep until the backward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.section import Needs, OnResume, Section, needs

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
    """Activations that layers keep until the backward; the rest is recomputed, or fetched from host
    memory. Results are the same (bitwise, unless a norm that is recomputed hands its input more
    than one gradient, as the CPU's rmsnorm does)."""

    ON_RESUME = OnResume.HARMLESS

    policy: ActivationPolicy | list[ActivationPolicy] = "keep"
    """keep: all that autograd saves; selective: recompute `modules` in the backward (Korthikanti
    et al., 2205.05198); full: recompute each block from its input; stage: recompute the whole stage
    from its input. One for all stages, or a list with one for each virtual stage."""
    modules: Annotated[list[ActivationModule], needs("activations.policy", "selective")] = Field(
        ["norm", "attention", "mlp_activation"]
    )
    """selective: what is recomputed. norm: both norms; attention: all between the projections;
    mlp_activation: the function between the matrices. The linear layers are not recomputed, but for
    experts: of these a layer keeps its input and the choice, and rows are dispatched and widened a
    second time."""
    keep_attention: bool = False
    """Whether blocks, modules and stages that are recomputed keep the results of attention (its
    output, and a number per head and position) and do not attend a second time; worth its memory
    where sequences are long (DistFlashAttn, Li et al., 2310.03294)."""
    blocks: Annotated[int | list[int] | None, NOT_BY_STAGE, BY_BLOCK] = None
    """Blocks of a stage, counted from its first, that `policy` and `offload` apply to; the others
    keep. Default: all. One number, or a list with one for each virtual stage."""
    span: Annotated[int, needs("activations.policy", "full")] = Field(1, ge=1)
    """full: consecutive blocks that are recomputed together, from the input of the first."""
    offload: Annotated[list[StoredModule], NOT_BY_STAGE] = Field([])
    """Modules whose activations wait in host memory for the backward, whether they are all kept or
    recomputed from an input. norm includes the input of a block, all that one keeps under full.
    Stages that are recomputed as a whole, as some schedules have them, keep what they keep."""

    @property
    def policies(self) -> set[ActivationPolicy]:
        """The policies that stages have."""
        return {self.policy} if isinstance(self.policy, str) else {*self.policy}
