"""Columns of cells: as numbers, as places among known texts, as the targets of a task, and where they have gaps.

It is imported without torch, so that a table can be looked at before anything that takes seconds is loaded.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bnn_pyro.errors import UserError, unknown

#: "ordinal": classes in order; "survival": a time, negative if censored; "targets": several numbers, "labels" 0 and 1.
TASKS = ("regression", "classification", "ordinal", "counts", "survival", "targets", "labels")
#: A target with more different whole numbers than this is a quantity, and so is one with fewer rows for the rarest
#: of them, which could not be in two parts of a split, or for each in the mean.
MAX_CLASSES, RAREST, USUAL = 20, 2, 5
#: A whole number with a point, as pandas writes codes of a column with gaps.
WHOLE = re.compile(r"^([-+]?\d+)\.0*$")
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
#: What words for yes and no stand for, in lower case.
TRUTH = dict.fromkeys(("1", "true", "t", "yes", "y", "ja", "j", "wahr", "oui", "vrai", "sí", "si", "on"), 1.0)
TRUTH |= dict.fromkeys(("0", "false", "f", "no", "n", "nein", "falsch", "non", "faux", "off"), 0.0)
#: Cells of a file that hold nothing.
MISSING = ("", "?", "NA", "N/A", "#N/A", "NaN", "nan", "NAN", "-nan", "null", "NULL", "None", "none", "n/a", "na")
#: Of these, words that are a category, or a class, where the other cells are some.
NONE = ("None", "none")
#: Categories that a column may always have, see :func:`max_categories`.
MAX_CATEGORIES = 20
#: Skewness of a positive target from which on a log scale is suggested.
SKEWED = 1.0
#: Standard deviation of a target over its largest value: below this, float32 rounds away more than 0.06 % of it.
MIN_RELATIVE_SPREAD = 1e-4
#: The smallest standard deviation of a target, 1 / the largest: variances in float32 end at 10⁻³⁸ and 10³⁸.
MIN_SPREAD = 1e-16
#: A task, targets, and the names of classes.
Targets = tuple[str, np.ndarray, tuple[str, ...]]


def max_categories(rows: int) -> int:
    """How many texts a column of categories may have; one with more of them is a name or a comment."""
    return max(MAX_CATEGORIES, rows // 5)


def text_columns(frame: pd.DataFrame) -> list[Any]:
    """The names of the columns that are not numbers."""
    return [name for name in frame if frame[name].dtype.kind not in "iuf"]


def gaps_in(
    frame: pd.DataFrame, words: Collection[str] = ("",), known: Mapping[str, Collection[str]] | None = None
) -> pd.DataFrame:
    """Where values are missing, which of text are these words; ``NONE`` is no such word among categories.

    known: the categories of a model's columns, by name, where there is a model.
    """
    gaps = frame.isna()
    for name in text_columns(frame):
        gaps[name] |= frame[name].isin(list(words))
        if known is not None:
            gaps[name] &= ~frame[name].isin(list(known.get(name, ())))
        elif set(NONE) <= set(words) and (none := frame[name].isin(list(NONE))).any():
            present = frame[name][~gaps[name]]
            if np.isnan(parsed(present)).sum() > len(present) / 2 and present.nunique() < max_categories(len(present)):
                gaps[name] &= ~none
    return gaps


def numbers(path: str | Path, cells: pd.Series, positive: str = "") -> np.ndarray:
    """A column as (N,) float64, yes and no as 1 and 0; the first cell that is no finite number is an error.

    positive: what the numbers are, where one that is not above 0 is an error too.
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
    path: str | Path, cells: pd.Series, texts: Sequence[str], known: Sequence[str], what: str, refuse: bool = True
) -> np.ndarray:
    """(N,) int64, where each text stands among the known ones; another text is −1, or where refused an error."""
    places = pd.Index(known).get_indexer(texts).astype(np.int64)
    if refuse and (places < 0).any():
        first = int(np.argmin(places))
        raise UserError(f"{path}: column '{cells.name}', row {cells.index[first]}: "
                        f"{unknown(what, cells.iloc[first], known)}")  # fmt: skip
    return places


