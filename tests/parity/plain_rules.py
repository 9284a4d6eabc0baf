"""One step of each update rule on one whole tensor, in plain formulas.

For the reader and not for speed, and sharing no code with the package. `states` are those of the
tensor by name, empty before the first step; nothing that is given is changed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

States = Mapping[str, Tensor]
Stepped = tuple[Tensor, dict[str, Tensor]]
"""The weight and the states after the step."""


def is_matrix(name: str) -> bool:
    """Whether a parameter decays (and LARS and LAMB scale it)."""
    return name.endswith(("weight", "lora_a", "lora_b")) and "norm" not in name


def is_hidden(name: str) -> bool:
    """Whether Muon makes a parameter's momentum orthogonal."""
    return is_matrix(name) and name.startswith("layers.")


def by_singular_values(matrix: Tensor) -> Tensor:
    """Muon's quintic of [..., m, n], which singular values alone pass through; 0 stays 0, as of an
    expert that no token has chosen."""
    left, s, right = torch.linalg.svd(matrix, full_matrices=False)  # [..., m, n]: both of two
    s = s / s.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (left * s[..., None, :]) @ right


def by_products(matrix: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Muon's quintic of [..., m, n] by products of matrices in `dtype`, as it is run."""
    x = matrix.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.flatten(-2).norm(dim=-1)[..., None, None].clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def step(
    config: Any,
    name: str,
    weight: Tensor,
    grad: Tensor,
    states: States,
    lr: float,
    count: int,
    orthogonalise: Callable[[Tensor], Tensor] = by_singular_values,
    *,
    model: Any = None,
) -> Stepped:
    """The rule `config.rule` after `count` steps; `config` has the names of `optimizer`. Muon looks
    at the heads of `model`, which has the names of that section, resolved."""
    decay = config.weight_decay if is_matrix(name) else 0.0
    match config.rule:
        case "adamw":
            return adam(config, weight * (1 - lr * decay), grad, states, lr, count)
        case "adam":
            return adam(config, weight, grad + decay * weight, states, lr, count)
        case "sgd":
            return sgd(config, weight, grad + decay * weight, states, lr)
        case "lion":
            return lion(config, weight, grad, states, lr, decay)
        case "lars":
            return lars(config, name, weight, grad, states, lr)
        case "lamb":
            return lamb(config, name, weight, grad, states, lr, count)
        case "rmsprop":
            return rmsprop(config, weight, grad + decay * weight, states, lr)
        case "nadamw":
            return nadam(config, weight * (1 - lr * decay), grad, states, lr, count)
        case "adabelief":
            return adabelief(config, weight * (1 - lr * decay), grad, states, lr, count)
        case "adam3":
            return adam3(config, weight * (1 - lr * decay), grad, states, lr, count)
        case "muon" if is_hidden(name):
            matrices = matrices_of(config.muon_split, name, model)
            return muon(config, weight, grad, states, lr, orthogonalise, matrices)
        case "muon":
            lr = lr * config.adamw_lr_scale
            return adam(config, weight * (1 - lr * decay), grad, states, lr, count)
    raise ValueError(config.rule)


def predicted(
    config: Any, name: str, weight: Tensor, states: States, distance: float, count: int
) -> Tensor:
    """The weight so much `distance` (updates times learning rate) ahead, after `count` steps."""
    if not count:
        return weight
    return weight - distance * direction(config, name, weight, states, count)


def direction(config: Any, name: str, weight: Tensor, states: States, count: int) -> Tensor:
    """That of the last of `count` steps, from what it left."""
    decay = config.weight_decay if is_matrix(name) else 0.0
    if config.rule in ("sgd", "rmsprop"):
        return states["momentum_buffer"]
    first = states["exp_avg"]
    if config.rule == "lion":
        return torch.sign(first) + decay * weight
    first = first / (1 - config.beta1**count)
    second = states["exp_avg_var" if config.rule == "adabelief" else "exp_avg_sq"]
    root = (second / (1 - config.beta2**count)).sqrt()
    ratio = first / (root if config.rule == "adam3" else root + config.eps)
    return ratio + decay * weight if config.rule == "adamw" else ratio


def moments(config: Any, grad: Tensor, states: States) -> tuple[Tensor, Tensor]:
    first = config.beta1 * states.get("exp_avg", 0) + (1 - config.beta1) * grad
    second = config.beta2 * states.get("exp_avg_sq", 0) + (1 - config.beta2) * grad**2
    return first, second


def adams_direction(config: Any, first: Tensor, second: Tensor, count: int) -> Tensor:
    t = count + 1
    root = (second / (1 - config.beta2**t)).sqrt() + config.eps
    return first / (1 - config.beta1**t) / root


def adam(
    config: Any, weight: Tensor, grad: Tensor, states: States, lr: float, count: int
) -> Stepped:
    first, second = moments(config, grad, states)
    weight = weight - lr * adams_direction(config, first, second, count)
    return weight, {"exp_avg": first, "exp_avg_sq": second}


def sgd(config: Any, weight: Tensor, grad: Tensor, states: States, lr: float) -> Stepped:
    if not config.momentum:
        return weight - lr * grad, {}
    momentum = config.momentum * states.get("momentum_buffer", 0) + grad
    direction = grad + config.momentum * momentum if config.nesterov else momentum
    return weight - lr * direction, {"momentum_buffer": momentum}


def lion_direction(config: Any, grad: Tensor, states: States) -> Tensor:
    """What Lion takes the sign of."""
    return config.beta1 * states.get("exp_avg", 0) + (1 - config.beta1) * grad


def lion(
    config: Any, weight: Tensor, grad: Tensor, states: States, lr: float, decay: float
) -> Stepped:
    direction = torch.sign(lion_direction(config, grad, states))
    momentum = config.beta2 * states.get("exp_avg", 0) + (1 - config.beta2) * grad
    return weight - lr * (direction + decay * weight), {"exp_avg": momentum}


def rmsprop(config: Any, weight: Tensor, grad: Tensor, states: States, lr: float) -> Stepped:
    square = config.beta2 * states.get("square_avg", 0) + (1 - config.beta2) * grad**2
    step = grad / (square.sqrt() + config.eps)
    if not config.momentum:
        return weight - lr * step, {"square_avg": square}
    momentum = config.momentum * states.get("momentum_buffer", 0) + step
    return weight - lr * momentum, {"square_avg": square, "momentum_buffer": momentum}


def nadam(
    config: Any, weight: Tensor, grad: Tensor, states: States, lr: float, count: int
) -> Stepped:
    first, second = moments(config, grad, states)
    root = (second / (1 - config.beta2 ** (count + 1))).sqrt() + config.eps
    mu = [config.beta1 * (1 - 0.5 * 0.96 ** (i * config.momentum_decay)) for i in range(count + 3)]
    now, then = math.prod(mu[1 : count + 2]), math.prod(mu[1 : count + 3])
    direction = (1 - mu[count + 1]) / (1 - now) * grad + mu[count + 2] / (1 - then) * first
    return weight - lr * direction / root, {"exp_avg": first, "exp_avg_sq": second}


def adabelief(
    config: Any, weight: Tensor, grad: Tensor, states: States, lr: float, count: int
) -> Stepped:
    first = config.beta1 * states.get("exp_avg", 0) + (1 - config.beta1) * grad
    spread = (1 - config.beta2) * (grad - first) ** 2 + config.eps
    second = config.beta2 * states.get("exp_avg_var", 0) + spread
    weight = weight - lr * adams_direction(config, first, second, count)
    return weight, {"exp_avg": first, "exp_avg_var": second}


def adam3(
    config: Any, weight: Tensor, grad: Tensor, states: States, lr: float, count: int
) -> Stepped:
    first = config.beta1 * states.get("exp_avg", 0) + (1 - config.beta1) * grad
    second = config.beta2 * states.get("exp_avg_sq", 0) + (1 - config.beta2) * first**2 + config.eps
    root = (second / (1 - config.beta2 ** (count + 1))).sqrt()
    weight = weight - lr * first / (1 - config.beta1 ** (count + 1)) / root
    return weight, {"exp_avg": first, "exp_avg_sq": second}


def norm(name: str, values: Tensor) -> Tensor:
    """That of a parameter, which is each matrix of an expert by itself: [] or [experts, 1, ...]."""
    if ".moe.up." in name or ".moe.down." in name:
        return torch.stack([expert.norm() for expert in values]).view(-1, *[1] * (values.dim() - 1))
    return values.norm()


def lars(
    config: Any, name: str, weight: Tensor, grad: Tensor, states: States, lr: float
) -> Stepped:
    step: Tensor | float = lr
    if is_matrix(name):
        size = norm(name, weight)
        decayed = norm(name, grad) + config.weight_decay * size
        step = lr * config.trust_coefficient * size / decayed
        grad = grad + config.weight_decay * weight
    momentum = config.momentum * states.get("momentum_buffer", 0) + step * grad
    return weight - momentum, {"momentum_buffer": momentum}


def lamb(
    config: Any, name: str, weight: Tensor, grad: Tensor, states: States, lr: float, count: int
) -> Stepped:
    first, second = moments(config, grad, states)
    direction = adams_direction(config, first, second, count)
    if is_matrix(name):
        direction = direction + config.weight_decay * weight
        direction = direction * norm(name, weight) / norm(name, direction)
    return weight - lr * direction, {"exp_avg": first, "exp_avg_sq": second}


def matrices_of(split: str, name: str, model: Any) -> list[Any]:
    """Rows of a weight that are matrices by themselves. Those of attention's first one are ordered
    by key head: its queries, its key, its value."""
    if split == "none" or not name.endswith("attention.qkv.weight"):
        return [slice(None)]
    rows: dict[Any, list[int]] = {}
    row, share = 0, model.heads // model.kv_heads
    for group in range(model.kv_heads):
        for kind, heads in (("q", share), ("k", 1), ("v", 1)):
            for head in range(heads):
                by = (kind, group, head) if split == "heads" else kind
                rows.setdefault(by, []).extend(range(row, row + model.head_dim))
                row += model.head_dim
    return list(rows.values())


def muon(
    config: Any,
    weight: Tensor,
    grad: Tensor,
    states: States,
    lr: float,
    orthogonalise: Callable[[Tensor], Tensor],
    matrices: Sequence[Any],
) -> Stepped:
    momentum = config.momentum * states.get("exp_avg", 0) + (1 - config.momentum) * grad
    direction = momentum
    if config.nesterov:
        direction = config.momentum * momentum + (1 - config.momentum) * grad
    step = torch.zeros_like(weight)
    for which in matrices:
        matrix = direction[which]
        rows, columns = matrix.shape[-2:]
        factor = max(1.0, rows / columns) ** 0.5
        if config.muon_adjust == "match_rms_adamw":
            factor = 0.2 * max(rows, columns) ** 0.5
        step[which] = factor * orthogonalise(matrix)
    weight = weight - lr * config.weight_decay * weight - lr * step
    return weight, {"exp_avg": momentum}
