"""Draw what the commands show on terminals of three sizes, into text files, for people to look at.

    python -m tests.captures --to FOLDER

The commands run on real pseudo-terminals, over the ledger of a real quickstart that the tests keep, with a made run
beside it to compare with. The live view is drawn from made values, because it would go on.
"""

import argparse
import gzip
import os
import sqlite3
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console

from launcher.cli.live import Frame
from launcher.ledger.store import open_ledger
from tests.launcher.made_ledger import a_long_run
from tests.launcher.test_live import VIEW, Terminal

ROOT = Path(__file__).parents[1]
SIZES = ((80, 24), (100, 30), (140, 40))
TALL = 400
"""Lines of the terminal for a command that prints and ends: nothing scrolls away."""

COMMANDS = {
    "plan-local": ("launch", "sky_yamls/quickstart.yaml", "--name", "another", "--dry-run"),
    "plan-clouds": ("launch", "sky_yamls/qwen_image_ocr.yaml", "--infra", "aws,gcp", "--dry-run"),
    "status": ("status", "quickstart"),
    "report": ("report", "quickstart"),
    "compare": ("compare", "quickstart", "digits-ocr"),
}


def make_home(folder: Path) -> None:
    """Make the ledger: a quickstart and a made run."""
    path = folder / "ledger.sqlite"
    script = gzip.decompress((ROOT / "tests" / "data" / "quickstart" / "ledger.sql.gz").read_bytes()).decode()
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    with open_ledger(path)() as session, session.begin():
        a_long_run(session)


def drawn(command: tuple[str, ...], home: Path, columns: int) -> str:
    """Return what a command shows on a terminal of this width."""
    environ = {**os.environ, "TERM": "xterm-256color", "SPOTRL_HOME": str(home)}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    os.chdir(ROOT)
    terminal = Terminal([sys.executable, "-m", "launcher.cli.main", *command], environ, columns, TALL)
    try:
        terminal.end(seconds=300.0)
    finally:
        terminal.close()
    return "\n".join(line.rstrip() for line in terminal.screen.display).rstrip() + "\n"


def live_view(columns: int, lines: int) -> str:
    file = StringIO()
    console = Console(width=columns, height=lines, file=file, color_system=None)
    events = [f"  {n}m 3s  spot-{n}-g0: ready on 2 GPUs after 4m 12s" for n in range(5)]
    console.print(Frame(view=VIEW, rewards=[0.4 + 0.01 * n for n in range(40)], events=events, header="on aws, gcp"))
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    to = parser.parse_args().to.absolute()
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_home(Path(folder))
        for columns, lines in SIZES:
            (to / f"live-{columns}x{lines}.txt").write_text(live_view(columns, lines), encoding="utf-8")
            for name, command in COMMANDS.items():
                text = drawn(command, Path(folder), columns)
                (to / f"{name}-{columns}x{lines}.txt").write_text(text, encoding="utf-8")
    print(f"wrote {len(SIZES) * (1 + len(COMMANDS))} files to {to}")


if __name__ == "__main__":
    main()
