"""`spotrl`: find and run a command, and exit with its code.

A command is a file in this folder with a click command of the same name. The file is imported only when the command
is called, so `spotrl --help` answers at once. The list of commands parses the source of each file without running the
file. `ctx.obj` is the ledger (a sessionmaker), opened when a command runs. A command may return an `ExitCode`.
"""

import ast
import gc
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from launcher.engine_process import check_engine_is_ours
from launcher.exit_codes import ExitCode

HERE = Path(__file__).parent

WITHOUT_LEDGER = ("init", "config", "check", "doctor", "panic")
"""Commands that do not open the ledger, because they must leave no file on the machine."""

OTHER_NAMES = {
    "cancel": "down",
    "delete": "rm",
    "destroy": "down",
    "history": "ls",
    "jobs": "ls",
    "kill": "down",
    "list": "ls",
    "ps": "ls",
    "queue": "ls",
    "remove": "rm",
    "show": "status",
    "start": "launch",
    "stop": "down",
}
"""Command names of other tools, and the matching `spotrl` command for the error message."""

GROUPS: dict[str, tuple[str, ...]] = {
    "Start and end runs": ("init", "config", "check", "selftest", "check-reward", "launch", "down", "resume"),
    "Look at runs": ("ls", "attach", "status", "events", "logs", "ui", "ssh"),
    "Use results": ("report", "compare", "bill", "pull", "sample", "trace", "sync"),
    "Prices and plans": ("prices", "catalog", "simulate"),
    "Clean up and ask for help": ("rm", "reap", "panic", "doctor"),
}
"""Headings of `spotrl --help` with their commands, in the order of a typical session."""

HIDDEN = ("controller",)
"""Commands left out of `spotrl --help`. `launch` starts the controller; `spotrl controller --help` describes it."""


@cache
def summaries() -> dict[str, str]:
    """Return every command with the first line of its help. The text comes from the source, without an import."""
    found = {}
    for file in sorted(HERE.glob("*.py")):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.rstrip("_") == file.stem and node.decorator_list:
                found[file.stem.replace("_", "-")] = (ast.get_docstring(node) or "").partition("\n")[0]
    return found


def _is_held(lease: Any) -> bool:
    """Return True if a controller holds the lease. Called only for a ledger of an older version."""
    from launcher.controller.lease import is_held

    return is_held(lease)


class CommandFolder(click.Group):
    """Group of commands by file name. A command's file is imported on the first use of the command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in summaries() if name not in HIDDEN]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in summaries():
            return None
        stem = cmd_name.replace("-", "_")
        module = import_module(f"launcher.cli.{stem}")
        gc.freeze()  # modules stay; a list of thousands of runs would look through them again and again
        command = getattr(module, stem, None) or getattr(module, f"{stem}_")
        assert isinstance(command, click.Command), f"launcher/cli/{stem}.py has no command {stem}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in summaries():
            other = OTHER_NAMES.get(args[0])
            near = [other] if other is not None else get_close_matches(args[0], summaries(), n=1)
            if near:
                ctx.fail(f"there is no command {args[0]}; did you mean `spotrl {near[0]}`?")
        name, command, rest = super().resolve_command(ctx, args)
        from launcher.cli.typed import keep_typed  # `spotrl --help` imports no other file of this folder

        keep_typed(ctx, args)
        is_help = ctx.resilient_parsing or {"-h", "--help"} & set(rest)  # shell completion, or --help
        if ctx.obj is None and name not in WITHOUT_LEDGER and not is_help:
            from launcher.ledger.store import open_ledger
            from launcher.settings import ledger_path

            ctx.obj = open_ledger(ledger_path(), _is_held)
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, without importing any command."""
        width = max(map(len, self.list_commands(ctx)))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{width}}", summaries()[name]) for name in names])


@click.command(
    cls=CommandFolder,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failure, 2 usage, 3 bad job, 4 credentials, 6 refused by budget, "
    "7 stopped by budget, 8 deadline missed, 9 bad price table, 10 something may still cost money, "
    "11 warnings (--strict), 12 the plan has changed, 130 interrupted.",
)
@click.version_option(package_name="spotrl")
def cli() -> None:
    """Reinforcement-learning post-training of diffusion transformers on the cheapest useful mix of GPUs.

    \b
    Example:
      spotrl init job.yaml
      spotrl launch job.yaml
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    try:
        check_engine_is_ours()
        code = cli.main(args=None if argv is None else list(argv), prog_name="spotrl", standalone_mode=False)
        return int(code) if isinstance(code, int) else ExitCode.OK
    except (Exception, KeyboardInterrupt) as error:
        from launcher.cli.endings import ending

        return ending(error, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    main()
