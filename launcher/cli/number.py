"""A finite number on the command line. click takes `nan` and `inf` for numbers, and a limit of `nan` never comes."""

import math
from typing import Any

import click


class Number(click.ParamType):
    """A finite number. `least`: the smallest that is allowed; None: any."""

    name = "float"

    def __init__(self, least: float | None = None) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the text. Raises click.BadParameter, with the allowed form."""
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not math.isfinite(found) or (self._least is not None and found < self._least):
            allowed = "" if self._least is None else f" of {self._least:g} or more"
            self.fail(f"{value} is not a finite number{allowed}; write it in decimal digits", param, ctx)
        return found
