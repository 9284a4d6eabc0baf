"""The base of every configuration section, and what its fields say of themselves."""

import ast
import inspect
import os.path
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, reduce
from itertools import pairwise
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from megapipe.config.strict_yaml import text_of
from megapipe.words import join_or

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A key's value that may be a path, and then may begin with ``~``."""
Rule = TypeVar("Rule")


@dataclass(frozen=True)
class ExpectedText:
    """Says in words what a key takes, where its type and bounds would not; for ``Annotated``."""

    words: str


class OnResume(Enum):
    """Says what becomes of a run that goes on with another value of a key; for ``Annotated``."""

    HARMLESS = "how and where it is computed, saved and told: it goes on as before"
    CORPUS = "how the corpus is read: harmless, unless the corpus comes out as another"
    LISTED = "how training goes on: the change is printed"
    ORDER = "which tokens a sample number stands for: refused, or the data begin anew"
    REFUSED = "another run"
    MODEL = "another model: refused, also where weights alone are taken"
    NEVER = "its state would mean something else: refused in any case"


@dataclass(frozen=True)
class Needs:
    """Says without what a key has no effect; for ``Annotated``."""

    words: str
    """The thing that is needed, as errors have it: "model.window"."""
    is_met: Callable[[Any], bool]
    """Whether a configuration, or an object with those of its sections that matter, has it."""


def needs(key: str, *values: Any, above: float | None = None, other: Any = None) -> Needs:
    """Say that a key needs another one.

    Args:
        key: the other one, by its dotted name; without what follows it needs any value but none.
        values: what its value has to be one of, or, where that is a list, have one of.
        above: what its value has to be above.
        other: what its value may not be.
    """

    def value(config: Any) -> Any:
        return reduce(getattr, key.split("."), config)

    def is_among(value: Any) -> bool:
        return any(each in values for each in (value if isinstance(value, list) else [value]))

    if values:
        words = f"{key}={join_or([text_of(each) for each in values])}"
        return Needs(words, lambda config: is_among(value(config)))
    if above is not None:
        return Needs(f"{key} above {above:g}", lambda config: value(config) > above)
    if other is not None:
        return Needs(f"a {key} other than {other}", lambda config: value(config) != other)
    return Needs(key, lambda config: value(config) not in (None, False, 0, "none", {}))


def one_of(*several: Needs) -> Needs:
    """Say that a key needs one of several things."""
    words = join_or([each.words for each in several])
    return Needs(words, lambda config: any(each.is_met(config) for each in several))


class Section(BaseModel):
    """A typed, frozen group of keys; the docstring under each field is its documentation.

    Unknown keys and wrong types are errors: ``"2"`` is not a number and ``true`` is not 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ON_RESUME: ClassVar[OnResume] = OnResume.LISTED
    """The class of its keys that have none of their own."""
    NEEDS: ClassVar[tuple[Needs, ...]] = ()
    """Needs of all its keys, before those of each."""


def rules_of(info: FieldInfo, kind: type[Rule]) -> list[Rule]:
    """Return the rules of a kind that a field has in its ``Annotated``."""
    return [rule for rule in info.metadata if isinstance(rule, kind)]


def keys_with(section: type[Section], rule: object) -> list[str]:
    """Return the keys of a section that have a rule in their ``Annotated``."""
    return [key for key, info in section.model_fields.items() if rule in info.metadata]


@cache
def needs_of(section: type[Section]) -> Mapping[str, Sequence[Needs]]:
    """Return the needs of each key of a section that has some, those of all its keys first."""
    found = {
        key: [*section.NEEDS, *rules_of(info, Needs)]
        for key, info in section.model_fields.items()
        if section_of(info) is None
    }
    return {key: rules for key, rules in found.items() if rules}


def on_resume(section: type[Section], key: str) -> OnResume:
    """Return the class on resume of a key of a section."""
    own = rules_of(section.model_fields[key], OnResume)
    return own[0] if own else section.ON_RESUME


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the section within another that a field is, if it is one."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def sections_within(
    section: type[Section], before: str = ""
) -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections of a section, and those within them, by their dotted names."""
    for name, info in section.model_fields.items():
        if inner := section_of(info):
            yield f"{before}{name}", inner
            yield from sections_within(inner, f"{before}{name}.")


@cache
def keys_within(config: type[Section]) -> Sequence[tuple[str, type[Section], str]]:
    """Return every key by its dotted name, with the section that it is in, and its name there."""
    return [
        (f"{name}.{key}", section, key)
        for name, section in sections_within(config)
        for key, info in section.model_fields.items()
        if section_of(info) is None
    ]


@cache
def documentation(section: type[Section]) -> Mapping[str, str]:
    """Return the docstring under each field, by the field's name, in one line.

    The source is read when somebody asks for it: pydantic would do so at every start.
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
