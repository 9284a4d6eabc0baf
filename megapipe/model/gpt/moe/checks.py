"""Checks of the section `model.moe`. Each error is one line that says what would be right."""

from types import SimpleNamespace

from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.config.strict_yaml import text_of
from megapipe.config.unused_keys import check_effects
from megapipe.errors import ConfigError
from megapipe.text import count_noun, divisors_hint, ranges
from megapipe.util.user_code import is_user_code


def check_experts(model: ModelConfig) -> None:
    """Check the section `model.moe` of a resolved model; raise :class:`ConfigError` if wrong."""
    moe = model.moe
    if moe.num_experts is None:
        return
    check_effects(SimpleNamespace(model=model), "model.moe")
    _check_dense_layers(model)
    layers = list(filter(moe.has_experts, range(model.layers)))
    if not layers:
        raise ConfigError(
            f"model.moe.first_dense_layers={moe.first_dense_layers} and "
            f"model.moe.layer_freq={moe.layer_freq} leave no MoE layer in "
            f"model.layers={model.layers}: expected a sum of at most {model.layers}"
        )
    if isinstance(moe.num_experts, list) and len(moe.num_experts) != len(layers):
        raise ConfigError(
            f"model.moe.num_experts={text_of(moe.num_experts)} has "
            f"{count_noun(len(moe.num_experts), 'number')}: expected {len(layers)}, one per "
            f"MoE layer ({ranges(layers)})"
        )
    for layer in layers:
        experts = moe.experts_of(layer)
        if experts % moe.num_groups:
            raise ConfigError(
                f"{experts_in(moe, layer)} is not divisible by "
                f"model.moe.num_groups={moe.num_groups}: "
                f"{divisors_hint('num_groups', experts, moe.num_groups)}"
            )
    groups = moe.topk_groups or moe.num_groups
    if groups > moe.num_groups:
        raise ConfigError(
            f"model.moe.topk_groups={groups} is more than model.moe.num_groups={moe.num_groups}: "
            "expected at most that"
        )
    fewest = min(layers, key=moe.experts_of)
    most = groups * (moe.experts_of(fewest) // moe.num_groups)
    if moe.top_k > most:
        what = experts_in(moe, fewest)
        if groups < moe.num_groups:
            what = f"the {most} experts of model.moe.topk_groups={groups} groups with {what}"
        raise ConfigError(
            f"model.moe.top_k={moe.top_k} is more than {what}: expected at most {most}"
        )
    if moe.second_expert == "random" and moe.top_k != 2:
        raise ConfigError(
            f"model.moe.second_expert=random needs model.moe.top_k=2, not {moe.top_k}: "
            "expected model.moe.second_expert=always, or model.moe.top_k=2"
        )
    if is_user_code(moe.score_function):
        from megapipe.layers.moe.routers import make_router  # loads torch

        make_router(moe.score_function)
    if moe.top_k == 1 and moe.norm_topk_prob and moe.score_function == "softmax":
        raise ConfigError(
            "model.moe.top_k=1 with model.moe.norm_topk_prob=true gives every token the "
            "weight 1, so the router learns nothing: expected model.moe.norm_topk_prob=false"
        )


def experts_in(moe: MoEConfig, layer: int) -> str:
    """Return ``model.moe.num_experts=N``, with a layer's number of experts, for errors."""
    text = f"model.moe.num_experts={text_of(moe.num_experts)}"
    if isinstance(moe.num_experts, list):
        text += f" ({moe.experts_of(layer)} in layer {layer})"
    return text


def _check_dense_layers(model: ModelConfig) -> None:
    """Refuse ``dense_layers`` that do not exist, are dense anyway, or leave no MoE layer."""
    dense_layers = model.moe.dense_layers
    setting = f"model.moe.dense_layers={text_of(dense_layers)}"
    others = model.moe.model_copy(update={"dense_layers": []})
    for layer in dense_layers:
        if not 0 <= layer < model.layers:
            raise ConfigError(
                f"{setting}: there is no layer {layer}: expected 0 to {model.layers - 1}"
            )
        if dense_layers.count(layer) > 1 or not others.has_experts(layer):
            raise ConfigError(f"{setting}: layer {layer} is already dense: remove it")
    with_experts = list(filter(others.has_experts, range(model.layers)))
    if dense_layers and len(with_experts) == len(dense_layers):
        raise ConfigError(
            f"{setting} leaves no MoE layer: remove some of {', '.join(map(str, with_experts))}"
        )
