"""Help on training: options, sections and keys with their types, defaults and meanings."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from difflib import get_close_matches
from pathlib import Path

from pydantic.fields import FieldInfo

from megapipe.config import presets
from megapipe.config.keys import KEYS, MAPPINGS, SECTIONS, expected, unknown
from megapipe.config.section import documentation
from megapipe.config.strict_yaml import text_of
from megapipe.errors import ConfigError, MegapipeError
from megapipe.words import clipped

ARGUMENTS = (
    "[CONFIG] [section.key=value ...] [--dry-run [--imbalance X] | --time-slices] [--traceback] "
    "[--help [SECTION | KEY | WORD | all]]"
)

MOST_WHOLE, MOST_FOUND = 6, 18
"""Most keys found by a word that are explained whole, and most that have at least a sentence."""
MOST_OF_SENTENCE = 240
"""Characters."""


def help_text(topic: str = "") -> str:
    """Explain keys with their types, defaults and meanings.

    `topic` is a key, a section, "all", or words: then the keys that have them in their names, and
    those that are explained by them. By default the options, the sections with a line each, and the
    exit codes. Raises ConfigError where no key has the words.
    """
    if topic == "all":
        parts = ("\n".join(_section_lines(name)) for name in SECTIONS)
        return "\n\n".join(parts) + "\n"
    if topic in KEYS:
        return "\n".join(_key_lines(topic)) + "\n"
    if topic in SECTIONS:
        return "\n".join(_section_lines(topic)) + "\n"
    return _overview() if not topic else _about(topic)


def _overview() -> str:
    lines = [*_wrapped(f"usage: {usage()}", ""), ""]
    lines += _wrapped(
        "CONFIG is a file in YAML, or the name of one that comes with megapipe: "
        f"{', '.join(presets.names())}. Values come from the file, then from the command line; the "
        "rest are defaults. They are YAML: numbers, true, false, null, text, [lists]. "
        "section.key=unset takes away what the file says, section=unset all of a section, and "
        "data.mixture.NAME=unset an entry.",
        "",
    )
    lines += _wrapped(
        "--dry-run shows the plan of a run and starts none; with --imbalance X its memory is that "
        "of a rank whose experts get X times the mean rows of a rank, in each layer.",
        "",
    )
    lines += _wrapped("--traceback shows where in the code an error arose.", "")
    lines += [
        "",
        *_wrapped(
            "sections, whose keys --help SECTION explains, or --help all (--help WORD finds keys "
            "by their names and by what they do):",
            "",
        ),
    ]
    width = max(map(len, SECTIONS))
    for name, section in SECTIONS.items():
        sentence = re.split(r"(?<=[.:])\s", " ".join((section.__doc__ or "").split()))[0]
        lines += _wrapped(sentence.rstrip(".:"), f"  {name:{width}}  ", " " * (width + 4))
    lines += ["", "exit codes:", "    0  done", "    1  a bug: an unexpected exception"]
    for error in _error_kinds():
        meaning = (error.__doc__ or "").strip().rstrip(".")
        lines += _wrapped(meaning, f"  {error.exit_code:>3}  ", " " * 7)
    return "\n".join(lines) + "\n"


def _about(word: str) -> str:
    """The keys that end with a word, then those that have it in their names, then those whose
    meanings or values have it: the first ones whole, others with a sentence each."""
    name = "_".join(word.lower().split())
    named = [key for key in KEYS if name in key]
    named.sort(key=lambda key: key.rpartition(".")[2] != name)
    starts = re.compile(rf"(?<![a-z0-9]){re.escape(' '.join(word.split()))}", re.IGNORECASE)
    found = [*named, *(key for key in KEYS if key not in named and starts.search(_flat(key)))]
    if not found:
        near = get_close_matches(word, SECTIONS, n=1) if "." not in word else []
        hint = f"did you mean {near[0]}?" if near else unknown(word).partition("; ")[2]
        raise ConfigError(f"command line: --help {clipped(word)}: no such section or key; {hint}")
    whole = sum(key.rpartition(".")[2] == name for key in named) or len(named)
    whole = min(whole, MOST_WHOLE)
    parts = ["\n".join(_key_lines(key)) for key in found[:whole]]
    parts += ["\n".join(_brief(key, starts)) for key in found[whole:MOST_FOUND]]
    if found[MOST_FOUND:]:
        parts.append("\n".join(_wrapped(f"and {', '.join(found[MOST_FOUND:])}", "")))
    return "\n\n".join(parts) + "\n"


def _flat(key: str) -> str:
    """Return all that is said of a key, on one line."""
    return " ".join(" ".join(_key_lines(key)).split())


def _brief(key: str, word: re.Pattern[str]) -> list[str]:
    """Return a key and the first sentence of its meaning that has the word, or else the first."""
    section, _, name = key.rpartition(".")
    meaning = " ".join(documentation(SECTIONS[section])[name].split())
    sentences = re.split(r"(?<=\.)\s", meaning)
    said = next((each for each in sentences if word.search(each)), sentences[0])
    said = textwrap.shorten(said, MOST_OF_SENTENCE, placeholder=" ...")
    return [*_wrapped(f"{key} = {_default(KEYS[key])}", "  "), *_wrapped(said, "      ")]


def usage() -> str:
    """How the program was called, and what it takes."""
    called = sys.argv[0]
    name = called if called.startswith("megapipe ") else Path(called).name
    return f"{name if name.endswith(('train', 'train.py')) else 'megapipe train'} {ARGUMENTS}"


def _section_lines(name: str) -> list[str]:
    lines = _wrapped(f"{name}: {' '.join((SECTIONS[name].__doc__ or '').split())}", "")
    for key in SECTIONS[name].model_fields:
        if f"{name}.{key}" in KEYS:
            lines += ["", *_key_lines(f"{name}.{key}")]
    return lines


def _key_lines(key: str) -> list[str]:
    info = KEYS[key]
    section, _, name = key.rpartition(".")
    lines = [
        *_wrapped(f"{key} = {_default(info)}    {expected(info)}", "  "),
        *_wrapped(documentation(SECTIONS[section])[name], "      "),
    ]
    inner = MAPPINGS.get(key)
    for each, field_info in inner.model_fields.items() if inner is not None else ():
        below = f"{key}.NAME.{each} = {_default(field_info)}    {expected(field_info)}"
        lines += _wrapped(below, "    ")
        lines += _wrapped(documentation(inner)[each], "        ") if inner is not None else []
    return lines


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "(needed)"
    return clipped(text_of(info.get_default(call_default_factory=True)))


def _wrapped(text: str, indent: str, further: str | None = None) -> list[str]:
    """Lines of at most 96 columns, or as many as the terminal has, or 80 without one; `further`
    begins those after the first, by default as `indent` does."""
    below = indent if further is None else further
    return textwrap.wrap(
        text,
        min(96, shutil.get_terminal_size().columns),
        initial_indent=indent,
        subsequent_indent=below,
        break_on_hyphens=False,
    )


def _error_kinds() -> list[type[MegapipeError]]:
    """The errors that have an exit code of their own, by code."""
    kinds = [kind for kind in MegapipeError.__subclasses__() if "exit_code" in vars(kind)]
    return sorted(kinds, key=lambda kind: kind.exit_code)
