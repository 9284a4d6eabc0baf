"""Maps tensor names of torchtitan's Llama (those of Meta's files) to Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from megapipe.model.tensor_files import StoredTensors

EMBEDDING = "tok_embeddings.weight"
_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
_ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.weight$")
_BUFFER = "freqs_cis"


def is_titan(names: Iterable[str]) -> bool:
    """Whether `names` are the names of torchtitan's Llama."""
    return EMBEDDING in names


class TitanTensors(StoredTensors):
    """Tensors of torchtitan's Llama under Hugging Face's names.

    torchtitan rotates neighbouring values of a query or key together, (0, 1), (2, 3), ...; Hugging
    Face rotates each value in the first half of a head with its counterpart in the second half. So
    the rows of the weights of queries and keys are reordered.
    """

    def __init__(self, inner: StoredTensors, head_dim: int) -> None:
        self._inner = inner
        self._half = head_dim // 2
        self._stored_names = {_renamed(name): name for name in inner.tensors if name != _BUFFER}
        super().__init__(
            inner.folder,
            {name: inner.tensors[stored] for name, stored in self._stored_names.items()},
        )

    @property
    def files(self) -> list[str]:
        """Names of the files."""
        return self._inner.files

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return the slices `index` of a tensor (default: all of it); slices of queries and keys
        must have whole heads. Raises CheckpointError."""
        tensor = self._inner.read(self._stored_names[name], index)
        if not _ROTATED.search(name):
            return tensor
        pairs = tensor.unflatten(0, (-1, self._half, 2))  # [heads, head_dim / 2, 2, h]
        return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def _renamed(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    layers, _, rest = name.partition(".")
    number, _, module = rest.partition(".")
    known = layers == "layers" and module in _LAYER
    return f"model.layers.{number}.{_LAYER[module]}" if known else name
