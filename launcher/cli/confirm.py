"""Ask a question that a command depends on."""

import click


class Declined(click.Abort):
    """The user said no, or Ctrl-C. The message says that nothing was done."""


def confirm(question: str, *, default: bool, declined: str, err: bool = True) -> None:
    """Ask a question with yes or no. Raises Declined with the sentence `declined` after a no.

    `err`: ask on stderr.
    """
    try:
        click.confirm(question, default=default, abort=True, err=err)
    except click.Abort:
        raise Declined(declined) from None
