"""The section `model.rope`: the angles of rotary position embeddings."""

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.section import OnResume, Section, needs

ROTARY = needs("model.positions", "rotary")
WINDOW = needs("model.sliding_window")
STRETCHED, BY_FREQUENCY = needs("model.rope.scaling"), needs("model.rope.scaling", "llama3", "yarn")


class RopeConfig(Section):
    """Rotary position embeddings (RoFormer; Su et al., 2104.09864), for
    `model.positions=rotary`."""

    ON_RESUME = OnResume.MODEL
    NEEDS = (ROTARY,)

    base: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies (Hugging Face: rope_theta)."""
    local_base: Annotated[float | None, WINDOW] = Field(None, gt=0)
    """Base of the rotary frequencies in layers with a sliding window, where `scaling` does not
    apply (Gemma 3); default: `base`."""
    percent: float = Field(1.0, gt=0, le=1)
    """Fraction of a head's dimensions that are rotated, from its first one on (GPT-NeoX: 0.25)."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How frequencies are scaled for texts longer than the sequences of the original training.
    linear divides all frequencies by `factor` (Chen et al., 2306.15595); llama3 and yarn (Peng et
    al., 2309.00071) divide low frequencies, keep high ones, and blend frequencies in between."""
    factor: Annotated[float, STRETCHED] = Field(1.0, ge=1)
    """Number by which `scaling` divides frequencies."""
    original_positions: Annotated[int | None, BY_FREQUENCY] = Field(None, ge=1)
    """Sequence length of the original training, for scaling llama3 and yarn."""
    low_freq_factor: Annotated[float, BY_FREQUENCY] = Field(1.0, gt=0)
    """Frequencies that make fewer rotations than this over `original_positions` positions are
    divided by the whole `factor` (yarn: beta_slow)."""
    high_freq_factor: Annotated[float, BY_FREQUENCY] = Field(4.0, gt=0)
    """Frequencies that make more rotations than this over `original_positions` positions stay as
    they are (yarn: beta_fast, usually 32)."""
    attention_factor: Annotated[float | None, needs("model.rope.scaling", "yarn")] = Field(
        None, gt=0
    )
    """With scaling=yarn: factor of rotated queries and keys; default: 0.1 ln(factor) + 1."""
