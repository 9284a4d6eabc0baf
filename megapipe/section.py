"""The base of every configuration section."""

import ast
import inspect
import os.path
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A key's value that may be a path, and then may begin with ``~``."""


class Section(BaseModel):
    """A typed, frozen group of keys; the docstring under each field is its documentation.

    Unknown keys and wrong types are errors: ``"2"`` is not a number and ``true`` is not 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@cache
def documentation(section: type[Section]) -> Mapping[str, str]:
    """The docstring under each field, by the field's name, in one line.

    It is read off the source when somebody asks for it: pydantic would do so at every start.
    """
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, after in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[field.target.id] = " ".join(text.split())
    return found


@dataclass(frozen=True)
class Expected:
    """Says in words what a key takes, where its type and bounds would not; for ``Annotated``."""

    words: str
