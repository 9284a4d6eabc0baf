"""The section `model.moe` of the configuration: MoE layers."""

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.section import ExpectedText, Needs, OnResume, Section, needs
from megapipe.util.user_code import is_class_name, names_or_code

SCORES = ("softmax", "sigmoid")

Number = Annotated[int, Field(ge=2, le=32767)]


EXPERTS, BALANCE = needs("model.moe.num_experts"), needs("model.moe.aux_loss_coeff")
SPLITTABLE = Needs(
    EXPERTS.words, lambda config: EXPERTS.is_met(config) or is_class_name(config.model.source)
)
"""Condition of keys about experts on several ranks: ``model.moe.num_experts``, or a class of
transformers, which may have experts."""


class MoEConfig(Section):
    """MoE layers (docs/moe.md), off by default: in place of one MLP, a router sends each token to a
    few of many MLPs, the experts, and sums their outputs with its weights."""

    ON_RESUME = OnResume.MODEL
    NEEDS = (EXPERTS,)

    num_experts: Annotated[
        Number | list[Number] | None,
        ExpectedText("a whole number >= 2 and <= 32767, a list of such numbers, or null"),
    ] = None
    """Number of experts of a layer, or a list with one number for each MoE layer, in order
    (PR-MoE's pyramid; Rajbhandari et al., 2201.05596); default: none, all layers are dense."""
    top_k: int = Field(2, ge=1)
    """Number of experts that a token is sent to."""
    expert_ffn_hidden: int | None = Field(None, ge=1)
    """FFN hidden size of an expert; default: that of a dense MLP."""
    first_dense_layers: int = Field(0, ge=0)
    """Number of layers at the beginning that stay dense (DeepSeek)."""
    layer_freq: int = Field(1, ge=1)
    """After `first_dense_layers`, every n-th layer has experts, where n is this number: 2 for every
    other layer (GShard)."""
    dense_layers: list[int] = Field(default_factory=list)
    """Further layers, counted from 0, that stay dense."""
    shared_ffn_hidden: int | None = Field(None, ge=1)
    """FFN hidden size of a shared expert, an MLP that takes every token; default: there is none."""
    shared_gate: Annotated[
        Literal["none", "sigmoid", "softmax"], needs("model.moe.shared_ffn_hidden")
    ] = "none"
    """Factor of the shared expert's output. none: 1. sigmoid: a gate that depends on the token
    (Qwen2-MoE). softmax: one of two coefficients that sum to 1; the routed experts' output gets the
    other one (PR-MoE)."""
    score_function: Annotated[
        str, ExpectedText(f"one of {', '.join(SCORES)}, or a class of your own as module:name")
    ] = Field("softmax", pattern=names_or_code(SCORES))
    """Scores of the experts, from the router's logits: softmax over all experts, or sigmoid of each
    logit (DeepSeek-V3). A token is sent to the experts with the largest scores; the scores are also
    the weights of their outputs. Or your own class as `module:name`, derived from `Router`, which
    may also choose the experts (docs/extending.md)."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    routed_scaling_factor: float = Field(1.0, gt=0)
    """Factor by which the weights of a token's experts are multiplied, after `norm_topk_prob`."""
    num_groups: Annotated[int, needs("model.moe.topk_groups")] = Field(1, ge=1)
    """Number of groups into which a layer's experts are divided, for `topk_groups`; a group has
    consecutive experts, and all groups equally many."""
    topk_groups: int | None = Field(None, ge=1)
    """Number of groups from which a token's experts are taken: the groups whose two best scores
    have the largest sum (DeepSeek-V3); default: all."""
    router_init_scale: Annotated[float, OnResume.HARMLESS] = Field(1.0, gt=0)
    """Factor of `init_std` for the initial weights of the router (Switch: 0.1)."""
    jitter: Annotated[float, OnResume.LISTED] = Field(0.0, ge=0, lt=1)
    """Jitter in training: each value of the router's input is multiplied by a random number from 1
    - jitter to 1 + jitter (Switch: 0.01)."""
    second_expert: Annotated[Literal["always", "random"], OnResume.LISTED] = "always"
    """Whether the second of a token's two choices is always kept. random: in training it is kept
    with a probability of twice its share of the two weights (GShard); otherwise it is dropped, and
    takes no capacity."""
    aux_loss_coeff: Annotated[float, OnResume.LISTED] = Field(0.01, ge=0)
    """Coefficient of the auxiliary loss, which spreads tokens evenly over experts; with an even
    spread it adds 1 x the coefficient to the loss in each layer."""
    aux_loss_scope: Annotated[
        Literal["sequence", "microbatch", "step"], OnResume.LISTED, BALANCE
    ] = "sequence"
    """Tokens over which the auxiliary loss is computed. sequence: each sequence. microbatch: each
    micro-batch; training then depends on train.microbatch. step: the whole global batch, with the
    choices of the previous step."""
    aux_loss_choices: Annotated[Literal["all", "first"], OnResume.LISTED, BALANCE] = "all"
    """Choices of a token that the auxiliary loss counts: all, or only the first (GShard)."""
    bias_update_rate: Annotated[float | None, OnResume.LISTED] = Field(None, ge=0)
    """Balance the load with a bias per expert (DeepSeek-V3, 2412.19437). The bias is added to the
    expert's score when experts are chosen, not to the expert's weight. Each update changes the bias
    by this rate: up if the expert had fewer of the step's choices than the mean, down if it had
    more. 0: biases stay as they are. Default: no biases."""
    z_loss_coeff: Annotated[float, OnResume.LISTED] = Field(0.0, ge=0)
    """Coefficient of the z-loss: mean squared logsumexp of router logits (ST-MoE, 2202.08906)."""
    capacity_factor: Annotated[float | None, OnResume.LISTED] = Field(None, gt=0)
    """Capacity factor: an expert takes at most ceil(capacity_factor x top_k x length / experts)
    tokens of a sequence; further choices of this expert are dropped and add nothing to the output.
    Default: no drops."""
    drop_policy: Annotated[
        Literal["choice", "position", "score"], OnResume.LISTED, needs("model.moe.capacity_factor")
    ] = "choice"
    """Which choices an expert above its capacity drops first. choice: second choices, then first
    choices, each from the last token on (GShard, Switch). position: choices of the last tokens.
    score: choices with the smallest weights."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        if (
            self.num_experts is None
            or layer < self.first_dense_layers
            or layer in self.dense_layers
        ):
            return False
        return (layer - self.first_dense_layers + 1) % self.layer_freq == 0

    def experts_of(self, layer: int) -> int:
        """Return the number of experts of a layer, counted from 0; 0 for a dense layer."""
        if self.num_experts is None or not self.has_experts(layer):
            return 0
        if isinstance(self.num_experts, int):
            return self.num_experts
        return self.num_experts[sum(map(self.has_experts, range(layer)))]

    def resolved(self, layers: int, ffn: int) -> "MoEConfig":
        """Return the section with all defaults filled in, for a model of `layers` layers with dense
        MLPs of FFN hidden size `ffn`. A list of equal numbers of experts becomes one number."""
        experts, count = self.num_experts, sum(map(self.has_experts, range(layers)))
        if experts is None:
            return self
        if isinstance(experts, list) and (len(experts), len(set(experts))) == (count, 1):
            experts = experts[0]
        filled = {
            "num_experts": experts,
            "expert_ffn_hidden": self.expert_ffn_hidden or ffn,
            "topk_groups": self.topk_groups or self.num_groups,
        }
        return self.model_copy(update=filled)
