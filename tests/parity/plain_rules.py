"""One step of each update rule on one whole tensor, in plain formulas.

Written for the reader and not for speed; it shares no code with the package. `states` are the
tensor's states by name, empty before the first step. Arguments are not changed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

States = Mapping[str, Tensor]
Stepped = tuple[Tensor, dict[str, Tensor]]
"""Weight and states after the step."""


def is_matrix(name: str) -> bool:
    """Whether a parameter decays (and LARS and LAMB scale it)."""
    return name.endswith(("weight", "lora_a", "lora_b")) and "norm" not in name


def is_hidden(name: str) -> bool:
    """Whether Muon makes a parameter's momentum orthogonal."""
    return is_matrix(name) and name.startswith("layers.")


def by_singular_values(matrix: Tensor) -> Tensor:
    """Apply Muon's quintic to the singular values of [..., m, n]. 0 stays 0, as for an expert
    without tokens."""
    left, s, right = torch.linalg.svd(matrix, full_matrices=False)  # [..., m, n]: both of two
    s = s / s.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (left * s[..., None, :]) @ right


def by_products(matrix: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Apply Muon's quintic to [..., m, n] by matrix products in `dtype`, as in a run."""
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
    """Take a step of the rule `config.rule` after `count` steps; `config` is the section
    `optimizer`. Muon uses the heads of `model`, which has the resolved names of that section."""
    options = config.rule_options
    decay = config.weight_decay if is_matrix(name) else 0.0
    match config.rule:
        case "adamw":
            return adam(options, weight * (1 - lr * decay), grad, states, lr, count)
        case "adam":
            return adam(options, weight, grad + decay * weight, states, lr, count)
        case "sgd":
            return sgd(options, weight, grad + decay * weight, states, lr)
        case "lion":
            return lion(options, weight, grad, states, lr, decay)
        case "lars":
            return lars(options, name, weight, grad, states, lr, decay)
        case "lamb":
            return lamb(options, name, weight, grad, states, lr, count, decay)
        case "rmsprop":
            return rmsprop(options, weight, grad + decay * weight, states, lr)
        case "nadamw":
            return nadam(options, weight * (1 - lr * decay), grad, states, lr, count)
        case "adabelief":
            return adabelief(options, weight * (1 - lr * decay), grad, states, lr, count)
        case "adam3":
            return adam3(options, weight * (1 - lr * decay), grad, states, lr, count)
        case "muon" if is_hidden(name):
            matrices = matrices_of(options.split_qkv, name, model)
            return muon(options, weight, grad, states, lr, decay, orthogonalise, matrices)
        case "muon":
            lr = lr * options.adamw_lr_scale
            return adam(options, weight * (1 - lr * decay), grad, states, lr, count)
    raise ValueError(config.rule)


def predicted(
    config: Any, name: str, weight: Tensor, states: States, distance: float, count: int
) -> Tensor:
    """Return the weight predicted by `distance` (updates times learning rate), after `count`
    steps."""
    if not count:
        return weight
    return weight - distance * direction(config, name, weight, states, count)


def direction(config: Any, name: str, weight: Tensor, states: States, count: int) -> Tensor:
    """Return the direction of the last of `count` steps, from the states that it left."""
    decay = config.weight_decay if is_matrix(name) else 0.0
    if config.rule in ("sgd", "rmsprop"):
        return states["momentum_buffer"]
    first, options = states["exp_avg"], config.rule_options
    if config.rule == "lion":
        return torch.sign(first) + decay * weight
    b1, b2 = options.betas
    first = first / (1 - b1**count)
    second = states["exp_avg_var" if config.rule == "adabelief" else "exp_avg_sq"]
    root = (second / (1 - b2**count)).sqrt()
    ratio = first / (root if config.rule == "adam3" else root + options.eps)
    return ratio + decay * weight if config.rule == "adamw" else ratio


def moments(options: Any, grad: Tensor, states: States) -> tuple[Tensor, Tensor]:
    b1, b2 = options.betas
    first = b1 * states.get("exp_avg", 0) + (1 - b1) * grad
    second = b2 * states.get("exp_avg_sq", 0) + (1 - b2) * grad**2
    return first, second


def adams_direction(options: Any, first: Tensor, second: Tensor, count: int) -> Tensor:
    b1, b2 = options.betas
    t = count + 1
    root = (second / (1 - b2**t)).sqrt() + options.eps
    return first / (1 - b1**t) / root


def adam(
    options: Any, weight: Tensor, grad: Tensor, states: States, lr: float, count: int
) -> Stepped:
    first, second = moments(options, grad, states)
    weight = weight - lr * adams_direction(options, first, second, count)
    return weight, {"exp_avg": first, "exp_avg_sq": second}


def sgd(options: Any, weight: Tensor, grad: Tensor, states: States, lr: float) -> Stepped:
    if not options.momentum:
        return weight - lr * grad, {}
    momentum = options.momentum * states.get("momentum_buffer", 0) + grad
    direction = grad + options.momentum * momentum if options.nesterov else momentum
    return weight - lr * direction, {"momentum_buffer": momentum}


def lion_direction(options: Any, grad: Tensor, states: States) -> Tensor:
    """Return the value whose sign Lion takes."""
    b1, _ = options.betas
    return b1 * states.get("exp_avg", 0) + (1 - b1) * grad


def lion(
    options: Any, weight: Tensor, grad: Tensor, states: States, lr: float, decay: float
) -> Stepped:
    _, b2 = options.betas
    direction = torch.sign(lion_direction(options, grad, states))
    momentum = b2 * states.get("exp_avg", 0) + (1 - b2) * grad
    return weight - lr * (direction + decay * weight), {"exp_avg": momentum}


def rmsprop(options: Any, weight: Tensor, grad: Tensor, states: States, lr: float) -> Stepped:
    square = options.alpha * states.get("square_avg", 0) + (1 - options.alpha) * grad**2
    step = grad / (square.sqrt() + options.eps)
    if not options.momentum:
        return weight - lr * step, {"square_avg": square}
    momentum = options.momentum * states.get("momentum_buffer", 0) + step
    return weight - lr * momentum, {"square_avg": square, "momentum_buffer": momentum}


def nadam(
    options: Any, weight: Tensor, grad: Tensor, states: States, lr: float, count: int
) -> Stepped:
    b1, b2 = options.betas
    first, second = moments(options, grad, states)
    root = (second / (1 - b2 ** (count + 1))).sqrt() + options.eps
    mu = [b1 * (1 - 0.5 * 0.96 ** (i * options.momentum_decay)) for i in range(count + 3)]
    now, then = math.prod(mu[1 : count + 2]), math.prod(mu[1 : count + 3])
    direction = (1 - mu[count + 1]) / (1 - now) * grad + mu[count + 2] / (1 - then) * first
    return weight - lr * direction / root, {"exp_avg": first, "exp_avg_sq": second}


def adabelief(
    options: Any, weight: Tensor, grad: Tensor, states: States, lr: float, count: int
) -> Stepped:
    b1, b2 = options.betas
    first = b1 * states.get("exp_avg", 0) + (1 - b1) * grad
    spread = (1 - b2) * (grad - first) ** 2 + options.eps
    second = b2 * states.get("exp_avg_var", 0) + spread
    weight = weight - lr * adams_direction(options, first, second, count)
    return weight, {"exp_avg": first, "exp_avg_var": second}


def adam3(
    options: Any, weight: Tensor, grad: Tensor, states: States, lr: float, count: int
) -> Stepped:
    b1, b2 = options.betas
    first = b1 * states.get("exp_avg", 0) + (1 - b1) * grad
    second = b2 * states.get("exp_avg_sq", 0) + (1 - b2) * first**2 + options.eps
    root = (second / (1 - b2 ** (count + 1))).sqrt()
    weight = weight - lr * first / (1 - b1 ** (count + 1)) / root
    return weight, {"exp_avg": first, "exp_avg_sq": second}


def norm(name: str, values: Tensor) -> Tensor:
    """Return the norm of a parameter, of each expert's matrix by itself: [] or [experts, 1,
    ...]."""
    if ".moe.up." in name or ".moe.down." in name:
        return torch.stack([expert.norm() for expert in values]).view(-1, *[1] * (values.dim() - 1))
    return values.norm()


def lars(
    options: Any, name: str, weight: Tensor, grad: Tensor, states: States, lr: float, decay: float
) -> Stepped:
    step: Tensor | float = lr
    if is_matrix(name):
        size = norm(name, weight)
        decayed = norm(name, grad) + decay * size
        step = lr * options.trust_coefficient * size / decayed
        grad = grad + decay * weight
    momentum = options.momentum * states.get("momentum_buffer", 0) + step * grad
    return weight - momentum, {"momentum_buffer": momentum}


def lamb(
    options: Any,
    name: str,
    weight: Tensor,
    grad: Tensor,
    states: States,
    lr: float,
    count: int,
    decay: float,
) -> Stepped:
    first, second = moments(options, grad, states)
    direction = adams_direction(options, first, second, count)
    if is_matrix(name):
        direction = direction + decay * weight
        direction = direction * norm(name, weight) / norm(name, direction)
    return weight - lr * direction, {"exp_avg": first, "exp_avg_sq": second}


def matrices_of(split: str, name: str, model: Any) -> list[Any]:
    """Return the rows of a weight that are matrices by themselves. Rows of the QKV weight are
    ordered by key head: its queries, its key, its value."""
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
    options: Any,
    weight: Tensor,
    grad: Tensor,
    states: States,
    lr: float,
    decay: float,
    orthogonalise: Callable[[Tensor], Tensor],
    matrices: Sequence[Any],
) -> Stepped:
    momentum = options.momentum * states.get("exp_avg", 0) + (1 - options.momentum) * grad
    direction = momentum
    if options.nesterov:
        direction = options.momentum * momentum + (1 - options.momentum) * grad
    step = torch.zeros_like(weight)
    for which in matrices:
        matrix = direction[which]
        rows, columns = matrix.shape[-2:]
        factor = max(1.0, rows / columns) ** 0.5
        if options.adjust_lr_fn == "match_rms_adamw":
            factor = 0.2 * max(rows, columns) ** 0.5
        step[which] = factor * orthogonalise(matrix)
    weight = weight - lr * decay * weight - lr * step
    return weight, {"exp_avg": momentum}
