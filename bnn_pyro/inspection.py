"""Inspect a table before training, without importing torch: find its problems and the `train` command that works."""

import csv
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from bnn_pyro.cells import MISSING, RAREST, TASKS, gaps_in, infer_task, parsed, read_targets, read_times, skewed, unfit
from bnn_pyro.csv_files import read_cells
from bnn_pyro.doubts import MAX_CATEGORIES, Doubt, between, may_be_class, of_events, of_numbers, of_texts, of_values
from bnn_pyro.errors import UserError, check_known, counted
from bnn_pyro.files import SUFFIXES

#: A table with fewer than ``FEW_ROWS`` rows is small; one with fewer than ``MIN_ROWS`` cannot be divided.
FEW_ROWS, MIN_ROWS = 20, 4
#: The default share of validation rows, and of test rows; and the share that is proposed for many classes.
SHARE, LARGER = 0.15, 0.2
SEPARATOR_NAMES = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}


@dataclass(frozen=True)
class Inspection:
    """A table as `train` will read it.

    columns  {name: description}    findings  doubts and errors, in the order of the columns, then of the targets
    missing, unlabelled, duplicates  numbers of rows with a missing value, without a target (or exposure, or event), and
             that repeat an earlier row
    given    {option of `train`: its value}: task, exposure, event, and what the target needs
    aside    a remark about row names
    """

    path: Path
    rows: int
    separator: str
    target: str | None
    task: str | None
    columns: dict[str, str]
    missing: int = 0
    unlabelled: int = 0
    duplicates: int = 0
    findings: list[Doubt] = field(default_factory=list)
    aside: str = ""
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The `train` command for this table; COLUMN is a placeholder for an unknown target."""
        given = {"task": self.task} | dict(self.given) if "exposure" in self.given else self.given
        options = [("data", str(self.path)), ("target", self.target or "COLUMN"), *given.items()]
        leave = [finding for finding in self.findings if finding.way in ("exclude", "groups")]
        if len({finding.column for finding in leave}) + 1 >= len(self.columns):  # some input must remain
            leave = [finding for finding in leave if finding.refused]
        gaps = {column for sentence, refused, _, column in self.findings if refused and "missing" in sentence}
        group = next((f.column for f in leave if f.way == "groups" and f.column not in gaps), None)
        excluded = dict.fromkeys(finding.column for finding in leave if finding.column != group)
        options += [("exclude", as_item(name)) for name in excluded] + [("groups", group)] * (group is not None)
        options += [("categorical", as_item(one.column)) for one in self.findings if one.way == "categorical"]
        dates = [finding.column for finding in self.findings if finding.way in ("dates", "time")]
        time = [] if group else [f.column for f in self.findings if f.way == "time" and f.column not in gaps][:1]
        options += [("time", *time)] * len(time) + [("dates", "parts")] * (dates != time)
        options += [("missing", "indicator")] if gaps - {*excluded} else []
        return shlex.join(["bnn-pyro", "train", *(word for name, value in options for word in (f"--{name}", value))])

    def text(self) -> str:
        """Return a report for a terminal."""
        width, size = max(map(len, self.columns)), f"{self.rows:,} rows × {len(self.columns)} columns"
        lines = [f"{self.path}: {size}, separated by {self.separator}{self.aside}", ""]
        lines += [f"  {name:{width}}  {about}" for name, about in self.columns.items()]
        if self.missing:
            kept = f"the {self.rows - self.unlabelled:,} that have a target" if self.unlabelled else "all"
            lines.append(f"\n{counted(self.missing, 'row')} of {self.rows:,} ({self.missing / self.rows:.1%}) with a "
                         f"missing value; --missing drop leaves {self.rows - self.missing:,}, --missing indicator "
                         f"keeps {kept} (of a text, missing is then a category of its own)")  # fmt: skip
        if self.duplicates:
            repeated = counted(self.duplicates, "row")
            lines.append(f"\nof {repeated} an earlier one is the same: test rows may be training rows")
        for title, refused in (("`train` refuses:", True), ("To look at:", False)):
            some = [f"  {f.column}: {f.sentence}" for f in self.findings if f.refused is refused]
            lines += ["", title, *some] if some else []
        lines += ["", "nothing is wrong with it"] if not (self.findings or self.duplicates) else []
        first = any(f.refused and not f.way and "missing" not in f.sentence for f in self.findings)
        return "\n".join([*lines, "", f"{'once that is corrected, ' * first}train with: {self.command}"])


def as_item(name: str) -> str:
    """Return a column's name for a list on the command line, in quotes if it has a comma."""
    return f'"{name}"' if "," in name else name


