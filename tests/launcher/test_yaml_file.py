import time

import pytest

from launcher.job.yaml_file import MAX_BYTES, YamlFileError, parse_value, parse_yaml, read_yaml


def test_values_are_plain_python_of_yaml_1_2():
    file = parse_yaml("a: [1, 2]\nb: 1e-4\nc: 2026-01-01\nd: 1:30\ne: ~\nf: $40\ng: L4:1\nh: 012\ni: true\nj: 'off'\n")
    assert file.values == {
        "a": [1, 2], "b": 1e-4, "c": "2026-01-01", "d": "1:30", "e": None,
        "f": "$40", "g": "L4:1", "h": 12, "i": True, "j": "off",
    }  # fmt: skip


def test_every_field_knows_its_line():
    file = parse_yaml("# a comment\nbudget:\n  max_total: $40\n\nsecrets:\n  - A\n  - B\n")
    assert file.line(("budget", "max_total")) == 3
    assert file.line(("secrets", 1)) == 7
    assert file.line(("budget", "deadline")) == 2, "a missing field stands where its section does"
    assert file.line(("nothing",)) is None


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (BOMB, 1, "alias or anchor"),
        ("a: 1\nb: *a", 2, "alias or anchor"),
        ("a: 1\nb:\n  c: 1\n  c: 2", 4, "`b.c` stands here and on line 3"),
        ("a: 1\na: 1", 2, "keep one of the two"),
        ("x: 1\nmode: off", 2, "true or false to some YAML readers"),
        ("mode: [yes]", 1, "true or false to some YAML readers"),
        ("a: !!python/object/apply:os.system [x]", 1, "is a YAML tag"),
        ("a: !!str 3", 1, "is a YAML tag"),
        ("- a\n- b", 1, "not a list of `key: value`"),
        ("just words", 1, "not a list of `key: value`"),
        ("a: [1, 2\nb: 3", 2, "not YAML"),
        ("a:\n\tb: 1", 2, "not YAML"),
        ("%YAML 1.1\n---\na: 1", 2, "spotrl reads 1.2"),
        ("a: 1\n---\nb: 2", 2, "second document"),
        ("a: " + "[" * 50_000, 1, "nest more than"),
        ("a: .nan", 1, "finite number"),
        ("a: -.inf", 1, "finite number"),
        ("a: 0x1F", 1, "finite number"),
        ("a: " + "9" * 5000, 1, "finite number"),
        ("? [a]\n: 1", 1, "a key is a list"),
        ("a: \x00", None, "not YAML"),
    ],
)
def test_ambiguous_yaml_is_refused_with_its_line(text, line, words):
    with pytest.raises(YamlFileError, match=words) as caught:
        parse_yaml(text)
    assert caught.value.line == line
    assert caught.value.remedy


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_is_an_empty_section(text):
    assert parse_yaml(text).values == {}


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path):
    too_large = tmp_path / "large.yaml"
    too_large.write_text("a: 1\n" * MAX_BYTES)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: \xe9\n")
    for path, words in [
        (tmp_path / "missing.yaml", "no such file"),
        (tmp_path, "cannot be read"),
        (too_large, "larger than 64 KiB"),
        (latin, "not UTF-8"),
    ]:
        with pytest.raises(YamlFileError, match=words):
            read_yaml(path)


def test_the_largest_file_is_read_in_a_few_seconds():
    begin = time.perf_counter()
    parse_yaml("\n".join(f"key{number}: {number}" for number in range(4000)))
    assert time.perf_counter() - begin < 10


@pytest.mark.parametrize(
    ("text", "value"), [("40", 40), ("$40", "$40"), ("[A, B]", ["A", "B"]), ("a: b", "a: b"), ("", None), ("0.5", 0.5)]
)
def test_a_flags_value_is_parsed_like_a_file(text, value):
    assert parse_value(text) == value
