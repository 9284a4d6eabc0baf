"""The command line of training: ``megapipe train [CONFIG] [section.key=value ...] [OPTION]``.

CONFIG is a file, the name of a preset, or a class of transformers (``hf:FOLDER``). Values come from
it, then from the command line; a later value overrides an earlier one. Other keys have their
defaults. This module does not import torch, so mistakes are reported fast.
"""

import contextlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from megapipe.config import old_names, presets, strict_yaml
from megapipe.config.class_defaults import class_defaults, class_notice
from megapipe.config.config import TASK, TASK_VARIABLE, Config, lacks_task
from megapipe.config.foreign import describe_file, describe_flag
from megapipe.config.help import help_text, usage
from megapipe.config.keys import (
    KEYS,
    MAPPINGS,
    OPTION_KEYS,
    OPTIONS_OF,
    SEARCH_WORDS,
    SECTIONS,
    entry_of,
    expected,
    field_of,
    literal_type_fits,
    refuse_code,
    unknown,
    unknown_to_unset,
    wrong_options,
)
from megapipe.config.lora import LoraConfig
from megapipe.config.model import ModelConfig
from megapipe.config.section import keys_within
from megapipe.config.strict_yaml import MOST_BYTES, Value, YamlError
from megapipe.errors import CheckpointError, ConfigError
from megapipe.text import clipped, folded, printable, without_secrets
from megapipe.util.heartbeat import print_notice
from megapipe.util.paths import user_path
from megapipe.util.urls import is_remote
from megapipe.util.user_code import TRANSFORMERS, is_class_name

JSON = "--json"
"""Option of a dry run: print the plan as one JSON object."""
OPTIONS = ("--dry-run", JSON, "--time-slices", TRACEBACK)
"""Options without a value. ``--help`` is not in the list, because it may have a value."""
UNSET = "unset"
"""Value that removes a key, a section or an entry of a mapping, even if a configuration file sets
it."""
COMMAND_LINE = "command line"
IMBALANCE = "--imbalance"
"""Option ``--imbalance X`` of a dry run: the planned rank's experts get X times the mean rows."""
KEY_OPTIONS = {"--gpus": "plan.gpus", "--device": "plan.device"}
"""Options of a dry run that are short for a key: ``--gpus 64`` for ``plan.gpus=64``."""
VALUE_OPTIONS = (IMBALANCE, *KEY_OPTIONS)
"""Options that have a value: ``OPTION VALUE`` or ``OPTION=VALUE``."""


@dataclass(frozen=True)
class Command:
    """The parsed command line of training."""

    config: Config = field(default_factory=Config)
    dry_run: bool = False
    as_json: bool = False
    """Whether to print the plan as JSON."""
    imbalance: Fraction | None = None
    """Value of --imbalance: rows of the planned rank's experts, as a multiple of the mean over
    ranks; None: not given."""
    time_slices: bool = False
    traceback: bool = False
    """Whether to print an error with its traceback."""
    help: str | None = None
    """Topic to explain: a section, a key, or all keys (""); None: print no help."""
    where: str = "defaults"
    """Where the values come from, for errors about several keys: a file, the command line, both."""
    notice: str | None = None
    """A line for the user about keys that were given by their old names."""
    defaults: str | None = None
    """A line for the user about the values of a run that starts from a class of transformers."""
    searched: frozenset[str] = frozenset()
    """Keys whose values a search chooses before the run; `config` has their defaults."""


_PARTS = ("data.subset", "data.dataset_split")
"""Keys that select a subset or split of `data.source`. If the command line sets another source, the
values of these keys in a file are dropped."""


@dataclass(frozen=True)
class _Given:
    """A value as the user gave it, and where it was given."""

    key: str
    value: Value
    where: str

    def problem(self, what: str) -> str:
        value = clipped(strict_yaml.text_of(self.value))
        return f"{self.where}: {clipped(self.key)}={value}: {what}"


