"""Bytes that the pieces of a stage hold from their forward to their weight gradients.

They follow from the list of what a block saves (:func:`saved_tensors`), of which a policy leaves
out what is run again, and from what its weight gradients wait with (:func:`queued_bytes`). The
lists are those of torch's own kernels: fused attention keeps no scores, but the CPU's cannot drop
any out.

A piece is a micro-batch, some of its rows, or a slice of its sequences. Keys and values of slices
are not among the bytes of a piece but in the cache of the whole micro-batch (:func:`cache_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from megapipe.dtypes import DTYPE_BYTES
from megapipe.layers.lora_specs import Lora, Rows
from megapipe.layers.policy import BlockPolicy, Span, padded_vocabulary
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.lora import places, targets_in
from megapipe.model.gpt.moe_memory import (
    COUNT,
    beside_experts_saved,
    experts_saved,
    mixture_queued,
)
from megapipe.model.gpt.parameters import known
from megapipe.model.gpt.scores import scores_of
from megapipe.model.interface import Held, Sizes
from megapipe.model.partition import StageSpec


class Saved(NamedTuple):
    """A storage that a block holds from its forward to its backward."""

    module: str
    name: str
    bytes: int
    is_input: bool = False
    """Its module recomputes from it."""
    is_saved: bool = True
    """It is saved where the module does not recompute."""
    has_grad: bool = True
    """It is offloaded where its module is; masks and statistics are not."""
    is_shared: bool = False
    """It is the input of the block, of which only host memory has a second copy."""


def saved_tensors(
    model: ModelConfig, sizes: Sizes, lora: Lora | None = None, layer: int | None = None
) -> tuple[Saved, ...]:
    """All that one block of a resolved model saves, in the order of the forward; that of `layer`,
    or one without experts."""
    first, *rest = norm_tensors(model, sizes)
    second = first._replace(is_shared=model.parallel_residual)
    after = tuple(_post_norm(model, sizes))
    attention, activation = _attention(model, sizes), _activation(model, sizes)
    mixed = layer is not None and model.moe.has_experts(layer)
    if layer is not None and mixed:
        activation = _mixture(model, sizes, layer, frozen=lora is not None)
    if lora is None:
        parts = [first, *rest], [*attention], [second, *rest], [*activation]
    else:
        beside = partial(_beside_adapters, model, sizes, lora, layer)
        parts = (
            [first, *beside("attention.qkv", rest)],
            [*beside("attention.out", attention)],
            [second, *beside("mlp.up", rest)],
            [*beside("mlp.down", activation)],
        )
    project, attend, widen, narrow = parts
    widen = list(_of_mixture(widen)) if mixed else widen
    return *project, *attend, *after, *widen, *narrow, *after


def _beside_adapters(
    model: ModelConfig,
    sizes: Sizes,
    lora: Lora,
    layer: int | None,
    linear: str,
    tensors: Iterable[Saved],
) -> Iterator[Saved]:
    """Tensors saved up to a frozen linear layer: its input only where adapters or attention itself
    need it; and the adapters' narrow tensors."""
    adapters = len(_parts_of(model, lora, layer, linear))
    for tensor in tensors:
        module = tensor.module
        if tensor.name != "output" or module == "attention" or adapters:
            yield tensor
    narrow = Widths.of(model, sizes).local_tokens * lora.rank * DTYPE_BYTES[model.dtype]
    for _ in range(adapters):
        yield Saved(module, "adapter", narrow)


def _parts_of(model: ModelConfig, lora: Lora, layer: int | None, linear: str) -> list[Rows]:
    """The rows of a linear layer that adapters add to."""
    targets = lora.targets if layer is None else targets_in(model, lora, layer)
    found = (places(model)[target] for target in targets)
    return [place.rows for place in found if place.layer == linear]


