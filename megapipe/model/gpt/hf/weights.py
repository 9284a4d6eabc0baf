"""Reads and writes weights of Hugging Face classes (:mod:`megapipe.model.gpt.hf.table`).

One generator (:func:`entries`) pairs every global tensor with the class's tensors, so writing and
reading cannot drift apart. Conversion only rearranges values, and changes none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.errors import CheckpointError
from megapipe.layers.specs import by_name
from megapipe.model.gpt.hf.config import row_of
from megapipe.model.gpt.hf.table import HFClass, TensorLayout
from megapipe.model.gpt.parameters import WORD_EMBEDDING, buffers, known, stage_parameters
from megapipe.model.partition import StageSpec

_BUFFERS = re.compile(r"\.((attn|attention)\.(masked_)?bias|rotary_emb\.inv_freq)$")
"""Names of buffers in old files: causal masks and rotary frequencies."""


def to_hf(
    params: Mapping[str, Tensor], model: ModelConfig, model_type: str | None = None
) -> dict[str, Tensor]:
    """Convert global tensors to the state dict of a Hugging Face class with a head.

    Args:
        params: every global tensor by its layout-free name.
        model: the resolved model.
        model_type: the class; default: the first that can express the model.

    Returns:
        Contiguous tensors that may share memory with `params`; with tied embeddings the head's is
        the input embedding itself, as in the classes' own state dicts.

    Raises:
        ConfigError: no class can express the model.
        CheckpointError: a tensor is missing, unexpected or of another shape.
    """
    row = row_of(model, model_type)
    left = dict(params)
    state: dict[str, Tensor] = {}
    for entry in entries(row, model, in_files=False):
        tensor = _take(left, entry.name, entry.shape)
        parts = (part.contiguous() for part in entry.transform.split(tensor, model))
        state.update(zip(entry.hf_names, parts, strict=True))
    _refuse_rest(left)
    if model.tied_embeddings:
        state[f"{row.modules['head']}.weight"] = state[f"{row.modules['embedding.word']}.weight"]
    return state


def from_hf(
    state: Mapping[str, Tensor], model: ModelConfig, model_type: str | None = None
) -> dict[str, Tensor]:
    """Convert a class's state dict to global tensors; the inverse of :func:`to_hf`.

    The prefix `model.` of names may be missing, as in files of the model without a head. With tied
    embeddings the head may be missing too. Names may be those of files or of state dicts. Buffers
    of old files (causal masks, rotary frequencies) are ignored.

    Returns:
        Contiguous tensors that may share memory with `state`.

    Raises:
        ConfigError: no class can express the model.
        CheckpointError: a tensor is missing, unexpected or of another shape, or the two tied
            embeddings differ.
    """
    row = row_of(model, model_type)
    head = row.modules["head"]
    left = {full: state[name] for full, name in full_names(row, state).items()}
    params: dict[str, Tensor] = {}
    for entry in entries_in(row, model, left.keys()):
        shapes = zip(entry.hf_names, entry.hf_shapes(model), strict=True)
        parts = tuple(_take(left, name, shape) for name, shape in shapes)
        params[entry.name] = entry.transform.join(parts, model).contiguous()
    if model.tied_embeddings:
        other = left.pop(f"{head}.weight", None)
        if other is not None and not torch.equal(other, params[WORD_EMBEDDING]):
            raise CheckpointError(
                f"{head}.weight differs from the input embedding, but model.tied_embeddings is "
                "true; load it with model.tied_embeddings=false"
            )
    _refuse_rest(left)
    return params


def full_names(row: HFClass, names: Iterable[str]) -> dict[str, str]:
    """Return the `names` in a file by their full names in the class; buffers of old files are left
    out."""
    known_as = (row.prefix, f"{row.modules['head']}.")
    found = {}
    in_files = {row.files[of].names[0]: row.modules[of] for of in row.files.keys() & row.modules}
    for original in names:
        module, dot, kind = original.rpartition(".")
        name = in_files.get(module, module) + dot + kind
        if not _BUFFERS.search(f".{name}"):
            found[name if name.startswith(known_as) else row.prefix + name] = original
    return found


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"tensor {name} is missing; the model needs it with shape {shape}")
    tensor = tensors.pop(name)
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"tensor {name} has shape {tuple(tensor.shape)}; the model needs {shape}"
        )
    return tensor


def _refuse_rest(tensors: dict[str, Tensor]) -> None:
    if tensors:
        raise CheckpointError(
            f"tensor {min(tensors)} is not part of the model ({len(tensors)} such tensors); "
            "check model.layers, model.bias and model.tied_embeddings"
        )


class TensorTransform(NamedTuple):
    """Conversion of a global tensor to a class's tensors (`split`), and back (`join`)."""

    split: Callable[[Tensor, ModelConfig], tuple[Tensor, ...]]
    join: Callable[[tuple[Tensor, ...], ModelConfig], Tensor]


