"""The formulas of docs/moe.md about routing, dropping and balance are what the code computes.

They are read from the page: ``name = formula``, and behind two blanks or more the settings for
which it holds, with a remark. Two factors stand side by side or have an x between them, and
``sum over e of`` goes on to the end of the formula or of its parentheses. In an array e are the
last dimension, as are a token's choices i; tokens t and scopes g are the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe import routing as route
from megapipe.layers.moe.routing import RoutingResult
from megapipe.layers.moe.specs import NUM_STATS, Drop, Routing, Scope
from megapipe.model.gpt.moe.moe_layer import MoELayer
from megapipe.train.moe.routing_state import RoutingState
from tests.parity import reference
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import new_stage

PAGE = (Path(__file__).parents[3] / "docs/moe.md").read_text(encoding="utf-8")
SECTIONS = ("Routing", "Dropping", "Balance", "Nearer experts")
LENGTH, SEQUENCES, EXPERTS = 6, 4, 8
TOKENS = LENGTH * SEQUENCES


class Formula(NamedTuple):
    name: str
    text: str
    """In Python."""
    setting: str
    """key=value, or nothing."""


def formulas() -> Iterator[Formula]:
    for title in SECTIONS:
        (section,) = re.findall(rf"^## {title}\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
        for line in re.findall(r"^ {4,6}(\w+ = .*)$", section, re.MULTILINE):
            formula, _, remark = re.sub(r" {2,}", "\0", line).partition("\0")
            name, _, text = formula.partition(" = ")
            setting = re.match(r"\w+=\w+", remark)
            yield Formula(name, in_python(text), setting[0] if setting else "")


def in_python(text: str) -> str:
    factors = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", as_calls(text.replace(" x ", " * ")))
    return factors.replace("^", "**")


def as_calls(text: str) -> str:
    """Replace ``sum over e of ...`` by ``sum_e(...)``."""
    found = re.search(r"(sum|mean) over (\w) of ", text)
    if found is None:
        return text
    depth, end = 0, len(text)
    for i in range(found.end(), len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth < 0:
            end = i
            break
    inner = as_calls(text[found.end() : end])
    return f"{text[: found.start()]}{found[1]}_{found[2]}({inner}){as_calls(text[end:])}"


ALL = list(formulas())
KNOWN: dict[str, Callable[..., Any]] = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "logsumexp": lambda values: values.logsumexp(-1),
    "ceil": math.ceil,
    **{f"sum_{over}": lambda values: values.sum(-1, keepdim=True) for over in "ei"},
    "mean_e": lambda values: values.mean(-1, keepdim=True),
    "sum_t": lambda values: values.sum(0),
    "mean_t": lambda values: values.mean(0),
    "sum_g": lambda values: values.sum(0),
}


def value(name: str, given: Mapping[str, Any], *settings: str) -> Any:
    """Evaluate the formula for these settings, or the only one of this name."""
    (found,) = (each for each in ALL if each.name == name and each.setting in ("", *settings))
    return eval(found.text, {**KNOWN}, dict(given))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def named(how: Routing) -> tuple[str, str]:
    return f"score_function={how.scores}", f"norm_topk_prob={str(how.normalise).lower()}"


def close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_python_of_formulas() -> None:
    assert in_python("E a_e / (k T_g)") == "E*a_e / (k*T_g)"
    assert in_python("z x (sum over t of f(l)^2) / T") == "z * (sum_t(f(l)**2)) / T"
    assert in_python("c / sum over e of a (b + c)") == "c / sum_e(a*(b + c))"


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_scores_and_weights(scores: str, normalise: bool) -> None:
    how = Routing(EXPERTS, 3, scores=scores, normalise=normalise, scale=2.5)
    logits = drawn(TOKENS, EXPERTS)
    p = how.router.scores(logits)
    assert close(value("p_e", {"logit_e": logits}, *named(how)), p)
    ids = route.decode_choices(route.route_tokens(p, how, SEQUENCES))
    given = {"p_i": p.gather(1, ids), "routed_scaling_factor": how.scale}
    assert close(value("w_i", given, *named(how)), route.routing_weights(p, ids, how))


@pytest.mark.parametrize("normalise", [True, False])
def test_second_choices(normalise: bool) -> None:
    how = Routing(EXPERTS, 2, normalise=normalise, random_second=True)
    p, u = how.router.scores(drawn(TOKENS, EXPERTS)), drawn(TOKENS, seed=1).sigmoid()
    choice = route.route_tokens(p, how, SEQUENCES, second=u)
    p_1, p_2 = p.gather(1, route.decode_choices(choice)).unbind(1)
    kept = value("kept", {"p_1": p_1, "p_2": p_2, "u": u}, *named(how))
    assert kept.tolist() == (choice[:, 1] >= 0).tolist()
    assert 0 < kept.sum() < TOKENS


class Matrix(NamedTuple):
    """Matrix of a linear layer, which is written as a factor."""

    weight: Tensor

    def __mul__(self, x: Any) -> Any:
        return x @ self.weight.T


@pytest.mark.parametrize("gate", ["none", "sigmoid", "softmax"])
def test_what_a_layer_makes_of_its_experts_and_of_a_shared_mlp(gate: str) -> None:
    model = configure(Case(model="gpt2", moe="top 2", layers=1, tied=False))[0].model
    changes = {"shared_ffn_hidden": 20, "shared_gate": gate, "routed_scaling_factor": 1.5}
    moe = model.moe.model_copy(update=changes)
    model = model.model_copy(update={"bias": False, "moe": moe})
    params = reference.init_random(model, seed=3)
    stage, _ = new_stage(model, params)
    (layer,) = (each for each in stage.module.modules() if isinstance(each, MoELayer))
    values = {name.removeprefix("layers.0.moe."): values for name, values in params.items()}
    x = drawn(TOKENS, model.hidden)
    p = (x @ values["router.weight"].T).softmax(-1)
    ids = route.route_tokens(p, layer.experts.routing, SEQUENCES).long()
    y_e = torch.stack([mlp(x, *pair) for pair in zip(*matrices(values, ""), strict=True)], -1)
    w_i = value(
        "w_i", {"p_i": p.gather(1, ids), "routed_scaling_factor": 1.5}, "norm_topk_prob=true"
    )
    y_i = y_e.gather(2, ids.unsqueeze(1).expand(-1, model.hidden, -1))  # [tokens, h, k]
    y = value("y", {"w_i": w_i.unsqueeze(1), "y_i": y_i}).squeeze(2)
    given: dict[str, Any] = {"x": x, "y": y, "s": mlp(x, *matrices(values, "shared."))}
    if gate != "none":
        given["g"] = Matrix(values["shared_gate.weight"])
        of_both = (given["g"] * x).softmax(-1)
        given |= {"c_0": of_both[:, :1], "c_1": of_both[:, 1:]}
    out = value("out", given, f"shared_gate={gate}")
    hidden = x.view(LENGTH, SEQUENCES, -1)
    with torch.no_grad():
        assert close(layer.experts(hidden, MicroBatch(0, 0, 1)).flatten(0, 1), y)
        assert close(layer(hidden, MicroBatch(0, 0, 1)).flatten(0, 1), out)


def matrices(values: Mapping[str, Tensor], of: str) -> tuple[Tensor, Tensor]:
    return values[f"{of}up.weight"], values[f"{of}down.weight"]


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return functional.gelu(x @ up.T, approximate="tanh") @ down.T


@pytest.mark.parametrize("drop", ["choice", "position", "score"])
@pytest.mark.parametrize("capacity", [0.3, 0.7, 1.0, 1.25])
def test_choices_that_are_dropped(drop: Drop, capacity: float) -> None:
    """A choice is dropped if its expert has no capacity left, in the order of the page."""
    how = Routing(5, 3, capacity=capacity, drop=drop)
    p = how.router.scores(drawn(TOKENS, 5))
    choice = route.route_tokens(p, how, SEQUENCES)
    ids = route.decode_choices(choice)
    given = {"capacity_factor": Fraction(str(capacity)), "k": 3, "length": LENGTH, "E": 5}
    places = value("places", given)
    assert places == how.expert_capacity(LENGTH)
    weights = route.routing_weights(p, ids, how).view(LENGTH, SEQUENCES, 3).tolist()
    kept = torch.zeros(LENGTH, SEQUENCES, 3, dtype=torch.bool)
    for sequence in range(SEQUENCES):
        ranked: dict[int, list[tuple[Any, int, int]]] = {e: [] for e in range(5)}
        for t, of_token in enumerate(ids.view(LENGTH, SEQUENCES, 3)[:, sequence].tolist()):
            for j, expert in enumerate(of_token):
                own = {"j": j, "t": t, "w": weights[t][sequence][j]}
                ranked[expert].append((value("order", own, f"drop_policy={drop}"), t, j))
        for each in ranked.values():
            for _, t, j in sorted(each)[:places]:
                kept[t, sequence, j] = True
    assert kept.view(TOKENS, 3).tolist() == (choice >= 0).tolist()
    assert not kept.all()


@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("scope", ["sequence", "microbatch"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_terms_of_the_loss(scores: str, scope: Scope, first_only: bool) -> None:
    """Their values, which are logged, and their gradients, of a third of a step's tokens."""
    how = Routing(
        EXPERTS,
        2,
        scores=scores,
        scope=scope,
        first_only=first_only,
        aux_loss_coeff=0.3,
        z_loss_coeff=0.05,
    )
    logits, T = drawn(TOKENS, EXPERTS).requires_grad_(), 3 * TOKENS
    p = value("p_e", {"logit_e": logits}, *named(how))
    choice = route.route_tokens(p.detach(), how, SEQUENCES)
    ids = route.decode_choices(choice)
    k = 1 if first_only else 2
    of_scopes = [list(range(g, TOKENS, SEQUENCES)) for g in range(SEQUENCES)]
    if scope == "microbatch":
        of_scopes = [list(range(TOKENS))]
    L_g = []
    for tokens in of_scopes:
        count_e = functional.one_hot(ids[tokens, :k], EXPERTS).sum((0, 1)).double()
        given = {"E": EXPERTS, "k": k, "T_g": len(tokens), "count_e": count_e}
        terms = {"f_e": value("f_e", given), "P_e": value("P_e", {"p_e": p[tokens]}, *named(how))}
        L_g.append(value("L_g", terms))
    given = {
        "aux_loss_coeff": how.aux_loss_coeff,
        "T_g": len(of_scopes[0]),
        "T": T,
        "L_g": torch.stack(L_g),
    }
    B = value("B", given).squeeze()
    Z = value("Z", {"z_loss_coeff": how.z_loss_coeff, "logit": logits, "T": T})
    counts = route.count(choice, how, SEQUENCES)
    spread = route.score_sums(p.detach(), how, len(counts))
    chosen = RoutingResult(choice, counts, None)  # type: ignore[arg-type]
    told = route.routing_stats(logits.detach(), chosen, how, spread)
    assert close(B.detach() * T / how.aux_loss_coeff, told[1])
    assert close(Z.detach() * T / how.z_loss_coeff, told[2])
    (grad,) = torch.autograd.grad(B + Z, logits)
    nothing = torch.zeros_like(ids, dtype=torch.float64)
    with torch.no_grad():
        found = route.logits_grad(nothing, logits, p, ids, counts, how, 1 / T)
    assert close(found, grad)


