"""The family of a configuration's model, under the conditions of its run."""

from megapipe.config import Config
from megapipe.layout.devices import device_kind
from megapipe.layout.layout import DeviceKind
from megapipe.model.gpt.family import GPT
from megapipe.model.interface import Conditions, Family


def conditions_of(config: Config, device: DeviceKind | None = None) -> Conditions:
    """How a run uses its model; `device` is what it computes on, where that is known."""
    parallel, train, cuda = config.parallel, config.train, (device or device_kind(config)) == "cuda"
    return Conditions(
        sequence_length=train.sequence_length,
        microbatch=train.microbatch,
        tp=parallel.tp,
        sequence_parallel=parallel.sequence_parallel,
        cuda=cuda,
        loss_chunk=config.kernels.loss_tokens(cuda=cuda),
        compile=config.kernels.compile,
    )


def family_of(config: Config, device: DeviceKind | None = None) -> Family:
    """The family of a configuration whose model section is resolved."""
    return GPT(config.model, conditions_of(config, device))
