"""What the command line takes; the options, examples and all words are in ``help.toml``.

Names of variants, methods and data sets are checked later, so that `--help` and a typo are answered before torch is
imported, which takes seconds.
"""

from __future__ import annotations

import argparse
import tomllib
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from bnn_pyro.errors import UserError, unknown

__all__ = ["parse"]

PROGRAM = "bnn-pyro"


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text) if text.strip().lstrip("+-").isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


#: What is special of options: all others take a text, or nothing and are there or not.
KINDS: dict[tuple[str, ...], dict[str, Any]] = {
    ("--limit", "--num-draws"): {"type": positive},
    ("--cores", "--data-seed", "--seed", "--split", "--validation"): {"type": int},
    ("--ood", "--only", "--set"): {"action": "append", "default": []},
    ("--baseline", "--bias"): {"action": BooleanOptionalAction},
    ("--input", "--output"): {"required": True},
    ("--budget",): {"default": "quick"},
    ("--drop-missing",): {"action": "store_true", "default": None},
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations and raises UserError instead of exiting."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message}; see {self.prog} --help")

    def add_group(self, options: dict[str, str]) -> None:
        """Add options of ``help.toml``: {name and what stands for its value: help}, and the group's title, if any."""
        options = dict(options)
        title = options.pop("title", None)
        group = self if title is None else self.add_argument_group(title)
        for text, help in options.items():
            name, *value = text.split()
            kind = next((kind for names, kind in KINDS.items() if name in names), {})
            if value and value[-1] in "?+":
                kind = {"nargs": value.pop()}
            if value:
                kind = {"metavar": value[0], **kind}
            elif name.startswith("-") and not kind:
                kind = {"action": "store_true"}
            group.add_argument(name, help=help, **kind)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments -> a namespace with ``command``; options without a command belong to ``train``.

    Raises UserError for a mistyped command or option, or a value of the wrong kind.
    """
    words = tomllib.loads((Path(__file__).parent / "help.toml").read_text(encoding="utf-8"))
    argv = list(argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version")):
        argv.insert(0, "train")
    if not argv[0].startswith("-") and argv[0] not in words["commands"]:
        raise unknown("command", argv[0], words["commands"])
    top = Parser(
        prog=PROGRAM,
        description="Bayesian neural networks in Pyro. Without a command: train the default recipe on embedded data.",
        epilog=f"`{PROGRAM} COMMAND --help` has the options and examples. {PROGRAM} is python -m bnn_pyro.run.",
    )
    top.add_argument("--version", action="store_true", help="show the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, command in words["commands"].items():
        summary = command["summary"]
        examples = "".join(f"\n  {PROGRAM} {line}" for line in command["examples"].splitlines())
        epilog = "\n\n".join([f"examples:{examples}", *(words["notes"][note] for note in command.get("notes", ()))])
        sentence = f"{summary[0].upper()}{summary[1:]}."
        parser = commands.add_parser(name, help=summary, description=sentence, epilog=epilog)
        for group in command["groups"]:
            parser.add_group(words["groups"][group])
    args, left = top.parse_known_args(argv)
    if left:
        option = left[0].split("=")[0]
        if not option.startswith("-"):
            raise UserError(f"unexpected argument '{option}'; see {PROGRAM} {args.command} --help")
        raise unknown(f"option of {args.command}", option, commands.choices[args.command]._option_string_actions)
    return args