def held_tensors(
    model: ModelConfig,
    spans: Sequence[Span],
    sizes: Sizes,
    lora: Lora | None = None,
    first: int = 0,
) -> Iterator[tuple[Saved, bool]]:
    """Storages that a stage's blocks, from layer `first` on, hold from F to I, each with whether it
    is in host memory.

    The first block's input is the stage's, and among them. The embedding, the final norm, the
    head and the loss hold more.
    """
    saved = saved_tensors(model, sizes, lora)
    is_held = not spans[0].policy.offloads_input if spans else False  # by the stage
    for blocks, policy in spans:
        if "block" in policy.recompute:
            yield saved[0], "block" in policy.offload
            for tensor in results(saved, policy) * blocks:
                yield tensor, False
            for tensor in choices(model, sizes, range(first, first + blocks)):
                yield tensor, False
            is_held = False
            first += blocks
            continue
        each = [saved_tensors(model, sizes, lora, first + i) for i in range(blocks)]
        first += blocks
        for tensor in chain.from_iterable(each):
            again = tensor.module in policy.recompute
            if tensor.is_shared and not {tensor.module, "norm"} & policy.offload:
                continue
            if is_held or (tensor.is_input if again else tensor.is_saved):
                yield tensor, tensor.has_grad and tensor.module in policy.offload
            is_held = False
        if "attention" in policy.recompute:
            for tensor in results(saved, policy) * blocks:
                yield tensor, False
        if "experts" in policy.recompute:
            for tensor in choices(model, sizes, range(first - blocks, first)):
                yield tensor, False


def results(saved: Sequence[Saved], policy: BlockPolicy) -> tuple[Saved, ...]:
    """The part of attention that a block keeps which is run again: its output and LSE."""
    if not policy.keeps_attention:
        return ()
    of_heads = any(tensor.name == "output of some heads" for tensor in saved)
    kept = ("output of some heads" if of_heads else "output", "logsumexp")
    return tuple(t for t in saved if t.module == "attention" and t.name in kept)


def choices(model: ModelConfig, sizes: Sizes, layers: Sequence[int]) -> Iterator[Saved]:
    """Choices of layers with experts, which those that are run again keep, and how many rows each
    of several ranks has for each expert."""
    ranks = sizes.ep * sizes.etp
    for layer in filter(model.moe.has_experts, layers):
        for tensor in saved_tensors(model, sizes, layer=layer):
            if tensor.name in ("choice", "counts"):
                yield tensor
            if tensor.name == "choice" and ranks > 1 and sizes.dispatch.padded is None:
                told = ranks * model.moe.experts_of(layer) * COUNT
                yield tensor._replace(name="rows of ranks", bytes=told)


def held(
    model: ModelConfig,
    spans: Sequence[Span],
    sizes: Sizes,
    lora: Lora | None = None,
    first: int = 0,
) -> Held:
    """Bytes of :func:`held_tensors`, and of what waits for W."""
    bytes_in = {False: 0, True: 0}
    for tensor, in_host in held_tensors(model, spans, sizes, lora, first):
        bytes_in[in_host] += tensor.bytes
    blocks = sum(span.blocks for span in spans)
    queued = sum(queued_bytes(model, sizes, lora, first + i) for i in range(blocks))
    return Held(bytes_in[False], bytes_in[True], queued)


