"""The command line of training: ``megapipe train [CONFIG] [section.key=value ...] [OPTION]``.

Values come from the configuration file, then from the command line, where a later one wins; the
rest are defaults. Nothing here imports torch, so that a mistake is reported at once.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megapipe.command_line import TRACEBACK
from megapipe.config import presets, strict_yaml
from megapipe.config.config import TASK, TASK_VARIABLE, Config, lacks_task
from megapipe.config.foreign import describe_file, describe_flag
from megapipe.config.help import help_text, usage
from megapipe.config.keys import (
    KEYS,
    MAPPINGS,
    SECTIONS,
    entry_of,
    expected,
    field_of,
    literal_type_fits,
    refuse_code,
    unknown,
    unknown_to_unset,
)
from megapipe.config.lora import LoraConfig
from megapipe.config.model import ModelConfig
from megapipe.config.section import keys_within
from megapipe.config.strict_yaml import MOST_BYTES, Value, YamlError
from megapipe.errors import ConfigError
from megapipe.util.urls import is_remote
from megapipe.words import clipped, folded, printable, without_secrets

OPTIONS = ("--dry-run", "--time-slices", TRACEBACK)
"""Those without a value; ``--help`` may have one."""
UNSET = "unset"
"""Stands for no value of a key, a section or an entry of a mapping, also where a configuration file
has one."""
COMMAND_LINE = "command line"
IMBALANCE = "--imbalance"
"""Has a value."""


@dataclass(frozen=True)
class Command:
    """The user's request."""

    config: Config = field(default_factory=Config)
    dry_run: bool = False
    imbalance: Fraction | None = None
    """The plan is for a rank whose experts get so many times the mean rows."""
    time_slices: bool = False
    traceback: bool = False
    """An error is to be shown with where it arose."""
    help: str | None = None
    """The keys to explain: a section, a key, or all of them (""); None: nothing."""
    where: str = "defaults"
    """Where the values come from, for messages about several keys: a file, the command line."""


_PARTS = ("data.subset", "data.dataset_split")
"""Keys that name a part of a configuration file's source, which the command line may replace."""


@dataclass(frozen=True)
class _Given:
    """A value as the user gave it, and where."""

    key: str
    value: Value
    where: str

    def problem(self, what: str) -> str:
        value = clipped(strict_yaml.text_of(self.value))
        return f"{self.where}: {clipped(self.key)}={value}: {what}"


def possible_words() -> list[str]:
    """Return the words of a command line besides options: presets, and keys with `=` behind."""
    return [*presets.names(), *(f"{key}=" for key in KEYS)]


def parse(argv: Sequence[str]) -> Command:
    """The command in `argv`, without the program's name.

    Raises :class:`ConfigError` with one line: where, key, value, what would be right. Of several
    problems it reports the first and counts the rest.
    """
    for option in ("--help", "-h"):
        if option in argv:
            return Command(help=_topic(argv[argv.index(option) + 1 :]))
    if {"--dry-run", "--time-slices"} <= set(argv):
        raise ConfigError("command line: --dry-run and --time-slices: expected one of them")
    imbalance, argv = _imbalance(argv)
    if imbalance is not None and "--dry-run" not in argv:
        raise ConfigError(f"command line: {IMBALANCE} is for a plan: expected --dry-run too")
    path: str | None = None
    given: list[_Given] = []
    assignments: list[tuple[str, str]] = []
    for argument in argv:
        key, equals, text = argument.partition("=")
        if argument in OPTIONS:
            continue
        if argument.startswith("-"):
            bare = argument.lstrip("-")
            hint = f"; write {clipped(bare)}" if bare.partition("=")[0] in KEYS else ""
            if (other := describe_flag(bare.partition("=")[0])) is not None:
                hint = f", {other}"
            raise ConfigError(
                f"command line: unknown option {clipped(argument)}{hint}; usage: {usage()}"
            )
        if equals and "/" not in key:
            assignments.append((key, text))
        elif argument in KEYS:
            raise ConfigError(f"command line: {argument} has no value; write {argument}=VALUE")
        elif path is not None:
            raise ConfigError(
                f"command line: {printable(path)} and {printable(argument)}: "
                "expected one configuration file"
            )
        else:
            path = argument
    if path is not None:
        given = _read(presets.find(path))
    for key, text in assignments:
        if text == UNSET:
            given = _without(given, key)
        else:
            given += _override(key, text)
    if any(each.key == "data.source" and each.where == COMMAND_LINE for each in given):
        given = [each for each in given if each.key not in _PARTS or each.where == COMMAND_LINE]
    where = " and ".join(
        filter(None, (path and printable(path), "command line" if assignments else None))
    )
    config, where = _config(given), where or "defaults"
    refuse_code(config, where)
    return Command(
        config=config,
        dry_run="--dry-run" in argv,
        imbalance=imbalance,
        time_slices="--time-slices" in argv,
        traceback=TRACEBACK in argv,
        where=where,
    )


