"""What is in a user's table, before anything is trained: all of its troubles at once, and the command that would work.

Nothing here imports torch: a table of some thousand rows is looked at in about a second.
"""

import csv
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from bnn_pyro.cells import MISSING, TASKS, gaps_in, infer_task, parsed, skewed
from bnn_pyro.csv_files import read_cells
from bnn_pyro.doubts import Doubt, copies, of_numbers, of_texts
from bnn_pyro.errors import UserError, check_known
from bnn_pyro.files import SUFFIXES

#: Share of the rows that are one class, from which on accuracy says little.
UNBALANCED = 0.9
#: Rows below which a table is small, and below which it cannot be divided.
FEW_ROWS, MIN_ROWS = 20, 4
SEPARATOR_NAMES = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}


@dataclass(frozen=True)
class Inspection:
    """A table as it will be read.

    columns  {name: what it is}     findings  what is doubtful or wrong, in the order of the columns
    missing  rows that have a missing value     duplicates  rows that repeat an earlier one
    aside    what is said of row names     given  {option of `train`: its value}: task, exposure, event
    """

    path: Path
    rows: int
    separator: str
    target: str | None
    task: str | None
    columns: dict[str, str]
    missing: int = 0
    duplicates: int = 0
    findings: list[Doubt] = field(default_factory=list)
    aside: str = ""
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The `train` command for this table; its placeholder is a target that was not given."""
        given = {"task": self.task} | dict(self.given) if "exposure" in self.given else self.given
        options = [("data", str(self.path)), ("target", self.target or "COLUMN"), *given.items()]
        leave = [finding for finding in self.findings if finding.way == "exclude"]
        if len({finding.column for finding in leave}) + 1 >= len(self.columns):  # something must be left
            leave = [finding for finding in leave if finding.refused]
        excluded = dict.fromkeys(finding.column for finding in leave)
        options += [("exclude", as_item(name)) for name in excluded]
        coded = [finding.column for finding in self.findings if finding.way == "categorical"]
        options += [("categorical", as_item(name)) for name in coded]
        options += [("dates", "parts")] if any(finding.way == "dates" for finding in self.findings) else []
        gaps = [column for sentence, refused, _, column in self.findings if refused and "missing" in sentence]
        if gaps := [self.columns[name] for name in gaps if name not in excluded]:
            options.append(("missing", "drop" if "←" in "".join(gaps) else "indicator"))  # which fills no target
        return shlex.join(["bnn-pyro", "train", *(word for name, value in options for word in (f"--{name}", value))])

    def text(self) -> str:
        """All of it, for a terminal."""
        width = max(map(len, self.columns))
        size = f"{self.rows:,} rows × {len(self.columns)} columns"
        lines = [f"{self.path}: {size}, separated by {self.separator}{self.aside}", ""]
        lines += [f"  {name:{width}}  {about}" for name, about in self.columns.items()]
        if self.missing:
            lines.append(f"\n{_rows(self.missing)} of {self.rows:,} ({self.missing / self.rows:.1%}) with a missing "
                         f"value; --missing drop leaves {self.rows - self.missing:,}, --missing indicator keeps all "
                         "(of a text, missing is then a category of its own)")  # fmt: skip
        if self.duplicates:
            lines.append(f"\nof {_rows(self.duplicates)} an earlier one is the same: a test part may hold rows that "
                         "trained")  # fmt: skip
        for title, refused in (("`train` refuses:", True), ("To look at:", False)):
            some = [f"  {f.column}: {f.sentence}" for f in self.findings if f.refused is refused]
            lines += ["", title, *some] if some else []
        lines += ["", "nothing is wrong with it"] if not self.findings else []
        return "\n".join([*lines, "", f"train with: {self.command}"])


def _rows(number: int) -> str:
    return f"{number:,} row{'s' * (number != 1)}"


def as_item(name: str) -> str:
    """A column's name in a list of the command line, quoted where it has a comma."""
    return f'"{name}"' if "," in name else name


