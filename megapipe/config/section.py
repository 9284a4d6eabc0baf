"""The base class of configuration sections, and the annotations of their fields."""

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
from megapipe.text import join_or
from megapipe.util.user_code import is_user_code

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""Type of a key whose value may be a path; a leading ``~`` becomes the home folder."""
Rule = TypeVar("Rule")


@dataclass(frozen=True)
class ExpectedText:
    """Words for errors and --help about a field's values, if type and bounds say too little; put
    into the field's ``Annotated``."""

    words: str


class OnResume(Enum):
    """Meaning of a key's changed value for a resumed run; put into the field's ``Annotated``."""

    HARMLESS = "how and where the run computes, saves and reports: it continues as before"
    CORPUS = "how the corpus is read: harmless, unless the corpus changes"
    LISTED = "how training continues: the change is printed"
    ORDER = "which tokens a sample number stands for: refused, or the data start over"
    REFUSED = "another run"
    MODEL = "another model: refused, even if only weights are loaded"
    NEVER = "the meaning of the stored state: always refused"


@dataclass(frozen=True)
class Searched:
    """Marks a key whose value a search may choose (``megapipe plan``); put into the field's
    ``Annotated``."""

    word: str = "auto"
    """The value that asks for the search."""


SEARCHED = Searched()


@dataclass(frozen=True)
class Needs:
    """Condition without which a key has no effect; put into the field's ``Annotated``."""

    words: str
    """The required setting in words, for errors: "model.sliding_window"."""
    is_met: Callable[[Any], bool]
    """Function that takes a configuration, or an object with the needed sections, and returns
    whether the condition holds."""


def needs(key: str, *values: Any, above: float | None = None, other: Any = None) -> Needs:
    """Return the condition that another key has a certain value.

    Args:
        key: dotted name of the other key. Without further arguments the key must be set: its value
            must not be null, false, 0, none or an empty mapping.
        values: the value must be one of these; a list must contain one of these.
        above: the value must be above this number.
        other: the value must not be this one.
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
    """Return the condition that at least one of several conditions holds."""
    words = join_or([each.words for each in several])
    return Needs(words, lambda config: any(each.is_met(config) for each in several))


OptionValue = str | int | float | bool | None | list[str | int | float | bool]
"""Type of an option's value (:class:`OptionsOf`)."""


@dataclass(frozen=True)
class OptionsOf:
    """Marks a mapping as the options of what another key selects; for the mapping's ``Annotated``.

    For example, ``optimizer.options`` has the options of the rule that ``optimizer.rule`` selects.
    The options of each value of the other key are the fields of a section. Options of user-defined
    code are known and checked only when the code is loaded.
    """

    key: str
    """Name of the other key, for example "optimizer.rule"."""
    sections: Mapping[str, type["Section"]]
    """Section whose fields are the options, for each value of the other key that has options."""

    def of(self, value: Any) -> type["Section"] | None:
        """Return the section with the options of `value`, a value of :attr:`key`. Return None for
        user code, and for a value that is not text, which validation refuses."""
        if not isinstance(value, str) or is_user_code(value):
            return None
        return self.sections.get(value, NoOptions)

    def complete(self, value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Complete `given`, the options of `value`, with defaults. `value`: value of :attr:`key`,
        which selects the options. The result has the order of the section's fields, and no options
        that are None. Options of user code are returned unchanged. Raises ValidationError."""
        section = self.of(value)
        return (
            given
            if section is None
            else section.model_validate(given).model_dump(exclude_none=True)
        )

    def names(self) -> list[str]:
        """Return the names of the options of all values of :attr:`key`, each name once."""
        fields = [name for section in self.sections.values() for name in section.model_fields]
        return list(dict.fromkeys(fields))

    def by_section(self) -> Mapping[type["Section"], list[str]]:
        """Map each section that has options to the values of :attr:`key` with these options."""
        found: dict[type[Section], list[str]] = {}
        for value, section in self.sections.items():
            if section.model_fields:
                found.setdefault(section, []).append(value)
        return found


class Section(BaseModel):
    """A typed, frozen group of keys; the docstring under each field is the key's documentation.

    Unknown keys and wrong types are errors: ``"2"`` is not a number and ``true`` is not 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ON_RESUME: ClassVar[OnResume] = OnResume.LISTED
    """Meaning of a changed value for a resumed run, for keys whose ``Annotated`` has none."""
    NEEDS: ClassVar[tuple[Needs, ...]] = ()
    """Conditions that apply to every key of the section; checked before the conditions of a key."""


def rules_of(info: FieldInfo, kind: type[Rule]) -> list[Rule]:
    """Return the objects of class `kind` in the ``Annotated`` of a field."""
    return [rule for rule in info.metadata if isinstance(rule, kind)]


def keys_with(section: type[Section], rule: object) -> list[str]:
    """Return the names of a section's keys that have the object `rule` in their ``Annotated``."""
    return [key for key, info in section.model_fields.items() if rule in info.metadata]


class NoOptions(Section):
    """Section without fields, for values that have no options."""


@cache
def needs_of(section: type[Section]) -> Mapping[str, Sequence[Needs]]:
    """Map each key of a section to the conditions without which it has no effect: the section's
    conditions first, then those of the key. Keys without conditions are left out."""
    found = {
        key: [*section.NEEDS, *rules_of(info, Needs)]
        for key, info in section.model_fields.items()
        if section_of(info) is None
    }
    return {key: rules for key, rules in found.items() if rules}


def on_resume(section: type[Section], key: str) -> OnResume:
    """Return what a changed value of a key means for a resumed run."""
    own = rules_of(section.model_fields[key], OnResume)
    return own[0] if own else section.ON_RESUME


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the class of a field that is a section itself; None for other fields."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def sections_within(
    section: type[Section], before: str = ""
) -> Iterator[tuple[str, type[Section]]]:
    """Yield (dotted name, section) for the sections in a section, at every depth."""
    for name, info in section.model_fields.items():
        if inner := section_of(info):
            yield f"{before}{name}", inner
            yield from sections_within(inner, f"{before}{name}.")


@cache
def keys_within(config: type[Section]) -> Sequence[tuple[str, type[Section], str]]:
    """Return (dotted name, section, name in the section) of every key."""
    return [
        (f"{name}.{key}", section, key)
        for name, section in sections_within(config)
        for key, info in section.model_fields.items()
        if section_of(info) is None
    ]


@cache
def documentation(section: type[Section]) -> Mapping[str, str]:
    """Return the docstring below each field, by the field's name and as one line. Fields of base
    classes are included.

    The source code is read only when this is called; pydantic could collect the docstrings too, but
    would read the source at every start.
    """
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for base in section.__bases__:
        if issubclass(base, Section) and base is not Section:
            found |= documentation(base)
    for field, after in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[field.target.id] = " ".join(text.split())
    return found