def _without(given: Iterable[_Given], key: str) -> list[_Given]:
    """Return the values without that of `key`: a key, a section, or an entry of a mapping.

    Raises :class:`ConfigError` where there is no such thing, or where a section or an entry would
    lose what the command line has given it before.
    """
    where, entry = f"{COMMAND_LINE}: {clipped(key)}={UNSET}", entry_of(key)
    if field_of(key) is None and key not in (*SECTIONS, *MAPPINGS, entry):
        raise ConfigError(f"{where}: {unknown_to_unset(key)}")
    if entry is not None:
        mapping, _, name = entry.rpartition(".")
        of_all = [found for each in given if (found := entry_of(each.key)) is not None]
        names = [one.rpartition(".")[2] for one in of_all if one.startswith(f"{mapping}.")]
        if name not in names:
            has = clipped(", ".join(_once(names))) or "no entries"
            raise ConfigError(f"{where}: there is none to take away: {mapping} has {has}")
    taken = [each for each in given if f"{each.key}.".startswith(f"{key}.")]
    for each in taken:
        if each.key != key and each.where == COMMAND_LINE:
            raise ConfigError(
                f"{where} would take away {each.key}, which the command line gives before it: "
                f"expected {key}={UNSET} first"
            )
    return [each for each in given if each not in taken]


def _imbalance(argv: Sequence[str]) -> tuple[Fraction | None, list[str]]:
    """The value of :data:`IMBALANCE`, and the other arguments."""
    found, others, words = None, [], iter(argv)
    for word in words:
        name, equals, text = word.partition("=")
        if name != IMBALANCE:
            others.append(word)
            continue
        text = text if equals else next(words, "")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 1 <= value < math.inf:
            shown = clipped(text) if text else "without a value"
            raise ConfigError(f"command line: {IMBALANCE} {shown}: expected a number >= 1")
        found = Fraction(str(value))
    return found, others


def from_mapping(given: Mapping[str, Any], where: str) -> Config:
    """The configuration of sections, ``{"train": {"steps": 9}}``, or keys, ``{"train.steps": 9}``.

    `where` begins the line of an error. Raises :class:`ConfigError`.
    """
    config = _config(_Given(key, value, where) for key, value in _keys_of(given))
    refuse_code(config, where)
    return config


