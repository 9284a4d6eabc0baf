"""What the blocks of a stage keep between their forward and their backward: policies and bytes.

The bytes follow from the list of what a block saves (:func:`saved_tensors`), of which a policy
leaves out what is run again, and from what its weight gradients wait with (:func:`queued_bytes`).
The lists are those of torch's own kernels: fused attention keeps no scores, but the CPU's cannot
drop any out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megapipe.config import ActivationsConfig
from megapipe.errors import ConfigError
from megapipe.model.config import ModelConfig
from megapipe.model.partition import StageSpec
from megapipe.plan.params import DTYPE_BYTES, known, padded_vocabulary


@dataclass(frozen=True)
class BlockPolicy:
    """What becomes of what a block saves; by default autograd keeps it.

    The names are those of modules, `norm`, `attention` and `mlp_activation`, or `block`, which
    stands for whole blocks.
    """

    recompute: frozenset[str] = frozenset()
    """What is run again in the backward, from its input."""
    offload: frozenset[str] = frozenset()
    """What has its activations, its input among them, in host memory."""

    @property
    def offloads_input(self) -> bool:
        """Whether the block's input waits in host memory."""
        return bool(self.offload & {"norm", "block"})


class Unit(NamedTuple):
    """Consecutive blocks with one policy; if they are run again, they are so together."""

    blocks: int
    policy: BlockPolicy


def stage_units(
    config: ActivationsConfig, stages: Sequence[StageSpec], again: Collection[int] = ()
) -> tuple[tuple[Unit, ...], ...]:
    """The units of each stage's blocks, in order.

    The stages that run `again` as a whole, because of their policy or of the schedule, have blocks
    that keep all: no block is run a third time. Raises :class:`ConfigError` for a list of another
    length than the stages, or a negative number.
    """
    policies = _for_each("policy", config.policy, len(stages))
    blocks = _for_each("blocks", config.blocks, len(stages))
    units = []
    for i, (policy, most, stage) in enumerate(zip(policies, blocks, stages, strict=True)):
        layers = len(stage.layers)
        if most is not None and most < 0:
            raise ConfigError(f"activations.blocks={config.blocks}: expected no negative number")
        affected = layers if most is None else min(most, layers)
        if i in again:
            affected = 0
        whole = config.unit if policy == "full" else max(affected, 1)
        treated = BlockPolicy(*_modules(config, policy))
        counts = [min(whole, affected - start) for start in range(0, affected, whole)]
        rest = [Unit(layers - affected, BlockPolicy())] if affected < layers else []
        units.append((*(Unit(count, treated) for count in counts), *rest))
    return tuple(units)


def recomputed_stages(config: ActivationsConfig, stages: int) -> frozenset[int]:
    """The stages that are run again as a whole."""
    policies = _for_each("policy", config.policy, stages)
    return frozenset(stage for stage, policy in enumerate(policies) if policy == "stage")


def _modules(config: ActivationsConfig, policy: str) -> tuple[frozenset[str], frozenset[str]]:
    """What `policy` runs again, and what is offloaded then."""
    if policy == "full":
        return frozenset({"block"}), frozenset({"block"} if "norm" in config.offload else ())
    again = config.modules if policy == "selective" else ()
    return frozenset(again), frozenset(config.offload)


def _for_each(key: str, given: Any, stages: int) -> list[Any]:
    """`given`, a value for all stages or a list with one for each, as a list."""
    if not isinstance(given, list):
        return [given] * stages
    if len(given) != stages:
        raise ConfigError(
            f"activations.{key} has {len(given)} items for {stages} virtual stages: expected "
            "one for each, or a single value"
        )
    return given


class Sizes(NamedTuple):
    """One micro-batch of whole sequences on one tensor-parallel rank."""

    sequence: int
    rows: int
    tp: int = 1
    sequence_parallel: bool = False
    cuda: bool = False


