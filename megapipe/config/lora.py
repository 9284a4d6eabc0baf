"""The keys of low-rank adapters."""

from pydantic import Field

from megapipe.config.section import OnResume, Section, needs


class LoraConfig(Section):
    """Low-rank adapters (LoRA; Hu et al., 2106.09685), off by default: the weights that a run
    begins with stay as they are, and small matrices beside them are trained."""

    ON_RESUME = OnResume.MODEL
    NEEDS = (needs("lora.rank"),)

    rank: int | None = Field(None, ge=1)
    """Rank of the adapters. A linear layer with a weight W [out, in] then computes x W^T + scale
    (x A^T) B^T, where A [rank, in] and B [out, rank] alone are trained. Default: no adapters, all
    weights are trained."""
    alpha: float = Field(8.0, gt=0)
    """The scale is alpha / rank."""
    rslora: bool = False
    """The scale is alpha / sqrt(rank) instead (Kalajdzievski, 2312.03732)."""
    targets: list[str] = Field(["all"])
    """Linear layers that get adapters, in each block: attention.q, attention.k and attention.v, or
    attention.qkv with one A for the three; attention.out; mlp.gate (of a gated MLP), mlp.up and
    mlp.down. all: each of them, with queries, keys and values apart where they are so in the
    model's class of Hugging Face's."""
