"""The configuration of a model: its sizes and variants, free of any layout."""

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.moe import MoEConfig
from megapipe.config.section import ExpectedText, Needs, OnResume, Section, needs
from megapipe.util.dtypes import Dtype
from megapipe.util.user_code import is_user_code, names_or_code

NORMS = ("layernorm", "rmsnorm")

ROTARY, BY_TURNS = (
    needs("model.positions", "rotary"),
    needs("model.rotary_scaling", "llama3", "yarn"),
)
WINDOW = needs("model.window")
WINDOW_IF_SHORT = Needs(
    WINDOW.words,
    lambda config: (
        WINDOW.is_met(config) or (config.model.full_attention_every or 0) > config.model.layers
    ),
)
"""A window, where a model is as deep as `full_attention_every`; it stands for none otherwise."""


class ModelConfig(Section):
    """A GPT-style decoder (GPT-2, GPT-3 and Llama are settings of it), or with `source` a model of
    your own."""

    ON_RESUME = OnResume.MODEL

    source: str | None = None
    """A model of your own: `module:name` of a function that returns its layers, a list of
    torch.nn.Modules (docs/models.md), or of a class derived from
    megapipe.model.interface.ModelSpec. Of the other keys of this section `options`,
    `vocab_size` and `dtype` go with it."""
    options: Annotated[
        dict[str, str | int | float | bool | None],
        ExpectedText("values by name, as in model.options.width=64"),
        needs("model.source"),
    ] = Field(default_factory=dict)
    """Arguments for `source`, by name: model.options.width=64."""
    layers: int = Field(4, ge=1, le=1000)
    """Transformer layers."""
    hidden: int = Field(128, ge=1)
    """Width of the residual stream."""
    heads: int = Field(4, ge=1)
    """Query heads of the attention."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads (grouped-query attention); default: as many as `heads`."""
    head_dim: int | None = Field(None, ge=1)
    """Width of a head; default: hidden / heads."""
    ffn_hidden: int | None = Field(None, ge=1)
    """Inner width of the MLP; default: 4 x hidden, with a gate 8/3 x hidden rounded up to 64."""
    vocab_size: int | None = Field(None, ge=2)
    """Size of the vocabulary; default: the tokenizer's. A larger number is allowed."""
    max_positions: int | None = Field(None, ge=1)
    """Rows of the learned position table; of other positions the longest text that exports name.
    Default: train.sequence_length."""
    norm: Annotated[
        str, ExpectedText(f"one of {', '.join(NORMS)}, or a function of your own as module:name")
    ] = Field("layernorm", pattern=names_or_code(NORMS))
    """Normalisation before attention, before the MLP and before the head. Or a function of your own
    as `module:name`, of (x, weight, bias, eps), over the last dimension (docs/extending.md)."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in every norm."""
    norm_offset: Annotated[bool, needs("model.norm", "rmsnorm")] = False
    """The weight of rmsnorm is kept as its difference from 1 (Gemma), and begins at 0."""
    post_norms: bool = False
    """A norm after attention and one after the MLP, before each is added to the residual stream
    (Gemma 2), besides those before them."""
    embedding_norm: bool = False
    """A norm after the embedding (BLOOM)."""
    embedding_scale: float | None = Field(None, gt=0)
    """Factor of the word embedding, rounded to `dtype` (Gemma: sqrt(hidden));
    default: 1."""
    parallel_residual: bool = False
    """Attention and MLP of a layer have the same input, and both are added to it (GPT-NeoX)."""
    logit_softcap: float | None = Field(None, gt=0)
    """Logits x become logit_softcap * tanh(x / logit_softcap) (Gemma 2)."""
    positions: Literal["learned", "rotary", "alibi"] = "learned"
    """A learned table added to the embedding (GPT-2), rotary embedding of queries and keys (Llama),
    or scores that fall with the distance, by a slope of each head (BLOOM; Press et al.,
    2108.12409)."""
    rotary_base: Annotated[float, ROTARY] = Field(10000.0, gt=0)
    """Base of the rotary frequencies."""
    rotary_local_base: Annotated[float | None, WINDOW, ROTARY] = Field(None, gt=0)
    """Base of the frequencies in layers with a window, which are not stretched (Gemma 3); default:
    as in the others."""
    rotary_share: Annotated[float, ROTARY] = Field(1.0, gt=0, le=1)
    """Share of a head's width that is rotated, from its beginning on (GPT-NeoX: 0.25)."""
    rotary_scaling: Annotated[Literal["none", "linear", "llama3", "yarn"], ROTARY] = "none"
    """How rotary frequencies are stretched for texts longer than those of the first training:
    linear divides all by `rotary_factor` (Chen et al., 2306.15595); llama3 and yarn (Peng et al.,
    2309.00071) divide the low ones, keep the high ones, and blend those between."""
    rotary_factor: Annotated[float, needs("model.rotary_scaling")] = Field(1.0, ge=1)
    """Divisor of frequencies under `rotary_scaling`."""
    rotary_original_positions: Annotated[int | None, BY_TURNS] = Field(None, ge=1)
    """Positions of the first training, for llama3 and yarn."""
    rotary_turns_low: Annotated[float, BY_TURNS] = Field(1.0, gt=0)
    """Frequencies with fewer turns over `rotary_original_positions` are divided in full."""
    rotary_turns_high: Annotated[float, BY_TURNS] = Field(4.0, gt=0)
    """Frequencies with more turns over them stay (yarn's usual number is 32)."""
    rotary_attention_factor: Annotated[float | None, needs("model.rotary_scaling", "yarn")] = Field(
        None, gt=0
    )
    """Factor of rotated queries and keys under yarn; default: 0.1 ln(rotary_factor) + 1."""
    attention_scale: float | None = Field(None, gt=0)
    """Factor of the products of queries and keys; default: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = Field(None, gt=0)
    """Scores x become attention_softcap * tanh(x / attention_softcap) (Gemma 2)."""
    window: int | None = Field(None, ge=1)
    """Positions that a token sees, the last of which is its own (Mistral); default: all."""
    full_attention_every: Annotated[int | None, WINDOW_IF_SHORT] = Field(None, ge=1)
    """With `window` every so many-th layer sees all positions: 2 in Gemma 2, 6 in Gemma 3."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu_tanh"] = "gelu_tanh"
    """Nonlinearity of the MLP; gelu_tanh is GPT-2's approximation, swiglu and geglu_tanh (Gemma)
    add a gate."""
    bias: bool = True
    """Biases in the linear layers (and in layernorm)."""
    qkv_bias: bool | None = None
    """Biases in the projection to queries, keys and values (Qwen2 has no others); default: as
    `bias`."""
    qk_norm: bool = False
    """Rmsnorm over the width of each query and key head, before they are rotated (Qwen3)."""
    tied_embeddings: bool = True
    """One matrix for the input embedding and the head."""
    dropout: Annotated[float, OnResume.LISTED] = Field(0.0, ge=0, lt=1)
    """Dropout after the embedding, on attention weights and on both residual branches."""
    init_std: Annotated[float, OnResume.HARMLESS] = Field(0.02, gt=0)
    """Standard deviation of the initial weights; residual outputs get it over sqrt(2 layers)."""
    dtype: Annotated[Dtype, OnResume.LISTED] = "fp32"
    """Type of weights and activations; main gradients and optimizer state: fp32 (fp64). fp16
    needs a scaled loss, see `optimizer.loss_scale`."""
    moe: MoEConfig = MoEConfig()

    def resolved(self, *, vocab_size: int | None, sequence_length: int) -> "ModelConfig":
        """The same model with every default filled in; an unknown vocabulary stays None."""
        head_dim = self.head_dim or self.hidden // self.heads
        every = self.full_attention_every
        if self.gated:
            ffn = -(-8 * self.hidden // (3 * 64)) * 64
        else:
            ffn = 4 * self.hidden
        ffn = self.ffn_hidden or ffn
        return self.model_copy(
            update={
                "moe": self.moe.resolved(self.layers, ffn),
                "kv_heads": self.kv_heads or self.heads,
                "head_dim": head_dim,
                "ffn_hidden": ffn,
                "vocab_size": self.vocab_size or vocab_size,
                "max_positions": self.max_positions or sequence_length,
                "qkv_bias": None if self.qkv_bias == self.bias else self.qkv_bias,
                "full_attention_every": every if every and every <= self.layers else None,
            }
        )

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation in ("swiglu", "geglu_tanh")

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projection to queries, keys and values has biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    def window_of(self, layer: int) -> int | None:
        """Positions that a token sees in a layer; None: all."""
        every = self.full_attention_every
        return None if every is not None and (layer + 1) % every == 0 else self.window

    @property
    def own_norm(self) -> bool:
        """Whether `norm` names a user-defined function."""
        return is_user_code(self.norm)

    @property
    def rotary_width(self) -> int:
        """Values of a head that are rotated, of a resolved model."""
        return int((self.head_dim or 0) * self.rotary_share)
