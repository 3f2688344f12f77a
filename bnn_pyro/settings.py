"""Settings are frozen dataclasses with bounds and choices at each field; JSON can store them. Example:

@dataclass(frozen=True)
class MyMethod(Settings):
    epochs: int = setting(100, low=1)
    lr: float = setting(0.01, above=0)
    start: str = setting("prior", choices=("prior", "map"))
"""

import dataclasses
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any, ClassVar, TypeVar

from bnn_pyro.errors import UserError, check_known, refusing, unknown

T = TypeVar("T")
#: The kinds of bounds: the comparison with a value, and the words of an error message.
BOUNDS = {"low": (operator.ge, "at least"), "above": (operator.gt, "above"),
          "high": (operator.le, "at most"), "below": (operator.lt, "below")}  # fmt: skip
#: Annotations of fields that hold a text or a number.
PLAIN = {"str", "int", "float", "bool", "None"}


def setting(
    default: Any, *, low: float | None = None, high: float | None = None, above: float | None = None,
    below: float | None = None, choices: Iterable[str] = (), parse: Callable[[Any], Any] | None = None,
    optional: bool = False,
) -> Any:  # fmt: skip
    """A field of :class:`Settings` and its allowed values; for a tuple, those of each element.

    low, high: inclusive bounds.   above, below: exclusive bounds.   choices: the allowed texts.
    parse: is called with the value, and raises UserError if the value does not have the right form.
    optional: the field is not written if it is None, so that archives from before the field existed compare equal.
    """
    limits = {"low": low, "high": high, "above": above, "below": below, "choices": tuple(choices), "parse": parse}
    limits["optional"] = optional or None
    return dataclasses.field(default=default, metadata={k: v for k, v in limits.items() if v not in (None, ())})


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that are checked when created. Raises UserError for a value that its field does not allow.

    The docstring of a subclass describes its own fields; the descriptions of inherited fields are appended to it.
    """

    #: {removed setting: its fixed value}. Old files may contain it, and it stays part of the key for resuming fits.
    former: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        described = field_docs(cls.__doc__)
        inherited = {k: v for base in reversed(cls.__mro__[1:]) for k, v in field_docs(base.__doc__).items()}
        lines = [f"{name}  {text}" for name, text in inherited.items() if name not in described]
        if lines and cls.__doc__:
            cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__), "", "Inherited settings:", "", *lines])

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value, limits = field.name, getattr(self, field.name), field.metadata
            if value is None and field.default is None:
                continue
            # Convert as on the command line: hidden=50 becomes (50,), and bias="no" becomes False.
            if isinstance(field.default, bool | tuple) and isinstance(value, Real | str | list):
                value = parse_value(name, value, field.default)
                object.__setattr__(self, name, value)
            annotation = getattr(field.type, "__name__", str(field.type))  # a class, a union, or text
            if set(annotation.split(" | ")) <= PLAIN and not isinstance(value, str | Real):
                such_as = f", such as {field.default!r}" if isinstance(field.default, str | Real) else ""
                raise UserError(f"{name} takes a text or a number{such_as}, got {_short(value)}")
            if "choices" in limits:
                check_known(name, limits["choices"], value)
            if "parse" in limits:
                limits["parse"](value)
            if annotation.startswith("int"):
                whole_number(name, value)
            bounds = [(compare, phrase, limits[key]) for key, (compare, phrase) in BOUNDS.items() if key in limits]
            for number in (value if isinstance(value, tuple | list) else (value,)) if bounds else ():
                is_finite = isinstance(number, Real) and math.isfinite(number)
                if not (is_finite and all(compare(number, bound) for compare, _, bound in bounds)):
                    range_ = " and ".join(f"{phrase} {bound:.10g}" for _, phrase, bound in bounds)
                    kind = "a number, " if isinstance(value, str) else ""
                    raise UserError(f"{name} must be {kind}{range_}, got {_short(value)}")


def _short(value: Any) -> str:
    way = "…: of a torch.nn.Module a variant is bp.Bayesian(module)" if hasattr(value, "named_modules") else ""
    return " ".join(repr(value).split())[:60] + way


def field_docs(doc: str | None) -> dict[str, str]:
    """{field: meaning} from a docstring's lines "name, name  meaning" (two spaces or more) and their continuations."""
    docs: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(doc or "").splitlines():
        if entry := re.match(r"(\w+(?:, \w+)*) {2,}(\S.*)", line):
            names = entry[1].split(", ")
            docs |= dict.fromkeys(names, entry[2])
        elif names and line.startswith("  ") and line.strip():
            docs |= {name: f"{docs[name]} {line.strip()}" for name in names}
        else:
            names = []
    return docs


