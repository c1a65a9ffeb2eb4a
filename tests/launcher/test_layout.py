"""Text that fits 80 columns."""

import pytest
from click.testing import CliRunner

from launcher.cli.catalog import show
from launcher.cli.check import check
from launcher.cli.layout import columns, fitted, sentence_rows, table_rows

OFFERS = [("zone", "$/h", "from"), ("us-east-2a", "$10.00", "[1]"), ("any", "$1.00", "")]
TERMINAL = {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}
"""Variables that make rich assume a terminal of 80 columns. A dumb terminal gets no colours."""


def test_a_long_sentence_is_wrapped_between_words_and_hangs():
    text = "  a " + "word " * 20 + "end"
    lines = list(fitted([text]))
    assert max(map(len, lines)) <= 80
    assert [line.startswith("      word") for line in lines] == [False, True]
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())


def test_a_line_that_fits_and_an_empty_line_stay_as_they_are():
    lines = ["  trainer  on_demand", "", "x" * 80]
    assert list(fitted(lines)) == lines


def test_lines_of_a_log_in_a_reason_stay_apart():
    assert list(fitted(["demo: failed (no reward", "first", "second)"])) == list(
        fitted(["demo: failed (no reward\nfirst\nsecond)"])
    )


def test_a_word_that_is_too_long_stays_whole():
    digest = "sha256:" + "0f" * 60
    assert digest in [line.strip() for line in fitted([f"job {digest} and more"])]


def test_columns_fit_their_cells_and_numbers_align_right():
    rows = [("nodes", "price"), ("trainer", "$10.00/h"), ("2 x spot", "$1.00/h")]
    assert list(columns(rows, words=1)) == ["  nodes        price", "  trainer   $10.00/h", "  2 x spot   $1.00/h"]


@pytest.mark.parametrize("width", [None, 80, 24])
def test_a_row_that_fits_is_one_line_without_trailing_blanks(width):
    assert list(table_rows(OFFERS, numbers=("$/h",), width=width)) == [
        ["zone           $/h  from"],
        ["us-east-2a  $10.00  [1]"],
        ["any          $1.00"],
    ]


def test_a_row_wider_than_the_terminal_continues_in_an_indented_line():
    assert list(table_rows(OFFERS, numbers=("$/h",), width=20)) == [
        ["zone           $/h", "    from"],
        ["us-east-2a  $10.00", "    [1]"],
        ["any          $1.00"],
    ]


def test_a_cell_wider_than_the_terminal_stays_whole():
    rows = list(table_rows(OFFERS, width=5))
    assert rows[1] == ["us-east-2a", "    $10.00", "    [1]"]


def test_sentences_of_a_table_are_wrapped_in_their_column():
    rows = [("check", "", "found"), ("bucket", "FAIL", "a b " * 12), ("clock", "OK", "")]
    assert list(sentence_rows(rows, 40)) == [
        ["check         found"],
        ["bucket  FAIL  a b a b a b a b a b a b a", "              b a b a b a b a b a b"],
        ["clock   OK"],
    ]


@pytest.mark.parametrize(("command", "arguments"), [(show, ["--shipped"]), (check, ["missing.yaml"])])
def test_no_line_is_wider_than_a_terminal_of_80_columns(command, arguments):
    lines = CliRunner(env=TERMINAL).invoke(command, arguments).output.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip() or "…" in line] == []


def test_a_row_in_a_pipe_is_one_line():
    lines = CliRunner().invoke(show, ["--shipped", "--gpu", "H100"]).output.splitlines()
    heading, first = lines[:2]
    assert heading.split()[:2] == ["cloud", "region"]
    assert first.startswith("aws ")
    assert first.endswith("]")
