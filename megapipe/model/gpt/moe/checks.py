"""Checks of the section `model.moe`; an error says in one line what would be right."""

from types import SimpleNamespace

from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.config.strict_yaml import text_of
from megapipe.config.unused_keys import check_effects
from megapipe.errors import ConfigError
from megapipe.util.user_code import is_user_code
from megapipe.words import count_noun, divisors_hint, ranges


def check_experts(model: ModelConfig) -> None:
    """Raise :class:`ConfigError` for the first thing that is wrong in a resolved model."""
    moe = model.moe
    if moe.experts is None:
        return
    check_effects(SimpleNamespace(model=model), "model.moe")
    _check_dense_layers(model)
    layers = list(filter(moe.has_experts, range(model.layers)))
    if not layers:
        raise ConfigError(
            f"model.moe.dense_first={moe.dense_first} and model.moe.every={moe.every} leave none "
            f"of model.layers={model.layers} with experts: expected at most {model.layers} together"
        )
    if isinstance(moe.experts, list) and len(moe.experts) != len(layers):
        raise ConfigError(
            f"model.moe.experts={text_of(moe.experts)} has "
            f"{count_noun(len(moe.experts), 'number')}: expected {len(layers)}, one for each layer "
            f"with experts ({ranges(layers)})"
        )
    for layer in layers:
        experts = moe.experts_of(layer)
        if experts % moe.groups:
            raise ConfigError(
                f"{experts_in(moe, layer)} is not divisible by model.moe.groups={moe.groups}: "
                f"{divisors_hint('groups', experts, moe.groups)}"
            )
    groups = moe.group_top_k or moe.groups
    if groups > moe.groups:
        raise ConfigError(
            f"model.moe.group_top_k={groups} is more than model.moe.groups={moe.groups}: expected "
            "at most that"
        )
    fewest = min(layers, key=moe.experts_of)
    most = groups * (moe.experts_of(fewest) // moe.groups)
    if moe.top_k > most:
        what = experts_in(moe, fewest)
        if groups < moe.groups:
            what = f"the {most} experts of model.moe.group_top_k={groups} groups with {what}"
        raise ConfigError(
            f"model.moe.top_k={moe.top_k} is more than {what}: expected at most {most}"
        )
    if moe.second == "random" and moe.top_k != 2:
        raise ConfigError(
            f"model.moe.second=random needs model.moe.top_k=2, not {moe.top_k}: expected always, "
            "or that"
        )
    if is_user_code(moe.scores):
        from megapipe.layers.moe.routers import make_router  # loads torch

        make_router(moe.scores)
    if moe.top_k == 1 and moe.normalise and moe.scores == "softmax":
        raise ConfigError(
            "model.moe.top_k=1 with model.moe.normalise=true has the weight 1 for every token, "
            "which teaches the router nothing: expected model.moe.normalise=false"
        )


def experts_in(moe: MoEConfig, layer: int) -> str:
    """The key with its value, as an error about the experts of a layer begins."""
    text = f"model.moe.experts={text_of(moe.experts)}"
    if isinstance(moe.experts, list):
        text += f" ({moe.experts_of(layer)} in layer {layer})"
    return text


def _check_dense_layers(model: ModelConfig) -> None:
    """Refuse layers that there are not, or that would be dense anyway; and those that are all."""
    given = model.moe.dense_layers
    where = f"model.moe.dense_layers={text_of(given)}"
    others = model.moe.model_copy(update={"dense_layers": []})
    for layer in given:
        if not 0 <= layer < model.layers:
            raise ConfigError(
                f"{where}: there is no layer {layer}: expected 0 to {model.layers - 1}"
            )
        if given.count(layer) > 1 or not others.has_experts(layer):
            raise ConfigError(f"{where}: layer {layer} is dense without it: expected it left out")
    with_experts = list(filter(others.has_experts, range(model.layers)))
    if given and len(with_experts) == len(given):
        raise ConfigError(
            f"{where} leaves no layer with experts: expected some of "
            f"{', '.join(map(str, with_experts))} left out"
        )
