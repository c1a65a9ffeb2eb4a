"""Text from nodes for a terminal: what would move its cursor, change its title or its colours is shown, not done."""


def harmless(text: str) -> str:
    """Return the text with control characters written out, like \\x1b. Line ends and tabs stay."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )
