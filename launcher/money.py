"""Parse and format money and durations. Values are integer micro-dollars and integer milliseconds.

`$40` and `12h30m` in; `$40.00` and `12h 30m` out. No floats: a sum of prices must be exact.
"""

import re
from decimal import ROUND_HALF_EVEN, Decimal

MICRO = 1_000_000
"""Micro-dollars in a dollar."""

HOUR_MS = 3_600_000

LARGEST_MICRO_USD = 10**9 * MICRO
LONGEST_MS = 10 * 365 * 24 * HOUR_MS
"""Upper limits of an amount and a duration. A run never costs or lasts more, and every column of the ledger can hold
the limits."""

_MONEY = re.compile(r"(?P<sign>[-+])?\$?(?P<amount>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)(?P<hourly>/h)?")
_UNITS_MS = {"d": 86_400_000, "h": HOUR_MS, "m": 60_000, "s": 1000, "ms": 1}
_DURATION = re.compile(
    r"(?:(?P<d>\d+)d)?\s*(?:(?P<h>\d+)h)?\s*(?:(?P<m>\d+)m(?!s))?\s*(?:(?P<s>\d+)s)?\s*(?:(?P<ms>\d+)ms)?"
)


def parse_money(text: str) -> int:
    """Parse `$40`, `40`, `$1,250.50` to micro-dollars.

    Raises ValueError for any other text, and below a micro-dollar.
    """
    match = _MONEY.fullmatch(text.strip())
    if not match or match["hourly"]:
        raise ValueError(f"{text!r} is not an amount of money; write it like $40 or $1.25")
    return _micro(match, text)


def parse_hourly(text: str) -> int:
    """Parse `$1.25/h`, or an amount without the `/h`, to micro-dollars an hour."""
    match = _MONEY.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a price per hour; write it like $1.25/h")
    return _micro(match, text)


def _micro(match: re.Match[str], text: str) -> int:
    micro_usd = Decimal(match["amount"].replace(",", "")) * MICRO
    if micro_usd != micro_usd.to_integral_value():
        raise ValueError(f"{text!r} is finer than a micro-dollar; use at most 6 decimals")
    if micro_usd > LARGEST_MICRO_USD:
        raise ValueError(f"{text!r} is more than ${LARGEST_MICRO_USD // MICRO:,}; use less")
    return -int(micro_usd) if match["sign"] == "-" else int(micro_usd)


def dollars(micro_usd: int) -> str:
    """Format for people: `$1,234.50`. Below a cent, four decimals keep a small price from reading as zero."""
    places = Decimal("0.0001") if 0 < abs(micro_usd) < MICRO // 100 else Decimal("0.01")
    amount = (Decimal(abs(micro_usd)) / MICRO).quantize(places, ROUND_HALF_EVEN)
    return f"{'-' if micro_usd < 0 else ''}${amount:,}"


def exact_dollars(micro_usd: int) -> str:
    """Format for machines with every decimal, `$0.123456`; `parse_money` gives the same integer back."""
    amount = Decimal(abs(micro_usd)) / MICRO
    return f"{'-' if micro_usd < 0 else ''}${amount.normalize():f}"


def hourly(micro_usd_per_hour: int) -> str:
    """Format a rate for people: `$1.54/h`."""
    return f"{dollars(micro_usd_per_hour)}/h"


def parse_duration(text: str) -> int:
    """Parse `12h30m`, `90s`, `1d`, `500ms` to milliseconds. A number without a unit is refused."""
    match = _DURATION.fullmatch(text.strip())
    if not match or not any(match.groupdict().values()):
        raise ValueError(f"{text!r} is not a duration; write it with units, like 12h30m or 90s")
    ms = sum(int(count[:20]) * _UNITS_MS[unit] for unit, count in match.groupdict().items() if count)
    if ms > LONGEST_MS:
        raise ValueError(f"{text[:40]!r} is longer than ten years; use less")
    return ms


def duration(ms: int) -> str:
    """Format for people with the two largest units: `12h 30m`, `1m 5s`, `0.4s`."""
    if ms < 0:
        return f"-{duration(-ms)}"
    if ms < 1000:
        return f"{ms}ms"
    parts: list[str] = []
    ms_left = ms
    for unit in ("d", "h", "m", "s"):
        count, ms_left = divmod(ms_left, _UNITS_MS[unit])
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0"))


def exact_duration(ms: int) -> str:
    """Format a duration (ms, 0 or more) without rounding, like `12h30m`.

    `parse_duration` turns the text back into the same number.
    """
    parts: list[str] = []
    ms_left = ms
    for unit, unit_ms in _UNITS_MS.items():
        count, ms_left = divmod(ms_left, unit_ms)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
