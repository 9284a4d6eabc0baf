"""Comparison of named tensors, with how far apart they are if they differ."""

import math
from collections.abc import Callable, Mapping

from torch import Tensor


def assert_grads_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-10
) -> None:
    """Assert per tensor max|a - b| <= tolerance x max(max|b|, 1e-3 x max|b| over all tensors).

    The second term is for gradients that are zero up to rounding, such as a key bias's.
    """
    _assert_close("gradient", actual, expected, gradient_scales(expected), tolerance)


def gradient_scales(grads: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the unit of each gradient's error: see :func:`assert_grads_close`."""
    floor = 1e-3 * max(_largest(g) for g in grads.values())
    return {name: max(_largest(g), floor) for name, g in grads.items()}


def assert_weights_close(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    lr: float,
    tolerance: float = 1e-10,
) -> None:
    """Assert per tensor max|a - b| <= tolerance x max(max|b|, lr)."""
    scales = {name: max(_largest(w), lr) for name, w in expected.items()}
    _assert_close("weight", actual, expected, scales, tolerance)


def assert_error_like(
    actual: Mapping[str, Tensor],
    baseline: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    factor: float = 2.0,
    *,
    slack: Mapping[str, Tensor] | None = None,
    kind: Callable[[str], str] = str,
) -> None:
    """Assert that `actual` is at most `factor` times as far from `expected` as `baseline`: for
    bf16.

    Distances are RMS per tensor. A baseline counts as at least 1e-3 x the rounding (2**-8) of the
    largest value over all, as for the gradients in `assert_grads_close`. `slack` are additional
    errors of single elements. Tensors of one `kind`, by name, are compared together, each in units
    of its size: the error of a few values is itself uncertain.
    """
    _assert_same_tensors(actual, expected)
    _assert_same_tensors(baseline, expected)
    floor = 1e-3 * 2**-8 * max(_largest(t) for t in expected.values())
    errors: dict[str, list[tuple[float, float, float]]] = {}
    for name, reference in expected.items():
        least = floor * math.sqrt(reference.numel())
        size = max(reference.double().norm().item(), least) or 1.0
        error = _distance(actual[name], reference)
        allowed = max(_distance(baseline[name], reference), least)
        extra = 0.0 if slack is None else slack[name].norm().item()
        errors.setdefault(kind(name), []).append((error / size, allowed / size, extra / size))
    ratios = {}
    for name, group in errors.items():
        error, allowed, extra = (math.hypot(*column) for column in zip(*group, strict=True))
        ratios[name] = _ratio(error, allowed + extra / factor)
    name, worst = _worst(ratios)
    assert worst <= factor, f"{name}: error is {worst:.3g} x the baseline's, above {factor:.3g}"


def assert_within(
    what: str,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    allowed: Mapping[str, Tensor],
) -> None:
    """Assert per element |a - b| <= allowed."""
    _assert_same_tensors(actual, expected)
    for name, wanted in expected.items():
        difference = (actual[name].double() - wanted.double()).abs()
        wrong = ~(difference <= allowed[name])  # so that NaN is wrong
        if wrong.any():
            excess = (difference / allowed[name]).masked_fill(~wrong, 0)
            worst = int(excess.argmax())
            raise AssertionError(
                f"{what} {name}: {int(wrong.sum())} of {wanted.numel()} values are wrong; the "
                f"largest difference is {difference.flatten()[worst]:.3g}, and "
                f"{allowed[name].flatten()[worst]:.3g} is allowed there"
            )


def assert_scalar_close(what: str, actual: float, expected: float, tolerance: float) -> None:
    """Assert |actual - expected| <= tolerance x |expected|."""
    assert abs(actual - expected) <= tolerance * abs(expected), (
        f"{what} {actual} is not {expected}: relative difference is "
        f"{abs(actual / expected - 1):.3g}, above {tolerance:.3g}"
    )


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def _distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).norm().item()


def _ratio(difference: float, scale: float) -> float:
    """Return difference / scale; infinity if it is not a finite number."""
    if difference == 0:
        return 0.0
    ratio = difference / scale if scale else math.inf
    return math.inf if math.isnan(ratio) else ratio


def _worst(ratios: Mapping[str, float]) -> tuple[str, float]:
    return max(ratios.items(), key=lambda item: item[1])


def _assert_same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    differing = sorted(actual.keys() ^ expected.keys())
    assert not differing, f"tensors in only one of the two: {differing}"
    for name, tensor in expected.items():
        found = tuple(actual[name].shape)
        assert found == tuple(tensor.shape), f"{name}: shape {found}, not {tuple(tensor.shape)}"


def _assert_close(
    what: str,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    scales: Mapping[str, float],
    tolerance: float,
) -> None:
    _assert_same_tensors(actual, expected)
    ratios = {
        name: _ratio(_largest(actual[name].double() - reference.double()), scales[name])
        for name, reference in expected.items()
    }
    name, worst = _worst(ratios)
    assert worst <= tolerance, (
        f"{what} {name}: largest difference is {worst:.3g} x its scale {scales[name]:.3g}, "
        f"above {tolerance:.3g}"
    )