def parse_named(kind: str, text: Any, table: Mapping[str, Callable[..., T]], number: type = float) -> T:
    """``"name:1,2"`` -> ``table["name"](1, 2)``. Arguments are positive numbers; omitted ones take their defaults.

    Error messages quote the first line of a function's docstring, such as "low-rank:RANK — …; RANK is positive".
    Raises UserError for an unknown name, too many arguments, or one that is not a finite number above 0.
    """
    name, colon, values = str(text).partition(":")
    check_known(kind, table, name)
    text_of = table[name].__doc__ or f"{name} — without a number"
    form, _, about = text_of.partition("\n")[0].rstrip(".").partition(" — ")
    with refusing(f"the {kind} '{text}' must have the form {form} ({about})", ValueError, TypeError):
        numbers = [number(part) for part in values.split(",")] if colon else []
        if not all(0 < value < math.inf for value in numbers):
            raise ValueError
        return table[name](*numbers)


def defaults(kind: Any) -> dict[str, Any]:
    """{field: default} of settings or their class."""
    return {field.name: field.default for field in dataclasses.fields(kind)}


def meant_for(one: Any, other: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are fields of ``one``, except those whose value is a choice of that field of ``other``."""
    choices = {field.name: field.metadata.get("choices", ()) for field in dataclasses.fields(other)}
    return {k: v for k, v in settings.items() if k in defaults(one) and v not in choices.get(k, ())}


def parse_value(name: str, value: Any, default: Any) -> Any:
    """Convert a setting's value, which may be text from the command line, to the type of its default.

    If the default is None, text of a number becomes a number, and "none" becomes None.
    Raises UserError for text that cannot be converted.
    """
    if default is None and isinstance(value, str):
        for read in ({"none": None}.__getitem__, int, float):
            with suppress(ValueError, KeyError):
                return read(value.strip())
    if isinstance(default, bool):
        if str(value).lower() not in ("true", "yes", "1", "false", "no", "0"):
            raise UserError(f"{name} is true or false, got '{value}'")
        return str(value).lower() in ("true", "yes", "1")
    if isinstance(default, tuple):
        parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        return tuple(whole_number(name, part) for part in (parts if isinstance(parts, list | tuple) else [parts]))
    if isinstance(default, int):
        return whole_number(name, value)
    if isinstance(default, float):
        with refusing(f"{name} is a number, got '{value}'", TypeError, ValueError, OverflowError):
            return float(value)
    return tuple(value) if isinstance(value, list) else value


def whole_number(name: str, value: Any) -> int:
    """Convert an int, a text or a float without a fraction to an int. Raises UserError for any other value."""
    with refusing(f"{name} takes whole numbers, got '{value}'", TypeError, ValueError, OverflowError):
        if isinstance(value, bool) or int(value) != float(value):
            raise ValueError
        return int(value)


def build(kind: type[T] | T, values: Mapping[str, Any]) -> T:
    """Create settings of a class, or replace values of existing settings; values go through :func:`parse_value`.

    Raises UserError for an unknown setting (with the nearest name) or a value that the class refuses.
    """
    name, fields = getattr(kind, "__name__", type(kind).__name__), {f.name: f for f in dataclasses.fields(kind)}
    former = getattr(kind, "former", {})
    for key, value in values.items():
        if key not in fields and key not in former:
            raise unknown(f"{name} setting", key, fields)
        if key in former and value != former[key]:
            raise UserError(f"{name} takes {key}={former[key]} alone, not {value}; leave '{key}' out")
    values = {key: value for key, value in values.items() if key in fields}
    objects = [k for k, v in values.items() if fields[k].type in ("Any", Any) and not isinstance(v, str)]
    parsed = {k: v if k in objects else parse_value(k, v, fields[k].default) for k, v in values.items()}
    with refusing(f"bad value among the {name} settings {dict(values)}: {{error}}", TypeError):
        return kind(**parsed) if isinstance(kind, type) else dataclasses.replace(kind, **parsed)


def plain(settings: Any) -> dict[str, Any]:
    """The fields as JSON values, objects as their ``description``; optional fields that are None are omitted."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)
              if not (field.metadata.get("optional") and getattr(settings, field.name) is None)}  # fmt: skip
    values = {k: dict(getattr(v, "description", None) or {}) or v for k, v in values.items()}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
