"""The base of every configuration section."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A typed, frozen group of keys; the docstring under each field is its documentation.

    Unknown keys and wrong types are errors: ``"2"`` is not a number and ``true`` is not 1.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Expected:
    """Says in words what a key takes, where its type and bounds would not; for ``Annotated``."""

    words: str