def inspect_table(path: Path, target: str | None = None, given: Mapping[str, str] = {}) -> Inspection:
    """Inspect a CSV or TSV file. Raises UserError if it is not a table or has no such column.

    target: one column, or several with commas between; by default the column "y".   given: see :class:`Inspection`.
    """
    if path.suffix.lower() not in (".csv", ".tsv"):
        way = f"inspect reads .csv and .tsv, and `train --data {path}` takes this as it is"
        way = way if path.suffix.lower() in SUFFIXES else f"save it as {', '.join(SUFFIXES)}"
        raise UserError(f"{path}: can't read a '{path.suffix}' file; {way}")
    frame = read_cells(path)
    separator, commas, unnamed = map(frame.attrs.get, ("separator", "commas", "unnamed"))
    beside = {given[name]: name for name in ("exposure", "event") if name in given}
    beside = {name if name in frame else name.partition("=")[0]: role for name, role in beside.items()}
    check_known(f"column of {path}", frame.columns, *beside)
    check_known("task", TASKS, *([given["task"]] if "task" in given else []))
    target = target or ("y" if "y" in frame.columns else None)
    targets = [] if target is None else next(csv.reader([target], skipinitialspace=True), [target])
    targets = [target] if target in frame.columns else targets
    check_known(f"target column of {path}{unnamed}", frame.columns, *targets)
    if both := [name for name in targets if name in beside]:
        raise UserError(f"{path}: '{both[0]}' is the target, and no {beside[both[0]]}")
    gaps = gaps_in(frame, MISSING)
    columns, findings, task = {}, [], None
    if unnamed and (parsed([*frame]) % 1).any():
        findings.append(Doubt(f"has {unnamed[2:-1]}", column="row 1"))
    if len(frame) < FEW_ROWS:
        findings.append(Doubt(f"{len(frame)} are few: hold none of them back, or say nothing of how good a fit is",
                              len(frame) < MIN_ROWS, column="rows"))  # fmt: skip
    labelled = frame[~gaps[[*targets, *beside]].any(axis=1)]
    named = [*targets, *(name for name, role in beside.items() if role == "event")]
    valid = frame if labelled.empty else labelled
    for name in frame:
        cells = (frame if name in (*targets, *beside) else valid)[name]
        columns[name] = _kind(frame[name][~gaps[name]], int(gaps[name].sum()), commas.get(name, ""))
        columns[name] += f"  ← {beside[name]}" if name in beside else ""
        found = _column(cells, gaps.loc[cells.index, name], name in targets)
        if name in targets and given.get("task") in ("classification", "ordinal"):  # a class may be called "1"
            found = (one for one in found if " and text in " not in one.sentence)
        findings += [one._replace(column=name) for one in found if name not in beside or "missing" in one.sentence]
    if targets and len(labelled):
        task = given.get("task") or ("survival" if "event" in given else "counts" if "exposure" in given else None)
        task, more, doubts = _target(path, valid[named], task, given.get("event", "").removeprefix(named[-1])[1:])
        is_refused = any(one.refused and one.column in targets and "missing" not in one.sentence for one in findings)
        findings += [one for one in doubts if not (is_refused if one.refused else given and "--task" in one.sentence)]
        given = {name: value for name, value in {**given, **more}.items() if value}
        for name in targets:
            columns[name] += f"  ← {f'target of {task}' if len(targets) == 1 else 'one of several targets'}"
    findings += of_events(valid, targets[0]) if len(targets) == 1 and not beside else ()
    findings += between(valid.drop(columns=[*targets, *beside]), valid[named])
    if set(columns) <= {*targets, *beside, *(one.column for one in findings if one.refused and one.way == "exclude")}:
        findings.append(Doubt("is the only column left: there is nothing to predict it from", True, "", "target"))
    if target is None:
        findings.append(Doubt(f"which column is it? --target {' or '.join(list(columns)[-3:])}, …", True, "", "target"))
    aside = "; column 1 has no name: row names, left out" if frame.attrs["row_names"] else ""
    rows = dict(unlabelled=len(frame) - len(labelled), duplicates=int(frame.duplicated().sum()))
    about = dict(missing=int(gaps.any(axis=1).sum()), **rows, findings=findings, aside=aside, given=given)
    return Inspection(path, len(frame), SEPARATOR_NAMES[separator], target, task, columns, **about)


