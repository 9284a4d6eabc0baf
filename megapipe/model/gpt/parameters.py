"""Exact parameter counts: of the model, of a stage, and of one tensor-parallel rank.

Names and global shapes are those of the checkpoints: they are free of any layout, and linear
weights are [out, in].
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from megapipe.layers.policy import padded_vocabulary
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.partition import StageSpec

Shapes = dict[str, tuple[int, ...]]

WORD_EMBEDDING = "embedding.word.weight"
POSITION_EMBEDDING = "embedding.position.weight"

_VOCABULARY = (WORD_EMBEDDING, "head.weight")
_SPLIT_FIRST = (".attention.qkv.weight", ".attention.qkv.bias")
_SPLIT_LAST = (".attention.out.weight", ".mlp.up.bias", ".mlp.down.weight")


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Global shape of every parameter of a resolved model, in the order of the forward."""
    everything = StageSpec(embedding=True, layers=range(model.layers), head=True)
    return stage_shapes(model, everything)


def stage_shapes(model: ModelConfig, stage: StageSpec) -> Shapes:
    """Global shapes of the parameters that a stage holds.

    A head tied to an embedding on another stage holds a copy of the embedding matrix.
    """
    vocabulary = (known(model.vocab_size), model.hidden)
    shapes: Shapes = {}
    if stage.embedding:
        shapes[WORD_EMBEDDING] = vocabulary
        if model.positions == "learned":
            shapes[POSITION_EMBEDDING] = (known(model.max_positions), model.hidden)
    for layer in stage.layers:
        shapes.update(
            (f"layers.{layer}.{name}", shape) for name, shape in _layer_shapes(model).items()
        )
    if stage.head:
        shapes.update(_norm_shapes(model, "final_norm"))
        shapes[WORD_EMBEDDING if model.tied_embeddings else "head.weight"] = vocabulary
    return shapes


def count(shapes: Mapping[str, Sequence[int]]) -> int:
    """Number of parameters in `shapes`."""
    return sum(prod(shape) for shape in shapes.values())


def count_held(model: ModelConfig, stages: Iterable[StageSpec], tp: int) -> int:
    """Parameters that one tensor-parallel rank keeps for `stages`, padding included.

    Heads and MLP columns are split over tp; rows of the vocabulary are too, padded so that all
    ranks have equally many. Norms, positions and the biases of row-parallel linears are kept
    whole. A tied matrix is held once even where embedding and head are on the same rank.
    """
    shapes: Shapes = {}
    for stage in stages:
        shapes.update(stage_shapes(model, stage))
    return sum(prod(local_shape(name, shape, tp)) for name, shape in shapes.items())


def local_shape(name: str, shape: Sequence[int], tp: int) -> tuple[int, ...]:
    """Shape of one tp rank's part of the parameter `name`."""
    local = list(shape)
    if name in _VOCABULARY:
        local[0] = padded_vocabulary(shape[0], tp) // tp
    elif name.endswith(_SPLIT_FIRST):
        local[0] //= tp
    elif name.endswith(_SPLIT_LAST):
        local[-1] //= tp
    elif name.endswith(".mlp.up.weight"):
        local[-2] //= tp
    return tuple(local)


def is_split(name: str) -> bool:
    """Whether tp splits the parameter; otherwise every tp rank holds all of it."""
    split = (*_SPLIT_FIRST, *_SPLIT_LAST, ".mlp.up.weight")
    return name in _VOCABULARY or name.endswith(split)


def known(size: int | None) -> int:
    """A size that :meth:`ModelConfig.resolved` fills in."""
    if size is None:
        raise ValueError("the model is not resolved: a size is still None")
    return size


def _layer_shapes(model: ModelConfig) -> Shapes:
    hidden, head_dim = model.hidden, known(model.head_dim)
    qkv = (model.heads + 2 * known(model.kv_heads)) * head_dim
    ffn = known(model.ffn_hidden)
    up = (2, ffn) if model.activation == "swiglu" else (ffn,)
    shapes = _norm_shapes(model, "attention_norm")
    shapes["attention.qkv.weight"] = (qkv, hidden)
    if model.bias:
        shapes["attention.qkv.bias"] = (qkv,)
    shapes["attention.out.weight"] = (hidden, model.heads * head_dim)
    if model.bias:
        shapes["attention.out.bias"] = (hidden,)
    shapes.update(_norm_shapes(model, "mlp_norm"))
    shapes["mlp.up.weight"] = (*up, hidden)
    if model.bias:
        shapes["mlp.up.bias"] = up
    shapes["mlp.down.weight"] = (hidden, ffn)
    if model.bias:
        shapes["mlp.down.bias"] = (hidden,)
    return shapes


def _norm_shapes(model: ModelConfig, name: str) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (model.hidden,)}
    if model.norm == "layernorm" and model.bias:
        shapes[f"{name}.bias"] = (model.hidden,)
    return shapes