def _keys_of(given: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _keys_of(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", list(value) if isinstance(value, tuple) else value


def flatten(config: Config) -> dict[str, str | int | float | bool | None]:
    """Every dotted key with its value, to be written down; lists and options as JSON."""
    tree = _to_write(config.model_dump())
    found = {key: reduce(getitem, key.split("."), tree) for key, *_ in keys_within(type(config))}
    return {
        key: json.dumps(value) if isinstance(value, (list, dict)) else value
        for key, value in found.items()
    }


def _to_write(value: Any) -> Any:
    """A value, and its URLs without their secrets."""
    if isinstance(value, dict):
        return {key: _to_write(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_write(inner) for inner in value]
    return without_secrets(value) if isinstance(value, str) and is_remote(value) else value


IN_JSON = ("model.options", "model.moe.experts", "model.moe.dense_layers")
"""Keys of the model section that :func:`flatten` has as JSON, where they are no numbers."""


def stored_model(stored: Mapping[str, Any]) -> ModelConfig:
    """The model section among keys as :func:`flatten` has them, such as those of a checkpoint; one
    that is not there has its default. Raises :class:`ConfigError` for keys of another version."""
    fields: dict[str, Any] = {}
    for key, value in stored.items():
        if key.startswith("model."):
            is_json = key in IN_JSON and isinstance(value, str)
            _put(fields, key.split(".")[1:], json.loads(value) if is_json else value)
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        value = clipped(strict_yaml.text_of(first["input"]))
        raise ConfigError(
            f"the checkpoint has model.{key} = {value}, which this version of megapipe does not "
            "know"
        ) from None


def stored_lora(stored: Mapping[str, Any]) -> LoraConfig:
    """The section of adapters among the keys of a checkpoint, which older ones lack."""
    fields = {
        name: stored[f"lora.{name}"] for name in LoraConfig.model_fields if f"lora.{name}" in stored
    }
    if "targets" in fields:
        fields["targets"] = json.loads(fields["targets"])
    return LoraConfig.model_validate(fields)


def dump(config: Config) -> str:
    """`config` as YAML, to be written down; :func:`parse` reads it back to an equal one, but for
    queries of URLs."""
    return strict_yaml.dump(_to_write(config.model_dump()))


def _topic(after: Sequence[str]) -> str:
    """The topic that the arguments after --help ask for; "" for none."""
    if not after or after[0].startswith("-") or "=" in after[0] or after[0].endswith(".yaml"):
        return ""
    help_text(after[0])
    return after[0]


def show(text: str) -> None:
    """Print what was asked for, as far as somebody reads it."""
    with contextlib.suppress(BrokenPipeError):
        print(folded(text), end="")


def _override(key: str, text: str) -> list[_Given]:
    try:
        entries = strict_yaml.parse_value(key, text)
    except YamlError as error:
        raise ConfigError(f"command line: {clipped(key)}={clipped(text)}: {error}") from None
    return [_Given(entry.key, entry.value, COMMAND_LINE) for entry in entries]


def _read(path: Path) -> list[_Given]:
    name = printable(str(path))
    try:
        if not path.is_file():
            raise ConfigError(_no_file(path))
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name}: cannot be read: {reason}") from None
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{name}: larger than {MOST_BYTES} bytes, which no configuration is")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text") from None
    try:
        entries = strict_yaml.parse_mapping(text)
    except YamlError as error:
        place = f"{name}:{error.line}" if error.line else name
        _refuse_foreign(path, text)
        raise ConfigError(f"{place}: {error}") from None
    if not all(map(_is_known, entries)):
        _refuse_foreign(path, text)
    if all(entry.key in SECTIONS and entry.value is None for entry in entries):
        raise ConfigError(f"{name}: no key is in it: expected sections with keys, such as 'model:'")
    return [_Given(entry.key, entry.value, f"{name}:{entry.line}") for entry in entries]


def _is_known(entry: strict_yaml.YamlEntry) -> bool:
    return field_of(entry.key) is not None or entry.key in SECTIONS or entry.key in MAPPINGS


def _refuse_foreign(path: Path, text: str) -> None:
    """Raise :class:`ConfigError` if a file is another trainer's configuration."""
    if (other := describe_file(text, path.suffix)) is not None:
        raise ConfigError(f"{printable(str(path))}: {other}")


def _no_file(path: Path) -> str:
    name = printable(str(path))
    if path.exists():
        return f"{name}: is not a file; expected a configuration in YAML"
    folder = path.parent
    others = sorted(str(other) for other in folder.glob("*.yaml")) if folder.is_dir() else []
    near = get_close_matches(str(path), [*others, *presets.names()], n=1)
    known = f"expected a configuration in YAML, or one of {', '.join(presets.names())}"
    return f"{name}: no such file; " + (f"did you mean {near[0]}?" if near else known)


def _config(given: Iterable[_Given]) -> Config:
    """The configuration with `given` over the defaults."""
    problems: list[str] = []
    known: dict[str, _Given] = {}
    tree: dict[str, Any] = {}
    for item in given:
        info = field_of(item.key)
        if item.key in MAPPINGS:
            problems.append(item.problem(f"expected {expected(KEYS[item.key])}"))
        elif _has_nul(item.value):  # which no name of a file has
            problems.append(item.problem("expected text without a NUL"))
        elif item.key == "run.name" and lacks_task(item.value):
            problems.append(
                item.problem(f"{TASK} is for job arrays: expected {TASK_VARIABLE} to be set")
            )
        elif info is not None:
            known[item.key] = item
            _put(tree, item.key.split("."), item.value)
        elif item.key not in SECTIONS:
            problems.append(item.problem(unknown(item.key)))
        elif item.value is not None:
            problems.append(item.problem(f"{item.key} is a section; write {item.key}.KEY"))
    wrong = [
        key
        for key, item in known.items()
        if not literal_type_fits(_field(key).annotation, item.value)
    ]
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        for detail in error.errors():
            path = [str(part) for part in detail["loc"]]
            found = next(key for key in _prefixes(path) if key in known or not key)
            if found:
                wrong.append(found)
            else:
                problems.append(_missing(".".join(path), known))
    problems += [known[key].problem(f"expected {expected(_field(key))}") for key in _once(wrong)]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)
    return config


def _has_nul(value: Value) -> bool:
    if isinstance(value, list):
        return any(map(_has_nul, value))
    return isinstance(value, str) and "\0" in value


def _put(tree: dict[str, Any], path: Sequence[str], value: Value) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _field(key: str) -> FieldInfo:
    info = field_of(key)
    assert info is not None
    return info


def _prefixes(path: Sequence[str]) -> Iterator[str]:
    """The dotted names that `path` begins with, the longest first, and then nothing."""
    for length in range(len(path), -1, -1):
        yield ".".join(path[:length])


def _missing(key: str, known: Mapping[str, _Given]) -> str:
    """Word the error about a key that has to be there, beside others of its group."""
    group = key.rpartition(".")[0]
    beside = next(item for name, item in known.items() if name.startswith(f"{group}."))
    return beside.problem(f"expected {key} too")


def _once(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))
