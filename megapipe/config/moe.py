"""The section `model.moe`: layers whose MLP is a mixture of experts."""

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.section import ExpectedText, OnResume, Section, needs
from megapipe.util.user_code import names_or_code

SCORES = ("softmax", "sigmoid")

Number = Annotated[int, Field(ge=2, le=32767)]


EXPERTS, BALANCE = needs("model.moe.experts"), needs("model.moe.balance")


class MoEConfig(Section):
    """A mixture of experts in the place of MLPs (docs/moe.md), off by default: a router sends each
    token to a few of many MLPs, and their outputs are added up by its weights."""

    ON_RESUME = OnResume.MODEL
    NEEDS = (EXPERTS,)

    experts: Annotated[
        Number | list[Number] | None,
        ExpectedText("a whole number >= 2 and <= 32767, a list of such numbers, or null"),
    ] = None
    """Experts of a layer, or a list of one number for each layer that has some, in their order
    (PR-MoE's pyramid; Rajbhandari et al., 2201.05596); default: none, all layers are dense."""
    top_k: int = Field(2, ge=1)
    """Experts that a token is sent to."""
    ffn: int | None = Field(None, ge=1)
    """Inner width of an expert; default: that of a dense MLP."""
    dense_first: int = Field(0, ge=0)
    """So many first layers stay dense (DeepSeek)."""
    every: int = Field(1, ge=1)
    """Of the layers after these the last of every so many has experts: 2 for every other one
    (GShard)."""
    dense_layers: list[int] = Field(default_factory=list)
    """Layers, counted from 0, that stay dense beside those."""
    shared: int | None = Field(None, ge=1)
    """Inner width of an MLP beside the experts that takes every token; default: there is none."""
    shared_gate: Annotated[Literal["none", "sigmoid", "softmax"], needs("model.moe.shared")] = (
        "none"
    )
    """Factor of the shared MLP's output. none: 1. sigmoid: a gate of the token
    (Qwen2-MoE). softmax: one of two coefficients that sum to 1, of which the experts' output gets
    the other (PR-MoE)."""
    scores: Annotated[
        str, ExpectedText(f"one of {', '.join(SCORES)}, or a class of your own as module:name")
    ] = Field("softmax", pattern=names_or_code(SCORES))
    """Scores of the experts, from the router's logits: over all experts, or each by itself
    (DeepSeek-V3). A token goes to the experts with the largest ones, and they are the weights. Or a
    class of your own as `module:name`, derived from `Router`, which may also choose
    (docs/extending.md)."""
    normalise: bool = True
    """Whether the weights of a token are divided by their sum."""
    scale: float = Field(1.0, gt=0)
    """Factor of the weights, after that."""
    groups: Annotated[int, needs("model.moe.group_top_k")] = Field(1, ge=1)
    """Groups of as many neighbouring experts each, for `group_top_k`."""
    group_top_k: int | None = Field(None, ge=1)
    """Groups that a token's experts are from: those whose two best scores have the largest sums
    (DeepSeek-V3); default: all."""
    router_init_scale: Annotated[float, OnResume.HARMLESS] = Field(1.0, gt=0)
    """Initial weights of the router have a standard deviation of init_std x this (Switch: 0.1)."""
    jitter: Annotated[float, OnResume.LISTED] = Field(0.0, ge=0, lt=1)
    """In training each value of the router's input is multiplied by a random number between 1 -
    this and 1 + this (Switch: 0.01)."""
    second: Annotated[Literal["always", "random"], OnResume.LISTED] = "always"
    """Whether the second of two choices is made always. random: in training with the probability
    of twice its share in both (GShard); else it is dropped, and takes no place."""
    balance: Annotated[float, OnResume.LISTED] = Field(0.01, ge=0)
    """Coefficient of the term that has tokens spread evenly over experts; it is 1 x the coefficient
    in each layer that they are spread so in."""
    balance_scope: Annotated[
        Literal["sequence", "microbatch", "step"], OnResume.LISTED, BALANCE
    ] = "sequence"
    """Tokens over which the term is taken, one for each sequence or each micro-batch: the latter
    makes training depend on train.microbatch. step: all of the global batch, with the choices of
    the step before."""
    balance_choices: Annotated[Literal["all", "first"], OnResume.LISTED, BALANCE] = "all"
    """Which choices of a token the term counts (GShard: the first)."""
    bias_rate: Annotated[float | None, OnResume.LISTED] = Field(None, ge=0)
    """Balance by a bias of each expert (DeepSeek-V3, 2412.19437), which is added to its score where
    experts are chosen and not in the weights. Each update moves it by this: up where the expert had
    fewer of the step's choices than the mean, down where it had more. 0: biases stay as they are.
    Default: there are none."""
    z: Annotated[float, OnResume.LISTED] = Field(0.0, ge=0)
    """Coefficient of the mean squared logsumexp of the router's logits (ST-MoE, 2202.08906)."""
    capacity: Annotated[float | None, OnResume.LISTED] = Field(None, gt=0)
    """An expert takes at most ceil(capacity x top_k x length / experts) tokens of a sequence; the
    other choices are dropped and add nothing. Default: no choice is dropped."""
    drop: Annotated[
        Literal["choice", "position", "score"], OnResume.LISTED, needs("model.moe.capacity")
    ] = "choice"
    """Whom a full expert refuses. choice: second choices before first ones, then later tokens
    (GShard, Switch). position: later tokens. score: those with smaller weights."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        if self.experts is None or layer < self.dense_first or layer in self.dense_layers:
            return False
        return (layer - self.dense_first + 1) % self.every == 0

    def experts_of(self, layer: int) -> int:
        """Experts of a layer, counted from 0; of a dense one 0."""
        if self.experts is None or not self.has_experts(layer):
            return 0
        if isinstance(self.experts, int):
            return self.experts
        return self.experts[sum(map(self.has_experts, range(layer)))]

    def resolved(self, layers: int, ffn: int) -> "MoEConfig":
        """The section of a model with so many layers and dense MLPs of the inner width `ffn`, with
        every default filled in. A list of one number over and over becomes that number."""
        experts, count = self.experts, sum(map(self.has_experts, range(layers)))
        if experts is None:
            return self
        if isinstance(experts, list) and (len(experts), len(set(experts))) == (count, 1):
            experts = experts[0]
        filled = {"ffn": self.ffn or ffn, "group_top_k": self.group_top_k or self.groups}
        return self.model_copy(update={**filled, "experts": experts})
