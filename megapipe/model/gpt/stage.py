"""The GPT model, cut into stages.

A :class:`GPTStage` is what one virtual pipeline stage computes: some layers, with the embedding in
the first stage, and with final norm and head in the last. A whole model is a single stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.context.positions import Positions
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.cross_entropy import masked_sum, soft_capped, vocab_parallel_cross_entropy
from megapipe.layers.dropout import dropout
from megapipe.layers.embedding import PositionEmbedding, WordEmbedding
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.linear import ColumnParallelLinear
from megapipe.layers.linear_cross_entropy import linear_cross_entropy
from megapipe.layers.lora_specs import Lora
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.norm import Norm
from megapipe.layers.parameter import Sharding
from megapipe.layers.specs import by_name
from megapipe.model.gpt.block import Block, Blocks, new_norm
from megapipe.model.gpt.compiled import CompiledBlock
from megapipe.model.gpt.lora import with_adapters
from megapipe.model.gpt.parameters import (
    EMBEDDING_NORM,
    POSITION_EMBEDDING,
    WORD_EMBEDDING,
    head,
    stage_parameters,
)
from megapipe.model.gpt.rotary import Rotaries, rotaries
from megapipe.model.interface import Loss
from megapipe.model.partition import StageSpec


class GPTStage(nn.Module):
    """A stage: tokens [b, s] or hidden [s(/tp), b, h] -> hidden [s(/tp), b, h] or sum of losses.

    The sum of losses is over unmasked tokens, in nats, [].

    If sequences are split into slices, s is the length of a slice, and all slices of a micro-batch
    share a :class:`~megapipe.layers.kv_cache.KVCache`.

    With tied embeddings the head has a separate parameter, a second use of
    ``embedding.word.weight``. The optimizer's tied bucket gives both their storage.

    With `lora` only the adapters in the layers are trained.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: StageSpec,
        sharding: Sharding,
        loss: Loss | None = None,
        lora: Lora | None = None,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.frozen = lora is not None
        self.config = config
        self.spec = spec
        self.sharding = sharding
        self.is_first, self.is_last = spec.embedding, spec.head
        self.queue = sharding.queue
        self.embedding: WordEmbedding | None = None
        self.position: PositionEmbedding | None = None
        self.embedding_norm: Norm | None = None
        named = by_name(with_adapters(config, stage_parameters(config, spec), lora))
        if spec.embedding:
            self.embedding = WordEmbedding(sharding, named[WORD_EMBEDDING])
            if config.embedding_norm:
                self.embedding_norm = new_norm(sharding, config, named, EMBEDDING_NORM)
            if POSITION_EMBEDDING in named:
                self.position = PositionEmbedding(sharding, named[POSITION_EMBEDDING])
        compiler = sharding.kernels.compiler
        compiled = None if compiler is None else CompiledBlock(compiler)
        self.layers = Blocks(Block(sharding, config, i, compiled, lora) for i in spec.layers)
        self.head: ColumnParallelLinear | None = None
        if spec.head:
            self.final_norm = new_norm(sharding, config, named, "final_norm")
            self.head = ColumnParallelLinear(sharding, *with_adapters(config, [head(config)], lora))
        self._rotary: tuple[Positions, Rotaries] | None = None

    def set_policies(self, spans: Sequence[BlockSpan]) -> None:
        """Set what blocks recompute and offload; `spans` cover all blocks in order."""
        self.layers.use(spans)

    def forward(
        self,
        x: Tensor | None,
        mb: MicroBatch,
        cache: KVCache | None = None,
        *,
        skip_output: bool = False,
    ) -> Tensor:
        """Return hidden states, or at the last stage the loss. With `skip_output` hidden states may
        have no value: recomputation needs the graph, not the output."""
        x = self.hidden(x, mb, cache, skip_output=skip_output and self.head is None)
        if self.head is None:
            return x
        return self._loss(self.final_norm(x), self.head, mb)

    def _loss(self, hidden: Tensor, head: ColumnParallelLinear, mb: MicroBatch) -> Tensor:
        """Return the sum of unmasked token losses; `hidden`: after the norm, [s(/tp), b, h]."""
        assert mb.labels is not None
        assert mb.mask is not None
        assert self.config.vocab_size is not None
        if self.loss is not None:
            logits = self._capped(head(hidden)).transpose(0, 1)[..., : self.config.vocab_size]
            return self.loss(logits, mb.labels, mb.mask != 0)
        labels, mask, vocab = mb.labels.t(), mb.mask.t(), self.config.vocab_size
        chunk = self.sharding.kernels.loss_chunk
        if chunk:
            return linear_cross_entropy(
                hidden,
                head,
                labels,
                mask,
                vocab_size=vocab,
                chunk=chunk,
                by_source=mb.by_source,
                softcap=self.config.logit_softcap,
            )
        logits = self._capped(head(hidden))
        losses = vocab_parallel_cross_entropy(logits, labels, self.sharding.tp, vocab)
        return masked_sum(losses, mask, mb.by_source)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.logit_softcap
        return logits if cap is None else soft_capped(logits, cap)

    def logits(
        self,
        x: Tensor | None,
        mb: MicroBatch,
        cache: KVCache | None = None,
        *,
        last: bool = False,
    ) -> Tensor:
        """Return this rank's columns of the logits, [s, b, V/tp], padding included; with `last`
        only at the last position, [1, b, V/tp]. Neither cp nor sequence parallelism may be on."""
        assert self.head is not None
        hidden = self.hidden(x, mb, cache)
        return self._capped(self.head(self.final_norm(hidden[-1:] if last else hidden)))

    def hidden(
        self,
        x: Tensor | None,
        mb: MicroBatch,
        cache: KVCache | None = None,
        *,
        skip_output: bool = False,
    ) -> Tensor:
        """Run embedding and layers, without final norm and head: return [s(/tp), b, h]."""
        if self.embedding is not None:
            assert mb.tokens is not None
            x = self.embedding(mb.tokens)
            if self.config.embedding_scale is not None:
                # rounded to the model's type, on the host: a copy from a device would be waited for
                scale = torch.tensor(self.config.embedding_scale, dtype=x.dtype, device="cpu")
                x = x * scale.item()
            if self.position is not None:
                x = self.position(x, mb.positions_of(self._rows(x)), mb.positions)
            if self.embedding_norm is not None:
                x = self.embedding_norm(x)
            p = self.config.dropout if self.training else 0.0
            x = dropout(x, p, mb, "embedding", 0, self.sharding)
            if self.frozen and torch.is_grad_enabled():
                x = x.requires_grad_()  # the graph of the trained parameters begins here
        assert x is not None
        rotary = self._rotary_for(x, mb) if self.config.positions == "rotary" else Rotaries(None)
        return self.layers(x, mb, rotary, cache, skip_output)

    def constants(self) -> list[Tensor]:
        """Return tensors that are kept for all micro-batches, without parameters: rotary tables."""
        return [] if self._rotary is None else self._rotary[1].tensors()

    def _rotary_for(self, x: Tensor, mb: MicroBatch) -> Rotaries:
        here = self._rows(x)
        length = mb.sequence_length or here
        own = Positions.whole(length) if mb.local_positions is None else mb.local_positions.own
        if self._rotary is None or self._rotary[0] != own:
            self._rotary = own, rotaries(self.config, own, x.device, x.dtype)

        def here_of(table: Tensor) -> Tensor:
            if mb.positions is not None:  # [s, b] of [length, 1, 1, 1, d] -> [s, b, 1, 1, d]
                return table[mb.positions].squeeze(2)
            return table[mb.start : mb.start + here]

        pairs = ((here_of(pair[0]), here_of(pair[1])) if pair else None for pair in self._rotary[1])
        return Rotaries(*pairs)

    def _rows(self, x: Tensor) -> int:
        """Return the sequence length s of `x`, [s(/tp), b, h]."""
        return x.shape[0] * (self.sharding.tp.size if self.sharding.sequence_split else 1)
