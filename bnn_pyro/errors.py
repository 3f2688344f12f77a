"""Errors that a user can act on: what is wrong, where, and the way out.

Everything that bad input can cause is raised as :class:`UserError`. The command line prints its one line and
exits with code 2; a library user sees an ordinary ``ValueError``. And what a notebook shows of an object.
"""

import difflib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from html import escape


class UserError(ValueError):
    """Bad input, told in one line: what, where, and what to do instead."""


class FitFailed(UserError):
    """A fit diverged and has no posterior: the command line exits with code 3."""


def diverged(what: str, step: int, lr: float) -> FitFailed:
    """The error that says so, with what to do."""
    if step == 1 and what.startswith("loss"):
        return FitFailed(f"the {what} step 1, before the learning rate was used: look at the values of the inputs and "
                         "the targets, and at the parameters that the likelihood is given")  # fmt: skip
    return FitFailed(f"the {what} step {step} (lr {lr}); the last good checkpoint, if any, is kept: try a smaller "
                     f"--lr, such as {lr / 10:g}")  # fmt: skip


def unknown(what: str, name: object, valid: Iterable[str]) -> UserError:
    """The error for a name that is none of ``valid``, with the nearest one suggested.

    >>> str(unknown("data set", "mnits", ["mnist", "digits"]))
    "unknown data set 'mnits'; did you mean 'mnist'? Valid: digits, mnist"
    """
    names = sorted(valid)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return UserError(f"unknown {what} '{name}'{hint} Valid: {', '.join(names)}")


def check_known(what: str, valid: Collection[str], *names: object) -> None:
    """Raise UserError, as of :func:`unknown`, for the first of the names that is none of ``valid``."""
    for name in names:
        if name not in valid:
            raise unknown(what, name, valid)


def counted(num: int, what: str) -> str:
    """ "1 chain", "2,000 chains"."""
    return f"{num:,} {what}{'' if num == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """What an error says, in its first line; its type's name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@contextmanager
def refusing(message: str, *kinds: type[Exception], saying: str = "") -> Iterator[None]:
    """A block whose errors of these kinds, all where none is named, become a UserError of this message.

    The first line of the error stands where the message has "{error}". UserErrors stay as they are, and so do errors
    whose text, in small letters, does not have what ``saying`` says.
    """
    try:
        yield
    except Exception as error:
        meant = isinstance(error, kinds or Exception) and saying in str(error).lower()
        if isinstance(error, UserError) or not meant:
            raise
        raise UserError(message.replace("{error}", first_line(error))) from None


class Introduced:
    """Has a ``repr`` of lines in angle brackets, then "next:" and calls divided by semicolons."""

    def _repr_html_(self) -> str:
        about, _, after = repr(self).partition("\nnext: ")
        lines = "<br>".join(escape(line.strip("<>")) for line in about.splitlines())
        calls = "".join(f"<li><code>{escape(call)}</code></li>" for call in after.split("; ") if call)
        return f"<p>{lines}</p>" + (f"<p>next:</p><ul>{calls}</ul>" if calls else "")
