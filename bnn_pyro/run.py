"""The command line: ``python -m bnn_pyro.run``, or ``bnn-pyro``: one command from its arguments to an exit code."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from bnn_pyro.cli import parse
from bnn_pyro.distributed import Alone, launched
from bnn_pyro.errors import UserError
from bnn_pyro.listing import check_names, list_
from bnn_pyro.parallel.executor import executor
from bnn_pyro.progress import quiet

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns 0; 1 where `check` finds that a claim does not hold, or a fit of a `sweep` failed; 2 after bad input, told
    in one line; 130 after Ctrl-C or SIGTERM.
    """
    former, format_before = None, warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # not the line of source that warned
    rank, size = launched()
    if rank:  # of several processes the first one speaks
        warnings.simplefilter("ignore")
    with suppress(ValueError):  # only the main thread can take signals
        former = signal.signal(signal.SIGTERM, _stop if size == 1 else _stop_unless_failing)
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        if size > 1 and args.command not in ("train", None):
            raise UserError(f"{args.command} runs in one process; start it without torchrun")
        if args.command is None:
            from bnn_pyro import __version__

            print(__version__)
            return 0
        where = getattr(args, "executor", None)
        if size > 1 and where is not None:
            raise UserError("torchrun has started the processes already; leave --executor out, or torchrun")
        if args.command == "list":
            return list_(args) or 0
        check_names(getattr(args, "variant", None), getattr(args, "inference", None))
        wait = args.command == "sweep"  # it starts what its fits run on once its file is read and its data are loaded
        with executor(None if wait else where), quiet(getattr(args, "quiet", False)):
            from bnn_pyro import commands

            return getattr(commands, args.command)(args) or 0
    except (UserError, OSError) as error:
        if rank == 0 or isinstance(error, Alone):
            _tell(f"error: {' '.join(str(error).split())}")  # of one line, whatever a file is called
        return 2
    except KeyboardInterrupt as stopped:
        if rank == 0:
            _tell(f"\n{stopped or 'stopped'}")
        return 130
    finally:
        warnings.formatwarning = format_before
        if former is not None:
            signal.signal(signal.SIGTERM, former)


def _tell(line: str) -> None:
    """In one piece: the processes that torchrun starts are unbuffered, and have one terminal."""
    sys.stderr.write(f"{line}\n")


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt("stopped by a signal")


def _stop_unless_failing(number: int, frame: FrameType | None) -> None:
    """Where one of several processes has failed torchrun ends the others, which may be about to say why."""
    if not isinstance(sys.exc_info()[1], UserError | RuntimeError):
        _stop(number, frame)


if __name__ == "__main__":
    sys.exit(main())