def possible_words() -> list[str]:
    """Return the words that a command line may contain besides options: names of presets, and every
    key followed by `=`."""
    return [*presets.names(), *(f"{key}=" for key in (*KEYS, *OPTION_KEYS))]


def parse(argv: Sequence[str]) -> Command:
    """Parse `argv`, which does not contain the program's name.

    Raises :class:`ConfigError` with one line: where the problem is, key, value, and what is
    expected. If there are several problems, the line describes the first and says how many others
    there are.
    """
    for option in ("--help", "-h"):
        if option in argv:
            return Command(help=_topic(argv[argv.index(option) + 1 :]))
    if {"--dry-run", "--time-slices"} <= set(argv):
        raise ConfigError("command line: --dry-run and --time-slices: expected one of them")
    values, argv = _values(argv)
    for option in (*values, *(word for word in argv if word == JSON)):
        if "--dry-run" not in argv:
            raise ConfigError(f"command line: {option} needs --dry-run: it changes only the plan")
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
    assignments += [(key, values[name]) for name, key in KEY_OPTIONS.items() if name in values]
    defaults: str | None = None
    if is_class_name(path):
        given, defaults = _from_class(path, {key for key, _ in assignments})
    elif path is not None:
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
    where, named = where or "defaults", [each.key for each in given]
    given, searched = _split_searched(given)
    if searched and "--time-slices" in argv:
        raise ConfigError(
            f"{where}: --time-slices measures a layout: expected {_a_value(searched)}"
        )
    config = _config(given)
    refuse_code(config, where)
    return Command(
        notice=old_names.notice(where, named),
        defaults=defaults,
        config=config,
        searched=searched,
        dry_run="--dry-run" in argv,
        as_json=JSON in argv,
        imbalance=_imbalance(values.get(IMBALANCE)),
        time_slices="--time-slices" in argv,
        traceback=TRACEBACK in argv,
        where=where,
    )


def _from_class(source: str, others: Collection[str]) -> tuple[list[_Given], str]:
    """Return the values of a run that starts from a class of transformers, but for the keys
    `others`, and a line that says them."""
    name = source.removeprefix(TRANSFORMERS)
    folder = user_path(name)
    if not folder.exists():
        from megapipe.model.hub import local_folder  # loads torch

        try:
            folder = local_folder(name)
        except CheckpointError as error:
            raise ConfigError(f"{COMMAND_LINE}: {source}: {error}") from None
    values = {
        key: value
        for key, value in class_defaults(source, folder).items()
        if key == "model.source" or key not in others
    }
    return [_Given(key, value, source) for key, value in values.items()], class_notice(
        source, values
    )


def parse_and_notify(argv: Sequence[str]) -> Command:
    """Parse `argv` as :func:`parse` does. Print a line on stderr about old key names."""
    command = parse(argv)
    if command.notice is not None:
        print_notice(command.notice)
    return command


def configured(argv: Sequence[str]) -> Config:
    """Return the configuration that `argv` describes. Print a line on stderr about old key names.

    Raises :class:`ConfigError`, as :func:`parse` does, and for values that a search would choose.
    """
    command = parse_and_notify(argv)
    if command.searched:
        raise ConfigError(
            f"{command.where}: only megapipe train and megapipe plan search a layout: expected "
            f"{_a_value(command.searched)}"
        )
    return command.config


def _split_searched(given: Sequence[_Given]) -> tuple[list[_Given], frozenset[str]]:
    """Return the values without those of keys whose values a search chooses, and these keys."""
    named = [(old_names.new_name(each.key) or each.key, each) for each in given]
    last = {key: each.value for key, each in named}
    searched = frozenset(key for key, word in SEARCH_WORDS.items() if last.get(key) == word)
    return [each for key, each in named if key not in searched], searched


def _a_value(searched: Iterable[str]) -> str:
    """Say which keys need a value instead of auto."""
    return f"a value of {', '.join(sorted(searched))}"


