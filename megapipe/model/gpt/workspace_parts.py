"""Memory that the steps of a piece's way through a stage take: sizes, and their parts that forward
and backward share."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.dtypes import DTYPE_BYTES
from megapipe.layers.policy import BlockPolicy, Span, loss_chunk, padded_vocabulary
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.explicit import explicit_of
from megapipe.model.gpt.parameters import known
from megapipe.model.gpt.saved import Widths, norm_tensors, results, saved_tensors, stage_held
from megapipe.model.gpt.unfused import Unfused
from megapipe.model.interface import Sizes
from megapipe.model.partition import StageSpec
from megapipe.model.tape import PutOff, Tape


class Parts:
    """Bytes of one piece at a stage, and what its parts make and free on a tape."""

    def __init__(
        self,
        model: ModelConfig,
        stage: StageSpec,
        spans: Sequence[Span],
        sizes: Sizes,
        most_tokens: int,
    ) -> None:
        self.model, self.stage, self.spans, self.sizes = model, stage, spans, sizes
        w, size = Widths.of(model, sizes), DTYPE_BYTES[model.dtype]
        self.size, self.high = size, max(size, 4)
        self.tokens = w.tokens
        self.split = sizes.tp if sizes.sequence_parallel else 1
        self.local = w.local_tokens * model.hidden * size
        """Hidden states [s(/tp), b, h]."""
        self.whole = w.tokens * model.hidden * size
        """Hidden states [s, b, h]."""
        self.queries, self.keys = w.tokens * w.queries * size, w.tokens * w.keys * size
        self.qkv = self.queries + 2 * self.keys
        self.up, self.inner = w.tokens * w.up * size, w.tokens * w.ffn * size
        self.turned = 0
        """Bytes that are copied at once to be rotated."""
        if model.positions == "rotary":
            of = self.queries if model.qk_norm else self.queries + self.keys
            self.turned = of * model.rotary_width // known(model.head_dim)
        self.saved = {
            module: [t for t in saved_tensors(model, sizes) if t.module == module]
            for module in ("norm", "attention", "mlp_activation")
        }
        self.statistics = sum(t.bytes for t in norm_tensors(model, sizes)) - 2 * self.local
        self.explicit = explicit_of(model, sizes)
        self.mask = sum(t.bytes for t in self.saved["mlp_activation"] if t.name == "residual mask")
        self.own = self.local if self.mask or model.post_norms else 0
        """The gradient of a branch, where it is not the residual's."""
        self.attended = sum(
            t.bytes
            for t in self.saved["attention"]
            if not t.is_input and t.name not in ("output", "residual mask")
        )
        """Bytes that attention itself saves: the logsumexp, copies, a mask."""
        self.copies = sum(
            t.bytes
            for t in self.saved["attention"]
            if t.has_grad and not t.is_input and t.name not in ("output", "residual mask")
        )
        """The part of `attended` that is offloaded with the attention."""
        keeping = BlockPolicy(keeps_attention=True)
        self.results = sum(t.bytes for t in results(self.saved["attention"], keeping))
        """The part of attention's results that is kept where it is not run again with a block."""
        self.unfused = Unfused.of(model, sizes, self.attended)
        self.needs_output = self.unfused is None and sizes.ulysses == 1
        """Whether the backward of attention reads the input of the output layer."""
        self.own_heads = 0
        """Queries and keys after their norms, or copies of these and values from between each
        other's heads."""
        if model.qk_norm:
            self.own_heads = self.queries + self.keys
        elif model.kv_heads != model.heads and w.groups > 1:
            self.own_heads = self.qkv
        self.keeps_qkv = self.saved["attention"][0].is_saved
        hidden, tp = model.hidden, sizes.tp
        self.matrices = {
            "qkv": (w.queries + 2 * w.keys) * hidden,
            "out": w.queries * hidden,
            "up": w.up * hidden,
            "down": w.ffn * hidden,
            "head": padded_vocabulary(known(model.vocab_size), tp) // tp * hidden,
        }
        if model.moe.shared is not None:
            shared = model.moe.shared // tp * hidden
            self.matrices |= {"shared.up": shared * (w.up // w.ffn), "shared.down": shared}
        self.logits = padded_vocabulary(known(model.vocab_size), tp) // tp  # columns
        self.most_tokens = most_tokens
        self.held = stage_held(model, stage, spans, sizes, loss_chunk=most_tokens)

    def post_norm(self, tape: Tape, keep: bool) -> None:
        """A branch's output, which was taken, becomes its norm."""
        if self.model.post_norms:
            self.normalise(tape)
            if not keep:
                tape.drop(self.local, self.statistics)

    def normalise(self, tape: Tape) -> None:
        if self.by_hand and self.size < self.high:
            wide = self.local * self.high // self.size
            tape.pass_by(2 * wide, self.local)
        tape.take(self.local, self.statistics)

    def norm_heads(self, tape: Tape, copies: int) -> None:
        """The norm of the queries, where it takes more than that of the keys: on the CPU, with some
        copies in a wider type."""
        if not self.sizes.cuda:
            copies = copies if self.size < self.high else copies // 4
            tape.pass_by(copies * self.queries * self.high // self.size, self.queries)

    @property
    def by_hand(self) -> bool:
        """Whether the norm is the CPU's rmsnorm."""
        return self.model.norm == "rmsnorm" and not self.sizes.cuda

    def row_product(self, tape: Tape) -> None:
        """The product of a row-parallel layer, or the embedding's rows, summed over tp."""
        tape.take(self.whole)
        self.scatter(tape)

    def scatter(self, tape: Tape) -> None:
        """The sum of [s, b, h] becomes this rank's [s/tp, b, h]."""
        if self.split > 1:
            tape.take((self.split - 1) * self.local)
            tape.drop((self.split - 2) * self.local, self.whole)

    def dropped(self, tape: Tape, keep: bool, *, given: bool = True) -> None:
        """Dropout of hidden states, which are `given` unless they have no value."""
        if self.model.dropout:
            tape.take(self.local, self.mask)
            tape.drop(self.local if given else 0, 0 if keep else self.mask)

    @property
    def chunk(self) -> int:
        """Logits of a chunk of the loss, a copy in a wider type, and what soft-capping keeps."""
        numbers = loss_chunk(self.tokens, self.most_tokens) * self.logits
        wide = self.high if self.high > self.size else 0
        capped = self.high if self.model.logit_softcap is not None else 0
        return numbers * (self.size + wide + capped)

    def post_norm_backward(self, tape: Tape) -> None:
        """The residual's gradient stays; that of the branch comes for what the norm has saved."""
        if self.model.post_norms:
            self.norm_backward(tape)

    def norm_backward(self, tape: Tape) -> None:
        """From the gradient of its output to that of its input."""
        if self.by_hand:
            wide = self.local * self.high // self.size
            if self.size < self.high:
                tape.pass_by(4 * wide, self.local)
            else:
                tape.pass_by(wide, self.local)
        tape.take(self.local)
        tape.drop(self.local, self.statistics)

    def product(self, matrix: str) -> int:
        return self.added(self.matrices[matrix])

    def added(self, numel: int) -> int:
        """A weight gradient of so many values that is not added within its GEMM."""
        if self.size == self.high:
            return 0
        return numel * (self.high if self.sizes.cuda else self.size)

    def dropped_backward(self, tape: Tape) -> None:
        """The branch's own gradient, from that of the residual or of a norm after it."""
        if self.mask:
            tape.take(self.local)
            tape.drop(self.mask, self.local if self.model.post_norms else 0)

    def row_backward(self, tape: Tape, x: int, matrix: str, at_once: bool, freed: int) -> None:
        """A row-parallel layer's input `x` is held, and the gradient of its output. After the
        weight gradient so many bytes of them are `freed`."""
        if self.split == 1:
            tape.take(x)  # the gradient of the input
            if at_once:
                tape.pass_by(self.product(matrix))
                tape.drop(freed)
            return
        tape.take(self.whole)
        self.compute_put_off(tape)
        tape.take(x)
        if at_once:
            tape.put_off = PutOff(matrix, self.whole + freed)
        else:
            tape.drop(self.whole)

    def compute_put_off(self, tape: Tape) -> None:
        if tape.put_off is not None:
            tape.pass_by(self.product(tape.put_off.matrix))
            tape.drop(tape.put_off.frees)
            tape.put_off = None

    def column_backward(
        self, tape: Tape, grad: int, matrix: str, at_once: bool, *, input_stays: bool = False
    ) -> None:
        """Leaves the gradient of the input, [s(/tp), b, h], which is let go of unless others
        need it."""
        gathered = self.whole if at_once and self.split > 1 else 0
        tape.take(gathered, self.whole)
        if self.split > 1:
            tape.take((self.split - 1) * self.local)  # what the sum receives
        if at_once:
            tape.pass_by(self.product(matrix))
            tape.drop(gathered, grad, 0 if input_stays else self.local)
        if self.split > 1:
            tape.drop((self.split - 2) * self.local, self.whole)

    def embedding_gradient(self, tape: Tape) -> None:
        gathered = self.whole if self.split > 1 else 0
        wide = self.whole * self.high // self.size
        copies = (wide if self.high > self.size else 0) + (wide if self.sizes.tp > 1 else 0)
        tape.pass_by(gathered, copies)
