"""The most that an operation holds while it runs.

Between operations a stage holds what :mod:`megapipe.model.gpt.saved` lists. Within one come the
gradients on their way through the graph, what is run again, and what kernels make and let go of.
Here each allocation of a piece's way through a stage is made and freed on a tape
(:class:`~megapipe.model.tape.Tape`), in the order of the engine, so the highest mark is what the
allocator must have had.

The kernels are torch's own. Left out are what they use inside (flash attention's on a GPU), a few
numbers per token of the loss, gradients of vectors, and the wait between a collective's members.
Gradients that slices leave to each other are counted between operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from megapipe.layers.policy import BlockPolicy, Span
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.moe_workspace import MixtureWorkspace
from megapipe.model.gpt.saved import share_gradient
from megapipe.model.gpt.workspace_parts import Parts
from megapipe.model.interface import Peaks, Sizes
from megapipe.model.partition import StageSpec
from megapipe.model.tape import Tape


def peaks(
    model: ModelConfig,
    stage: StageSpec,
    spans: Sequence[Span],
    sizes: Sizes,
    *,
    most_tokens: int,
    again: bool = False,
) -> Peaks:
    """The peaks of a piece; `again`: the stage keeps its input alone and is run again as a whole.

    `most_tokens` is ``kernels.loss_chunk``.
    """
    way = _Way(model, stage, spans, sizes, most_tokens)
    return Peaks(
        F=way.forward(keep=not again),
        R=way.forward(keep=True, graph_only=True),
        I=way.backward(again=again, at_once=False),
        B=way.backward(again=again, at_once=True),
        W=way.weight_grads(),
    )


class _Way(Parts):
    """The memory, in bytes, of one piece's way through a stage."""

    @cached_property
    def mixtures(self) -> dict[int, MixtureWorkspace]:
        """Of layers with experts."""
        layers = filter(self.model.moe.has_experts, self.stage.layers)
        return {layer: MixtureWorkspace(self, layer) for layer in layers}

    # forward

    def forward(self, *, keep: bool, graph_only: bool = False) -> int:
        """The most bytes of a forward; with `keep` it builds a graph, with `graph_only` nothing
        else."""
        layers = iter(self.stage.layers)
        tape = Tape()
        if not self.stage.embedding:
            tape.take(self.local)
        else:
            self._embed(tape, keep)
        is_held = True  # what the first block is given, until all have run
        for blocks, policy in self.spans:
            for i in range(blocks):
                layer = next(layers)
                in_graph = keep and "block" not in policy.recompute
                is_last = layer == self.stage.layers[-1]
                has_value = self.stage.head or not (graph_only and is_last)
                kept = policy.keeps_attention
                self._block_forward(
                    tape, layer, policy, keep=in_graph, kept=kept, has_value=has_value
                )
                away = policy.offloads_input and not (in_graph and self._holds_input(layer))
                if (away or not (in_graph or (keep and i == 0))) and not is_held:
                    tape.drop(self.local)  # the block's input
                is_held = False
        if self.stage.head:
            self._loss_forward(tape, keep)
        return tape.peak

    def _holds_input(self, layer: int) -> bool:
        """Whether a mixture's norm keeps the input of its block, which is never put away."""
        return self.model.parallel_residual and layer in self.mixtures

    def _embed(self, tape: Tape, keep: bool) -> None:
        self.row_product(tape)
        for changes in (self.model.embedding_scale is not None, self.model.positions == "learned"):
            if changes:
                tape.take(self.local)
                tape.drop(self.local)
        if self.model.embedding_norm:
            self.normalise(tape)
            if not keep:
                tape.drop(self.local, self.statistics)
        self.dropped(tape, keep)

    def _block_forward(
        self,
        tape: Tape,
        layer: int,
        policy: BlockPolicy,
        *,
        keep: bool,
        kept: bool = False,
        known: bool = False,
        has_value: bool = True,
        chosen: bool = False,
    ) -> None:
        """The block's input is held before and after; its output comes on top. Results of attention
        are `kept` for a second run, or `known` from a first, in which experts have been `chosen`.
        Where nothing reads the output it has no value: the last product is left out."""
        has_product = has_value or self.model.post_norms
        again, away = (policy.recompute, policy.offload) if keep else (frozenset(), frozenset())
        stays = {module: keep and module not in again for module in self.saved}
        self._norm_and_column(tape, self.qkv, stays["norm"], "norm" in away)
        if self.model.qk_norm:
            self.norm_heads(tape, 2)
        tape.pass_by(self.turned)
        if known:
            tape.drop(self.results)  # they are taken over
        let_go = self._attend(tape, stays["attention"])
        if kept and not stays["attention"]:
            let_go -= self.results
        self.row_product(tape)
        tape.drop(let_go)
        self.dropped(tape, stays["attention"])
        if stays["attention"] and "attention" in away:  # to the host when the segment is over
            tape.drop(self.copies, self.queries)
        self.post_norm(tape, keep)
        tape.take(self.local)  # the sum
        tape.drop(self.local)
        if layer in self.mixtures:
            rerun = "experts" in again
            self.mixtures[layer].forward(
                tape, keep=keep, again=rerun, has_value=has_product, chosen=chosen
            )
        else:
            self._mlp(tape, keep, stays, away, has_product)
        holds_qkv = keep and "attention" not in away
        if not (holds_qkv and (self.keeps_qkv or "attention" in again)):
            tape.drop(self.qkv)

    def _mlp(
        self,
        tape: Tape,
        keep: bool,
        stays: Mapping[str, bool],
        away: Collection[str],
        has_product: bool,
    ) -> None:
        """From the sum with attention's output to the block's output."""
        self._norm_and_column(tape, self.up, stays["norm"], "norm" in away)
        tape.take(self.inner)
        if has_product:
            self.row_product(tape)
        if not stays["mlp_activation"]:
            tape.drop(self.inner)
        self.dropped(tape, stays["mlp_activation"], given=has_product)
        if stays["mlp_activation"] and "mlp_activation" in away:
            tape.drop(self.inner)
        self.post_norm(tape, keep)
        tape.take(self.local)  # the sum
        if has_product or self.mask:
            tape.drop(self.local)
        if not keep or "norm" in away or self.model.parallel_residual:
            tape.drop(self.local)  # the first sum
        if not (keep and "mlp_activation" not in away):
            tape.drop(self.up)

    def _attend(self, tape: Tape, stays: bool) -> int:
        """From queries, keys and values to the input of the output layer; returns the bytes freed
        after that layer."""
        let_go, saved = 0, self.attended
        if self.unfused is not None:
            tape.take(self.unfused.copies)
            tape.pass_by(self.unfused.forward if stays else self.unfused.without_graph)
            tape.take(self.queries)  # its output, by heads
            let_go = self.unfused.copies + self.queries
            saved *= stays
        if self.sizes.ulysses > 1:
            let_go = self._attend_to_some_heads(tape, saved)
        else:
            tape.take(saved, self.queries)
            tape.pass_by(self.explicit.forward + self.sizes.exchanging[0])
        return let_go if stays else let_go + saved + self.queries

    def _attend_to_some_heads(self, tape: Tape, saved: int) -> int:
        """With exchanges before and after, each of which takes what is sent, what comes, and the
        result; returns the bytes of copies that go after the output layer."""
        tape.take(self.own_heads)
        tape.pass_by(3 * self.queries)
        tape.take(saved)
        tape.pass_by(self.sizes.exchanging[0])
        tape.pass_by(3 * self.queries)
        tape.take(self.queries)
        return self.own_heads

    def _norm_and_column(self, tape: Tape, out: int, stays: bool, away: bool) -> None:
        self.normalise(tape)
        if self.split > 1:
            tape.take(self.whole)
        tape.take(out)
        if self.split > 1:
            tape.drop(self.whole)
        if not stays:
            tape.drop(self.local, self.statistics)
        elif away:
            tape.drop(self.local)

    def _loss_forward(self, tape: Tape, keep: bool) -> None:
        self.normalise(tape)
        if self.most_tokens:
            if not keep:
                tape.pass_by(self.chunk, self.whole if self.split > 1 else 0)
            return
        if self.split > 1:
            tape.take(self.whole)
        logits = self.tokens * self.logits
        tape.take(logits * self.size)
        if self.split > 1:
            tape.drop(self.whole)
        tape.take(logits * self.high)

    # backward

    def backward(self, *, again: bool, at_once: bool) -> int:
        """The most bytes of I, or of B with `at_once`; `again`: the stage first recomputes."""
        tape = Tape(0 if self.stage.head else self.local)
        if again:
            # the input that it keeps is the one that it begins with
            tape.pass_by(self.forward(keep=True, graph_only=True))
            tape.now += self.held.device
        else:
            tape.take(self.held.device)
        if self.stage.head:
            self._loss_backward(tape, at_once)
        is_first_held = not self.stage.embedding
        layers = list(self.stage.layers)
        for index, (blocks, policy) in reversed(list(enumerate(self.spans))):
            own = [layers.pop() for _ in range(blocks)][::-1]
            entrance = is_first_held and index == 0
            message = not self.stage.head and index == len(self.spans) - 1  # held by the caller
            if "block" in policy.recompute:
                self._unit_again(tape, own, policy, entrance, at_once, message)
                continue
            for i, layer in reversed(list(enumerate(own))):
                stays = message and i == blocks - 1
                is_input = entrance and i == 0
                self._block_backward(tape, layer, policy, is_input, at_once, grad_stays=stays)
        if self.stage.embedding:
            if self.model.dropout:
                tape.take(self.local)
                tape.drop(self.local, self.mask)
            if at_once:
                self.embedding_gradient(tape)
        self.compute_put_off(tape)
        return tape.peak

    def _unit_again(
        self,
        tape: Tape,
        layers: Sequence[int],
        policy: BlockPolicy,
        entrance: bool,
        at_once: bool,
        grad_stays: bool,
    ) -> None:
        """The blocks are built again from the input of the first, which is let go of last."""
        if policy.offload:
            tape.take(self.local)
        plain, known = BlockPolicy(), policy.keeps_attention
        for layer in layers:
            value = layer != layers[-1]
            self._block_forward(
                tape, layer, plain, keep=True, known=known, has_value=value, chosen=True
            )
        tape.drop(self.local)  # the output
        for layer in reversed(layers):
            # the gradient that the run is given is let go of last
            is_input, stays = layer == layers[0], layer == layers[-1]
            self._block_backward(tape, layer, plain, is_input, at_once, grad_stays=stays)
        last = self.mixtures.get(layers[-1])
        waits = last is None or last.queues_gradient
        if (at_once or self.own or not waits) and not grad_stays:
            tape.drop(self.local)
        if not entrance or policy.offload:
            tape.drop(self.local)

    def _block_backward(
        self,
        tape: Tape,
        layer: int,
        policy: BlockPolicy,
        input_stays: bool,
        at_once: bool,
        *,
        grad_stays: bool,
    ) -> None:
        """From the gradient of its output, [s(/tp), b, h], to that of its input."""
        self.post_norm_backward(tape)
        parallel = self.model.parallel_residual
        if layer in self.mixtures:
            again, away = "experts" in policy.recompute, policy.offloads_input
            self.mixtures[layer].backward(
                tape, at_once, again=again, puts_away=away, grad_stays=grad_stays
            )
        else:
            self._narrow_backward(tape, policy, at_once)
            self._widen_backward(
                tape, policy, self.up, "up", at_once, grad_stays=grad_stays, adds=not parallel
            )
        self.post_norm_backward(tape)
        self._attention_backward(tape, policy, at_once)
        tape.pass_by(self.turned)
        stays = input_stays and "norm" not in policy.offload
        self._widen_backward(tape, policy, self.qkv, "qkv", at_once, input_stays=stays)
        if parallel:
            tape.drop(self.local)  # what came through the MLP
            if share_gradient(self.model) and at_once and grad_stays:
                tape.take(self.local)

    def _narrow_backward(self, tape: Tape, policy: BlockPolicy, at_once: bool) -> None:
        again = "mlp_activation" in policy.recompute
        away = "mlp_activation" in policy.offload
        if again:
            tape.take(self.up if away else 0, self.inner, self.mask)
            tape.pass_by(self.local if self.mask else 0)
        elif away:
            tape.take(self.inner)
        given = self._given_again(again, at_once)
        self.dropped_backward(tape)
        self.row_backward(tape, self.inner, "down", at_once, self.inner + self.own - given)
        if away and not again:
            tape.take(self.up)
        tape.take(self.up)
        tape.drop(self.inner, self.up, given)

    def _given_again(self, again: bool, at_once: bool) -> int:
        """The gradient that a second run is given, where that is a branch's own: let go of last."""
        return self.own if again and at_once and not self.mask else 0

    def _attention_backward(self, tape: Tape, policy: BlockPolicy, at_once: bool) -> None:
        again, away = "attention" in policy.recompute, "attention" in policy.offload
        kept, saved = self.qkv if again or self.keeps_qkv else 0, self.attended
        if again:
            if policy.keeps_attention:
                tape.drop(self.results)  # they are taken over
            tape.take(kept if away else 0)
            if self.unfused is not None:
                tape.pass_by(self.unfused.copies + self.unfused.forward)
            tape.take(saved, self.queries, self.mask)
            tape.pass_by(self.local if self.mask else 0)
        elif away:
            tape.take(self.queries)
        waits = self.split > 1  # the input of the output layer, with its weight gradient
        output = self.queries if self.needs_output and at_once and not waits else 0
        given = self._given_again(again, at_once)
        self.dropped_backward(tape)
        freed = self.queries + self.own - output - given
        self.row_backward(tape, self.queries, "out", at_once, freed)
        if away and not again:
            if self.unfused is not None:
                saved -= self.copies
                tape.pass_by(kept, self.unfused.from_host)
            tape.take(kept, saved - self.attended + self.copies)
        elif self.unfused is not None:
            tape.pass_by(self.unfused.backward)
        tape.take(self.qkv)  # three gradients
        tape.pass_by(self.explicit.backward + self.sizes.exchanging[1])
        tape.drop(self.queries, saved, output)
        if self.model.qk_norm:
            self.norm_heads(tape, 4)
        tape.drop(0 if again else kept)
        tape.take(self.qkv)  # joined
        tape.drop(self.qkv, given, kept if again else 0)

    def _widen_backward(
        self,
        tape: Tape,
        policy: BlockPolicy,
        grad: int,
        matrix: str,
        at_once: bool,
        *,
        input_stays: bool = False,
        grad_stays: bool = False,
        adds: bool = True,
    ) -> None:
        """A column-parallel layer, the norm before it, and the sum with the residual's gradient,
        unless another branch has to add its own (`adds`)."""
        again, away = "norm" in policy.recompute, "norm" in policy.offload
        if away:
            tape.take(self.local)  # what is run again from, or the linear layer's input
        if again:
            self.normalise(tape)
        # a gradient that a second run was given is let go of last
        self.column_backward(tape, 0 if again else grad, matrix, at_once)
        if away and not again:
            tape.take(self.local)
        self.norm_backward(tape)
        if again and at_once:
            tape.drop(grad)
        if not adds:
            tape.drop(self.local if away else 0)
            return
        if not input_stays:
            tape.drop(self.local)
        tape.take(self.local)  # the sum
        tape.drop(self.local)
        if grad_stays:
            return
        if self.own or (at_once and tape.put_off is None):
            tape.drop(self.local)  # the residual's, which no queue holds
        elif at_once:
            assert tape.put_off is not None
            tape.put_off.frees += self.local

    def _loss_backward(self, tape: Tape, at_once: bool) -> None:
        if self.most_tokens:
            gathered = self.whole if self.split > 1 else 0
            tape.take(gathered, self.whole)
            tape.pass_by(self.chunk, self.product("head"))
            self.scatter(tape)
            tape.drop(gathered, self.local)  # the norm's output
        else:
            logits = self.tokens * self.logits
            narrow = self.size < self.high
            if narrow:
                tape.take(logits * self.size)
                tape.drop(logits * self.high)
            tape.drop(self.tokens * (self.high + 8 + 1 + 1))  # a few numbers per token
            if self.model.logit_softcap is not None:
                tape.take(logits * self.size)
                tape.drop(2 * logits * self.size)
                tape.take(logits * self.size)
            self.column_backward(tape, logits * self.size, "head", at_once)
        self.norm_backward(tape)
        tape.drop(self.local)

    # weight gradients

    def weight_grads(self) -> int:
        """The most bytes of W: each weight gradient in turn frees what it waited with."""
        tape = Tape(self.held.queued)
        gathered = self.whole if self.split > 1 else 0
        if self.stage.head and not self.most_tokens:
            tape.pass_by(gathered, self.product("head"))
            tape.drop(self.local, self.tokens * self.logits * self.size)
        for layer in reversed(self.stage.layers):
            mlp = [("down", self.inner, self.local), ("up", self.local, self.up)]
            if layer in self.mixtures:
                self.mixtures[layer].weight_grads(tape)
                mlp.clear()
            for matrix, x, grad in (
                *mlp,
                ("out", self.queries, self.local),
                ("qkv", self.local, self.qkv),
            ):
                # beside it the next task's gather, which has begun (kernels.overlap)
                tape.pass_by(2 * gathered, self.product(matrix))
                tape.drop(x, 0 if matrix == "out" and share_gradient(self.model) else grad)
        if self.stage.embedding:
            self.embedding_gradient(tape)
        return tape.peak
