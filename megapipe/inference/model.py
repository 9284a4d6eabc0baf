"""A model in one process or split over the ranks of a mesh, and its forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.checkpoint.stateful import TensorReader
from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather
from megapipe.distributed.mesh import ParallelMesh
from megapipe.inference.chain import ForwardChannels
from megapipe.inference.source import ModelInfo
from megapipe.inference.stages import family_for, fill, stages_of
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES, Sharding
from megapipe.ops.documents import Documents, document_ids, positions_in


class Model:
    """This process's stage of a model, in evaluation mode.

    All ranks call the methods in the same order with the same arguments. Without a `mesh`, this
    process has the whole model.

    Raises:
        ConfigError: the sizes of the model do not allow the layout.
        CheckpointError: a weight is missing or damaged.
    """

    def __init__(
        self,
        source: ModelInfo,
        weights: TensorReader,
        device: torch.device,
        mesh: ParallelMesh | None = None,
    ) -> None:
        self.source = source
        self.mesh = mesh
        self.device = device
        tp, pp = (Axis.alone(), Axis.alone()) if mesh is None else (mesh.tp, mesh.pp)
        family = family_for(source.model, source.lora, context=source.context, tp=tp.size)
        weights.match(family.weights())
        stages = stages_of(family, pp.size)
        self.stage = stages[pp.index]
        self.module = family.build(
            self.stage, Sharding(tp, False, TORCH_DTYPES[source.model.dtype])
        )
        self.module.train(False)
        fill(self.module, weights, device)
        self.module.to(device)
        self.is_last = pp.index == pp.size - 1
        self.speaks = self.is_last and tp.index == 0
        """Whether this rank's logits are used: true on one of the ranks that have the logits."""
        self.columns_axis = tp if family.splits_logits(self.stage) else Axis.alone()
        """Axis of the ranks that have different columns of the logits."""
        self.keeps = "kv_cache" in family.supports
        """Whether the model supports a KV cache."""
        self._chain = (
            None if mesh is None or pp.size == 1 else ForwardChannels(mesh, family, stages)
        )
        masks = source.data.masks_documents
        self._document_end = source.tokenizer.eod if masks else None
        self._resets = source.model.may_learn_positions and source.data.resets_positions

    @property
    def vocab_size(self) -> int:
        """Number of token ids in the model's vocabulary."""
        size = self.source.model.vocab_size
        assert size is not None
        return size

    def document_ids(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor | None:
        """Return the number of each token's document, [b, t]; None if attention crosses documents.

        `padding` [b]: number of padding columns before each text, which count as a separate
        document.
        """
        padded = padding is not None and bool(padding.any())
        if self._document_end is None and not padded:
            return None
        numbers = torch.zeros_like(tokens)
        if padding is not None:
            numbers += (torch.arange(tokens.shape[1]) >= padding.unsqueeze(1)).long()
        if self._document_end is not None:
            numbers += document_ids(tokens, self._document_end)
        return numbers

    def microbatch(
        self, tokens: Tensor, *, start: int = 0, padding: Tensor | None = None
    ) -> MicroBatch:
        """Return columns `start` and later of `tokens` [b, t] as a micro-batch; earlier columns are
        in the KV cache. `padding` [b] has the number of padding columns before each text."""
        numbers = self.document_ids(tokens, padding)
        return MicroBatch(
            index=0,
            step=0,
            seed=0,
            tokens=tokens[:, start:].to(self.device),
            documents=None if numbers is None else Documents(numbers, self.device),
            start=start,
            positions=self._positions(numbers, padding, start, tokens.shape[1]),
            sequence_length=self.source.context,
        )

    def _positions(
        self, numbers: Tensor | None, padding: Tensor | None, start: int, stop: int
    ) -> Tensor | None:
        """Return each column's position in its text, [columns, b]; None if equal to the column."""
        if self._resets and numbers is not None:
            return positions_in(numbers)[:, start:].t().to(self.device)
        if padding is None or not padding.any():
            return None
        columns = torch.arange(start, stop).unsqueeze(1)
        return (columns - padding).clamp(min=0).to(self.device)

    @torch.no_grad()
    def local_logits(
        self, mb: MicroBatch, cache: KVCache | None = None, *, last: bool = False
    ) -> Tensor | None:
        """Return this rank's columns of the logits, including vocabulary padding: [s, b, V or
        V/tp]. With `last`, s = 1: only the last position. None on ranks without the last stage."""
        assert mb.tokens is not None
        x = None if self._chain is None else self._chain.receive(*mb.tokens.shape)
        if self.is_last:
            return self.module.logits(x, mb, cache, last=last)
        assert self._chain is not None
        self._chain.send(self.module(x, mb, cache))
        return None

    def logits(
        self, mb: MicroBatch, cache: KVCache | None = None, *, last: bool = False
    ) -> Tensor | None:
        """Return the logits of the whole vocabulary, [s, b, V]; with `last`, only the last
        position, [1, b, V]. None on ranks without the last stage."""
        own = self.local_logits(mb, cache, last=last)
        if own is None:
            return None
        if self.columns_axis.size > 1:
            whole = all_gather(own.permute(2, 0, 1).contiguous(), self.columns_axis)
            own = whole.permute(1, 2, 0)
        return own[..., : self.vocab_size]

    def shared(self, numbers: Sequence[float] | Tensor | None, count: int) -> Tensor:
        """Broadcast `numbers` (`count` of them) from the rank with :attr:`speaks`; return them as
        fp64 on the host. `numbers` of other ranks are ignored.

        When this returns, all messages between stages have been received.
        """
        own = torch.zeros(count, dtype=torch.float64)
        if self.speaks:
            assert numbers is not None
            own += torch.as_tensor(numbers, dtype=torch.float64, device="cpu")
        if self.mesh is not None:
            own = self.mesh.ordered_sum(own, "tp", "pp")
        if self._chain is not None:
            self._chain.settle()
        return own


def load_model(
    weights: TensorReader,
    device: torch.device,
    mesh: ParallelMesh | None = None,
    *,
    tokenizer: str | None = None,
    context: int | None = None,
) -> Model:
    """Load the model of a checkpoint or of a Hugging Face folder, in the layout of `mesh`.

    Raises the errors of :meth:`ModelInfo.of` and :class:`Model`.
    """
    source = ModelInfo.of(weights, tokenizer=tokenizer, context=context)
    return Model(source, weights, device, mesh)
