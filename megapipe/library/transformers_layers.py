"""Models of transformers as lists of modules, for :class:`~megapipe.library.pipeline.Pipeline`."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from megapipe.errors import ConfigError


def transformers_layers(model: Any) -> list[nn.Module]:
    """Cut a causal language model of transformers into embedding, layers and head.

    The modules share the model's parameters, so ``model.save_pretrained`` saves what they have
    learned. They run the class's own forward, with stand-ins in place of the layers::

        model = AutoModelForCausalLM.from_pretrained("Qwen3-0.6B").train()
        pipe = megapipe.Pipeline(megapipe.transformers_layers(model), ranks=2)
        loss = pipe.step((tokens, labels))

    Args:
        model: the model, with values.

    Raises:
        ConfigError: the class cannot be cut: its layers need more than the hidden state and what
            is the same for all samples.
    """
    from megapipe.model.hf.calls import LayerCalls
    from megapipe.model.hf.outline import outline_of
    from megapipe.model.hf.stand_ins import UnfitClassError
    from megapipe.model.hf.units import units_of

    try:
        outline = outline_of(deepcopy(model).to("meta"))
        calls = LayerCalls(model, outline)
        calls.check(model.config.get_text_config(decoder=True).vocab_size)
    except UnfitClassError as error:
        raise ConfigError(f"{type(model).__name__} cannot be cut into stages: {error}") from None
    return [*units_of(model, outline, calls)]
