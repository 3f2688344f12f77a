"""Errors that a user can act on: they say what is wrong, where, and what to do; and how notebooks show an object.

Every error that bad input can cause is a :class:`UserError`. The command line prints it in one line and exits with
code 2; a user of the library sees an ordinary ``ValueError``.
"""

import difflib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from html import escape


class UserError(ValueError):
    """Bad input; the message says in one line what is wrong, where, and what to do instead."""


class FitFailed(UserError):
    """A fit diverged and has no posterior; the command line exits with code 3."""


def diverged(event: str, step: int, lr: float) -> FitFailed:
    """Return the error for a fit that diverged, with advice.   event: such as "loss is nan at"."""
    if step == 1 and event.startswith("loss"):
        return FitFailed(f"the {event} step 1, before the learning rate was used: look at the values of the inputs and "
                         "the targets, and at the parameters that the likelihood is given")  # fmt: skip
    remark = "the last good checkpoint, if any, is kept"
    return FitFailed(f"the {event} step {step} (lr {lr}); {remark}: try a smaller --lr, such as {lr / 10:g}")


def unknown(kind: str, name: object, valid: Iterable[str]) -> UserError:
    """Return the error for a name that is not one of ``valid``; it suggests the nearest one and lists 30 at most."""
    names = sorted(valid)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return UserError(f"unknown {kind} '{name}'{hint} Valid: {', '.join(names[:30])}{', …' * (len(names) > 30)}")


def check_known(kind: str, valid: Collection[str], *names: object) -> None:
    """Raise UserError (see :func:`unknown`) for the first of the names that is not one of ``valid``."""
    for name in names:
        if name not in valid:
            raise unknown(kind, name, valid)


def counted(num: int, noun: str) -> str:
    """Return a number with its noun: "1 chain", "2,000 chains"."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@contextmanager
def refusing(message: str, *kinds: type[Exception], saying: str = "") -> Iterator[None]:
    """Convert errors of a block that are of these kinds (by default all) to a UserError with this message.

    "{error}" in the message is replaced by the first line of the error, or the whole message of a UserError. UserErrors
    are only converted if UserError is one of the kinds; an error whose text, in lower case, does not contain ``saying``
    is not converted.
    """
    try:
        yield
    except Exception as error:
        is_user_error = isinstance(error, UserError)  # a ValueError too, which may be one of the kinds
        is_meant = UserError in kinds if is_user_error else isinstance(error, kinds or Exception)
        if not is_meant or saying not in str(error).lower():
            raise
        raise UserError(message.replace("{error}", str(error) if is_user_error else first_line(error))) from None


class Introduced:
    """Shows its ``repr`` as HTML in notebooks: lines in angle brackets, then "next:" and calls joined by semicolons."""

    def _repr_html_(self) -> str:
        about, _, after = repr(self).partition("\nnext: ")
        lines = "<br>".join(escape(line.strip("<>")) for line in about.splitlines())
        calls = "".join(f"<li><code>{escape(call)}</code></li>" for call in after.split("; ") if call)
        return f"<p>{lines}</p>" + (f"<p>next:</p><ul>{calls}</ul>" if calls else "")