class Saved(NamedTuple):
    """A storage that a block holds from its forward to its backward."""

    module: str
    name: str
    bytes: int
    is_input: bool = False
    """Its module is run again from it."""
    is_saved: bool = True
    """It is saved where the module is not run again."""
    has_grad: bool = True
    """It is offloaded where its module is; masks and statistics are not."""


class Held(NamedTuple):
    """Bytes that the blocks of a stage hold for one micro-batch."""

    device: int
    """From F to I, on the device."""
    host: int
    """From F to I, in host memory."""
    queued: int
    """From I to W, on the device, with the weight gradients that wait."""


def saved_tensors(model: ModelConfig, sizes: Sizes) -> tuple[Saved, ...]:
    """All that one block of a resolved model saves, in the order of the forward."""
    norm = tuple(_norm(model, sizes))
    return *norm, *_attention(model, sizes), *norm, *_activation(model, sizes)


def held_tensors(
    model: ModelConfig, units: Sequence[Unit], sizes: Sizes
) -> Iterator[tuple[Saved, bool]]:
    """What a stage's blocks hold from F to I, each with whether it is in host memory.

    The first block's input is the stage's, and among them. The embedding, the final norm, the
    head and the loss hold more.
    """
    saved = saved_tensors(model, sizes)
    is_held = not units[0].policy.offloads_input if units else False  # by the stage
    for blocks, policy in units:
        if "block" in policy.recompute:
            yield saved[0], "block" in policy.offload
            is_held = False
            continue
        for tensor in saved * blocks:
            again = tensor.module in policy.recompute
            if is_held or (tensor.is_input if again else tensor.is_saved):
                yield tensor, tensor.has_grad and tensor.module in policy.offload
            is_held = False


def held(model: ModelConfig, units: Sequence[Unit], sizes: Sizes) -> Held:
    """Bytes of :func:`held_tensors`, and of what waits for W."""
    bytes_in = {False: 0, True: 0}
    for tensor, in_host in held_tensors(model, units, sizes):
        bytes_in[in_host] += tensor.bytes
    blocks = sum(unit.blocks for unit in units)
    return Held(bytes_in[False], bytes_in[True], blocks * queued_bytes(model, sizes))


def stage_held(
    model: ModelConfig, stage: StageSpec, units: Sequence[Unit], sizes: Sizes, *, loss_chunk: int
) -> Held:
    """Bytes that a whole stage holds for one micro-batch: its blocks, embedding, head and loss.

    `loss_chunk` is ``kernels.loss_chunk``. Left out: a few numbers per micro-batch, and the tokens,
    labels and masks themselves.
    """
    device, host, queued = held(model, units, sizes)
    w = _Widths.of(model, sizes)
    size, high = DTYPE_BYTES[model.dtype], max(DTYPE_BYTES[model.dtype], 4)
    residual = w.local_tokens * model.hidden * size
    if stage.embedding:
        device += sum(tensor.bytes for tensor in _residual_mask("embedding", model, sizes))
        queued += residual
    if stage.head:
        device += sum(tensor.bytes for tensor in _norm(model, sizes) if tensor.is_saved)
        if not loss_chunk:
            logits = w.tokens * padded_vocabulary(known(model.vocab_size), sizes.tp) // sizes.tp
            # exponentials; a factor, a column (int64), whose it is, and whether masked, per token
            device += logits * high + w.tokens * (high + 8 + high + 1)
            queued += residual + logits * size
    return Held(device, host, queued)


def queued_bytes(model: ModelConfig, sizes: Sizes) -> int:
    """What the weight gradients of one block wait with, under any policy: the input and the output
    gradient of each of the four linear layers."""
    w = _Widths.of(model, sizes)
    whole = (w.queries + 2 * w.keys) + w.queries + w.up + w.ffn
    return DTYPE_BYTES[model.dtype] * (w.tokens * whole + w.local_tokens * 4 * model.hidden)