def test_biases() -> None:
    state = RoutingState({2: 4}, bias_rate=0.01, dtype=torch.float64)
    bias = torch.zeros(4, dtype=torch.float64)
    for counts in ([3.0, 1, 4, 0], [1.0, 3, 2, 2], [2.0, 2, 2, 2]):
        state.update([0.0] * NUM_STATS + counts)
        given = {"bias_e": bias, "bias_update_rate": 0.01, "count_e": torch.tensor(counts).double()}
        bias = value("bias_e", given)
        assert close(state.biases[2], bias)
    assert bias.tolist() == [0.0, 0.0, -0.01, 0.01]


def test_nearer_experts() -> None:
    """The split at which the term has no gradient is that of the bandwidths."""
    B_ie = torch.tensor([8.0, 8, 4, 4, 1, 1, 1, 1], dtype=torch.float64)
    q_ie = value("q_ie", {"B_ie": B_ie})
    assert close(q_ie, route.distance_factors([8.0, 4, 1, 1], EXPERTS, torch.float64))
    count_e = value("count_e", {"k": 2, "T_g": TOKENS, "B_ie": B_ie})
    assert count_e.sum() == pytest.approx(2 * TOKENS)
    f_e = value("f_e", {"E": EXPERTS, "count_e": count_e, "k": 2, "T_g": TOKENS})
    assert close(q_ie * f_e, (q_ie * f_e).mean().expand(EXPERTS))


def test_there_are_no_other_formulas() -> None:
    """The tests above look at all of them."""
    by_name: dict[str, list[str]] = {}
    for each in ALL:
        by_name.setdefault(each.name, []).append(each.setting)
    scores, gates = (
        ["score_function=softmax", "score_function=sigmoid"],
        ("none", "sigmoid", "softmax"),
    )
    normalise = ["norm_topk_prob=true", "norm_topk_prob=false"]
    several = {
        "p_e": scores,
        "w_i": normalise,
        "out": [f"shared_gate={gate}" for gate in gates],
        "kept": normalise,
        "order": [f"drop_policy={drop}" for drop in ("choice", "position", "score")],
        "P_e": scores,
    }
    alone = ("y", "places", "f_e", "L_g", "B", "Z", "bias_e", "q_ie", "count_e")
    assert by_name == several | {name: [""] for name in alone}
