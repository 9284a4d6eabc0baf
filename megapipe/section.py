"""The base of every configuration section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A typed, frozen group of keys; the docstring under each field is its documentation.

    Unknown keys and wrong types are errors: ``"2"`` is not a number and ``true`` is not 1.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )
