"""End a failed command with one sentence and an exit code, without a traceback."""

import errno
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import click
from sqlalchemy.exc import SQLAlchemyError

from launcher.exit_codes import ExitCode, Failure
from launcher.settings import ledger_path

EXTRAS = {
    "engine": ("diffusers", "numpy", "onnxruntime", "peft", "PIL", "rapidocr", "safetensors", "starlette", "torch"),
    "prices": ("boto3", "botocore", "google", "gpuhunt"),
    "sky": ("requests", "sky"),
    "ray": ("ray",),
    "ui": ("uvicorn",),
}
"""Packages missing after an installation without extras, by the extra to install."""

REMEDIES = {
    errno.ENOENT: "make its folder, or name another place",
    errno.EACCES: "name a place that you may write to; SPOTRL_HOME says where spotrl keeps its own files",
    errno.EPERM: "name a place that you may write to; SPOTRL_HOME says where spotrl keeps its own files",
    errno.EROFS: "name a place that can be written to; SPOTRL_HOME says where spotrl keeps its own files",
    errno.ENOSPC: "make room on that disk",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOTDIR: "one part of that path is a file; name a folder",
    errno.EEXIST: "there is a file where a folder should be; SPOTRL_HOME says where spotrl keeps its own files",
    errno.ENAMETOOLONG: "use a shorter path",
}


INTERRUPTED = {"attach": "Interrupted. The run goes on."}
"""The end of a command after Ctrl-C, by its name, where the usual word could mislead."""

PANIC = "`spotrl panic` terminates all nodes without the ledger"

LEDGER_REMEDIES = {
    "is full": f"make room on that disk, and repeat the command; the ledger itself is whole. {PANIC}",
    "readonly": "become its owner, or make it and its folder writable; it is not damaged",
    "disk I/O error": "make room on that disk, and look at its health; move the ledger away only if it stays "
    f"unreadable. {PANIC}",
}
"""Remedies by words of SQLite's message, for a ledger that is not damaged: a moved ledger forgets which nodes run."""

DAMAGED = (
    "if it is damaged, move it away or set SPOTRL_HOME to another folder, and ask `spotrl reap` whether nodes of its "
    "runs are left"
)


def ending(error: BaseException, argv: Sequence[str]) -> int:
    """Print the error on stderr, with `--json` also as JSON on stdout. Return the exit code."""
    if isinstance(error, BrokenPipeError):  # the reader of stdout, like `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILURE
    code = error.exit_code if isinstance(error, Failure | click.ClickException) else ExitCode.FAILURE
    if isinstance(error, click.Abort | KeyboardInterrupt):
        code, text = ExitCode.INTERRUPTED, str(error) or INTERRUPTED.get("".join(argv[:1]), "Interrupted.")
        click.echo(text, err=True)
    elif isinstance(error, click.ClickException):
        text = error.format_message()
        error.show()
    else:
        text = sentence(error) or _own_fault(error, argv)
        _tell(f"Error: {text}")
    if "--json" in argv:
        click.echo(json.dumps({"error": text, "exit_code": int(code)}))
    return int(code)


def _tell(text: str) -> None:
    """Print to stderr. A terminal would break words at its edge; a log keeps one line, so that a program finds it."""
    if sys.stderr.isatty():
        from launcher.cli.layout import fitted  # rich takes a while, and most commands succeed

        text = "\n".join(fitted([text]))
    click.echo(text, err=True)


def sentence(error: BaseException) -> str | None:
    """Return the problem and the remedy as a sentence, or None if the error is a bug of spotrl."""
    match error:
        case Failure():
            return str(error)
        case LookupError() if type(error) is LookupError:  # a KeyError is a bug of spotrl
            return str(error.args[0])
        case ModuleNotFoundError() if (extra := _extra_of(error.name or "")) is not None:
            from engine.installation import install_command  # a foreign `engine` is an error that ends here too

            return f"this needs {error.name}, which is not installed; `{install_command(extra)}`"
        case SQLAlchemyError():
            found = str(getattr(error, "orig", None) or error).splitlines()[0]
            if "is locked" in found:
                return (
                    f"the ledger {ledger_path()} is locked by another process of spotrl, perhaps a frozen one: repeat "
                    "the command. If the lock stays, `fuser` on this file names the processes; end the frozen one by "
                    f"its id. {PANIC}"
                )
            remedy = next((remedy for words, remedy in LEDGER_REMEDIES.items() if words in found), DAMAGED)
            return f"the ledger {ledger_path()} cannot be used: {found}; {remedy}"
        case OSError() if error.errno is not None:
            place = " and ".join(str(one) for one in (error.filename, error.filename2) if one is not None)
            remedy = REMEDIES.get(error.errno, "")
            return f"{place}{': ' if place else ''}{error.strerror}{'; ' if remedy else ''}{remedy}"
        case _:
            return None


def _extra_of(module: str) -> str | None:
    top = module.partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if top in modules), None)


def _own_fault(error: BaseException, argv: Sequence[str]) -> str:
    if argv[:1] == ["controller"]:  # the controller's stderr is its log file
        traceback.print_exception(error)
        return f"spotrl failed by a fault of its own: {type(error).__name__}"
    with tempfile.NamedTemporaryFile("w", prefix="spotrl-error-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    words = " ".join(str(error).split())[:200]
    return f"spotrl failed by a fault of its own: {type(error).__name__}: {words}; report it with {Path(file.name)}"
