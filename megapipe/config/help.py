"""Help on ``megapipe train``: options, sections, and keys with types, defaults and meanings."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from difflib import get_close_matches
from pathlib import Path

from pydantic.fields import FieldInfo

from megapipe.config import presets
from megapipe.config.keys import (
    KEYS,
    MAPPINGS,
    OPTION_KEYS,
    OPTIONS_OF,
    SECTIONS,
    expected,
    unknown,
)
from megapipe.config.section import documentation
from megapipe.config.strict_yaml import text_of
from megapipe.errors import ConfigError, MegapipeError
from megapipe.text import clipped

ARGUMENTS = (
    "[CONFIG] [section.key=value ...] [--dry-run [--gpus N] [--device NAME] [--imbalance X] "
    "[--json] | --time-slices] [--traceback] [--help [SECTION | KEY | WORD | all]]"
)

MOST_WHOLE, MOST_FOUND = 6, 18
"""Maximum numbers of keys that a search explains: in full, and altogether."""
MOST_OF_SENTENCE = 240
"""Maximum number of characters of the sentence with which a search explains a key briefly."""


def help_text(topic: str = "") -> str:
    """Explain keys with their types, defaults and meanings.

    `topic`: a key, a section, "all", or words to search for in names and explanations of keys.
    Default: the options, the sections with a line each, and the exit codes. Raises ConfigError if
    the search finds nothing.
    """
    if topic == "all":
        parts = ("\n".join(_section_lines(name)) for name in SECTIONS)
        return "\n\n".join(parts) + "\n"
    if topic in KEYS:
        return "\n".join(_key_lines(topic)) + "\n"
    if topic in OPTION_KEYS:
        return "\n".join(_option_lines(*topic.rsplit(".", 1))) + "\n"
    if topic in SECTIONS:
        return "\n".join(_section_lines(topic)) + "\n"
    return _overview() if not topic else _about(topic)


def _overview() -> str:
    lines = [*_wrapped(f"usage: {usage()}", ""), ""]
    lines += _wrapped(
        "CONFIG is a file in YAML, or the name of one that comes with megapipe: "
        f"{', '.join(presets.names())}. Values come from the file, then from the command "
        "line; the rest are defaults. They are YAML: numbers, true, false, null, text, "
        "[lists]. section.key=unset removes the file's value, section=unset all values of a "
        "section, and data.mixture.NAME=unset an entry.",
        "",
    )
    lines += _wrapped(
        "--dry-run shows the plan of a run and does not start it. --gpus N and --device NAME plan "
        "for N processes on another device; they are short for plan.gpus=N and plan.device=NAME. "
        "With --imbalance X the plan shows the memory of a rank whose experts get X times a "
        "rank's mean rows in each layer. --json prints the plan as one JSON object.",
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
    """Explain the keys that match `word`. Keys whose final part is the word come first, then other
    keys with the word in their names, then keys with the word in their meanings or values. The
    first keys are explained in full, the others in a sentence."""
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
    """Return the full explanation of a key on one line."""
    return " ".join(" ".join(_key_lines(key)).split())


def _brief(key: str, word: re.Pattern[str]) -> list[str]:
    """Return lines with a key's name, default and one sentence of its meaning: the first sentence
    that contains `word`, or else the first sentence."""
    section, _, name = key.rpartition(".")
    meaning = " ".join(documentation(SECTIONS[section])[name].split())
    sentences = re.split(r"(?<=\.)\s", meaning)
    sentence = next((each for each in sentences if word.search(each)), sentences[0])
    sentence = textwrap.shorten(sentence, MOST_OF_SENTENCE, placeholder=" ...")
    return [*_wrapped(f"{key} = {_default(KEYS[key])}", "  "), *_wrapped(sentence, "      ")]


def usage() -> str:
    """Return how the program was called, with the arguments that it takes."""
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
    return lines + (_option_lines(key) if key in OPTIONS_OF else [])


def _option_lines(key: str, only: str | None = None) -> list[str]:
    """Explain the options in the mapping `key`, grouped by the update rules or schedules that have
    them. `only`: name of the one option to explain; None: all."""
    lines = []
    for section, owners in OPTIONS_OF[key].by_section().items():
        if only is not None and only not in section.model_fields:
            continue
        lines += _wrapped(f"of {', '.join(owners)}:", "    ")
        for name, info in section.model_fields.items():
            if only not in (None, name):
                continue
            lines += _wrapped(f"{key}.{name} = {_default(info)}    {expected(info)}", "      ")
            lines += _wrapped(documentation(section)[name], "          ")
    return lines


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "(needed)"
    return clipped(text_of(info.get_default(call_default_factory=True)))


def _wrapped(text: str, indent: str, further: str | None = None) -> list[str]:
    """Wrap text to the terminal's width, but at most 96 columns, or to 80 columns without a
    terminal. `further`: text at the beginning of each line after the first; default: `indent`."""
    below = indent if further is None else further
    return textwrap.wrap(
        text,
        min(96, shutil.get_terminal_size().columns),
        initial_indent=indent,
        subsequent_indent=below,
        break_on_hyphens=False,
    )


def _error_kinds() -> list[type[MegapipeError]]:
    """Return the error classes that define an exit code, sorted by exit code."""
    kinds = [kind for kind in MegapipeError.__subclasses__() if "exit_code" in vars(kind)]
    return sorted(kinds, key=lambda kind: kind.exit_code)