def _without(given: Iterable[_Given], key: str) -> list[_Given]:
    """Return `given` without the values of `key`, which may be a section or an entry of a mapping.

    Raises :class:`ConfigError` if `key` is unknown, or if the command line sets a key inside the
    section or mapping to the left of KEY=unset.
    """
    where = f"{COMMAND_LINE}: {clipped(key)}={UNSET}"
    key = old_names.new_name(key) or key
    entry = entry_of(key)
    named = [(old_names.new_name(each.key) or each.key, each) for each in given]
    if field_of(key) is None and key not in (*SECTIONS, *MAPPINGS, entry):
        raise ConfigError(f"{where}: {unknown_to_unset(key)}")
    if entry is not None:
        mapping, _, name = entry.rpartition(".")
        of_all = [found for other, _ in named if (found := entry_of(other)) is not None]
        names = [one.rpartition(".")[2] for one in of_all if one.startswith(f"{mapping}.")]
        if name not in names:
            has = clipped(", ".join(_once(names))) or "no entries"
            raise ConfigError(f"{where}: there is no such entry to unset: {mapping} has {has}")
    taken = [(other, each) for other, each in named if f"{other}.".startswith(f"{key}.")]
    for other, each in taken:
        if other != key and each.where == COMMAND_LINE:
            raise ConfigError(
                f"{where} would unset {each.key}, which the command line sets before it: "
                f"expected {key}={UNSET} first"
            )
    return [each for other, each in named if (other, each) not in taken]