def _kind(cells: pd.Series, missing: int, commas: str) -> str:
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
        texts = ", ".join(sorted({f"'{cell}'" for cell in cells[gaps]}))
        first, remark = cells.index[gaps.argmax()], may_be_class(cells, gaps) if is_target else ""
        yield Doubt(f"{counted(gaps.sum(), 'missing value')} ({texts}), the first in row {first}{remark}", True)
    cells = cells[~gaps]
    values, distinct = parsed(cells), cells.nunique()
    bad = np.isnan(values)
    if not len(cells):
        yield Doubt("has no value in any row", True, "" if is_target else "exclude")
    elif distinct == 1 and gaps.any() and not is_target:
        yield Doubt(f"is '{cells.iloc[0]}' or missing, which may tell something: --missing indicator keeps that")
    elif distinct == 1:
        yield Doubt(f"is '{cells.iloc[0]}' in every row, and tells nothing", is_target, "" if is_target else "exclude")
    elif bad.mean() > 0.5:
        yield from of_texts(cells, is_target)
    elif bad.any():
        first, few = int(bad.argmax()), not is_target and distinct <= min(MAX_CATEGORIES, len(cells) // 2)
        yield Doubt(f"is a number in {np.sum(~bad):,} rows and text in {np.sum(bad):,}, the first "
                    f"'{cells.iloc[first]}' in row {cells.index[first]}: correct it"
                    f"{', or --categorical' * few}{', or --task classification' * is_target}",
                    True, "categorical" * few)  # fmt: skip
    else:
        yield from of_numbers(values, str(cells.name), cells.index, cells, is_target)


def _target(where: Path, cells: pd.DataFrame, task: str | None, event: str) -> tuple[str, dict[str, str], list[Doubt]]:
    """Return (the task, the options of `train` that the target needs, doubts about it), for one or several targets.

    cells: the targets, and the event last, of rows that have them.   event: its value, if that is not 1.
    """
    name, present = cells.columns[0], cells.iloc[:, 0]
    try:
        if task == "survival":
            read_times(where, cells, event or None)
            return task, {}, []
        task, values, classes = read_targets(where, cells, task, None)
    except UserError as error:
        problem, more, doubts = str(error).removeprefix(f"{where}: ").removeprefix("target "), {}, []
        if task == "survival":
            more = {"event": f"{cells.columns[-1]}=VALUE"} if "=VALUE" in problem else {}
        elif task == "ordinal" and "the order" in problem:
            more = {"classes": "LOWEST,…,HIGHEST"}
        elif task:
            _, more, doubts = _target(where, cells, None, "")
            more = {"task": "", **more}
        task = task or (infer_task(present) if cells.shape[1] == 1 else "targets")
        return task, more, [Doubt(problem, True, "options" if more else "", "target"), *doubts]
    sentences, more, doubts, num = [], {}, [], len(cells)
    rarest, test = int(np.bincount(values).min()) if classes else num, round(SHARE * num)
    if len(classes) > test or rarest < RAREST:
        if len(classes) <= round(LARGER * num) and rarest > RAREST:  # every part can have a row of each class
            more = {"fractions": f"{1 - 2 * LARGER:g},{LARGER:g},{LARGER:g}"}
        few = (f"has {len(classes)} classes, the rarest of {counted(rarest, 'row')}, and {test} of {num} rows test: "
               "bring more, merge classes, or give other --fractions")  # fmt: skip
        doubts = [Doubt(few, True, "options" if more else "", name)]
    columns = zip(cells, () if classes or task == "labels" else values.reshape(num, -1).T, strict=False)
    doubts += [Doubt(why, True, column=column) for column, y in columns if (why := unfit(y))]
    if task == "classification":
        counts = present.value_counts()
        if len(counts) > 2 and not np.isnan(parsed(present)).any():
            sentences.append("numbers are taken for classes; --task ordinal has them in order, --task regression takes "
                             "them for quantities, --task counts for counts")  # fmt: skip
        if counts.iloc[0] > 0.9 * num:
            always = f"who always says {counts.index[0]} is right in {counts.iloc[0] / num:.1%} of the rows"
            sentences.append(f"{always}: do not judge by accuracy")
    elif task == "regression":
        if np.array_equal(values, np.round(values)) and values.min() in (0, 1):
            sentences.append(f"whole numbers from {values.min():.0f} on; if they are counts, --task counts")
        sentences += [*of_values(values, cells.index), *filter(None, [skewed(values)])]
    return task, more, [*doubts, *(Doubt(sentence, column=name) for sentence in sentences)]
