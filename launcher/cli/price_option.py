"""The option `--prices` of commands that plan or show prices: which of the shipped prices count."""

import click

from launcher.market.offers import Prices

prices_option = click.option(
    "--prices",
    type=click.Choice([prices.value for prices in Prices]),
    default=Prices.NEWEST.value,
    show_default=True,
    callback=lambda _context, _option, value: Prices(value),
    help="Shipped prices that count where you refreshed none. newest: the newest that are known. recorded: those of "
    "the time of the recorded markets, to compare with (launch: with --dry-run).",
)