def infer_task(cells: pd.Series) -> str:
    """Classification for text, for two different whole numbers, and for up to 20 that come often enough to be classes.

    That is twice or more each, and five times in the mean. Everything else is regression: a rating of 1 to 5 stars
    counts as classes, so say ``task="regression"`` where the order matters.
    """
    if cells.dtype == "category" or np.isnan(values := parsed(cells)).mean() > 0.5:
        return "classification"
    if np.isnan(values).any() or (values != np.round(values)).any():
        return "regression"
    counts = np.unique(values, return_counts=True)[1]
    few = len(counts) <= MAX_CLASSES and counts.min() >= RAREST and counts.mean() >= USUAL
    return "classification" if len(counts) <= 2 or few else "regression"


def read_targets(path: str | Path, cells: pd.DataFrame, task: str | None, order: Sequence[str] | None) -> Targets:
    """The task, the targets ((N,) float64 or int64 labels; of several (N, T) float64), and the names of the classes.

    task   where not given see :func:`infer_task`; of several targets "labels" where every value is 0 or 1
    order  the names of all classes in the order of their labels, which numbers may be already; where not given numbers
           are by size, texts by letter, or for task "ordinal" as an ordered category has them
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
        numbers(path, cells)  # refuses infinite ones
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
        classes = tuple(names[i] for i in sizes.argsort(kind="stable"))  # numbers by size, before texts
    if without := [name for name in classes if name not in names or classes.count(name) > 1]:
        raise UserError(f"{where} has no row of class '{without[0]}', or classes= (--classes) names it twice")
    if len(classes) > max(2, len(labels) // 2):
        way = "is it a quantity? Then give task='regression' (--task regression)"
        if not is_number and re.search(r"\d", cells.iloc[0]):
            way = f"of a quantity leave units out of the cells, such as '{cells.iloc[0]:.30}'"
        raise UserError(f"{where} has {len(classes)} classes in {len(labels)} rows; {way}")
    return task, positions(path, cells, labels, classes, "class"), classes


def numbered(path: str | Path, cells: pd.Series, task: str | None, order: Sequence[str]) -> Targets:
    """As :func:`read_targets`, of labels 0 … K−1 of the classes in this order, of which some may have no row."""
    classes = tuple(map(str, order))
    if task not in (None, "classification", "ordinal") or len(set(classes)) < max(2, len(classes)):
        raise UserError(f"{path}: classes are two or more different names, and the task is classification or ordinal")
    places = [str(k) for k in range(len(classes))]
    return task or "classification", positions(path, cells, [*map(label, cells)], places, "label"), classes


def read_times(where: str | Path, cells: pd.DataFrame, value: str | None) -> np.ndarray:
    """(N,) float64, negative where censored, of times and of an event: 1 or 0, or this value or any other."""
    if cells.shape[1] != 2:
        raise UserError(f"{where}: task='survival' takes a time and an event, and there are {cells.shape[1]} columns; "
                        "give event= (--event), 1 where it happened at that time and 0 where it had not")  # fmt: skip
    name, event = cells.columns
    y, labels = numbers(where, cells[name], "time"), cells[event].map(label)
    known = parsed(truth(cells[event])) if value is None else (labels == label(value)).to_numpy(float)
    if not np.isin(known, (0, 1)).all():
        names = ", ".join(sorted(set(labels))[:5])
        raise UserError(f"{where}: event '{event}' holds {names}; give 1 where the event happened and 0 where it had "
                        f"not, or say which it is: event='{event}=VALUE' (--event {event}=VALUE)")  # fmt: skip
    return np.where(known == 1, y, -y)


def skewed(y: np.ndarray) -> str:
    """What helps positive numbers of a skewness above ``SKEWED``, which their logarithms have not; "" for others."""
    skewness = [(((v - v.mean()) / max(v.std(), 1e-300)) ** 3).mean() for v in ((y, np.log(y)) if y.min() > 0 else ())]
    hint = "positive and skewed: intervals may reach below 0, target_scale=log (--target-scale) models its logarithm"
    return hint if skewness and skewness[0] > max(SKEWED, abs(skewness[1])) else ""


def unfit(y: np.ndarray) -> str:
    """Why 32-bit numbers do not hold how a target (N,) varies, with what helps; "" where they do."""
    mean, sd, least = y.mean(), y.std(), max(MIN_RELATIVE_SPREAD * np.abs(y).max(), MIN_SPREAD)
    if sd > 1 / MIN_SPREAD:
        return f"varies by {sd:.3g}, too much for 32-bit numbers; divide by a constant"
    far = abs(mean) * MIN_RELATIVE_SPREAD > max(sd, MIN_SPREAD)
    way = f"too little for 32-bit numbers; {'subtract a constant' if far else 'multiply by a large constant'}"
    return f"varies by {sd:.3g} around {mean:.6g}, {way}" if sd < least and y.min() < y.max() else ""


def label(cell: str | float) -> str:
    """The name of a class in a column of numbers, where 1, 1.0 and 1e0 are one class; text as it is."""
    try:
        value = float(cell)
    except ValueError:
        return cell
    return str(int(value)) if value.is_integer() else str(value)


def coded_cells(cells: pd.Series) -> pd.Series:
    """Names of categories of a column whose numbers are codes; texts, such as 007, and missing values stay."""
    return cells.map(lambda cell: cell if isinstance(cell, str) else label(cell), na_action="ignore")


def as_known(cells: pd.Series, known: Collection[str]) -> pd.Series:
    """The cells; one that is no known category, but the same whole number as one, as 2 is of 2.0, is that one."""
    if not (strange := ~cells.isin([*known, ""]) & cells.notna()).any():
        return cells
    names = {WHOLE.sub(r"\1", name): name for name in known}
    same = cells[strange].astype(str).map(lambda cell: names.get(WHOLE.sub(r"\1", cell), cell))
    return cells.astype(object).mask(strange, same)


def truth(cells: pd.Series) -> pd.Series:
    """A column of words for yes and no as 1 and 0; any other as it is."""
    if cells.dtype.kind in "iuf" or not set(cells.iloc[:20].astype(str).str.lower()) <= TRUTH.keys():
        return cells
    values = cells.astype(str).str.lower().map(TRUTH)
    return cells if values.isna().any() else values


def parsed(cells: Sequence[str]) -> np.ndarray:
    """(N,) float64, nan for a text that is no number."""
    if isinstance(cells, pd.Series) and cells.dtype == "category":
        cells = cells.astype(str)
    return pd.to_numeric(pd.Series(cells), errors="coerce").to_numpy(dtype=np.float64, copy=True)


def follows(a: np.ndarray, b: np.ndarray, curves: bool) -> bool:
    """Whether two columns of numbers (N,) are on a straight line; or (``curves``) ranks are, of rows spread over them.

    Ranks are compared where each column has ten different values, of which none makes up more than half.
    """
    if len(a) < 10 or not a.dtype.kind == b.dtype.kind == "f":
        return False
    some = [pd.Series(values[:: -(-len(a) // 10_000)]) for values in (a, b)]  # so many rows at most
    several = curves and all(v.nunique() >= 10 and v.value_counts().iloc[0] <= len(v) / 2 for v in some)
    with np.errstate(all="ignore"):  # of a column of one value, or that is refused as it is not finite
        pairs = [[v / np.abs(v).max() for v in (a, b)], *([[v.rank() for v in some]] if several else [])]
        return any(abs(np.corrcoef(*pair)[0, 1]) > 0.9999 for pair in pairs)
