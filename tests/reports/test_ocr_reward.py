"""The OCR reward asks for what stands in quotes of any script, reads words in order, and names what cannot be read."""

import re

import numpy as np
import pytest

from engine.config import EngineConfig, RewardConfig
from engine.entrypoints.prompt_warnings import prompt_warnings
from engine.prompts import FilePrompts
from engine.rewards.ocr import _in_order, reading_metrics, target_text, unreadable_characters
from engine.rewards.requested_text import normalised, requested_texts

QUOTES = re.findall("..", '“”„“„”«»»«»»””「」『』‹››‹＂＂""\'\'‘’‚‘‚’``《》〈〉〝〞〝〟❝❞﹁﹂“"')


@pytest.mark.parametrize("quotes", QUOTES)
def test_a_text_in_quotes_of_any_script_is_the_target(quotes):
    opens, closes = quotes
    assert target_text(f"a sign that says {opens}OPEN NOW{closes}, at night") == "opennow"
    assert requested_texts(f"{opens}A{closes} and {opens}B{closes}") == ("a", "b")
    assert requested_texts(f"{opens}{closes} or {opens}YES{closes}") == ("yes",)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ('a 24" screen that shows "HELLO"', ("hello",)),
        ('a 24" x 36" poster with "SALE"', ("sale",)),
        ("a 6'2\" man with “HI”", ("hi",)),
        ('"ROOM 24" and "B"', ("room24", "b")),
        ('"" in a frame, "YES" below', ("yes",)),
        ('"SALE" and “50 percent off”', ("sale", "50percentoff")),
        ("the dogs' bowl that isn't 'EMPTY'", ("empty",)),
        ("‘don’t panic’ in red", ("don'tpanic",)),
        ("a rock 'n' roll poster", ("arock'n'rollposter",)),
        ('写着"你好"的牌子', ("你好",)),
        ('a sign \\"HELLO\\"', ("hello",)),
        ("a sign ``HELLO'' in TeX", ("hello",)),
        ("″PRIME″ in neon", ("prime",)),
        ('a CSV file\'s ""SALE"" and ""CUT""', ("sale", "cut")),
        ("no quotes", ("noquotes",)),
    ],
)
def test_marks_that_are_no_quotes_ask_for_nothing(prompt, texts):
    assert requested_texts(prompt) == texts


@pytest.mark.parametrize("prompt", ['a sign that says "OPEN', "a sign: OPEN NOW", "a <b>BOLD</b> sign"])
def test_prompts_that_quote_no_text_are_counted_and_named(prompt):
    source = FilePrompts(trained=("4821", prompt), evaluated=("a “dog”",), run_seed=0, prompts_per_batch=1)
    (warning,) = prompt_warnings(EngineConfig(reward=RewardConfig(name="ocr")), source)
    assert warning.startswith("1 of 3 prompts have no text in quotes")
    assert repr(prompt) in warning


def test_a_prompt_without_any_text_is_refused():
    with pytest.raises(ValueError, match="asks for no text"):
        target_text(" \u200b ")


def test_texts_that_look_alike_are_equal():
    alike = [("cafe\u0301", "café"), ("don’t", "don't"), ("ＡＢ１２", "AB12"), ("a\u200bb", "ab"), ("a–b", "a-b")]
    for one, other in [*alike, ("ﬁre", "FIRE")]:
        assert normalised(one) == normalised(other)


def test_all_quoted_texts_count_in_any_order():
    texts = requested_texts('"SALE" and "50 percent off"')
    assert reading_metrics("sale50percentoff", texts) == {"exact_match": 1.0, "similarity": 1.0}
    assert reading_metrics("50percentoffsale", texts) == {"exact_match": 1.0, "similarity": 1.0}
    assert reading_metrics("50percentoffxxsale", texts) == {"exact_match": 0.0, "similarity": 1.0}
    assert reading_metrics("sale", texts)["similarity"] == 0.25
    assert reading_metrics("50percentof", texts)["similarity"] == 11 / 16
    assert reading_metrics("hi", ("hi", "hi"))["similarity"] == 0.5
    assert reading_metrics("x", tuple("abcdefgh"))["similarity"] == 0.0


class Found:
    """The output of rapidocr: texts, and the corners of their boxes, from left, top, right, bottom."""

    def __init__(self, *words):
        self.txts = tuple(text for text, *_ in words)
        self.boxes = np.array([[[x, y], [r, y], [r, b], [x, b]] for _, x, y, r, b in words], dtype=np.float32)


@pytest.mark.parametrize("higher", [-14, -10, 0, 10, 14])
def test_words_on_one_line_are_read_from_left_to_right(higher):
    words = [("world", 120, 50 - higher, 200, 80 - higher), ("hello", 10, 50, 100, 80), ("below", 10, 100, 90, 130)]
    assert _in_order(Found(*words)) == ["hello", "world", "below"]
    assert _in_order(Found(*reversed(words))) == ["hello", "world", "below"]


def test_lines_are_read_from_top_to_bottom_and_an_empty_image_has_none():
    assert _in_order(Found(("b", 0, 40, 50, 60), ("a", 60, 0, 90, 30))) == ["a", "b"]
    assert _in_order(object()) == []


@pytest.mark.parametrize("text", ["HELLO", "Grüße", "你好", "こんにちは", "50 % off!", "don’t"])
def test_texts_of_readable_scripts_have_no_unreadable_character(text):
    assert unreadable_characters(f"a sign “{text}”") == ""


@pytest.mark.parametrize("text", ["привет", "안녕", "مرحبا", "שלום", "สวัสดี", "नमस्ते"])
def test_prompts_for_scripts_that_the_reader_lacks_are_counted_and_named(text):
    assert set(unreadable_characters(f"a sign “{text}”")) == set(normalised(text))
    source = FilePrompts(trained=("a “cat”", f"a sign “{text}”"), evaluated=("“dog”",), run_seed=0, prompts_per_batch=1)
    (warning,) = prompt_warnings(EngineConfig(reward=RewardConfig(name="ocr")), source)
    assert f"1 of 3 prompts ask for characters that the OCR reader cannot read ({normalised(text)[0]} " in warning
    assert f"asks for {normalised(text)}" in warning
    assert prompt_warnings(EngineConfig(reward=RewardConfig(name="module:function")), source) == []
