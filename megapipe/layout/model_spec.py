"""Makes the model spec of a configuration: the model with resolved sizes, as the run uses it."""

from megapipe.config.config import Config
from megapipe.config.lora import LoraConfig
from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.config.unused_keys import given, refuse_unused
from megapipe.errors import ConfigError
from megapipe.layers.lora_specs import Lora
from megapipe.layout.devices import device_kind
from megapipe.layout.layout import DeviceKind
from megapipe.model.gpt.checks import resolved
from megapipe.model.gpt.lora import resolved_targets
from megapipe.model.gpt.model_spec import GPTSpec
from megapipe.model.interface import ModelSpec, RunShape
from megapipe.util.user_code import UserCode, is_class_name

OWN_KEYS = ("source", "options", "vocab_size", "dtype")
"""Keys of the section `model` that may be set together with a user-defined model."""


def resolved_model(config: Config, tokenizer_size: int | None) -> ModelConfig:
    """Return the section `model` with all defaults filled in; an unknown `vocab_size` stays None.

    Raises :class:`ConfigError` for keys that conflict.
    """
    model = config.model
    if model.vocab_size and tokenizer_size and model.vocab_size < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of "
            f"data.tokenizer={config.data.tokenizer}: expected at least {tokenizer_size}"
        )
    if model.source is None:
        return resolved(model, tokenizer_size, config.train.sequence_length)
    _refuse_sizes(model)
    if is_class_name(model.source):
        return _class_model(model, tokenizer_size)
    return model.model_copy(update={"vocab_size": model.vocab_size or tokenizer_size})


def _class_model(model: ModelConfig, tokenizer_size: int | None) -> ModelConfig:
    """Return the section for a class of transformers, with the class's size of the vocabulary."""
    from megapipe.model.hf.source import ClassSource  # loads transformers

    size = ClassSource.of(model).vocab_size
    if model.vocab_size not in (None, size):
        raise ConfigError(
            f"model.vocab_size={model.vocab_size}: the class of model.source={model.source} has "
            f"{size} token ids; leave the key out"
        )
    if tokenizer_size is not None and tokenizer_size > size:
        raise ConfigError(
            f"model.source={model.source} has {size} token ids: expected at least the "
            f"{tokenizer_size} of data.tokenizer"
        )
    return model.model_copy(update={"vocab_size": size})


def _refuse_sizes(model: ModelConfig) -> None:
    """Refuse keys that belong to the built-in model if the model is user-defined."""
    keys = [key for key in ModelConfig.model_fields if key not in (*OWN_KEYS, "moe")]
    others = given(model, [*keys, *(f"moe.{key}" for key in MoEConfig.model_fields)])
    if others:
        it, away = ("it", f"model.{others[0]}") if len(others) == 1 else ("them", "model")
        own = "" if "." in others[0] else f" (or model.options.{others[0]}, if it takes that)"
        right = (
            f"{it} removed; to remove {it} from a file's values: {away}=unset before "
            f"model.source{own}"
        )
        why = f"with model.source={model.source}, which is not the built-in model"
        refuse_unused("model", model, others, why, right=right)


def resolved_lora(lora: LoraConfig, model: ModelConfig) -> LoraConfig:
    """Return the section `lora` with the names of the targeted layers in place of `all`."""
    if lora.rank is None or model.source is not None:
        return lora
    return lora.model_copy(update={"targets": resolved_targets(model, lora.targets)})


def run_shape_of(config: Config, device: DeviceKind | None = None) -> RunShape:
    """Return the sizes and settings of a run that its model spec needs. `device`: kind of device of
    the run; None: as far as it is known without torch."""
    parallel, train, cuda = config.parallel, config.train, (device or device_kind(config)) == "cuda"
    return RunShape(
        sequence_length=train.sequence_length,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        pad_to_capacity=config.experts.pad_to_capacity,
        microbatch=train.microbatch,
        tp=parallel.tp,
        sequence_parallel=parallel.sequence_parallel,
        cuda=cuda,
        loss_chunk=config.loss_tokens(cuda=cuda),
        compile=config.kernels.compile,
        loss=train.loss_function,
        seed=config.run.seed,
        lora=Lora.of(config.lora),
    )


def model_spec_of(config: Config, device: DeviceKind | None = None) -> ModelSpec:
    """Return the model spec of a configuration whose section `model` is resolved."""
    return make_model_spec(config.model, run_shape_of(config, device))


def make_model_spec(model: ModelConfig, conditions: RunShape) -> ModelSpec:
    """Make the spec of a resolved section `model`. Raises ConfigError for a wrong `source`."""
    if model.source is None:
        return GPTSpec(model, conditions)
    if is_class_name(model.source):
        from megapipe.model.hf.model_spec import TransformersSpec

        return TransformersSpec(
            model.source, model.options, model.dtype, model.vocab_size, conditions
        )
    code = UserCode(model.source, what="model.source=", error=ConfigError)
    if isinstance(code.function, type) and issubclass(code.function, ModelSpec):
        try:
            return code.function.of(model.options, model.dtype, model.vocab_size, conditions)
        except (NotImplementedError, TypeError) as error:
            raise code.failed(error) from error
    from megapipe.model.modules.model_spec import ModuleListSpec

    return ModuleListSpec(model.source, model.options, model.dtype, model.vocab_size, conditions)
