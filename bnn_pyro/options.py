"""What the command line takes: its commands with their options and examples, with nothing but the standard library.

Names of variants, methods and data sets are checked later, by ``commands``, so that ``--help`` and a typo are answered
before torch is imported.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.examples import EXAMPLES, NOTES

__all__ = ["parse"]

PROGRAM = "bnn-pyro"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations and whose errors are one line, with the nearest option named."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise UserError(f"{message}; see {self.prog} --help")

    def unknown_option(self, text: str) -> UserError:
        """The error for an argument that none of the options took."""
        option, valid = text.split("=")[0], list(self._option_string_actions)
        if not option.startswith("-"):
            return UserError(f"unexpected argument '{text}'; see {self.prog} --help")
        near = difflib.get_close_matches(option, valid, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"see {self.prog} --help"
        return UserError(f"unknown option '{option}'; {hint}")


def _list(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")


def _train(parser: Parser) -> None:
    parser.add_argument("variant", nargs="?", help="a name that `list` shows (mean-field)")
    _data_options(parser.add_argument_group("data"))
    _model_options(parser)
    inference = parser.add_argument_group("inference: any setting of the method; these are the usual ones")
    inference.add_argument("--inference", metavar="METHOD", help="a method that `list` shows for the variant")
    inference.add_argument("--epochs", metavar="N", help="passes over the training rows")
    inference.add_argument("--batch-size", metavar="N", help="rows a step; 0 takes all of them in every step")
    inference.add_argument("--lr", metavar="RATE", help="first learning rate")
    run = parser.add_argument_group("run")
    run.add_argument("--seed", type=int, help="of initial weights, order of rows and noise (0)")
    run.add_argument("--config", metavar="FILE", help="JSON or TOML; flags go before it, it goes before tuned settings")
    run.add_argument("--baseline", action=argparse.BooleanOptionalAction, default=None, help="also train the plain mlp")
    run.add_argument("--out", metavar="FOLDER", help="default: runs/VARIANT-DATA-SEED, numbered where that is taken")
    run.add_argument("--resume", action="store_true", help="go on with a run that was stopped, to the same result")
    run.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    _executor_option(run, "chains and ensemble members")
    _common_options(run)


def _evaluate(parser: Parser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument(
        "--ood",
        metavar="DATA",
        action="append",
        default=[],
        help="inputs from elsewhere: uniform, gaussian or noise (both), a data set, an NPZ file, a folder of images; "
        "repeatable",
    )
    parser.add_argument("--data", metavar="NAME|FILE", help="score on other data with labels (the run's own test set)")
    parser.add_argument(
        "--mean-weights",
        action="store_true",
        help="score the one network at the posterior mean weights instead, into metrics-mean-weights.json",
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="also score the run without 25 %% to 98 %% of its weights, least certain first; into pruning.json, report",
    )
    parser.add_argument("--limit", metavar="N", type=int, help="at most so many rows of each outside data set (10000)")
    parser.add_argument("--invert", action="store_true", help="images of --ood are dark on light: invert them")
    _common_options(parser)


def _predict(parser: Parser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument(
        "--input",
        metavar="FILE",
        required=True,
        help="CSV/TSV with the run's columns, NPZ, an image, or a folder of them",
    )
    parser.add_argument("--output", metavar="FILE", required=True, help="the CSV file to write")
    parser.add_argument("--invert", action="store_true", help="the images are dark on light: invert them")
    parser.add_argument("--overwrite", action="store_true", help="replace --output")
    _common_options(parser)


def _compare(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; differences are taken to the first")
    parser.add_argument("--out", metavar="FILE", help="the HTML to write (comparison.html in the first run)")
    _common_options(parser)


def _diagnose(parser: Parser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--out", metavar="FOLDER", help="where to write instead of the run folder; must not exist yet")
    parser.add_argument(
        "--no-netcdf", action="store_true", help="do not write posterior.nc, the draws for ArviZ (it can be large)"
    )
    _machine_options(parser)


def _sweep(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="a TOML file, such as the one below")
    parser.add_argument("--out", metavar="FOLDER", help="of all its fits (runs/sweep-SPEC)")
    parser.add_argument(
        "--cores", metavar="N", type=int, help="processes of this machine; 1: one after the other (all)"
    )
    _executor_option(parser, "fits")
    parser.add_argument("--dry-run", action="store_true", help="check the file and list the fits; train nothing")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace finished fits of the same name but other settings or data"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _check(parser: Parser) -> None:
    parser.add_argument("variant", nargs="?", help="a name that `list` shows (every variant with each of its methods)")
    check = parser.add_argument_group("check")
    check.add_argument("--inference", metavar="METHOD", help="a method that `list` shows for the variant (its first)")
    check.add_argument(
        "--budget", metavar="BUDGET", default="quick", help="quick: seconds a check; full: minutes (quick)"
    )
    check.add_argument(
        "--only",
        metavar="CHECK",
        action="append",
        default=[],
        help="a check that `list` shows; repeatable (all that apply)",
    )
    check.add_argument("--seed", type=int, help="of simulated data, fits and draws (0)")
    check.add_argument("--out", metavar="FOLDER", help="default: runs/check-VARIANT-METHOD-DATA")
    check.add_argument(
        "--resume", action="store_true", help="keep the checks that are finished in --out, make the rest"
    )
    _executor_option(check, "replications and chains")
    check.add_argument("--quiet", action="store_true", help="no progress on standard error")
    _model_options(parser)
    _data_options(parser.add_argument_group("data: its inputs; the targets are simulated, but for --only reference"))


def _model_options(parser: Parser) -> None:
    model = parser.add_argument_group("model: any setting of the variant; these are the usual ones")
    model.add_argument("--hidden", metavar="WIDTHS", help="hidden widths, such as 400,400")
    model.add_argument("--activation", metavar="NAME", help="relu, tanh, sigmoid, leaky_relu or gelu")
    model.add_argument(
        "--prior",
        metavar="PRIOR",
        help="normal:SCALE, fan-in:SCALE, gamma:SHAPE,RATE or scale-mixture:WIDE,NARROW,WEIGHT",
    )
    model.add_argument("--noise", metavar="NOISE", help="regression: learned, heteroscedastic or a standard deviation")
    model.add_argument("--bias", action=argparse.BooleanOptionalAction, default=None, help="biases in every layer")
    model.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="any setting of variant or method; repeatable"
    )


def _data_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data", metavar="NAME|FILE", help="a name that `list` shows, or a CSV, TSV or NPZ file (digits)"
    )
    group.add_argument("--target", metavar="COLUMN", help="CSV/TSV: the column to predict")
    group.add_argument("--features", metavar="A,B,…", help="input columns, by their names (all)")
    group.add_argument("--task", metavar="TASK", help="regression or classification (inferred from the target)")
    group.add_argument("--drop-missing", action="store_true", default=None, help="leave out rows with missing values")
    group.add_argument("--splits", metavar="FILE", help="NPZ with test_0, test_1, …: row numbers of given test parts")
    group.add_argument("--split", metavar="K", type=int, help="which of --splits (0)")
    group.add_argument("--validation", metavar="ROWS", type=int, help="training rows held out for validation")
    group.add_argument("--limit", metavar="ROWS", type=int, help="use so many training rows at most")
    group.add_argument("--data-seed", metavar="SEED", type=int, help="of the split into parts (0)")


def _executor_option(group: argparse._ActionsContainer, what: str) -> None:
    group.add_argument(
        "--executor",
        metavar="WHERE",
        help=f"where {what} run: here, processes:4, dask:4 (a cluster of this machine) or dask://HOST:PORT, the "
        "scheduler of any (this machine, on all cores where that pays); results are the same",
    )


def _common_options(group: argparse._ActionsContainer) -> None:
    group.add_argument("--num-draws", metavar="S", type=int, help="draws of the weights in a prediction (100)")
    _machine_options(group)


def _machine_options(group: argparse._ActionsContainer) -> None:
    group.add_argument("--device", metavar="DEVICE", help="auto, cpu or cuda (auto)")
    group.add_argument("--quiet", action="store_true", help="no progress on standard error")


#: What each command adds to its parser, and its line in the overview.
COMMANDS = {
    "list": (_list, "variants, inference methods, data sets"),
    "train": (_train, "fit a variant, score it beside a deterministic network, write a run folder with a report"),
    "evaluate": (_evaluate, "score a run again, also on inputs from elsewhere, and refresh its report"),
    "predict": (_predict, "predictions with their uncertainty for new inputs, as a CSV file"),
    "compare": (_compare, "several runs side by side: rankings with standard errors, paired differences to the first"),
    "sweep": (
        _sweep,
        "many recipes on many data sets, splits and seeds side by side; one report with errors and paired differences",
    ),
    "check": (
        _check,
        "are posteriors right? A variant and a method against what is known without them; exits with 1 where not",
    ),
    "diagnose": (
        _diagnose,
        "can the posterior be trusted? R-hat, effective draws, PSIS-LOO, k-hat; with figures and a file for ArviZ",
    ),
}


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    top = Parser(
        prog=PROGRAM,
        description="Bayesian neural networks in Pyro. Without a command: train the default recipe on embedded data.",
        epilog=f"`{PROGRAM} COMMAND --help` has the options and examples. {PROGRAM} is python -m bnn_pyro.run.",
    )
    top.add_argument("--version", action="store_true", help="show the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parsers = {}
    for name, (add_options, summary) in COMMANDS.items():
        epilog = "examples:\n" + "\n".join(f"  {PROGRAM} {example}" for example in EXAMPLES[name]) + NOTES.get(name, "")
        parsers[name] = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=epilog
        )
        add_options(parsers[name])
    return top, parsers


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments -> a namespace with ``command``; options without a command belong to ``train``.

    Raises UserError for a mistyped command or option, or a value of the wrong kind.
    """
    top, parsers = _parsers()
    argv = list(argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version")):
        argv.insert(0, "train")
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise unknown("command", argv[0], COMMANDS)
    args, left = top.parse_known_args(argv)
    if left:
        raise parsers[args.command].unknown_option(left[0]) if args.command else top.unknown_option(left[0])
    return args
