"""`spotrl ui`: show all runs in the browser, live."""

import logging
import socket
from types import FrameType

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.exit_codes import Failure
from launcher.ledger.store import open_read_only
from launcher.runs.runs import bring_down
from launcher.settings import home, ledger_path, simulations_path
from launcher.web.token import kept_token

STOP_SECONDS = 2.0
"""Seconds that the request to stop a run waits. The page shows the rest of the stop."""


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on loopback.  [default: a free one]")
@click.option("--open", "open_browser", is_flag=True, help="Open the page in the browser.")
@click.pass_obj
def ui(sessions: sessionmaker[Session], port: int, open_browser: bool) -> None:
    """Show all runs in the browser, live: curves, nodes and images.

    The server listens on 127.0.0.1 only, and the printed address carries a token: without the token it shows nothing.
    The token is kept in SPOTRL_HOME/ui-token, so that open pages come back after a restart on the same port; delete
    the file for a new one. The server reads the ledger and changes nothing, except that it stops a run after a
    question. From another computer, forward
    the port: `ssh -L 8642:127.0.0.1:8642 HOST`, with --port 8642.

    \b
    Example:
      spotrl ui
      spotrl ui --port 8642 --open
    """
    import uvicorn  # of the extra `ui`

    from launcher.web.server import build_app, warm

    token = kept_token(home() / "ui-token")
    reading = open_read_only(ledger_path())
    app = build_app(reading, lambda run: bring_down(sessions, run, STOP_SECONDS), token, simulations_path())
    warm(reading, token)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen()  # the browser may ask before the server has started
    except OSError as error:
        raise Failure(f"port {port} cannot be used ({error.strerror}); choose another with --port") from None
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}"
    click.echo(f"{address}\nCtrl-C ends the server; runs go on.")
    if open_browser:
        click.launch(address)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )

    class Ended(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # Pages that are open are cut off, and say so themselves. The terminal shows no stack trace of each.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            super().handle_exit(sig, frame)

    Ended(config).run(sockets=[listening])
