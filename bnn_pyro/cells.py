"""Convert columns of a table to numbers, categories or targets, and find missing values, without importing torch."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bnn_pyro.errors import UserError, unknown

#: "ordinal": classes in order; "survival": a time, negative if censored; "targets": several numbers, "labels" 0 and 1.
TASKS = ("regression", "classification", "ordinal", "counts", "survival", "targets", "labels")
#: A target of whole numbers is taken for classes if it has at most ``MAX_CLASSES`` different values, with at least
#: ``RAREST`` rows for the rarest one (two parts of a split need it) and ``USUAL`` rows on average.
MAX_CLASSES, RAREST, USUAL = 20, 2, 5
#: A whole number such as "2.0": pandas writes whole numbers so if their column has missing values.
WHOLE = re.compile(r"^([-+]?\d+)\.0*$")
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
#: Words for yes (1) and no (0), in lower case.
TRUTH = dict.fromkeys(("1", "true", "t", "yes", "y", "ja", "j", "wahr", "oui", "vrai", "sí", "si", "on"), 1.0)
TRUTH |= dict.fromkeys(("0", "false", "f", "no", "n", "nein", "falsch", "non", "faux", "off"), 0.0)
#: Texts that stand for a missing value in a file.
MISSING = ("", "?", "NA", "N/A", "#N/A", "NaN", "nan", "NAN", "-nan", "null", "NULL", "None", "none", "n/a", "na")
#: The words of ``MISSING`` that are a category (or class) of their own in a column of categories.
NONE = ("None", "none")
#: The number of categories that every column may have; see :func:`max_categories`.
MAX_CATEGORIES = 20
#: A log scale is suggested for a positive target whose skewness is above this value.
SKEWED = 1.0
#: Smallest ratio of a target's standard deviation to its largest value: float32 then rounds away 0.06 % of the former.
MIN_RELATIVE_SPREAD = 1e-4
#: Smallest standard deviation of a target (the largest is 1 / this): variances in float32 range from 10⁻³⁸ to 10³⁸.
MIN_SPREAD = 1e-16
#: A task, its targets and the names of its classes.
Targets = tuple[str, np.ndarray, tuple[str, ...]]


def max_categories(rows: int) -> int:
    """The most categories that a column may have; with more different texts it holds names or comments."""
    return max(MAX_CATEGORIES, rows // 5)


def text_columns(frame: pd.DataFrame) -> list[Any]:
    """Return the names of the columns that are not numeric."""
    return [name for name in frame if frame[name].dtype.kind not in "iuf"]


def gaps_in(
    frame: pd.DataFrame, nulls: Collection[str] = ("",), categories: Mapping[str, Collection[str]] | None = None
) -> pd.DataFrame:
    """Return a boolean table that is True where a value is missing: NaN or, in columns of text, one of ``nulls``.

    In a column of categories the words of ``NONE`` are a category, not missing values.
    categories: {column: its categories} of a trained model, whose categories are never missing values.
    """
    gaps = frame.isna()
    for name in text_columns(frame):
        gaps[name] |= frame[name].isin(list(nulls))
        if categories is not None:
            gaps[name] &= ~frame[name].isin(list(categories.get(name, ())))
        elif set(NONE) <= set(nulls) and (none := frame[name].isin(list(NONE))).any():
            present = frame[name][~gaps[name]]
            if np.isnan(parsed(present)).sum() > len(present) / 2 and present.nunique() < max_categories(len(present)):
                gaps[name] &= ~none
    return gaps


def numbers(path: str | Path, cells: pd.Series, positive: str = "") -> np.ndarray:
    """Convert a column to (N,) float64, with yes and no as 1 and 0. Raises UserError for a cell that is not finite.

    positive: what the numbers are called in the error message, if they must be above 0.
    """
    values = parsed(truth(cells))
    good = (np.abs(values) <= np.finfo(np.float32).max) & (values > 0 if positive else True)
    if good.all():
        return values
    first = int(good.argmin())
    cell, value = str(cells.iloc[first]), values[first]
    why = "is not finite; correct or remove it" if np.isinf(value) else "is too large for 32-bit numbers; rescale it"
    if np.isnan(value):
        plain, point = cell.replace(",", ""), cell.replace(",", ".")
        other = f"correct or remove it; an input whose values are categories takes --categorical {cells.name}"
        way = f"write {plain} or {point}, as it is meant" if DECIMAL_COMMA.fullmatch(cell) else other
        why = f"is not a number, and the column is numeric; {way}"
    elif positive and value <= 0:
        why = f"is no {positive}, which is positive; correct it, or leave such rows out"
    raise UserError(f"{path}: column '{cells.name}', row {cells.index[first]}: '{cell}' {why}")


def positions(
    path: str | Path, cells: pd.Series, texts: Sequence[str], categories: Sequence[str], kind: str, refuse: bool = True
) -> np.ndarray:
    """Return the index of each text in ``categories``, (N,) int64; another text is −1, or if refused an error."""
    places = pd.Index(categories).get_indexer(texts).astype(np.int64)
    if refuse and (places < 0).any():
        first = int(np.argmin(places))
        advice = "; leave such rows out, or train with --unseen ignore (unseen=)" * (kind == "category")
        problem = unknown(kind, cells.iloc[first], categories)
        raise UserError(f"{path}: column '{cells.name}', row {cells.index[first]}: {problem}{advice}")
    return places


def infer_task(cells: pd.Series) -> str:
    """Infer "classification" or "regression" from the target's cells.

    Text is classification, and so are whole numbers with two different values, or with up to 20 of them that occur at
    least twice each and five times on average. All else is regression. A rating of 1 to 5 stars is therefore taken for
    classes: give ``task="regression"`` where the order matters.
    """
    if cells.dtype == "category" or np.isnan(values := parsed(cells)).mean() > 0.5:
        return "classification"
    if np.isnan(values).any() or (values != np.round(values)).any():
        return "regression"
    counts = np.unique(values, return_counts=True)[1]
    few = len(counts) <= MAX_CLASSES and counts.min() >= RAREST and counts.mean() >= USUAL
    return "classification" if len(counts) <= 2 or few else "regression"


def read_targets(path: str | Path, cells: pd.DataFrame, task: str | None, order: Sequence[str] | None) -> Targets:
    """Return the task, the targets and the class names.

    The targets are (N,) float64 or int64 labels; several targets are (N, T) float64.

    task   None infers it with :func:`infer_task`; several targets are "labels" if every value is 0 or 1
    order  the names of all classes in the order of their labels; the cells may also be these labels. None sorts
           numbers by size and text alphabetically; for task "ordinal" text has the order of its ordered category
    """
    if cells.shape[1] == 1:
        return _read_target(path, cells.iloc[:, 0], task, order)
    values = np.stack([numbers(path, cells[name]) for name in cells], 1)
    other = (values != 0) & (values != 1)
    task = {None: "targets" if other.any() else "labels", "regression": "targets"}.get(task, task)
    if task not in ("targets", "labels"):
        raise UserError(f"{path}: {', '.join(cells)} are several targets, of which {task} takes one; leave task= "
                        "(--task) out, or give 'targets' or 'labels'")  # fmt: skip
    if task == "labels" and other.any():
        row, column = np.argwhere(other)[0]
        name, value = cells.columns[column], cells.iat[row, column]
        raise UserError(f"{path}: target '{name}', row {cells.index[row]}: {value} is no label, 0 or 1; correct it, or "
                        "give task='targets'")  # fmt: skip
    return task, values, ()


def _read_target(path: str | Path, cells: pd.Series, task: str | None, order: Sequence[str] | None) -> Targets:
    is_number = cells.dtype != "category" and not np.isnan(parsed(cells)).any()
    if task is None:
        task = "classification" if order is not None and is_number else infer_task(cells)
    where = f"{path}: target '{cells.name}'"
    if task in ("targets", "labels"):
        raise UserError(f"{where} is one, and task='{task}' is for several; leave task= (--task) out")
    if task not in ("classification", "ordinal"):
        if order is not None:
            raise UserError(f"{where}: classes= (--classes) names classes, and the task is {task}; leave it out")
        if np.isnan(parsed(truth(cells))).mean() > 0.5:
            raise UserError(f"{where} is text, and task='{task}' takes numbers; leave task= (--task) out")
        values = numbers(path, cells)
        wrong = np.flatnonzero((values < 0) | (values != np.round(values))) if task == "counts" else ()
        if len(wrong):
            raise UserError(f"{where}, row {cells.index[wrong[0]]}: {cells.iloc[wrong[0]]} is no count (0, 1, 2, …); "
                            "correct it, or give task='regression'")  # fmt: skip
        if len(values) > 1 and values.min() == values.max():
            raise UserError(f"{where} is {cells.iloc[0]} in every row; there is nothing to learn")
        return task, values, ()
    labels = list(cells)
    if is_number:
        numbers(path, cells)  # raises UserError for infinite values
        labels = [label(cell) for cell in cells]
    names, classes = sorted(set(labels)), () if order is None else tuple(map(str, order))
    if is_number and classes and not set(names) & set(classes):
        return numbered(path, cells, task, classes)
    if len(names) < 2:
        if is_number:
            raise UserError(f"{where} is {names[0]} in every row; there is nothing to learn")
        ways = cells.nunique()
        keep = f"written in {ways} ways, which --categorical (categorical=) keeps apart; " if ways > 1 else ""
        raise UserError(f"{where} has one class only, '{names[0]}'; {keep}classification needs two")
    if order is None and task == "ordinal" and getattr(cells.dtype, "ordered", False):
        classes = tuple(name for name in cells.cat.categories if name in names)
    elif order is None:
        sizes = parsed(names)
        if task == "ordinal" and np.isnan(sizes).any():
            raise UserError(f"{where}: the order of the classes {', '.join(names):.80} is not known; give classes= "
                            "(--classes), the lowest first")  # fmt: skip
        classes = tuple(names[i] for i in sizes.argsort(kind="stable"))  # numbers by size, then texts
    if without := [name for name in classes if name not in names or classes.count(name) > 1]:
        raise UserError(f"{where} has no row of class '{without[0]}', or classes= (--classes) names it twice")
    if len(classes) > max(2, len(labels) // 2):
        way = "is it a quantity? Then give task='regression' (--task regression)"
        if not is_number and re.search(r"\d", cells.iloc[0]):
            way = f"if it is a quantity, leave units out of the cells, such as '{cells.iloc[0]:.30}'"
        raise UserError(f"{where} has {len(classes)} classes in {len(labels)} rows; {way}")
    return task, positions(path, cells, labels, classes, "class"), classes


def numbered(path: str | Path, cells: pd.Series, task: str | None, order: Sequence[str]) -> Targets:
    """Do what :func:`read_targets` does for labels 0 … K−1 of the classes ``order``, some of which may have no row."""
    classes = tuple(map(str, order))
    if task not in (None, "classification", "ordinal") or len(set(classes)) < max(2, len(classes)):
        raise UserError(f"{path}: classes must be two or more different names, for task classification or ordinal")
    places = [str(k) for k in range(len(classes))]
    return task or "classification", positions(path, cells, [*map(label, cells)], places, "label"), classes


def read_times(where: str | Path, cells: pd.DataFrame, value: str | None) -> np.ndarray:
    """Return (N,) float64 times, negative where censored, from a column of times and one of events.

    An event is 1 (it happened) or 0 (censored); with ``value``, the event happened where the cell equals it.
    """
    if cells.shape[1] != 2:
        raise UserError(f"{where}: task='survival' takes a time and an event, and there are {cells.shape[1]} columns; "
                        "give event= (--event), 1 where it happened at that time and 0 where it had not")  # fmt: skip
    name, event = cells.columns
    y, labels = numbers(where, cells[name], "time"), cells[event].map(label)
    observed = parsed(truth(cells[event])) if value is None else (labels == label(value)).to_numpy(float)
    if not np.isin(observed, (0, 1)).all():
        names = ", ".join(sorted(set(labels))[:5])
        raise UserError(f"{where}: event '{event}' holds {names}; give 1 where the event happened and 0 where it had "
                        f"not, or say which it is: event='{event}=VALUE' (--event {event}=VALUE)")  # fmt: skip
    return np.where(observed == 1, y, -y)


def skewed(y: np.ndarray) -> str:
    """Return a hint for positive numbers that are skewed (``SKEWED``), and more so than their logarithms; else ""."""
    skewness = [(((v - v.mean()) / max(v.std(), 1e-300)) ** 3).mean() for v in ((y, np.log(y)) if y.min() > 0 else ())]
    hint = "positive and skewed: intervals may reach below 0, target_scale=log (--target-scale) models its logarithm"
    return hint if skewness and skewness[0] > max(SKEWED, abs(skewness[1])) else ""


def unfit(y: np.ndarray) -> str:
    """Say why the variation of a target (N,) is lost in 32-bit numbers, and what to do; "" if it is not."""
    mean, sd, least = y.mean(), y.std(), max(MIN_RELATIVE_SPREAD * np.abs(y).max(), MIN_SPREAD)
    if sd > 1 / MIN_SPREAD:
        return f"varies by {sd:.3g}, too much for 32-bit numbers; divide by a constant"
    far = abs(mean) * MIN_RELATIVE_SPREAD > max(sd, MIN_SPREAD)
    way = f"too little for 32-bit numbers; {'subtract a constant' if far else 'multiply by a large constant'}"
    return f"varies by {sd:.3g} around {mean:.6g}, {way}" if sd < least and y.min() < y.max() else ""


def label(cell: str | float) -> str:
    """Return a class name for a cell: the numbers 1, 1.0 and 1e0 have one name; text stays as it is."""
    try:
        value = float(cell)
    except ValueError:
        return cell
    return str(int(value)) if value.is_integer() else str(value)


def coded_cells(cells: pd.Series) -> pd.Series:
    """Convert numbers that are codes to names of categories; texts, such as "007", and missing values stay."""
    return cells.map(lambda cell: cell if isinstance(cell, str) else label(cell), na_action="ignore")


def as_known(cells: pd.Series, categories: Collection[str]) -> pd.Series:
    """Replace cells that are not known categories by categories of the same value, as "2" is "2.0", or 1 is "True"."""
    if not (unknown_cells := ~cells.isin([*categories, ""]) & cells.notna()).any():
        return cells
    names = {WHOLE.sub(r"\1", name): name for name in categories}
    names |= {"0": "False", "1": "True"} if {*categories} == {"False", "True"} else {}
    same = cells[unknown_cells].astype(str).map(lambda cell: names.get(WHOLE.sub(r"\1", cell), cell))
    return cells.astype(object).mask(unknown_cells, same)


def truth(cells: pd.Series) -> pd.Series:
    """Convert a column of words for yes and no to 1 and 0; return any other column unchanged."""
    if cells.dtype.kind in "iuf" or not set(cells.iloc[:20].astype(str).str.lower()) <= TRUTH.keys():
        return cells
    values = cells.astype(str).str.lower().map(TRUTH)
    return cells if values.isna().any() else values


def parsed(cells: Sequence[str]) -> np.ndarray:
    """Convert cells to (N,) float64, with NaN for a text that is not a number."""
    if isinstance(cells, pd.Series) and cells.dtype == "category":
        cells = cells.astype(str)
    return pd.to_numeric(pd.Series(cells), errors="coerce").to_numpy(dtype=np.float64, copy=True)


def follows(a: np.ndarray, b: np.ndarray, curves: bool) -> bool:
    """Return whether two columns of numbers (N,) lie on a straight line, or with ``curves`` on a monotonic curve.

    A curve is found by the correlation of the ranks (of at most 10,000 evenly spaced rows). Ranks are compared only if
    each column has at least ten different values, none of which makes up more than half of the rows.
    """
    if len(a) < 10 or not a.dtype.kind == b.dtype.kind == "f":
        return False
    some = [pd.Series(values[:: -(-len(a) // 10_000)]) for values in (a, b)]
    several = curves and all(v.nunique() >= 10 and v.value_counts().iloc[0] <= len(v) / 2 for v in some)
    with np.errstate(all="ignore"):  # the column may be constant, or have infinite values, which are refused elsewhere
        pairs = [[v / np.abs(v).max() for v in (a, b)], *([[v.rank() for v in some]] if several else [])]
        return any(abs(np.corrcoef(*pair)[0, 1]) > 0.9999 for pair in pairs)