def inspect_table(path: Path, target: str | None = None, given: Mapping[str, str] = {}) -> Inspection:
    """Look at a CSV or TSV file.   target: its column, or several with commas; by default a column called "y".

    given: see :class:`Inspection`.   Raises UserError where it is no table, or has no such column.
    """
    if path.suffix.lower() not in (".csv", ".tsv"):
        way = f"inspect reads .csv and .tsv, and `train --data {path}` takes this as it is"
        way = way if path.suffix.lower() in SUFFIXES else f"save it as {', '.join(SUFFIXES)}"
        raise UserError(f"{path}: can't read a '{path.suffix}' file; {way}")
    frame = read_cells(path)
    beside = {given[name]: name for name in ("exposure", "event") if name in given}
    beside = {name if name in frame else name.partition("=")[0]: what for name, what in beside.items()}
    check_known(f"column of {path}", frame.columns, *beside)
    check_known("task", TASKS, *([given["task"]] if "task" in given else []))
    target = target or ("y" if "y" in frame.columns else None)
    targets = [] if target is None else next(csv.reader([target], skipinitialspace=True), [target])
    targets = [target] if target in frame.columns else targets
    check_known(f"target column of {path}", frame.columns, *targets)
    if both := [name for name in targets if name in beside]:
        raise UserError(f"{path}: '{both[0]}' is the target, and no {beside[both[0]]}")
    gaps = gaps_in(frame, MISSING)
    separator, commas = SEPARATOR_NAMES[frame.attrs["separator"]], frame.attrs["commas"]
    columns, findings, task, header = {}, [], None, parsed([*frame])
    if not np.isnan(header).any() and (header != np.round(header)).any():
        findings.append(Doubt("has numbers where names of columns belong: is that line missing?", column="row 1"))
    if len(frame) < FEW_ROWS:
        findings.append(Doubt(f"{len(frame)} are few: hold none of them back, or say nothing of how good a fit is",
                              len(frame) < MIN_ROWS, column="rows"))  # fmt: skip
    for name in frame:
        present = frame[name][~gaps[name]]
        columns[name] = _kind(present, int(gaps[name].sum()), commas.get(name, ""))
        columns[name] += f"  ← {beside[name]}" if name in beside else ""
        found = _column(frame[name], gaps[name], name in targets)
        findings += [one._replace(column=name) for one in found if name not in beside or "missing" in one.sentence]
        if name not in targets or not len(present):
            continue
        if len(targets) == 1:
            of = {"event": "survival", "exposure": "counts"}
            task = given.get("task") or next((of[name] for name in of if name in given), infer_task(present))
            columns[name] += f"  ← target of {task}"
            findings += [Doubt(s, column=name) for s in _target(present, task) if not (given and "--task" in s)]
        else:
            task = "labels" if np.isin(values := parsed(present), (0, 1)).all() else "targets"
            columns[name] += "  ← one of several targets"
            if np.isnan(values).any():
                findings.append(Doubt("is no number in every row, as each of several targets must be", True, "", name))
    values = {name: parsed(frame[name]) for name in frame}
    values = {k: frame[k].to_numpy("U") if np.isnan(v).all() else v for k, v in values.items()}
    of_targets = {name: values.pop(name) for name in (*targets, *beside)}
    findings += copies(values, of_targets)
    if set(columns) <= {*targets, *beside}:
        findings.append(Doubt("is the only column: there is nothing to predict it from", True, "", targets[-1]))
    if target is None:
        findings.append(Doubt(f"which column is it? --target {' or '.join(list(columns)[-3:])}, …", True, "", "target"))
    missing, duplicates = int(gaps.any(axis=1).sum()), int(frame.duplicated().sum())
    aside = "; column 1 has no name: row names, left out" if frame.attrs["row_names"] else ""
    return Inspection(path, len(frame), separator, target, task, columns, missing, duplicates, findings, aside, given)


def _kind(cells: pd.Series, missing: int, commas: str) -> str:
    """Kind, range or categories, and missing values of a column."""
    values, extra = parsed(cells), (f"; {commas}" if commas else "") + (f"; {missing:,} missing" if missing else "")
    if not len(cells):
        return f"empty{extra}"
    if not np.isnan(values).any():
        ends = [f"{v:{',.0f' if v.is_integer() and abs(v) < 1e15 else ',.6g'}}" for v in (values.min(), values.max())]
        return f"number, {' to '.join(ends)}{extra}"
    counts = cells.value_counts()
    most = ", ".join(f"{text[:20]} ({count:,})" for text, count in counts.head(3).items())
    return f"text, {len(counts):,} different: {most}{', …' if len(counts) > 3 else ''}{extra}"


def _column(cells: pd.Series, gaps: pd.Series, is_target: bool) -> Iterator[Doubt]:
    if gaps.any():
        words = ", ".join(sorted({f"'{cell}'" for cell in cells[gaps]}))
        values = f"{gaps.sum():,} missing value{'s' * int(gaps.sum() > 1)}"
        yield Doubt(f"{values} ({words}), the first in row {cells.index[gaps.argmax()]}", True)
    cells = cells[~gaps]
    values, distinct = parsed(cells), cells.nunique()
    bad = np.isnan(values)
    if not len(cells):
        yield Doubt("has no value in any row", True, "exclude")
    elif distinct == 1:
        yield Doubt(f"is '{cells.iloc[0]}' in every row, and tells nothing", is_target, "" if is_target else "exclude")
    elif bad.mean() > 0.5:
        yield from of_texts(cells, is_target)
    elif bad.any():
        first = int(bad.argmax())
        yield Doubt(f"is a number in {np.sum(~bad):,} rows and text in {np.sum(bad):,}, the first "
                    f"'{cells.iloc[first]}' in row {cells.index[first]}: correct it", True)  # fmt: skip
    else:
        yield from of_numbers(values, str(cells.name), cells.index, cells, is_target)


def _target(cells: pd.Series, task: str) -> Iterator[str]:
    """What to expect of the target as `train` takes it."""
    if cells.nunique() < 2:
        return
    if task == "classification":
        counts = cells.value_counts()
        if len(counts) > 2 and not np.isnan(parsed(cells)).any():
            yield ("numbers are taken for classes; --task ordinal has them in order, --task regression takes "
                   "them for quantities, --task counts for counts")  # fmt: skip
        if counts.iloc[0] > UNBALANCED * len(cells):
            share = counts.iloc[0] / len(cells)
            yield f"who always says {counts.index[0]} is right in {share:.1%} of the rows: do not judge by accuracy"
        return
    values = parsed(cells)
    values = values[np.isfinite(values)]
    if np.array_equal(values, np.round(values)) and values.min() == 0:
        yield "whole numbers from 0 on; if they are counts, --task counts"
    if hint := skewed(values):
        yield hint
