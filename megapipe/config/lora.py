"""The section `lora` of the configuration: low-rank adapters."""

from pydantic import Field

from megapipe.config.section import OnResume, Section, needs


class LoraConfig(Section):
    """Low-rank adapters (LoRA; Hu et al., 2106.09685), off by default: the weights of the start
    point are frozen, and small additional matrices are trained."""

    ON_RESUME = OnResume.MODEL
    NEEDS = (needs("lora.rank"),)

    rank: int | None = Field(None, ge=1)
    """Rank of the adapters. A linear layer with a weight W [out, in] then computes x W^T + scale (x
    A^T) B^T, where only A [rank, in] and B [out, rank] are trained. Default: no adapters; all
    weights are trained."""
    alpha: float = Field(8.0, gt=0)
    """Numerator of the adapters' scale, alpha / rank."""
    rslora: bool = False
    """Whether the adapters' scale is alpha / sqrt(rank) (Kalajdzievski, 2312.03732)."""
    targets: list[str] = Field(["all"])
    """Linear layers that get adapters, in each block: attention.q, attention.k and attention.v, or
    attention.qkv with one A for the three; attention.out; mlp.gate (of a gated MLP), mlp.up and
    mlp.down. all: every layer, with separate queries, keys and values if the model's Hugging Face
    class separates them. With ``model.source=hf:...`` the class's own names, such as q_proj or
    mlp.down_proj; all: every linear layer but the head."""
