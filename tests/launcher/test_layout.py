"""Text that fits 80 columns."""

from launcher.cli.layout import columns, fitted


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


def test_columns_are_as_wide_as_their_cells_and_numbers_end_together():
    rows = [("nodes", "price"), ("trainer", "$10.00/h"), ("2 x spot", "$1.00/h")]
    assert list(columns(rows, words=1)) == ["  nodes        price", "  trainer   $10.00/h", "  2 x spot   $1.00/h"]
