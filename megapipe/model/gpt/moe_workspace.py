"""Memory that the half of a block with a mixture of experts takes within an operation. No torch.

Each step is that of :mod:`megapipe.model.gpt.mixture`, and around it of the block: a norm, experts
and an MLP beside them, and the sum with the residual.
"""

from __future__ import annotations

from megapipe.model.gpt.moe import GATES
from megapipe.model.gpt.moe_experts_workspace import ExpertsWorkspace
from megapipe.model.gpt.moe_memory import beside_experts_saved, tokens_of
from megapipe.model.gpt.saved import choices, share_gradient
from megapipe.model.gpt.workspace_parts import Parts
from megapipe.model.tape import Tape


class MixtureWorkspace:
    """Tensors that the half makes and frees on a tape. Of its parts experts alone may be run
    `again` by themselves; none is put away."""

    def __init__(self, parts: Parts, layer: int) -> None:
        self.parts = parts
        self.experts = ExpertsWorkspace(parts, layer)
        model, sizes = parts.model, parts.sizes
        self.beside = sum(size for _, size in beside_experts_saved(model, sizes))
        """The part that is kept of the MLP beside the experts."""
        self.choice = sum(tensor.bytes for tensor in choices(model, sizes, [layer]))
        """The choice, which is kept for a second run and taken over by it."""
        self.gates = GATES[model.moe.shared_gate]
        self.gate = tokens_of(sizes) * self.gates * parts.size
        shared = model.moe.shared or 0
        self.inner = sizes.sequence * sizes.rows * shared // sizes.tp * parts.size
        """Of the shared MLP; 0 where there is none."""
        self.wide = self.inner * (2 if model.gated else 1)

    @property
    def queues_gradient(self) -> bool:
        """Whether the gradient of the output waits for W, with the input of the shared MLP's second
        product."""
        return self.inner > 0 and not self.gates

    def forward(
        self, tape: Tape, *, keep: bool, again: bool, has_value: bool, chosen: bool
    ) -> None:
        """From the sum with attention's output to the block's output. Experts have been `chosen` in
        a first run, or their choice is kept for a second."""
        parts = self.parts
        parts.normalise(tape)
        tape.drop(self.choice if chosen else 0)
        has_output = self._mix(tape, keep, again, has_value or self.gates > 0)
        parts.dropped(tape, keep, given=has_output)
        parts.post_norm(tape, keep)
        if not keep:
            tape.drop(parts.local, parts.statistics)
        tape.take(parts.local)  # the sum
        if has_output or parts.mask:
            tape.drop(parts.local)
        if not keep or parts.model.parallel_residual:
            tape.drop(parts.local)  # the first sum

    def _mix(self, tape: Tape, keep: bool, again: bool, has_value: bool) -> bool:
        """Returns whether there is an output, which comes on top."""
        local, start = self.parts.local, tape.now
        self.experts.forward(tape, keep=keep and not again, has_value=has_value)
        has_output = has_value or self.inner > 0
        if self.inner:
            whole = self.parts.whole if self.parts.split > 1 else 0
            tape.take(whole, self.wide)
            tape.drop(whole)
            tape.take(self.inner)
            if has_value:
                self.parts.row_product(tape)
            if not keep:
                tape.drop(self.inner, self.wide)
            tape.take(2 * self.gate)
            tape.take(self.gates * local)
            tape.take(local)
        stays = self.choice if again or not keep else self.experts.saved
        stays += keep * self.beside
        tape.drop(tape.now - start - stays - has_output * local)
        return has_output

    def backward(
        self, tape: Tape, at_once: bool, *, again: bool, puts_away: bool, grad_stays: bool
    ) -> None:
        """From the gradient of the block's output to that of the sum, or only of the norm's input
        where attention takes the same; this is let go of where the stage `puts_away` its own."""
        parts, local = self.parts, self.parts.local
        parts.dropped_backward(tape)
        self._mix_backward(tape, at_once, again)
        if at_once:
            tape.drop(local)  # its input
        if parts.own:
            self._let_go_of_gradient(tape, at_once)
        parts.norm_backward(tape)
        if parts.model.parallel_residual:
            tape.drop(local if puts_away else 0)
            return
        tape.drop(local)
        tape.take(local)  # the sum
        tape.drop(local)
        if grad_stays:
            return
        if parts.own:
            tape.drop(local)
        else:
            self._let_go_of_gradient(tape, at_once)

    def _let_go_of_gradient(self, tape: Tape, at_once: bool) -> None:
        if not self.queues_gradient or (at_once and tape.put_off is None):
            tape.drop(self.parts.local)
        elif at_once:
            assert tape.put_off is not None
            tape.put_off.frees += self.parts.local

    def _mix_backward(self, tape: Tape, at_once: bool, again: bool) -> None:
        """Leaves the gradient of the norm's output on top."""
        parts, local = self.parts, self.parts.local
        if self.gates:
            for _ in range(self.gates):
                tape.take(2 * local)  # of a coefficient, before it is summed, and of a branch
                tape.drop(local)
            tape.drop(self.gates * local)  # outputs of the branches
            tape.take(self.gate, local)
            tape.drop(self.gate * (1 + at_once))
        if self.inner:
            freed = self.inner + (local if self.gates else 0)
            parts.row_backward(tape, self.inner, "shared.down", at_once, freed)
            tape.take(self.wide)
            tape.drop(self.inner, self.wide)
            parts.column_backward(tape, self.wide, "shared.up", at_once, input_stays=True)
            if self.gates:
                tape.take(local)
                tape.drop(2 * local)
        if again:
            tape.drop(self.choice)
            self.experts.forward(tape, keep=True, has_value=False)
        self.experts.backward(tape, at_once)
        if self.gates == 2:
            tape.drop(local)
        if self.inner:
            tape.take(local)
            tape.drop(2 * local)

    def weight_grads(self, tape: Tape) -> None:
        """In W: each frees what waited for it."""
        parts, local = self.parts, self.parts.local
        gathered = 2 * parts.whole if parts.split > 1 else 0
        if self.inner:
            tape.drop(self.gate)
            tape.pass_by(gathered, parts.product("shared.down"))
            tape.drop(self.inner, local if self.gates or not share_gradient(parts.model) else 0)
            tape.pass_by(gathered, parts.product("shared.up"))
            tape.drop(self.wide)
        self.experts.weight_grads(tape)
        tape.drop(local)