def stage_held(
    model: ModelConfig,
    stage: StageSpec,
    spans: Sequence[Span],
    sizes: Sizes,
    *,
    loss_chunk: int,
    lora: Lora | None = None,
) -> Held:
    """Bytes that a whole stage holds for one piece: its blocks, embedding, head and loss.

    `loss_chunk` is ``kernels.loss_chunk``. Left out: a few numbers per piece, and the tokens,
    labels and masks themselves.
    """
    first = stage.layers[0] if stage.layers else 0
    device, host, queued, _ = held(model, spans, sizes, lora, first)
    w = Widths.of(model, sizes)
    size, high = DTYPE_BYTES[model.dtype], max(DTYPE_BYTES[model.dtype], 4)
    residual, trains = w.local_tokens * model.hidden * size, lora is None
    if stage.embedding:
        device += sum(tensor.bytes for tensor in _residual_mask("embedding", model, sizes))
        if model.embedding_norm:
            *own, _output = norm_tensors(model, sizes)
            device += sum(tensor.bytes for tensor in own)
        queued += trains * residual
    if stage.head:
        device += sum(
            tensor.bytes
            for tensor in norm_tensors(model, sizes)
            if loss_chunk or trains or tensor.name != "output"
        )
        if not loss_chunk:
            logits = w.tokens * padded_vocabulary(known(model.vocab_size), sizes.tp) // sizes.tp
            if model.logit_softcap is not None:
                device += logits * size
            # exponentials; a factor, a column (int64), if it is here, and whether masked, per token
            device += logits * high + w.tokens * (high + 8 + 1 + 1)
            queued += trains * (residual + logits * size)
    kept = sum(tensor.bytes for tensor in choices(model, sizes, stage.layers))
    for blocks, policy in spans:
        kept += blocks * sum(t.bytes for t in results(saved_tensors(model, sizes), policy))
    return Held(device, host, queued, kept)


def queued_bytes(
    model: ModelConfig, sizes: Sizes, lora: Lora | None = None, layer: int | None = None
) -> int:
    """Bytes that wait for one block's weight gradients, under any policy: the input and the output
    gradient of each of the four linear layers. Two that write to one sum share its gradient.
    The block is that of `layer`, or one without experts."""
    w = Widths.of(model, sizes)
    if lora is not None:
        return DTYPE_BYTES[model.dtype] * _queued_beside_adapters(model, w, sizes, lora, layer)
    if layer is not None and model.moe.has_experts(layer):
        values = w.tokens * 2 * (w.queries + w.keys) + w.local_tokens * 2 * model.hidden
        beside = mixture_queued(model, sizes, layer, shared=share_gradient(model))
        return DTYPE_BYTES[model.dtype] * values + beside
    whole = (w.queries + 2 * w.keys) + w.queries + w.up + w.ffn
    hidden = 3 if share_gradient(model) else 4
    return DTYPE_BYTES[model.dtype] * (w.tokens * whole + w.local_tokens * hidden * model.hidden)


def _queued_beside_adapters(
    model: ModelConfig, w: Widths, sizes: Sizes, lora: Lora, layer: int | None
) -> int:
    """Values that wait for the weight gradients of a block's adapters: inputs of the layers that
    have some, gradients of the rows that they add to, and two narrow tensors of each."""
    hidden, ffn, up, gated = w.local_tokens * model.hidden, w.ffn, w.up, False
    targets: Sequence[str] = lora.targets
    if layer is not None and model.moe.has_experts(layer):
        ffn, gated = (model.moe.shared or 0) // sizes.tp, model.moe.shared_gate != "none"
        up, targets = ffn * (2 if model.gated else 1), targets_in(model, lora, layer)
    values = 2 * w.local_tokens * lora.rank * len(targets)
    for linear, out in (("attention.qkv", w.queries + 2 * w.keys), ("mlp.up", up)):
        if parts := _parts_of(model, lora, layer, linear):
            values += hidden + w.tokens * sum(rows.count(out) for rows in parts)
    gradients = 0
    for linear, width in (("attention.out", w.queries), ("mlp.down", ffn)):
        if _parts_of(model, lora, layer, linear):
            values += w.tokens * width
            gradients += 1
    together = share_gradient(model) and not gated
    return values + (min(gradients, 1) if together else gradients) * hidden


def share_gradient(model: ModelConfig) -> bool:
    """Whether the outputs of attention and MLP have the same gradient, as one tensor."""
    return model.parallel_residual and not (model.dropout or model.post_norms)


def cache_bytes(model: ModelConfig, blocks: int, sizes: Sizes) -> int:
    """Keys and values of all positions, `sizes` being those of the whole sequences: what the slices
    of a micro-batch share in `blocks` blocks, from the first one's F to its I, under any policy."""
    w = Widths.of(model, sizes)
    return blocks * 2 * w.tokens * w.keys * DTYPE_BYTES[model.dtype]


