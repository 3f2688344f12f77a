"""What is in a user's table, before anything is trained: all of its troubles at once, and the command that would work.

Nothing here imports torch: a table of some thousand rows is looked at in about a second.
"""

import csv
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from bnn_pyro.cells import (
    FAR,
    MAX_CATEGORIES,
    MISSING,
    NONE,
    RAREST,
    SKEWED_HINT,
    gaps_in,
    infer_task,
    is_skewed,
    max_categories,
    parsed,
)
from bnn_pyro.csv_files import read_cells
from bnn_pyro.dates import find_dates
from bnn_pyro.errors import UserError, unknown

#: Rows of a category or class below which it is rare.
RARE = 5
#: Share of the rows that are one class, from which on accuracy says little.
UNBALANCED = 0.9
#: What to do about codes, whether few of them differ; and words in the names of columns that have some.
CODE = {True: "a code is a category: --categorical", False: "a code is no quantity: --exclude"}
CODE_NAMES = re.compile(r"(?i)(?<![a-z])(zip|zip_?code|post_?code|postal_?code|plz|code|id)(?![a-z])")
UNIT = re.compile(r"[$€£]\s?[-+]?[\d.,]+|[-+]?[\d.,]+\s?[%€$£]")
SEPARATOR_NAMES = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}


@dataclass(frozen=True)
class Finding:
    """One thing that is said of a column.

    refused  whether `train` refuses the table because of it     exclude  whether to leave the column out helps
    """

    column: str
    sentence: str
    refused: bool = False
    exclude: bool = False


@dataclass(frozen=True)
class Inspection:
    """A table as it will be read.

    columns  {name: what it is}     findings  what is doubtful or wrong, in the order of the columns
    missing  rows that have a missing value     duplicates  rows that repeat an earlier one
    aside    what is said of row names
    """

    path: Path
    rows: int
    separator: str
    target: str | None
    task: str | None
    columns: dict[str, str]
    missing: int = 0
    duplicates: int = 0
    findings: list[Finding] = field(default_factory=list)
    aside: str = ""

    @property
    def command(self) -> str:
        """The `train` command for this table; its placeholder is a target that was not given."""
        words, gaps = ["bnn-pyro", "train", "--data", str(self.path), "--target", self.target or "COLUMN"], []
        for name in dict.fromkeys(finding.column for finding in self.findings if finding.exclude):
            words += ["--exclude", as_item(name)]
        for finding in self.findings:
            if finding.sentence.endswith("--categorical"):
                words += ["--categorical", as_item(finding.column)]
            if finding.refused and not finding.exclude and "missing" in finding.sentence:
                gaps.append("target" in self.columns[finding.column])  # which nothing can fill
        if any("--dates" in finding.sentence for finding in self.findings):
            words += ["--dates", "parts"]
        return shlex.join(words + (["--missing", "drop" if any(gaps) else "indicator"] if gaps else []))

    def text(self) -> str:
        """All of it, for a terminal."""
        width = max(map(len, self.columns))
        size = f"{self.rows:,} rows × {len(self.columns)} columns"
        lines = [f"{self.path}: {size}, separated by {self.separator}{self.aside}", ""]
        lines += [f"  {name:{width}}  {about}" for name, about in self.columns.items()]
        if self.missing:
            lines.append(f"\n{self.missing:,} of {self.rows:,} rows ({self.missing / self.rows:.0%}) have a missing "
                         f"value; --missing drop leaves {self.rows - self.missing:,}, --missing indicator keeps all "
                         "(of a text, missing is then a category of its own)")  # fmt: skip
        if self.duplicates:
            lines.append(f"\n{self.duplicates:,} rows repeat an earlier one: a test part may hold rows that trained")
        for title, refused in (("`train` refuses:", True), ("To look at:", False)):
            some = [f"  {f.column}: {f.sentence}" for f in self.findings if f.refused is refused]
            lines += ["", title, *some] if some else []
        lines += ["", "nothing is wrong with it"] if not self.findings else []
        return "\n".join([*lines, "", f"train with: {self.command}"])


