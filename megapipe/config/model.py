"""The section `model` of the configuration: sizes and variants, independent of layout."""

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.moe import MoEConfig
from megapipe.config.rope import WINDOW, RopeConfig
from megapipe.config.section import ExpectedText, Needs, OnResume, Section, needs
from megapipe.util.dtypes import Dtype
from megapipe.util.user_code import is_class_name, is_user_code, names_or_code

NORMS = ("layernorm", "rmsnorm")

WINDOW_IF_SHORT = Needs(
    WINDOW.words,
    lambda config: (
        WINDOW.is_met(config) or (config.model.full_attention_every or 0) > config.model.layers
    ),
)
"""Condition of ``model.full_attention_every``: a sliding window is set. The key is also accepted if
its value exceeds the number of layers: then it changes no layer."""


class ModelConfig(Section):
    """A GPT-style decoder (GPT-2, GPT-3 and Llama are settings of it), or with `source` your own
    model."""

    ON_RESUME = OnResume.MODEL

    source: str | None = None
    """Your own model: `module:name` of a function that returns its layers, a list of
    torch.nn.Modules (docs/models.md), or of a class derived from
    megapipe.model.interface.ModelSpec. Or a model of transformers as its own class
    (docs/classes.md): `hf:FOLDER` with weights, `hf:OWNER/NAME` on the hub, or `hf:FILE.json`, a
    configuration alone. Only `options`, `vocab_size` and `dtype` of this section can be set with
    it."""
    options: Annotated[
        dict[str, str | int | float | bool | None],
        ExpectedText("values by name, as in model.options.width=64"),
        needs("model.source"),
    ] = Field(default_factory=dict)
    """Arguments for `source`, by name: model.options.width=64. With hf: there is one,
    trust_remote_code, which allows to run Python code of the folder."""
    layers: int = Field(4, ge=1, le=1000)
    """Number of transformer layers."""
    hidden: int = Field(128, ge=1)
    """Hidden size: width of the residual stream."""
    heads: int = Field(4, ge=1)
    """Number of query heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Number of key/value heads (grouped-query attention); default: as many as `heads`."""
    head_dim: int | None = Field(None, ge=1)
    """Width of a head; default: hidden / heads."""
    ffn_hidden: int | None = Field(None, ge=1)
    """FFN hidden size: inner width of the MLP. Default: 4 x hidden; with a gated activation 8/3 x
    hidden, rounded up to a multiple of 64."""
    vocab_size: int | None = Field(None, ge=2)
    """Size of the vocabulary, at least the tokenizer's; default: the tokenizer's."""
    max_positions: int | None = Field(None, ge=1)
    """Number of rows of the learned position table; with other positions, the longest text that
    exports declare. Default: train.sequence_length."""
    norm: Annotated[
        str, ExpectedText(f"one of {', '.join(NORMS)}, or a function of your own as module:name")
    ] = Field("layernorm", pattern=names_or_code(NORMS))
    """Norm before attention, before the MLP and before the head. Or your own function as
    `module:name`, of (x, weight, bias, eps), over the last dimension (docs/extending.md)."""
    norm_eps: float = Field(1e-5, gt=0)
    """Constant added to the variance in every norm."""
    zero_centered_norm: Annotated[bool, needs("model.norm", "rmsnorm")] = False
    """Zero-centred weights: rmsnorm stores its weight minus 1, which begins at 0 (Gemma)."""
    post_norms: bool = False
    """Add a norm to the output of attention and one to the output of the MLP, before each output is
    added to the residual stream (Gemma 2)."""
    embedding_norm: bool = False
    """Add a norm after the embedding (BLOOM)."""
    embedding_scale: float | None = Field(None, gt=0)
    """Factor by which the output of the word embedding is multiplied, rounded to `dtype` (Gemma:
    sqrt(hidden)); default: 1."""
    parallel_residual: bool = False
    """Give attention and MLP the same input, and add both outputs to it (GPT-NeoX)."""
    logit_softcap: float | None = Field(None, gt=0)
    """Soft cap: logits x become logit_softcap * tanh(x / logit_softcap) (Gemma 2)."""
    positions: Literal["learned", "rotary", "alibi"] = "learned"
    """Position embeddings. learned: a table that is added to the embedding (GPT-2). rotary:
    rotation of queries and keys (Llama). alibi: scores fall with the distance, with a slope per
    head (BLOOM; Press et al., 2108.12409)."""
    rope: RopeConfig = RopeConfig()
    attention_scale: float | None = Field(None, gt=0)
    """Factor of the products of queries and keys; default: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = Field(None, gt=0)
    """Soft cap: scores x become attention_softcap * tanh(x / attention_softcap) (Gemma 2)."""
    sliding_window: int | None = Field(None, ge=1)
    """Number of positions that a token attends to, itself included (Mistral); default: all."""
    full_attention_every: Annotated[int | None, WINDOW_IF_SHORT] = Field(None, ge=1)
    """With `sliding_window`, every n-th layer attends to all positions, where n is this number: 2
    in Gemma 2, 6 in Gemma 3."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu_tanh"] = "gelu_tanh"
    """Activation function of the MLP. gelu_tanh is GPT-2's approximation; swiglu and geglu_tanh
    (Gemma) are gated."""
    bias: bool = True
    """Biases in the linear layers (and in layernorm)."""
    qkv_bias: bool | None = None
    """Biases in the projection to queries, keys and values (Qwen2 has no others); default:
    `bias`."""
    qk_norm: bool = False
    """Norm (rmsnorm) of each query and key head, before rotation (Qwen3)."""
    tied_embeddings: bool = True
    """Use one matrix for the input embedding and the head."""
    dropout: Annotated[float, OnResume.LISTED] = Field(0.0, ge=0, lt=1)
    """Dropout after the embedding, on attention weights and on both residual branches."""
    init_std: Annotated[float, OnResume.HARMLESS] = Field(0.02, gt=0)
    """Standard deviation of initial weights. For the matrices that write to the residual stream it
    is divided by sqrt(2 x layers), as in GPT-2."""
    dtype: Annotated[Dtype, OnResume.LISTED] = "fp32"
    """Type of weights and activations. Main gradients and optimizer state are fp32 (fp64 for fp64).
    fp16 needs a scaled loss, see `optimizer.loss_scale`."""
    moe: MoEConfig = MoEConfig()

    def resolved(self, *, vocab_size: int | None, sequence_length: int) -> "ModelConfig":
        """Return the model with all defaults filled in; an unknown `vocab_size` stays None."""
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
        """Return the number of positions that a token attends to in a layer; None: all."""
        every = self.full_attention_every
        return None if every is not None and (layer + 1) % every == 0 else self.sliding_window

    @property
    def may_learn_positions(self) -> bool:
        """Whether positions can matter beyond distances, as learned positions do; rotary positions
        and ALiBi depend on distances only."""
        return is_class_name(self.source) or (self.source is None and self.positions == "learned")

    @property
    def own_norm(self) -> bool:
        """Whether `norm` names a user-defined function."""
        return is_user_code(self.norm)

    @property
    def rotary_width(self) -> int:
        """Number of dimensions of a head that are rotated, in a resolved model."""
        return int((self.head_dim or 0) * self.rope.percent)
