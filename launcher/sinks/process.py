"""The process of a sink: read questions from stdin, answer on stdout, until stdin ends.

    python -P -m launcher.sinks.process wandb|mlflow

A client may print, freeze or crash here, and the run does not notice: the controller ends this process and starts it
again. It ends by itself when its controller is gone, also when it is frozen.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

from engine.installation import install_command
from launcher.harmless import harmless
from launcher.sinks.messages import QUESTION, Accepted, Answer, Close, Open, Question, Records, Refused
from launcher.sinks.sink import NotAccepted, Sink

PR_SET_PDEATHSIG = 1


def main(name: str) -> None:
    """Serve one sink on this process's stdin and stdout."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)  # what a client prints must not be read as an answer
        _die_with_controller()
        serve(lambda: make_sink(name), sys.stdin.buffer, answers)


def make_sink(name: str) -> Sink:
    """Return the sink of this name. Raises NotAccepted if its client is not installed."""
    try:
        if name == "wandb":
            from launcher.sinks.wandb_run import WandbRun

            return WandbRun()
        from launcher.sinks.mlflow_run import MlflowRun

        return MlflowRun()
    except ImportError as error:
        text = f"{error.name or name} is not installed here; `{install_command(name)}`"
        raise NotAccepted(text, is_final=True) from error


def serve(make: Callable[[], Sink], questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer each question until the questions end, or a sink is closed."""
    sink: Sink | None = None
    for line in questions:
        question = QUESTION.validate_json(line)
        try:
            if sink is None:
                sink = make()
            answer = _answer(sink, question)
        except NotAccepted as error:
            answer = Refused(text=harmless(str(error)), is_final=error.is_final)
        except Exception as error:  # a client raises what it likes, and the controller tries again
            answer = Refused(text=harmless(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"))
        answers.write(answer.model_dump_json().encode() + b"\n")
        if isinstance(question, Close):
            return


def _answer(sink: Sink, question: Question) -> Answer:
    match question:
        case Open():
            return sink.open(question)
        case Records():
            sink.add(question.records, question.known)
        case Close():
            sink.close(question.state)
    return Accepted()


def _die_with_controller() -> None:
    """Have the kernel kill this process when the controller's thread ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
