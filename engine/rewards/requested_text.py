"""The text that a prompt asks an image to show: what stands in quotes, else the whole prompt.

    a shop called “OPEN NOW” and a sign „50 % off“ -> ("opennow", "50%off")

Quotes of all scripts count. Double quotes come first; single quotes count only in a prompt without others, because an
apostrophe looks the same. A straight quote after a digit opens nothing: 24" is a size. Empty quotes ask for nothing.
Marks typed twice, as TeX and CSV files have them, are double quotes: ``OPEN'' and ""OPEN"".
"""

import re
import unicodedata

CLOSED_BY = {
    '"': '"',
    "\N{LEFT DOUBLE QUOTATION MARK}": "\N{RIGHT DOUBLE QUOTATION MARK}",
    "\N{RIGHT DOUBLE QUOTATION MARK}": "\N{RIGHT DOUBLE QUOTATION MARK}",
    "\N{DOUBLE LOW-9 QUOTATION MARK}": "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}",
    "\N{DOUBLE HIGH-REVERSED-9 QUOTATION MARK}": "\N{RIGHT DOUBLE QUOTATION MARK}",
    "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}": "\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}",
    "\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}": (
        "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"
    ),
    "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}": "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
    "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}": "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}",
    "\N{LEFT CORNER BRACKET}": "\N{RIGHT CORNER BRACKET}",
    "\N{LEFT WHITE CORNER BRACKET}": "\N{RIGHT WHITE CORNER BRACKET}",
    "\N{LEFT DOUBLE ANGLE BRACKET}": "\N{RIGHT DOUBLE ANGLE BRACKET}",
    "\N{LEFT ANGLE BRACKET}": "\N{RIGHT ANGLE BRACKET}",
    "\N{REVERSED DOUBLE PRIME QUOTATION MARK}": "\N{DOUBLE PRIME QUOTATION MARK}\N{LOW DOUBLE PRIME QUOTATION MARK}",
    "\N{HEAVY DOUBLE TURNED COMMA QUOTATION MARK ORNAMENT}": "\N{HEAVY DOUBLE COMMA QUOTATION MARK ORNAMENT}",
}
"""Marks that open a quoted text, and those that may close it."""

SINGLE = tuple(
    re.compile(rf"(?<!\w){opens}(?=[^\s{closes}])(.+?)(?<=\S)[{closes}](?!\w)")
    for opens, closes in (
        ("'", "'"),
        ("\N{LEFT SINGLE QUOTATION MARK}", "\N{RIGHT SINGLE QUOTATION MARK}"),
        (
            "\N{SINGLE LOW-9 QUOTATION MARK}",
            "\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}",
        ),
        ("`", "`"),
    )
)
"""Texts in single quotes. An apostrophe stands beside a letter on both sides, or closes nothing."""

TYPED_TWICE = re.compile(r"``|''|\N{DOUBLE PRIME}|(?<!\w)\"{2,}(?=\w)|(?<=\w)\"{2,}(?!\w)")
"""Marks that stand for a straight double quote. Quotes around nothing stay two."""

SHORT_FORMS = ("n", "em", "til", "cause")
"""Words that are written between or after apostrophes, as in rock 'n' roll."""

SAME = str.maketrans(
    {
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{MODIFIER LETTER APOSTROPHE}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{DOUBLE LOW-9 QUOTATION MARK}": '"',
        "\N{HYPHEN}": "-",
        "\N{NON-BREAKING HYPHEN}": "-",
        "\N{EN DASH}": "-",
        "\N{EM DASH}": "-",
        "\N{MINUS SIGN}": "-",
    }
)
"""Characters that an image does not tell apart."""


def normalised(text: str) -> str:
    """Return the text without spaces and invisible characters, in lower case, with one form for each character."""
    composed = unicodedata.normalize("NFKC", text).translate(SAME)
    visible = (character for character in "".join(composed.split()) if unicodedata.category(character) != "Cf")
    return unicodedata.normalize("NFKC", "".join(visible).lower())


def requested_texts(prompt: str) -> tuple[str, ...]:
    """Return the normalised texts that an image shall show. Raises ValueError if there is none."""
    texts = _texts_in_quotes(prompt) or [normalised(prompt)]
    if not texts[0]:
        raise ValueError(f"prompt {prompt!r} asks for no text; an ocr reward needs some, best in double quotes")
    return tuple(texts)


def names_no_text(prompt: str) -> bool:
    """Return True if the prompt has several words and none in quotes, so that an image shall show all of it."""
    return len(prompt.split()) > 1 and not _texts_in_quotes(prompt)


def _texts_in_quotes(prompt: str) -> list[str]:
    plain = unicodedata.normalize("NFKC", TYPED_TWICE.sub('"', prompt.replace('\\"', '"')))
    return _quoted(plain) or _single_quoted(plain)


def _quoted(prompt: str) -> list[str]:
    texts, at = [], 0
    while at < len(prompt):
        mark = prompt[at]
        end = -1
        if mark in CLOSED_BY and not (mark == '"' and prompt[:at][-1:].isdigit()):
            end = min(
                (place for closing in CLOSED_BY[mark] if (place := prompt.find(closing, at + 1)) >= 0), default=-1
            )
            if end < 0:  # opened by a curly quote and closed by a straight one
                end = prompt.find('"', at + 1)
        if end < 0:
            at += 1
            continue
        if text := normalised(prompt[at + 1 : end]):
            texts.append(text)
        at = end + 1
    return texts


def _single_quoted(prompt: str) -> list[str]:
    matches = sorted((match.start(), match[1]) for pattern in SINGLE for match in pattern.finditer(prompt))
    texts = [normalised(text) for _, text in matches]
    return [text for text in texts if text and text not in SHORT_FORMS]