def _split_qkv(tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
    """Split a qkv weight or bias into q, k and v. Its rows [groups x (queries + 2) x head_dim, ...]
    have, for each key/value group, the query heads, the key head and the value head."""
    rest, groups = tensor.shape[1:], known(model.kv_heads)
    queries = model.heads // groups
    grouped = tensor.reshape(groups, queries + 2, known(model.head_dim), *rest)
    return tuple(part.reshape(-1, *rest) for part in grouped.split((queries, 1, 1), dim=1))


def _join_qkv(parts: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
    """Join q, k and v to a qkv weight or bias; the inverse of :func:`_split_qkv`."""
    rest = parts[0].shape[1:]
    by_group = (known(model.kv_heads), -1, known(model.head_dim), *rest)
    return torch.cat([part.reshape(by_group) for part in parts], dim=1).reshape(-1, *rest)


_TRANSFORMS = {
    "same": TensorTransform(lambda tensor, _: (tensor,), lambda parts, _: parts[0]),
    "transposed": TensorTransform(lambda tensor, _: (tensor.t(),), lambda parts, _: parts[0].t()),
    "apart": TensorTransform(_split_qkv, _join_qkv),
    "blocks": TensorTransform(
        lambda tensor, model: (torch.cat(_split_qkv(tensor, model)).t(),),
        lambda parts, model: _join_qkv(parts[0].t().chunk(3), model),
    ),
    "stacked": TensorTransform(
        lambda tensor, _: tensor.unbind(), lambda parts, _: torch.stack(parts)
    ),
    "pairs": TensorTransform(
        lambda tensor, _: tensor.flatten(0, 1).unbind(),
        lambda parts, _: torch.stack(parts).unflatten(0, (-1, 2)),
    ),
    "joined": TensorTransform(
        lambda tensor, _: (tensor.flatten(1, 2),),
        lambda parts, _: parts[0].unflatten(1, (2, -1)),
    ),
}
"""Conversions by :data:`TensorLayout`; a vector is its own transpose."""


class TensorMapping(NamedTuple):
    """One global tensor, and the class's tensors with its values."""

    name: str
    shape: tuple[int, ...]
    hf_names: tuple[str, ...]
    arrangement: TensorLayout
    is_buffer: bool = False
    """Whether the tensor is a buffer: its type stays even if weights have a narrower one."""

    @property
    def transform(self) -> TensorTransform:
        """Conversion of the global tensor to the class's tensors, and back."""
        return _TRANSFORMS[self.arrangement]

    def hf_shapes(self, model: ModelConfig) -> list[tuple[int, ...]]:
        """Return the shapes of the class's tensors."""
        parts = self.transform.split(torch.empty(self.shape, device="meta"), model)
        return [tuple(part.shape) for part in parts]


def entries(row: HFClass, model: ModelConfig, *, in_files: bool = True) -> Iterator[TensorMapping]:
    """Yield every global tensor of a resolved model with its names in files or in a state dict."""
    for each in _tensors(model):
        yield _entry(row, each, in_files=in_files)


def entries_in(row: HFClass, model: ModelConfig, names: Collection[str]) -> Iterator[TensorMapping]:
    """Yield every global tensor with those of the `names` that it has. `names`: tensor names of a
    state dict or of files."""
    for each in _tensors(model):
        found = _entry(row, each, in_files=True)
        other = _entry(row, each, in_files=False)
        yield other if any(name in names for name in other.hf_names) else found


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    is_buffer: bool


def _tensors(model: ModelConfig) -> Iterator[_Tensor]:
    whole = StageSpec(embedding=True, layers=range(model.layers), head=True)
    for name, spec in by_name(stage_parameters(model, whole)).items():
        yield _Tensor(name, spec.shape, False)
    for name, shape in buffers(model).items():
        yield _Tensor(name.removeprefix("model/"), shape, True)


def _entry(row: HFClass, of: _Tensor, *, in_files: bool) -> TensorMapping:
    module, _, kind = of.name.rpartition(".")
    tensors = row.counterpart(of.name if of.is_buffer else module, in_files=in_files)
    names = tensors.of_kind(kind, of.shape[0])
    return TensorMapping(of.name, of.shape, names, tensors.arrangement, of.is_buffer)