def _values(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the options in :data:`VALUE_OPTIONS`, and all other arguments."""
    found, others, words = dict[str, str](), list[str](), list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if name not in VALUE_OPTIONS:
            others.append(word)
            continue
        if not equals and words and not words[0].startswith("--"):
            text = words.pop(0)
        if not text:
            key = KEY_OPTIONS.get(name)
            wanted = "a number >= 1" if key is None else expected(KEYS[key])
            raise ConfigError(f"command line: {name} without a value: expected {wanted}")
        found[name] = text
    return found, others


def _imbalance(text: str | None) -> Fraction | None:
    """Return the value of --imbalance; None if it is not given."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise ConfigError(f"command line: {IMBALANCE} {clipped(text)}: expected a number >= 1")
    return Fraction(str(value))


def from_mapping(given: Mapping[str, Any], where: str) -> Command:
    """Return the command to train with values of keys, ``{"train": {"steps": 9}}`` or
    ``{"train.steps": 9}``.

    `where`: beginning of error lines. Raises :class:`ConfigError`.
    """
    items = [_Given(key, value, where) for key, value in _keys_of(given)]
    kept, searched = _split_searched(items)
    config = _config(kept)
    refuse_code(config, where)
    notice = old_names.notice(where, [each.key for each in items])
    return Command(config, where=where, notice=notice, searched=searched)


def _keys_of(given: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _keys_of(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", list(value) if isinstance(value, tuple) else value


def flatten(config: Config) -> dict[str, str | int | float | bool | None]:
    """Return each dotted key with its value in the form that is written to files: lists and
    mappings as JSON, options of registered rules and schedules completed with their defaults."""
    tree = _to_write(config.model_dump())
    found = {key: reduce(getitem, key.split("."), tree) for key, *_ in keys_within(type(config))}
    for mapping, rule in OPTIONS_OF.items():
        found[mapping] = rule.complete(found[rule.key], found[mapping])
    return {
        key: json.dumps(value) if isinstance(value, (list, dict)) else value
        for key, value in found.items()
    }


def _to_write(value: Any) -> Any:
    """Return a value as it is written to files: without the secrets of URLs."""
    if isinstance(value, dict):
        return {key: _to_write(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_write(inner) for inner in value]
    return without_secrets(value) if isinstance(value, str) and is_remote(value) else value


IN_JSON = ("model.options", "model.moe.num_experts", "model.moe.dense_layers")
"""Keys of the model section whose values :func:`flatten` writes as JSON, except plain numbers."""


def stored_model(stored: Mapping[str, Any]) -> ModelConfig:
    """Build the model section from keys that :func:`flatten` has written, for example in a
    checkpoint. Missing keys have their defaults. Raises :class:`ConfigError` for unknown keys."""
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
    """Build the LoRA section from a checkpoint's keys. Missing keys have their defaults."""
    fields = {
        name: stored[f"lora.{name}"] for name in LoraConfig.model_fields if f"lora.{name}" in stored
    }
    if "targets" in fields:
        fields["targets"] = json.loads(fields["targets"])
    return LoraConfig.model_validate(fields)


def dump(config: Config) -> str:
    """Return `config` as YAML text. :func:`parse` reads the text back as an equal configuration,
    except that queries of URLs are not written."""
    return strict_yaml.dump(_to_write(config.model_dump()))


def _topic(after: Sequence[str]) -> str:
    """Return the topic that follows --help; "" if there is none."""
    if not after or after[0].startswith("-") or "=" in after[0] or after[0].endswith(".yaml"):
        return ""
    help_text(after[0])
    return after[0]


def show(text: str) -> None:
    """Print a text. Stop without an error if the reader has closed the pipe."""
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
        raise ConfigError(f"{name}: larger than {MOST_BYTES} bytes: expected a configuration")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text") from None
    try:
        entries = strict_yaml.parse_mapping(text)
    except YamlError as error:
        location = f"{name}:{error.line}" if error.line else name
        _refuse_foreign(path, text)
        raise ConfigError(f"{location}: {error}") from None
    if not all(map(_is_known, entries)):
        _refuse_foreign(path, text)
    if all(entry.key in SECTIONS and entry.value is None for entry in entries):
        raise ConfigError(f"{name} has no keys: expected sections with keys, such as 'model:'")
    return [_Given(entry.key, entry.value, f"{name}:{entry.line}") for entry in entries]


def _is_known(entry: strict_yaml.YamlEntry) -> bool:
    return field_of(entry.key) is not None or entry.key in SECTIONS or entry.key in MAPPINGS


def _refuse_foreign(path: Path, text: str) -> None:
    """Raise :class:`ConfigError` if `text` is the configuration of another training program."""
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
    """Return the configuration with the values `given`, and defaults for other keys."""
    problems: list[str] = []
    known: dict[str, _Given] = {}
    tree: dict[str, Any] = {}
    items = list(given)
    for number, key, value in old_names.with_new_names([(item.key, item.value) for item in items]):
        item, info = items[number], field_of(key)
        if key in MAPPINGS:
            problems.append(item.problem(f"expected {expected(KEYS[key])}"))
        elif _has_nul(value):  # a file name cannot have a NUL
            problems.append(item.problem("expected text without a NUL"))
        elif key == "run.name" and lacks_task(value):
            problems.append(
                item.problem(f"{TASK} is for job arrays: expected {TASK_VARIABLE} to be set")
            )
        elif info is not None:
            known[key] = item
            _put(tree, key.split("."), value)
        elif key not in SECTIONS:
            problems.append(item.problem(unknown(key)))
        elif value is not None:
            problems.append(item.problem(f"{key} is a section; write {key}.KEY"))
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
    problems += [known[key].problem(why) for key, why in wrong_options(tree) if key not in wrong]
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
    """Yield the dotted prefixes of `path`, the longest first, and then ""."""
    for length in range(len(path), -1, -1):
        yield ".".join(path[:length])


def _missing(key: str, known: Mapping[str, _Given]) -> str:
    """Return the error about a required `key` that is missing beside keys that are set, such as
    ``data.mixture.web.source`` beside ``data.mixture.web.weight``."""
    group = key.rpartition(".")[0]
    beside = next(item for name, item in known.items() if name.startswith(f"{group}."))
    return beside.problem(f"expected {key} too")


def _once(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))
