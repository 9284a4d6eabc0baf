"""Text from a checkpoint, in one process, whatever layout saved it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.checkpoint.manifest import MANIFEST
from megapipe.checkpoint.reader import Checkpoint, find_newest
from megapipe.data.tokenizer import Tokenizer, load_tokenizer
from megapipe.errors import CheckpointError, ConfigError
from megapipe.mesh import Axis
from megapipe.model.config import ModelConfig
from megapipe.model.gpt import TORCH_DTYPES, GPTStage
from megapipe.model.microbatch import MicroBatch
from megapipe.model.partition import StageSpec
from megapipe.optim.buffers import owned_parameters
from megapipe.tensor_parallel.parameter import Sharding, spec_of


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: its folder, or a run folder, whose newest intact one is taken."""
    if (path / MANIFEST).exists():
        checkpoint = Checkpoint.open(path)
        checkpoint.verify()
        return checkpoint
    damaged: set[Path] = set()
    while True:
        found = find_newest(path / "checkpoints", skip=damaged).path
        if found is None:
            what = "all its checkpoints are damaged" if damaged else "it has no checkpoint"
            raise CheckpointError(f"{path}: neither a checkpoint nor a run folder: {what}")
        checkpoint = Checkpoint.open(found)
        try:
            checkpoint.verify()
            return checkpoint
        except CheckpointError:
            damaged.add(found)


class Generator:
    """A whole model on one device, for sampling."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        stored = checkpoint.manifest.config
        fields = {
            key.removeprefix("model."): value
            for key, value in stored.items()
            if key.startswith("model.")
        }
        self.config = ModelConfig.model_validate(fields)
        self.device = device
        self.tokenizer: Tokenizer = load_tokenizer(str(stored["data.tokenizer"]))
        if self.config.vocab_size is None or self.tokenizer.vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"tokenizer {stored['data.tokenizer']} has {self.tokenizer.vocab_size} ids, the "
                f"checkpoint's model {self.config.vocab_size}"
            )
        length = stored["train.sequence_length"]
        assert isinstance(length, int)
        self.context = length
        """Longest context, tokens: the length that the model was trained at."""
        sharding = Sharding(Axis.alone(), False, TORCH_DTYPES[self.config.dtype])
        spec = StageSpec(embedding=True, layers=range(self.config.layers), head=True)
        self.module = GPTStage(self.config, spec, sharding).eval()
        self._fill(checkpoint)

    def _fill(self, checkpoint: Checkpoint) -> None:
        """Give every parameter its weights; the two uses of a tied embedding share one tensor."""
        tensors: dict[str, Tensor] = {}
        for owned in owned_parameters(self.module):
            spec = spec_of(owned.parameter)
            if spec.name not in tensors:
                values = torch.zeros(spec.sizes, dtype=owned.parameter.dtype, device=self.device)
                whole = checkpoint.read(f"model/{spec.name}")
                values[tuple(slice(n) for n in spec.shape)] = whole.to(values)
                tensors[spec.name] = values
            owned.replace(Parameter(tensors[spec.name], requires_grad=False))

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Logits of the token that follows `ids`, [vocabulary]."""
        tokens = torch.tensor([ids[-self.context :]], dtype=torch.int64, device=self.device)
        mb = MicroBatch(index=0, step=0, seed=0, tokens=tokens)
        return self.module.logits(None, mb)[-1, 0, : self.tokenizer.vocab_size].float()

    def generate(
        self,
        prompt: str,
        *,
        tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Iterator[int]:
        """Sample up to `tokens` ids after `prompt`; ends early at the end of a document.

        Temperature 0 takes the most probable token; `top_k` samples among that many.
        """
        ids = [self.tokenizer.eod, *self.tokenizer.encode(prompt)]
        draw = torch.Generator().manual_seed(seed)
        for _ in range(tokens):
            logits = self.logits(ids).cpu()
            if temperature == 0:
                token = int(logits.argmax())
            else:
                if top_k is not None and top_k < len(logits):
                    least = logits.topk(top_k).values[-1]
                    logits = logits.masked_fill(logits < least, float("-inf"))
                odds = (logits / temperature).softmax(-1)
                token = int(torch.multinomial(odds, 1, generator=draw))
            if token == self.tokenizer.eod:
                return
            ids.append(token)
            yield token
