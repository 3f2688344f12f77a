"""Find doubtful columns of a table, which is inspected or trained on, and describe each doubt in a sentence."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from bnn_pyro.cells import MAX_CATEGORIES, MAX_CLASSES, NONE, RAREST, USUAL, follows, max_categories, parsed, truth
from bnn_pyro.dates import find_dates
from bnn_pyro.errors import UserError

#: A category or class with fewer rows than this is rare.
RARE = 5
#: A column is an identifier if it has more than ``MANY`` different numbers, and one of its own in this share of rows.
MANY, OWN_SHARE = 20, 0.95
#: A target with at most this many different values may be one of classes.
FEW = 10
#: A value is an outlier beyond ``FAR`` standard deviations of the others, unless the second largest distance among the
#: others is at least ``ALSO`` times as large (then the column has long tails).
FAR, ALSO = 8.0, 0.3
#: A value that makes up at least this share of the rows is a peak of a target.
PEAK = 0.2
#: A column gives the classes away if it is wrong in at most the share ``WRONG`` of the rows outside the largest class,
#: and if the logarithm of the probability that this happens by chance is below ``CHANCE``.
WRONG, CHANCE = 0.01, -9.0
#: Numbers that often stand for a missing answer.
CODES = {-1, -9, -99, -999, -9999, 99, 999, 9999, 99999}
#: Words in the names of columns of codes, and of times (whose numbers may count the rows without being identifiers).
CODE_NAMES = re.compile(
    r"(?i)(?<![a-z])(zip|zip_?code|post_?code|postal_?code|plz|code|p?id|key|uuid)(?![a-z])"
    r"|^(account|client|customer|order|participant|patient|person|record|subject|user)$"
)
TIME_NAMES = re.compile(r"(?i)(?<![a-z])(year|month|week|day|date|time|hour|age|t)(?![a-z])")
#: Words in the names of columns that say whether an event has happened, and of columns with the time until then.
EVENT_NAMES = re.compile(
    r"(?i)(?<!marital.)(?<![a-z])(event|status|death|died|dead|deceased|censored|failure|relapse|churn(ed)?)(?![a-z])"
)
UNTIL_NAMES = re.compile(r"(?i)(?<![a-z])(time|days|weeks|months|years|duration|tenure|follow_?up|survival)(?![a-z])")
#: Parts of sentences: what happens to texts that stand for numbers, and what to do if a column gives the target away.
AS_IT_IS, UNKNOWN = "as they are, each is a category", "--exclude it if it is not known of new rows"
#: {pattern of texts that stand for numbers: (what they are called, how they become numbers)}.
WRITTEN = {
    re.compile(r"[-+]?\d{1,3}([ '’]\d{3})+([.,]\d+)?|[-+]?\d{1,3}"): (
        "numbers with a blank or an apostrophe for thousands", "leave it out of the cells"),
    re.compile(r"\d{1,2}:\d\d(:\d\d)?"): ("times", "give hours as numbers"),
    re.compile(r"(?P<before>[$€£])?\s?[-+]?[\d.,]*\d\s?(?P<unit>[%€$£]|[a-zµ°][a-z]{0,3}([23²³]|/[a-z]{1,3}\d?)?)?",
               re.IGNORECASE): ("numbers with a unit", "leave the unit out of the cells"),
}  # fmt: skip


class Doubt(NamedTuple):
    """A sentence about a column.

    refused  whether `train` refuses the table because of it
    way      the option of `train` that helps: "exclude", "categorical", "groups", "dates", "time"; "" for none
    column   the column's name, or another part of the table; "" if unknown
    """

    sentence: str
    refused: bool = False
    way: str = ""
    column: str = ""


def of_texts(cells: pd.Series, is_target: bool) -> Iterator[Doubt]:
    """Find doubts about a column of texts without missing values."""
    distinct, leave = cells.nunique(), "" if is_target else "exclude"
    refused = distinct > (max(2, len(cells) // 2) if is_target else max_categories(len(cells)))
    if (doubt := as_meant(cells)) and not (is_target and doubt.way == "groups"):
        way = leave if doubt.refused or (refused and not doubt.way) else "" if is_target else doubt.way
        keep = "; --categorical takes them for categories" * (doubt.way == "groups")
        yield Doubt(f"{doubt.sentence}{keep}" if refused else f"{doubt.sentence}; {AS_IT_IS}", refused, way)
    elif refused:
        way = "; --categorical takes them for categories" * (not is_target and 2 * distinct <= len(cells))
        yield Doubt(f"{distinct:,} different texts in {len(cells):,} rows: a name or a comment{way}", True, leave)
    else:
        for text, num in cells[cells.isin(list(NONE))].value_counts().items():
            yield Doubt(f"'{text}' is a category of {num:,} rows; if it is a missing value, empty these cells")
        if same := in_case(cells):
            yield Doubt(same)
        counts = cells.value_counts()
        if rare := [text for text, count in counts.items() if count < RARE]:
            names, few = ", ".join(f"'{text}'" for text in rare[:3]), bool(counts.iloc[-1] < RAREST)
            more = ", …" if len(rare) > 3 else ""
            yield Doubt(f"{len(rare):,} with fewer than {RARE} rows: {names}{more}", is_target and few)


def may_be_class(cells: pd.Series, gaps: pd.Series) -> str:
    """Ask whether the word of most missing values of a text target is a class; "" if there is no such word."""
    text, num = next(cells[gaps].value_counts().items(), ("", 0))
    is_text = np.isnan(parsed(cells[~gaps])).sum() > (~gaps).sum() / 2
    may_be = is_text and num >= max(RARE, gaps.sum() / 2) and str(text).isalpha()
    return f"; if '{text}' is a class, write another word in these {num:,} cells" if may_be else ""


def as_meant(cells: pd.Series) -> Doubt | None:
    """Return a doubt about texts that are dates (refused if their order is unclear), numbers or codes, else None."""
    different = cells.drop_duplicates()
    try:
        if (date := find_dates("", different)) is not None:
            if (bad := (days := date.read(cells)).isna()).any():
                row = bad.idxmax()
                return Doubt(f"holds dates with the {date.order} first, and others ('{cells[row]}' in row {row}): "
                             "write all alike")  # fmt: skip
            ordered = len(different) > MANY and (days.is_monotonic_increasing or days.is_monotonic_decreasing)
            later = f"; rows are in their order: --time {cells.name} (time=) tests on the last ones" * ordered
            return Doubt(f"holds dates, such as '{cells.iloc[0]}': --dates parts or elapsed (dates=) makes numbers of "
                         f"dates among the inputs{later}", way="time" if ordered else "dates")  # fmt: skip
    except UserError as error:
        return Doubt(str(error).partition(", ")[2], True)
    for pattern, (form, way) in WRITTEN.items():
        matches = [pattern.fullmatch(cell) for cell in different]
        if len(different) > 1 and all(matches) and len({tuple(m.groupdict().values()) for m in matches}) == 1:
            return Doubt(f"holds {form}, such as '{max(different, key=len)}': {way}")
    if CODE_NAMES.search(str(cells.name)) and MAX_CATEGORIES < len(different) <= len(cells) / 2:
        return Doubt(f"is named like a code: --groups {cells.name} keeps rows of the same in one part", way="groups")
    return None


def in_case(cells: pd.Series) -> str:
    """Name the first categories that differ only in case; "" if there are none."""
    different = pd.Series(cells.unique())
    lower = different.str.lower()
    some = different[lower == lower[lower.duplicated()].iloc[0]] if lower.duplicated().any() else ()
    return f"has categories that differ in case alone: {', '.join(map(repr, some))}" if len(some) else ""


def of_numbers(
    values: np.ndarray, name: str, rows: np.ndarray | pd.Index, cells: pd.Series | None = None, is_target: bool = False
) -> Iterator[Doubt]:
    """Find doubts about numbers (N,) without gaps.   rows: the row numbers.   cells: texts in the file, if known."""
    bad = np.flatnonzero(~np.isfinite(values) | (np.abs(values) > np.finfo(np.float32).max))
    if len(bad):
        cell = values[bad[0]] if cells is None else cells.iloc[bad[0]]
        yield Doubt(f"'{cell}' in row {rows[bad[0]]} is not finite, or too large for 32 bits", True)
        return
    zeros = "" if cells is None or not is_target else leading_zeros(cells)
    if len(values) > 1 and np.isclose(values.min(), values.max(), 1e-12, 0):
        way = "categorical" if zeros else "" if is_target else "exclude"
        yield Doubt(f"is {values[0]:.7g} in every row, and tells nothing{zeros and f'; {zeros}'}", is_target, way)
        return
    all_integers = np.array_equal(values, np.round(values))
    if all_integers and not is_target and (codes := [*_codes(values, name, cells)]):
        yield from codes
        return
    if all_integers and zeros:
        yield Doubt(zeros, way="categorical" * (2 * len(np.unique(values)) <= len(values)))
    at = int(np.abs(values - np.median(values)).argmax())
    same = values == values[at]
    stands_for_none = same.sum() < (0.5 if values[at] in CODES else 0.1) * len(values)
    others = values[~same] if stands_for_none else np.delete(values, at)
    if len(np.unique(others)) < 2 or len(others) < 10 or not others.std():
        return
    distance = abs(values[at] - others.mean()) / others.std()
    again = int(same.sum()) - 1
    more = f", and {again:,} more of it: a missing value?" if again and len(others) + again < len(values) else ""
    second = np.sort(np.abs(others - others.mean()))[-2] / others.std()
    if distance > FAR and (more or is_target or second < ALSO * distance):
        yield Doubt(f"{values[at]:.7g} in row {rows[at]} is {distance:{',.0f' if distance < 1e6 else '.2g'}} standard "
                    f"deviations of the others from their mean{more or ': correct it, if a mistake'}")  # fmt: skip


def of_values(y: np.ndarray, rows: np.ndarray | pd.Index | None) -> Iterator[str]:
    """Find doubts about numeric targets: a frequent value; if rows (row numbers) are given, few different values."""
    numbers, first, counts = np.unique(y, return_index=True, return_counts=True)
    if rows is not None and len(numbers) <= min(FEW, len(y) // USUAL):
        remark = [f", of which {y[k]:.7g} stands in row {rows[k]} alone (a mistake?)" for k in first[counts == 1][:1]]
        yield f"has {len(numbers)} different values{''.join(remark)}: --task classification, if they are classes"
    if len(numbers) > MAX_CATEGORIES and (share := counts.max() / len(y)) >= PEAK:
        yield (f"is {numbers[counts.argmax()]:.7g} in {share:.0%} of the rows, and no noise of a regression has such a "
               "peak: means and intervals may be far off; better predict whether it is so, and how much where it is "
               "not, by two models")  # fmt: skip


def _codes(values: np.ndarray, name: str, cells: pd.Series | None) -> Iterator[Doubt]:
    """Find doubts about a column of whole numbers that may be codes, identifiers or dates."""
    named, reach, low, high = CODE_NAMES.search(name), np.ptp(values), values.min(), values.max()
    may_be = named or cells is not None or reach < 1.25 * len(values) or 19000101 <= low <= high <= 21001231
    distinct = len(np.unique(values)) if may_be else 0
    few, mostly = distinct <= MAX_CATEGORIES, distinct > max(MANY, OWN_SHARE * len(values))
    code = Doubt("a code is a category: --categorical", way="categorical")
    if not few:
        again = 2 * distinct <= len(values)
        keep = f"--groups {name} keeps rows of the same in one part, else " if again else ""
        code = Doubt(f"a code is no quantity: {keep}--exclude", way="groups" if again else "exclude")
    if cells is not None and cells.str.fullmatch(r"[-+]?\d{16,}").any() and cells.nunique() > distinct:
        yield Doubt("has more digits than numbers keep: different ones become the same: --exclude", way="exclude")
    elif mostly and (named or (reach < 1.25 * distinct and not TIME_NAMES.search(name))):
        every = "every row" if distinct == len(values) else "nearly every row"
        yield Doubt(f"has another whole number in {every}: an identifier, not a quantity: --exclude", way="exclude")
    elif cells is not None and (zeros := leading_zeros(cells, code.sentence)):
        yield code._replace(sentence=zeros)
    elif named:
        yield code._replace(sentence=f"is named like a code; {code.sentence}")
    elif 19000101 <= low <= high <= 21001231:
        dates = pd.to_datetime(pd.Series(np.unique(values)).astype(int).astype(str), format="%Y%m%d", errors="coerce")
        if dates.notna().all():
            yield Doubt(f"may be dates, such as {values[0]:.0f}: write 2024-12-31, and --dates makes numbers of them")


def of_table(frame: pd.DataFrame, gaps: pd.DataFrame | None, targets: pd.DataFrame) -> Iterator[str]:
    """Find what is probably not read as it is meant in a table that `train` accepts: sentences "COLUMN: …".

    Doubts with an option that helps, and those about a target, come first.
    frame, gaps: the inputs, and where they are missing (None: nowhere).   targets: how classes are written is examined.
    """
    doubts = []
    for name in (name for name, cells in frame.items() if cells.dtype != "category"):
        values = parsed(frame[name])
        valid = slice(None) if gaps is None else ~gaps[name].to_numpy()
        cells, kind = frame[name][valid], frame[name].dtype.kind
        if not np.isnan(values[valid]).any():
            exact = kind not in "iu" or max(cells.max(), -cells.min()) < 2**53
            written = cells.astype(str) if kind not in "f" and not (kind in "iu" and exact) else None
            signs = [*of_numbers(values[valid], name, cells.index, written)]
            no_gaps = len(values) == len(cells)  # missing values may make a constant column informative
            doubts += [one._replace(column=name) for one in signs if no_gaps or "tells nothing" not in one.sentence]
        elif doubt := as_meant(cells):
            doubts.append(doubt._replace(sentence=f"{doubt.sentence}; {AS_IT_IS}", column=name))
        elif same := in_case(cells):
            doubts.append(Doubt(same, column=name))
    for name, cells in targets.select_dtypes(exclude=["number", "category"]).items():
        sentences = (leading_zeros(cells), in_case(cells))
        doubts += [Doubt(sentence, way="categorical", column=name) for sentence in sentences if sentence]
    for doubt in sorted([*between(frame, targets), *doubts], key=lambda d: not d.way and "target" not in d.sentence):
        yield f"{doubt.column}: {doubt.sentence}"


def leading_zeros(cells: pd.Series, way: str = "they are lost: --categorical keeps them") -> str:
    """Describe numbers with leading zeros, with advice; "" if there are none."""
    zeros = cells[cells.str.match(r"[-+]?0\d")]
    return f"has leading zeros, such as '{zeros.iloc[0]}'; {way}" if len(zeros) else ""


def between(inputs: pd.DataFrame, targets: pd.DataFrame) -> Iterator[Doubt]:
    """Find columns that are the same as another column or a target, or that determine a target."""
    columns, of_targets = ({str(name): _values(cells) for name, cells in one.items()} for one in (inputs, targets))
    known = {values.tobytes(): f"is the same as the target '{name}' in every row: its answer is not known of new rows"
             for name, values in of_targets.items()}  # fmt: skip
    classes = {name: pd.factorize(cells)[0] for name, cells in targets.items() if cells.nunique() <= MAX_CLASSES}
    for name, values in columns.items():
        if (key := values.tobytes()) in known:
            yield Doubt(f"{known[key]}: --exclude", way="exclude", column=name)
        elif line := next((target for target, y in of_targets.items() if follows(values, y, len(columns) > 1)), None):
            yield Doubt(f"follows the target '{line}' on a line or curve: {UNKNOWN}", column=name)
        else:
            for target, rows in ((target, some) for target, y in classes.items() if (some := _determined(values, y))):
                yield Doubt(f"alone tells the target '{target}' in {rows}: {UNKNOWN}", column=name)
        known.setdefault(key, f"is the same as column '{name}' in every row")


def of_events(frame: pd.DataFrame, target: str) -> Iterator[Doubt]:
    """Find columns of two values that may say whether a time ended with an event; the target is either column."""
    positive = [name for name, v in frame.items() if v.nunique() > MAX_CATEGORIES and (parsed(v) > 0).all()]
    times = [target] if target in positive else [name for name in positive if UNTIL_NAMES.search(name)]
    for name, cells in frame.items():
        if EVENT_NAMES.search(name) and cells.nunique() == 2 and times and target in (name, times[0]):
            value = "" if {*parsed(truth(cells))} == {0.0, 1.0} else "=VALUE"
            yield Doubt(f"may say whether the time '{times[0]}' ended with an event, or was cut short: "
                        f"--target {times[0]} --event {name}{value}", column=name)  # fmt: skip


def _values(cells: pd.Series) -> np.ndarray:
    """Return (N,) float64 for numbers, with NaN for other cells; for a column of texts their uint64 hashes."""
    values = parsed(cells)
    return pd.util.hash_array(cells.astype(str).to_numpy(object)) if np.isnan(values).all() else values


def _determined(x: np.ndarray, y: np.ndarray) -> str:
    """Say in how many rows the categories or thresholds of x determine the class; "" if not in nearly all of them.

    "" is also returned if this may be chance: if all N! / ∏ Nₖ! assignments of classes to rows are equally likely, its
    probability is at most the share of them that any choice of categories or thresholds determines.
    """
    (labels, classes), (places, values) = pd.factorize(y[x == x]), pd.factorize(x[x == x], sort=True)
    num, k, few = len(labels), len(classes), x.dtype.kind != "f" or len(values) <= MAX_CATEGORIES
    if k < 2:
        return ""
    table = np.bincount(places * k + labels, minlength=len(values) * k).reshape(-1, k)
    rows, right = table.sum(0), table.max(1).sum()
    if not few:  # the rows that the best thresholds classify, with the classes in the order of their mean ranks
        order, best = (np.arange(len(table)) @ table / rows).argsort(), np.zeros(len(table) + 1)
        for below in np.pad(table[:, order].cumsum(0), ((1, 0), (0, 0))).T:
            best = below + np.maximum.accumulate(best - below)
        right = int(best[-1])
    chance = len(values) * math.log(k) if few else math.lgamma(k + 1)
    chance += (num - right) * math.log(num * k) + sum(map(math.lgamma, rows + 1.0)) - math.lgamma(num + 1)
    return f"{right:,} of {num:,} rows" if num - right <= WRONG * (num - rows.max()) and chance < CHANCE else ""