def cache_gradients(model: ModelConfig, blocks: int, sizes: Sizes) -> int:
    """Gradients of the keys and values up to a slice's end, in fp32 (fp64 for fp64), which the I of
    the slice leaves to the slice before it."""
    attended = Widths.of(model, sizes._replace(sequence=sizes.attended))
    return blocks * 2 * attended.tokens * attended.keys * max(DTYPE_BYTES[model.dtype], 4)


class Widths(NamedTuple):
    """Tokens, and numbers per token, on one tensor-parallel rank."""

    tokens: int
    local_tokens: int
    """Tokens between the tensor-parallel regions."""
    heads: int
    groups: int
    """Key/value heads."""
    queries: int
    keys: int
    """Of the keys, and as many of the values."""
    ffn: int
    up: int

    @staticmethod
    def of(model: ModelConfig, sizes: Sizes) -> Widths:
        tokens, tp = sizes.sequence * sizes.rows, sizes.tp
        ffn = known(model.ffn_hidden) // tp
        return Widths(
            tokens=tokens,
            local_tokens=tokens // tp if sizes.sequence_parallel else tokens,
            heads=model.heads // tp,
            groups=known(model.kv_heads) // tp,
            queries=model.heads * known(model.head_dim) // tp,
            keys=known(model.kv_heads) * known(model.head_dim) // tp,
            ffn=ffn,
            up=2 * ffn if model.gated else ffn,
        )


def norm_tensors(model: ModelConfig, sizes: Sizes) -> Iterator[Saved]:
    """A norm before a linear layer saves this, and that layer saves the norm's output."""
    size, high = DTYPE_BYTES[model.dtype], max(DTYPE_BYTES[model.dtype], 4)
    tokens = Widths.of(model, sizes).local_tokens
    values = tokens * model.hidden
    yield Saved("norm", "input", values * size, is_input=True)
    if model.norm == "rmsnorm":
        yield Saved("norm", "rstd", tokens * high, has_grad=False)
    else:
        for name in ("mean", "rstd"):
            yield Saved("norm", name, tokens * (high if sizes.cuda else size), has_grad=False)
    yield Saved("norm", "output", values * size)


def _post_norm(model: ModelConfig, sizes: Sizes) -> Iterator[Saved]:
    """It is neither run again nor put away by itself."""
    if model.post_norms:
        *own, _output = norm_tensors(model, sizes)
        for tensor in own:
            yield tensor._replace(module="post_norm", is_input=False)


def _attention(model: ModelConfig, sizes: Sizes) -> Iterator[Saved]:
    size, high = DTYPE_BYTES[model.dtype], max(DTYPE_BYTES[model.dtype], 4)
    w = Widths.of(model, sizes)
    queries, keys = w.tokens * w.queries, w.tokens * w.keys
    rows = w.tokens * w.heads  # of the scores
    is_slice = sizes.before is not None
    is_grouped = model.kv_heads != model.heads
    is_gathered = is_grouped and w.groups > 1  # copied, each from between the groups' others
    is_fused = sizes.cuda or not model.dropout
    is_copied = not is_fused and (is_grouped or size < high)
    # keys and values of a slice are in the cache: its queries alone are viewed
    is_viewed = not is_gathered and (is_fused if is_slice else not is_copied)
    qkv = (queries + 2 * keys) * size
    if sizes.ulysses > 1:
        yield from _of_some_heads(model, sizes)
        return
    yield Saved("attention", "qkv", qkv, is_input=True, is_saved=is_viewed or model.qk_norm)
    if model.qk_norm:
        yield Saved("attention", "rstd of queries", rows * high, has_grad=False)
        yield Saved("attention", "rstd of keys", w.tokens * w.groups * high, has_grad=False)
        if not is_copied:
            yield Saved("attention", "normed queries", queries * size)
            if not is_slice:
                yield Saved("attention", "normed keys", keys * size)
    if is_fused:
        if is_gathered and not model.qk_norm:
            yield Saved("attention", "queries", queries * size)
            for name in () if is_slice else ("keys", "values"):
                yield Saved("attention", name, keys * size)
        if sizes.before and not sizes.cuda and not _is_written_out(model, sizes):
            mask = sizes.sequence * sizes.attended * size
            yield Saved("attention", "causal mask", mask, has_grad=False)
        yield Saved("attention", "logsumexp", rows * high, has_grad=False)
    else:
        scores = rows * sizes.attended
        all_keys = sizes.attended * sizes.rows * w.queries
        yield Saved("attention", "scaled queries", queries * high)
        yield Saved("attention", "scaled keys, one per query", all_keys * high)
        if is_copied:
            yield Saved("attention", "values, one per query", all_keys * high)
        yield Saved("attention", "weights", scores * high)
        yield Saved("attention", "mask", scores * high, has_grad=False)
        yield Saved("attention", "dropped weights", scores * high)
    yield Saved("attention", "output", queries * size)
    yield from _residual_mask("attention", model, sizes)