def as_item(name: str) -> str:
    """A column's name in a list of the command line, quoted where it has a comma."""
    return f'"{name}"' if "," in name else name


def inspect_table(path: Path, target: str | None = None) -> Inspection:
    """Look at a CSV or TSV file.   target: its column, or several with commas; by default a column called "y".

    Raises UserError where it is no table, or has no such column.
    """
    frame = read_cells(path)
    target = target or ("y" if "y" in frame.columns else None)
    one = target is None or target in frame.columns
    targets = [target] if one else next(csv.reader([target], skipinitialspace=True), [target])
    for name in () if target is None else targets:
        if name not in frame.columns:
            raise unknown(f"target column of {path}", name, frame.columns)
    gaps = gaps_in(frame, MISSING)
    separator, commas = SEPARATOR_NAMES[frame.attrs["separator"]], frame.attrs["commas"]
    columns, findings, task = {}, [], None
    for name in frame:
        present = frame[name][~gaps[name]]
        columns[name] = _kind(present, int(gaps[name].sum()), commas.get(name, ""))
        findings += [Finding(name, *what) for what in _column(frame[name], gaps[name], name in targets)]
        if name not in targets or not len(present):
            continue
        if len(targets) == 1:
            task = infer_task(present)
            columns[name] += f"  ← target of {task}"
            findings += [Finding(name, sentence) for sentence in _target(present, task)]
        else:
            task = "labels" if np.isin(values := parsed(present), (0, 1)).all() else "targets"
            columns[name] += "  ← one of several targets"
            if np.isnan(values).any():
                findings.append(Finding(name, "is no number in every row, as each of several targets must be", True))
    if set(columns) <= set(targets):
        findings.append(Finding(targets[-1], "is the only column: there is nothing to predict it from", True))
    if target is None:
        findings.append(Finding("target", f"which column is it? --target {' or '.join(list(columns)[-3:])}, …", True))
    missing, duplicates = int(gaps.any(axis=1).sum()), int(frame.duplicated().sum())
    aside = "; column 1 has no name: row names, left out" if frame.attrs["row_names"] else ""
    return Inspection(path, len(frame), separator, target, task, columns, missing, duplicates, findings, aside)


def _kind(cells: pd.Series, missing: int, commas: str) -> str:
    """Kind, range or categories, and missing values of a column."""
    values, extra = parsed(cells), (f"; {commas}" if commas else "") + (f"; {missing:,} missing" if missing else "")
    if not len(cells):
        return f"empty{extra}"
    if not np.isnan(values).any():
        return f"number, {np.min(values):,.6g} to {np.max(values):,.6g}{extra}"
    counts = cells.value_counts()
    most = ", ".join(f"{text[:20]} ({count:,})" for text, count in counts.head(3).items())
    return f"text, {len(counts):,} different: {most}{', …' if len(counts) > 3 else ''}{extra}"


def _column(cells: pd.Series, gaps: pd.Series, is_target: bool) -> Iterator[tuple[str, bool, bool]]:
    """(sentence, whether refused, whether to exclude the column) of what is doubtful in a column."""
    if gaps.any():
        words = ", ".join(sorted({f"'{cell}'" for cell in cells[gaps]}))
        yield f"{gaps.sum():,} missing values ({words}), the first in row {cells.index[gaps.argmax()]}", True, False
    cells = cells[~gaps]
    values, distinct = parsed(cells), cells.nunique()
    bad = np.isnan(values)
    if not len(cells):
        yield "has no value in any row", True, True
    elif distinct == 1:
        yield f"is '{cells.iloc[0]}' in every row, and tells nothing", is_target, not is_target
    elif bad.mean() > 0.5:
        yield from _texts(cells, distinct, is_target)
    elif bad.any():
        first = int(bad.argmax())
        yield (f"is a number in {np.sum(~bad):,} rows and text in {np.sum(bad):,}, the first '{cells.iloc[first]}' in "
               f"row {cells.index[first]}: correct it"), True, False  # fmt: skip
    else:
        yield from _numbers(cells, values, distinct, is_target)


