"""Format sizes in bytes."""


def size_text(count: int) -> str:
    """Return a size as text, like `512 bytes`, `3.4 MiB` or `1.2 GiB`."""
    if count < 1 << 10:
        return f"{count} bytes"
    unit, shift = next((unit, shift) for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if count >> shift)
    return f"{count / (1 << shift):.1f} {unit}"