class _Widths(NamedTuple):
    """Tokens, and numbers per token, on one tensor-parallel rank."""

    tokens: int
    local_tokens: int
    """Tokens between the tensor-parallel regions."""
    heads: int
    queries: int
    keys: int
    """Of the keys; and of the values."""
    ffn: int
    up: int

    @staticmethod
    def of(model: ModelConfig, sizes: Sizes) -> _Widths:
        tokens, tp = sizes.sequence * sizes.rows, sizes.tp
        ffn = known(model.ffn_hidden) // tp
        return _Widths(
            tokens=tokens,
            local_tokens=tokens // tp if sizes.sequence_parallel else tokens,
            heads=model.heads // tp,
            queries=model.heads * known(model.head_dim) // tp,
            keys=known(model.kv_heads) * known(model.head_dim) // tp,
            ffn=ffn,
            up=2 * ffn if model.activation == "swiglu" else ffn,
        )


def _norm(model: ModelConfig, sizes: Sizes) -> Iterator[Saved]:
    size, high = DTYPE_BYTES[model.dtype], max(DTYPE_BYTES[model.dtype], 4)
    tokens = _Widths.of(model, sizes).local_tokens
    values = tokens * model.hidden
    yield Saved("norm", "input", values * size, is_input=True)
    if model.norm == "rmsnorm":
        yield Saved("norm", "rstd", tokens * high, has_grad=False)
    else:
        for name in ("mean", "rstd"):
            yield Saved("norm", name, tokens * (high if sizes.cuda else size), has_grad=False)
    yield Saved("norm", "output", values * size)


def _attention(model: ModelConfig, sizes: Sizes) -> Iterator[Saved]:
    size, high = DTYPE_BYTES[model.dtype], max(DTYPE_BYTES[model.dtype], 4)
    w = _Widths.of(model, sizes)
    queries, keys = w.tokens * w.queries, w.tokens * w.keys
    rows = w.tokens * w.heads  # of the scores
    is_grouped = model.kv_heads != model.heads
    is_fused = sizes.cuda or not model.dropout
    is_copied = not is_fused and (is_grouped or size < high)
    qkv = (queries + 2 * keys) * size
    yield Saved("attention", "qkv", qkv, is_input=True, is_saved=not is_copied)
    if is_fused:
        if model.positions == "rotary":
            yield Saved("attention", "turned queries and keys", (queries + keys) * size)
        if is_grouped:
            yield Saved("attention", "queries", queries * size)
        yield Saved("attention", "logsumexp", rows * high, has_grad=False)
    else:
        scores = rows * sizes.sequence
        yield Saved("attention", "scaled queries", queries * high)
        yield Saved("attention", "scaled keys, one per query", queries * high)
        if is_copied:
            yield Saved("attention", "values, one per query", queries * high)
        yield Saved("attention", "weights", scores * high)
        yield Saved("attention", "mask", scores * high, has_grad=False)
        yield Saved("attention", "dropped weights", scores * high)
    yield Saved("attention", "output", queries * size)
    yield from _residual_mask("attention", model, sizes)


def _activation(model: ModelConfig, sizes: Sizes) -> Iterator[Saved]:
    w = _Widths.of(model, sizes)
    inner = w.tokens * w.ffn * DTYPE_BYTES[model.dtype]
    yield Saved("mlp_activation", "up", inner * w.up // w.ffn, is_input=True)
    if model.activation == "swiglu":
        yield Saved("mlp_activation", "gate", inner)
    yield Saved("mlp_activation", "output", inner)
    yield from _residual_mask("mlp_activation", model, sizes)


def _residual_mask(module: str, model: ModelConfig, sizes: Sizes) -> Iterator[Saved]:
    if model.dropout:
        values = _Widths.of(model, sizes).local_tokens * model.hidden
        size = 1 if sizes.cuda else DTYPE_BYTES[model.dtype]
        yield Saved(module, "residual mask", values * size, has_grad=False)
