"""Weights of Hugging Face's GPT-2 and Llama, both ways.

One table (:func:`_entries`) pairs every global tensor with the tensors that Hugging Face makes of
it, so writing and reading cannot drift apart. Only the arrangement differs, never a value:

* GPT-2 keeps linear weights as [in, out] and query, key and value as three blocks `q | k | v`;
* Llama keeps query, key and value, and gate and up, as tensors of their own;
* here the rows of qkv go by key/value group: its query heads, its key head, its value head.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.errors import CheckpointError
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.hf_config import config_from_hf, config_to_hf, hf_family

__all__ = ["config_from_hf", "config_to_hf", "from_hf", "hf_family", "to_hf"]


class _Entry(NamedTuple):
    """One global tensor, its Hugging Face counterparts and the way between them."""

    name: str
    shape: tuple[int, ...]
    hf_names: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    join: Callable[..., Tensor]


class _Sizes(NamedTuple):
    """The sizes of a resolved model."""

    vocab: int
    positions: int
    hidden: int
    ffn: int
    queries: int  # query heads per group
    groups: int
    head_dim: int


def to_hf(params: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The state dict of `GPT2LMHeadModel` or `LlamaForCausalLM` for global tensors `params`.

    Args:
        params: every global tensor by its layout-free name.
        model: the resolved model; learned positions make GPT-2, rotary ones Llama.

    Returns:
        Contiguous tensors that may share memory with `params`; with tied embeddings
        `lm_head.weight` is the input embedding itself, as in the classes' own state dicts.

    Raises:
        ConfigError: neither class can express the model.
        CheckpointError: a tensor is missing, unexpected or of another shape.
    """
    left = dict(params)
    state: dict[str, Tensor] = {}
    for entry in _entries(model):
        tensor = _take(left, entry.name, entry.shape)
        parts = (part.contiguous() for part in entry.split(tensor))
        state.update(zip(entry.hf_names, parts, strict=True))
    _refuse_rest(left)
    if model.tied_embeddings:
        state["lm_head.weight"] = state[_embedding_name(model)]
    return state


