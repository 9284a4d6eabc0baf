"""The GPT model, cut into stages.

A :class:`GPTStage` is what one virtual pipeline stage computes: the embedding if it is the first,
some layers, the final norm and the head if it is the last. A whole model is one stage with all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megapipe.layers.cross_entropy import masked_sum, vocab_parallel_cross_entropy
from megapipe.layers.dropout import dropout
from megapipe.layers.embedding import PositionEmbedding, WordEmbedding
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.linear import ColumnParallelLinear
from megapipe.layers.linear_cross_entropy import linear_cross_entropy
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding
from megapipe.layers.policy import Span
from megapipe.layers.specs import by_name
from megapipe.model.gpt.block import Block, Blocks, new_norm
from megapipe.model.gpt.compiled import CompiledBlock
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.parameters import (
    POSITION_EMBEDDING,
    WORD_EMBEDDING,
    head,
    stage_parameters,
)
from megapipe.model.gpt.rotary import Tables, rotary_tables
from megapipe.model.interface import Loss
from megapipe.model.partition import StageSpec


class GPTStage(nn.Module):
    """tokens [b, s] or hidden [s(/tp), b, h] -> hidden [s(/tp), b, h] or the sum of the losses.

    The loss is that of the unmasked tokens, in nats, [].

    Where sequences are cut, s is the length of a slice, and all slices of a micro-batch are given
    the same :class:`~megapipe.layers.kv_cache.KVCache`.

    With tied embeddings the head is a second use of ``embedding.word.weight``: a parameter of its
    own whose storage the optimizer's tied buffer provides.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: StageSpec,
        sharding: Sharding,
        own_loss: Loss | None = None,
    ) -> None:
        super().__init__()
        self.own_loss = own_loss
        self.config = config
        self.spec = spec
        self.sharding = sharding
        self.is_first, self.is_last = spec.embedding, spec.head
        self.queue = sharding.queue
        self.embedding: WordEmbedding | None = None
        self.position: PositionEmbedding | None = None
        named = by_name(stage_parameters(config, spec))
        if spec.embedding:
            self.embedding = WordEmbedding(sharding, named[WORD_EMBEDDING])
            if POSITION_EMBEDDING in named:
                self.position = PositionEmbedding(sharding, named[POSITION_EMBEDDING])
        compiler = sharding.kernels.compiler
        compiled = None if compiler is None else CompiledBlock(compiler)
        self.layers = Blocks(Block(sharding, config, i, compiled) for i in spec.layers)
        self.head: ColumnParallelLinear | None = None
        if spec.head:
            self.final_norm = new_norm(sharding, config, named, "final_norm")
            self.head = ColumnParallelLinear(sharding, head(config))
        self._rotary: tuple[int, Tables] | None = None

    def use(self, spans: Sequence[Span]) -> None:
        """Set which activations the blocks keep: `spans` cover all blocks in order."""
        self.layers.use(spans)

    def forward(
        self,
        x: Tensor | None,
        mb: MicroBatch,
        cache: KVCache | None = None,
        *,
        graph_only: bool = False,
    ) -> Tensor:
        """The hidden states, or the loss at the last stage. With `graph_only` hidden states may
        have no value: recomputation needs the graph, not the output."""
        x = self.hidden(x, mb, cache, graph_only=graph_only and self.head is None)
        if self.head is None:
            return x
        return self._loss(self.final_norm(x), self.head, mb)

    def _loss(self, hidden: Tensor, head: ColumnParallelLinear, mb: MicroBatch) -> Tensor:
        """Sum of the unmasked token losses of normed hidden states [s(/tp), b, h]."""
        assert mb.labels is not None
        assert mb.mask is not None
        assert self.config.vocab_size is not None
        if self.own_loss is not None:
            logits = head(hidden).transpose(0, 1)[..., : self.config.vocab_size]
            return self.own_loss(logits, mb.labels, mb.mask != 0)
        labels, mask, vocab = mb.labels.t(), mb.mask.t(), self.config.vocab_size
        chunk = self.sharding.kernels.loss_chunk
        if chunk:
            return linear_cross_entropy(
                hidden, head, labels, mask, vocab_size=vocab, chunk=chunk, by_source=mb.by_source
            )
        losses = vocab_parallel_cross_entropy(head(hidden), labels, self.sharding.tp, vocab)
        return masked_sum(losses, mask, mb.by_source)

    def logits(
        self,
        x: Tensor | None,
        mb: MicroBatch,
        cache: KVCache | None = None,
        *,
        last: bool = False,
    ) -> Tensor:
        """This rank's columns of the logits, [s, b, V/tp], padding included; with `last` those of
        the last position alone, [1, b, V/tp], of sequences that are not split."""
        assert self.head is not None
        hidden = self.hidden(x, mb, cache)
        return self.head(self.final_norm(hidden[-1:] if last else hidden))

    def hidden(
        self,
        x: Tensor | None,
        mb: MicroBatch,
        cache: KVCache | None = None,
        *,
        graph_only: bool = False,
    ) -> Tensor:
        """Embedding and layers, without the head: [s(/tp), b, h]."""
        if self.embedding is not None:
            assert mb.tokens is not None
            x = self.embedding(mb.tokens)
            if self.position is not None:
                x = self.position(x, mb.start, mb.positions)
            p = self.config.dropout if self.training else 0.0
            x = dropout(x, p, mb, "embedding", 0, self.sharding)
        assert x is not None
        rotary = self._rotary_for(x, mb) if self.config.positions == "rotary" else None
        return self.layers(x, mb, rotary, cache, graph_only)

    def _rotary_for(self, x: Tensor, mb: MicroBatch) -> Tables:
        split = self.sharding.tp.size if self.sharding.sequence_split else 1
        here = x.shape[0] * split
        length = mb.sequence_length or here
        if self._rotary is None or self._rotary[0] != length:
            self._rotary = length, rotary_tables(self.config, length, x.device, x.dtype)
        cos, sin = self._rotary[1]
        if mb.positions is not None:  # [s, b] of [length, 1, 1, 1, d] -> [s, b, 1, 1, d]
            return cos[mb.positions].squeeze(2), sin[mb.positions].squeeze(2)
        return cos[mb.start : mb.start + here], sin[mb.start : mb.start + here]
