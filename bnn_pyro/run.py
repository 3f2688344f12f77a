"""The command line, ``python -m bnn_pyro.run`` or ``bnn-pyro``; it answers --help and typos before importing torch."""

import os
import signal
import sys
import tomllib
import warnings
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from bnn_pyro import __version__
from bnn_pyro.distributed import LocalError, launched
from bnn_pyro.errors import FitFailed, UserError, unknown
from bnn_pyro.listing import check_names, list_
from bnn_pyro.parallel.executor import executor
from bnn_pyro.progress import quiet

PROGRAM = "bnn-pyro"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: success. 1: `check` found a claim that does not hold, or a fit of a `sweep` failed. 2: bad input, with a message
    of one line. 3: the fit of `train` failed, see ``diagnostics.failures``. 4: the report of `train` begins with
    another problem, such as chains that disagree. 130: Ctrl-C or SIGTERM.
    """
    former, format_before = None, warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # without the line of source code
    argv, (rank, size) = sys.argv[1:] if argv is None else argv, launched()
    if rank:  # only rank 0 prints
        warnings.simplefilter("ignore")
    with suppress(ValueError):  # only the main thread can handle signals
        former = signal.signal(signal.SIGTERM, _stop)
    with suppress(AttributeError):  # standard output may not be a file
        sys.stdout.reconfigure(line_buffering=True)  # so that a closed pipe raises its error within this function
    try:
        args = parse(argv)
        if size > 1 and args.command not in ("train", None):
            raise UserError(f"{args.command} runs in one process; start it without torchrun")
        if args.command is None:
            print(__version__)
            return 0
        where = getattr(args, "executor", None)
        if size > 1 and where is not None:
            raise UserError("torchrun has started the processes already; leave --executor out, or torchrun")
        if args.command == "list":
            return list_(args) or 0
        if args.command == "inspect":
            from bnn_pyro.files import existing
            from bnn_pyro.inspection import inspect_table

            options = {name: value for name in ("task", "exposure", "event") if (value := getattr(args, name))}
            print(inspect_table(existing(Path(args.file)), args.target, options).text())
            return 0
        variant = getattr(args, "variant", None)
        check_names(None if (args.command, variant) == ("train", "auto") else variant, getattr(args, "inference", None))
        where = None if args.command == "sweep" else where  # sweep starts it after it has read its file and its data
        with executor(where), quiet(getattr(args, "quiet", False)):
            import bnn_pyro.commands as commands

            return getattr(commands, args.command)(args) or 0
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        if rank == 0 or isinstance(error, LocalError):
            parts = str(error).split()  # to print one line, even if the name of a file has line breaks
            option = f"--{parts[0].replace('_', '-')}" if parts[1:2] and parts[1] in ("must", "takes", "is") else ""
            if option and option in [text.partition("=")[0] for text in argv]:  # name the setting as it was typed
                parts[0] = option
            # With a single write: the processes that torchrun starts are unbuffered and share one terminal.
            sys.stderr.write(" ".join(["error:", *parts]) + "\n")
        return 3 if isinstance(error, FitFailed) else 2
    except KeyboardInterrupt as stopped:
        if rank == 0:
            sys.stderr.write(f"\n{str(stopped) or 'stopped'}\n")
        return 130
    finally:
        warnings.formatwarning = format_before
        if former is not None:
            signal.signal(signal.SIGTERM, former)


def _stop(*_: object) -> None:
    """Handle SIGTERM; torchrun sends it to all processes if one fails, and this one may be about to print why."""
    if launched()[1] == 1 or not isinstance(sys.exc_info()[1], UserError | RuntimeError):
        raise KeyboardInterrupt("stopped by a signal")


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    number = int(text) if text.strip().lstrip("+-").isdecimal() else 0
    if number < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def numbers(text: str) -> list[float]:
    """Parse numbers with commas between them."""
    return [float(part) for part in text.split(",")]


#: Functions and classes that the kinds of options in ``help.toml`` name.
CALLED = {"int": int, "float": float, "positive": positive, "numbers": numbers, "yes-or-no": BooleanOptionalAction}


class Parser(ArgumentParser):
    """An ArgumentParser that accepts no abbreviations and raises UserError instead of exiting."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message}; see {self.prog} --help")

    def add_group(self, options: dict[str, str], kinds: dict[str, dict[str, Any]]) -> None:
        """Add a group of options of ``help.toml``: {"--name METAVAR": help}, with "title" as the group's title."""
        options = dict(options)
        title = options.pop("title", None)
        group = self if title is None else self.add_argument_group(title)
        for text, help in options.items():
            name, *value = text.split()
            special = next((kind for names, kind in kinds.items() if name in names.split()), {})
            kind = {key: CALLED.get(str(value), value) for key, value in special.items()}
            if value and value[-1] in "?+":
                kind = {"nargs": value.pop()}
            if value:
                kind = {"metavar": value[0], **kind}
            elif name.startswith("-") and not kind:
                kind = {"action": "store_true"}
            group.add_argument(name, help=help, **kind)


def parse(argv: Sequence[str]) -> Namespace:
    """Parse the arguments to a namespace with ``command`` (by default train). Raises UserError for unknown options."""
    texts = tomllib.loads((Path(__file__).parent / "help.toml").read_text(encoding="utf-8"))
    argv = list(argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version")):
        argv.insert(0, "train")
    if not argv[0].startswith("-") and argv[0] not in texts["commands"]:
        raise unknown("command", argv[0], texts["commands"])
    top = Parser(
        prog=PROGRAM,
        description="Bayesian neural networks in Pyro. Without a command: train what `auto` chooses on digits.",
        epilog=f"`{PROGRAM} COMMAND --help` shows options and examples. {PROGRAM} stands for python -m bnn_pyro.run.",
    )
    top.add_argument("--version", action="store_true", help="show the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, command in texts["commands"].items():
        summary = command["summary"]
        examples = "".join(f"\n  {PROGRAM} {line}" for line in command["examples"].splitlines())
        epilog = "\n\n".join([f"examples:{examples}", *(texts["notes"][note] for note in command.get("notes", ()))])
        sentence = f"{summary[0].upper()}{summary[1:]}."
        parser = commands.add_parser(name, help=summary, description=sentence, epilog=epilog)
        for group in command["groups"]:
            parser.add_group(texts["groups"][group], texts["kinds"])
    args, unread = top.parse_known_args(argv)
    if unread:
        option = unread[0].split("=")[0]
        if not option.startswith("-"):
            raise UserError(f"unexpected argument '{option}'; see {PROGRAM} {args.command} --help")
        raise unknown(f"option of {args.command}", option, commands.choices[args.command]._option_string_actions)
    if hasattr(args, "module"):
        args.module = ",".join(args.module) or None
    return args


if __name__ == "__main__":
    code = main()
    if launched()[1] > 1:  # a gloo thread that still runs at exit may abort this process, and torchrun then all others
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