def from_hf(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The global tensors of a Hugging Face state dict; the inverse of :func:`to_hf`.

    The prefix `transformer.` or `model.` may be missing, as in files of the model without a head.
    With tied embeddings so may `lm_head.weight`. Buffers of old files (causal masks, rotary
    frequencies) are passed over.

    Returns:
        Contiguous tensors that may share memory with `state`.

    Raises:
        ConfigError: neither class can express the model.
        CheckpointError: a tensor is missing, unexpected or of another shape, or the two tied
            embeddings differ.
    """
    prefix = "transformer." if hf_family(model) == "gpt2" else "model."
    left = {
        name if name.startswith((prefix, "lm_head.")) else prefix + name: tensor
        for name, tensor in state.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))
    }
    params: dict[str, Tensor] = {}
    for entry in _entries(model):
        expected = entry.split(torch.empty(entry.shape, device="meta"))
        parts = [
            _take(left, name, tuple(part.shape))
            for name, part in zip(entry.hf_names, expected, strict=True)
        ]
        params[entry.name] = entry.join(*parts).contiguous()
    if model.tied_embeddings:
        head = left.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, params["embedding.word.weight"]):
            raise CheckpointError(
                "lm_head.weight differs from the input embedding, but model.tied_embeddings is "
                "true; load it with model.tied_embeddings=false"
            )
    _refuse_rest(left)
    return params


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


def _embedding_name(model: ModelConfig) -> str:
    gpt2 = hf_family(model) == "gpt2"
    return "transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"


def _entries(model: ModelConfig) -> Iterator[_Entry]:
    """Every global tensor of a resolved model."""
    family = hf_family(model)
    groups = model.kv_heads or 1
    n = _Sizes(
        vocab=model.vocab_size or 0,
        positions=model.max_positions or 0,
        hidden=model.hidden,
        ffn=model.ffn_hidden or 0,
        queries=model.heads // groups,
        groups=groups,
        head_dim=model.head_dim or 0,
    )
    yield _same("embedding.word.weight", (n.vocab, n.hidden), _embedding_name(model))
    if family == "gpt2":
        yield from _gpt2_body(model.layers, n)
    else:
        yield from _llama_body(model.layers, n, bias=model.bias)
    if not model.tied_embeddings:
        yield _same("head.weight", (n.vocab, n.hidden), "lm_head.weight")


def _gpt2_body(layers: int, n: _Sizes) -> Iterator[_Entry]:
    h, f = n.hidden, n.ffn

    def fuse(tensor: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(_split_qkv(tensor, n)).t(),)

    def regroup(tensor: Tensor) -> Tensor:
        return _join_qkv(*tensor.t().chunk(3), n=n)

    def norm(name: str, hf_name: str) -> Iterator[_Entry]:
        yield _same(f"{name}.weight", (h,), f"{hf_name}.weight")
        yield _same(f"{name}.bias", (h,), f"{hf_name}.bias")

    def linear(name: str, shape: tuple[int, int], hf_name: str) -> Iterator[_Entry]:
        weight = f"{name}.weight", shape, (f"{hf_name}.weight",)
        yield _Entry(*weight, lambda tensor: (tensor.t(),), lambda tensor: tensor.t())
        yield _same(f"{name}.bias", shape[:1], f"{hf_name}.bias")

    yield _same("embedding.position.weight", (n.positions, h), "transformer.wpe.weight")
    for i in range(layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        qkv, c_attn = f"{ours}.attention.qkv", f"{theirs}.attn.c_attn"
        yield from norm(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield _Entry(f"{qkv}.weight", (3 * h, h), (f"{c_attn}.weight",), fuse, regroup)
        yield _Entry(f"{qkv}.bias", (3 * h,), (f"{c_attn}.bias",), fuse, regroup)
        yield from linear(f"{ours}.attention.out", (h, h), f"{theirs}.attn.c_proj")
        yield from norm(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        yield from linear(f"{ours}.mlp.up", (f, h), f"{theirs}.mlp.c_fc")
        yield from linear(f"{ours}.mlp.down", (h, f), f"{theirs}.mlp.c_proj")
    yield from norm("final_norm", "transformer.ln_f")


def _llama_body(layers: int, n: _Sizes, *, bias: bool) -> Iterator[_Entry]:
    h, f, attended = n.hidden, n.ffn, n.groups * n.queries * n.head_dim
    rows = attended + 2 * n.groups * n.head_dim

    def split_qkv(tensor: Tensor) -> tuple[Tensor, ...]:
        return _split_qkv(tensor, n)

    def join_qkv(*parts: Tensor) -> Tensor:
        return _join_qkv(*parts, n=n)

    def join_up(gate: Tensor, up: Tensor) -> Tensor:
        return torch.stack((gate, up))

    for i in range(layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        yield _same(f"{ours}.attention_norm.weight", (h,), f"{theirs}.input_layernorm.weight")
        yield _same(f"{ours}.mlp_norm.weight", (h,), f"{theirs}.post_attention_layernorm.weight")
        for kind in ("weight", "bias") if bias else ("weight",):

            def shape(*out: int, columns: int, kind: str = kind) -> tuple[int, ...]:
                return (*out, columns) if kind == "weight" else out

            qkv = tuple(f"{attention}.{part}_proj.{kind}" for part in "qkv")
            up = (f"{mlp}.gate_proj.{kind}", f"{mlp}.up_proj.{kind}")
            out, down = f"{attention}.o_proj.{kind}", f"{mlp}.down_proj.{kind}"
            yield _Entry(
                f"{ours}.attention.qkv.{kind}", shape(rows, columns=h), qkv, split_qkv, join_qkv
            )
            yield _same(f"{ours}.attention.out.{kind}", shape(h, columns=attended), out)
            yield _Entry(f"{ours}.mlp.up.{kind}", shape(2, f, columns=h), up, torch.unbind, join_up)
            yield _same(f"{ours}.mlp.down.{kind}", shape(h, columns=f), down)
    yield _same("final_norm.weight", (h,), "model.norm.weight")


def _same(name: str, shape: tuple[int, ...], hf_name: str) -> _Entry:
    return _Entry(name, shape, (hf_name,), lambda tensor: (tensor,), lambda tensor: tensor)


def _split_qkv(tensor: Tensor, n: _Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by group, [groups x (queries + 2) x head_dim, ...], to the rows of q, of k and of v."""
    rest = tensor.shape[1:]
    grouped = tensor.reshape(n.groups, n.queries + 2, n.head_dim, *rest)
    q, k, v = grouped.split((n.queries, 1, 1), dim=1)
    return q.reshape(-1, *rest), k.reshape(-1, *rest), v.reshape(-1, *rest)


def _join_qkv(*parts: Tensor, n: _Sizes) -> Tensor:
    """The inverse of :func:`_split_qkv`."""
    rest = parts[0].shape[1:]
    grouped = [part.reshape(n.groups, -1, n.head_dim, *rest) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)