def _of_some_heads(model: ModelConfig, sizes: Sizes) -> Iterator[Saved]:
    """The same where ranks exchange positions for heads, and back: as many values, but for copies
    of keys, in tensors of their own."""
    size, high = DTYPE_BYTES[model.dtype], max(DTYPE_BYTES[model.dtype], 4)
    w = Widths.of(model, sizes)
    queries, keys = w.tokens * w.queries, w.tokens * w.keys
    copied = keys * max(1, sizes.ulysses // w.groups)
    qkv = (queries + 2 * keys) * size
    yield Saved("attention", "qkv", qkv, is_input=True, is_saved=model.qk_norm)
    if model.qk_norm:
        yield Saved("attention", "rstd of queries", w.tokens * w.heads * high, has_grad=False)
        yield Saved("attention", "rstd of keys", w.tokens * w.groups * high, has_grad=False)
    yield Saved("attention", "queries of some heads", queries * size)
    for name in () if sizes.before is not None else ("keys", "values"):
        yield Saved("attention", f"{name} of some heads", copied * size)
    yield Saved("attention", "logsumexp", w.tokens * w.heads * high, has_grad=False)
    yield Saved("attention", "output of some heads", queries * size)
    yield Saved("attention", "output", queries * size)


def _is_written_out(model: ModelConfig, sizes: Sizes) -> bool:
    """Whether attention on the CPU is so in all layers, and needs no mask from call to call."""
    scores = scores_of(model, 0, 0, sizes.tp).among(sizes.attended)
    if model.full_attention_every is not None:
        scores = scores._replace(window=None)
    return not scores.plain


def _activation(model: ModelConfig, sizes: Sizes) -> Iterator[Saved]:
    w = Widths.of(model, sizes)
    inner = w.tokens * w.ffn * DTYPE_BYTES[model.dtype]
    yield Saved("mlp_activation", "up", inner * w.up // w.ffn, is_input=True)
    yield Saved("mlp_activation", "output", inner)
    yield from _residual_mask("mlp_activation", model, sizes)


def _of_mixture(tensors: Iterable[Saved]) -> Iterator[Saved]:
    """Tensors of the norm before a mixture of experts, which is not run again by itself."""
    for tensor in tensors:
        yield tensor._replace(module="mixture", is_input=False)


def _mixture(model: ModelConfig, sizes: Sizes, layer: int, *, frozen: bool) -> Iterator[Saved]:
    """Of a mixture; `frozen` experts keep no rows for weight gradients."""
    for name, size in experts_saved(model, sizes, layer):
        if not (frozen and name == "arrived"):
            yield Saved("experts", name, size)
    for name, size in beside_experts_saved(model, sizes):
        yield Saved("mixture", name, size)
    yield from _residual_mask("mixture", model, sizes)


def _residual_mask(module: str, model: ModelConfig, sizes: Sizes) -> Iterator[Saved]:
    if model.dropout:
        values = Widths.of(model, sizes).local_tokens * model.hidden
        size = 1 if sizes.cuda else DTYPE_BYTES[model.dtype]
        yield Saved(module, "residual mask", values * size, has_grad=False)
