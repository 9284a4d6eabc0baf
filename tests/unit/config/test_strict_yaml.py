"""The YAML subset: the pitfalls of YAML 1.1, and everything that is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.strict_yaml import (
    YamlEntry,
    YamlError,
    dump,
    parse_mapping,
    parse_value,
    text_of,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("+1", 1),
        ("-0", 0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("# only a comment", None),
        ("off", "off"),
        ("yes", "yes"),
        ("010", "010"),
        ("0o10", "0o10"),
        ("0x1f", "0x1f"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"),
        ("nan", "nan"),
        ("=", "="),
        ("<<", "<<"),
        ("'1'", "1"),
        ('"a\\nb"', "a\nb"),
        ("[1, [x, null]]", [1, ["x", None]]),
        ("[]", []),
        ("E L*3 | L*4 H", "E L*3 | L*4 H"),
        ("http://host/x", "http://host/x"),
    ],
)
def test_values(text: str, value: object) -> None:
    (entry,) = parse_value("k", text)
    assert entry.value == value
    assert type(entry.value) is type(value)


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        (".nan", "not a finite number", 1),
        ("-.Inf", "not a finite number", 1),
        ("1e999", "not a finite number", 1),
        ("9" * 41, "a number of 41 digits", 1),
        ("!!python/object/apply:os.system [x]", "tag .* is not allowed", 1),
        ("!x 1", "tag !x is not allowed", 1),
        ("a: &n 1\nb: 2", "anchors and aliases", 1),
        ("a: 1\nb: *n", "anchors and aliases", 2),
        ("[" * 5000 + "]" * 5000, "nested deeper", 1),
        ("{a: 1, a: 2}", "k.a is given twice", 1),
        ("{1: 2}", "the key 1 is not a name", 1),
        ("{[1]: 2}", "the key .* is not a name", 1),
        ("[{a: 1}]", "a mapping is not allowed in this place", 1),
        ("a\n---\nb", "single document", 2),
        ("[1", "not valid YAML", 1),
        ("a: b: c", "not valid YAML", 1),
        ("a\n\x00", "character '\\\\x00' is not allowed", 2),
        ("\ud800", "is not allowed", 1),
    ],
)
def test_refused(text: str, words: str, line: int) -> None:
    with pytest.raises(YamlError, match=words) as caught:
        parse_value("k", text)
    assert caught.value.line == line
    assert "\n" not in str(caught.value)


def test_mapping_has_dotted_names_and_lines() -> None:
    text = "# comment\nmodel:\n  layers: 4\n  hidden: 8\n\nparallel: {tp: 2}\ntrain:\nrun.name: x\n"
    assert parse_mapping(text) == [
        YamlEntry("model.layers", 4, 3),
        YamlEntry("model.hidden", 8, 4),
        YamlEntry("parallel.tp", 2, 6),
        YamlEntry("train", None, 7),
        YamlEntry("run.name", "x", 8),
    ]
    assert parse_mapping("") == []


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("a:\n  b: 1\na.b: 2", "a.b is given twice, first in line 2", 3),
        ("a:\n  b: 1\na:\n  b: 2", "a.b is given twice, first in line 2", 4),
        ("a:\na:", "a is given twice", 2),
        ("- 1", "expected sections", 1),
        ("\n3", "expected sections", 2),
        ("a:\n b: 1\n  c: 2", "not valid YAML", 3),
        ("a:\n\tb: 1", "not valid YAML", 2),
    ],
)
def test_bad_mapping(text: str, words: str, line: int) -> None:
    with pytest.raises(YamlError, match=words) as caught:
        parse_mapping(text)
    assert caught.value.line == line


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.sampled_from(["off", "1e-4", "012", "null", "~", "", "true", ".inf", "a: b", "a\x85b", "'"]),
)


@pytest.mark.full
@given(st.one_of(SCALARS, st.lists(SCALARS, max_size=3)))
def test_dump_reads_back(value: object) -> None:
    document = dump({"a": {"b": value, "c": 1}})  # type: ignore[dict-item]
    assert [(e.key, e.value) for e in parse_mapping(document)] == [("a.b", value), ("a.c", 1)]
    (entry,) = parse_value("k", text_of(value))  # type: ignore[arg-type]
    assert entry.value == value
    assert "\n" not in text_of(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("escape", ["\\UFFFFFFFF", "\\U00110000"])
def test_an_escape_beyond_unicode(escape: str) -> None:
    with pytest.raises(YamlError, match="an escape of a character that is not in Unicode"):
        parse_mapping(f'x: "{escape}"')