def _texts(cells: pd.Series, distinct: int, is_target: bool) -> Iterator[tuple[str, bool, bool]]:
    try:
        date = find_dates("", cells)
    except UserError as error:
        yield str(error).partition(", ")[2], True, not is_target
        return
    if date is not None:
        way = "make numbers of them" if is_target else "--dates parts (or elapsed) makes numbers of them"
        yield f"holds dates, such as '{cells.iloc[0]}': {way}", True, False
    elif cells.map(lambda cell: bool(UNIT.fullmatch(cell))).all():
        yield f"holds numbers with a unit, such as '{cells.iloc[0]}': leave the unit out", True, False
    elif distinct > max_categories(len(cells)):
        yield f"{distinct:,} different texts in {len(cells):,} rows: a name or a comment", True, not is_target
    else:
        for word, num in cells[cells.isin(list(NONE))].value_counts().items():
            yield f"'{word}' is a category of {num:,} rows; if it is a missing value, empty these cells", False, False
        lower = cells.str.lower()
        if lower.nunique() < distinct:
            some = next(cells[lower == text].unique() for text in lower.unique() if cells[lower == text].nunique() > 1)
            yield f"has categories that differ in case alone: {', '.join(map(repr, some))}", False, False
        counts = cells.value_counts()
        if rare := [text for text, count in counts.items() if count < RARE]:
            names = ", ".join(f"'{text}'" for text in rare[:3])
            refused = is_target and counts.iloc[-1] < RAREST  # two parts of a split need it
            yield f"{len(rare):,} with fewer than {RARE} rows: {names}{', …' if len(rare) > 3 else ''}", refused, False


def _numbers(cells: pd.Series, values: np.ndarray, distinct: int, is_target: bool) -> Iterator[tuple[str, bool, bool]]:
    infinite = np.flatnonzero(~np.isfinite(values) | (np.abs(values) > np.finfo(np.float32).max))
    if len(infinite):
        row = cells.index[infinite[0]]
        yield f"'{cells.iloc[infinite[0]]}' in row {row} is not finite, or too large for 32 bits", True, False
        return
    whole, few = np.array_equal(values, np.round(values)), distinct <= MAX_CATEGORIES
    if whole and not is_target and distinct == len(cells) > MAX_CATEGORIES and (np.diff(values) == 1).all():
        yield "counts the rows: an identifier, not a quantity", False, True
    if whole and (codes := cells[cells.str.match(r"[-+]?0\d")]).size:
        way = "its classes lose them" if is_target else CODE[few]
        yield f"has leading zeros, such as '{codes.iloc[0]}'; {way}", False, False
    elif whole and not is_target and CODE_NAMES.search(str(cells.name)) and distinct < len(cells):
        yield f"is named like a code; {CODE[few]}", False, False
    at = int(np.abs(values - np.median(values)).argmax())
    others = np.delete(values, at)
    distance = abs(values[at] - others.mean()) / (others.std() or np.inf)
    if len(others) >= 10 and distance > FAR:
        yield (f"{cells.iloc[at]} in row {cells.index[at]} is {distance:,.0f} standard deviations of the others from "
               f"their mean{'' if is_target else ': correct it, or --scale robust'}"), False, False  # fmt: skip


def _target(cells: pd.Series, task: str) -> Iterator[str]:
    """What to expect of the target as `train` takes it."""
    if cells.nunique() < 2:
        return
    if task == "classification":
        counts = cells.value_counts()
        if len(counts) > 2 and not np.isnan(parsed(cells)).any():
            yield "numbers are taken for classes; --task regression takes them for quantities, --task counts for counts"
        if counts.iloc[0] > UNBALANCED * len(cells):
            share = counts.iloc[0] / len(cells)
            yield f"who always says {counts.index[0]} is right in {share:.1%} of the rows: do not judge by accuracy"
        return
    values = parsed(cells)
    values = values[np.isfinite(values)]
    if np.array_equal(values, np.round(values)) and values.min() == 0:
        yield "whole numbers from 0 on; if they are counts, --task counts"
    if is_skewed(values):
        yield SKEWED_HINT
