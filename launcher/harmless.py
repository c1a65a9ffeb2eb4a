"""Make text from nodes safe for a terminal: sequences that move the cursor or change title or colours are shown."""


def harmless(text: str) -> str:
    """Return the text with control characters written out, like \\x1b. Line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )
