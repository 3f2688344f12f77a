"""Convert columns of dates to columns of numbers: parts of the date, or the days since the earliest date."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from bnn_pyro.errors import UserError

#: {what comes first in a date: its formats}. Dates with points do not have the month first.
ORDERS = {
    "year": ("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%Y-%m"),
    "day": ("%d.%m.%Y", "%d/%m/%Y", "%d-%m-%Y", "%d-%b-%Y", "%d-%b-%y", "%d.%m.%y", "%d/%m/%y"),
    "month": ("%m/%d/%Y", "%m-%d-%Y", "%m/%d/%y"),
}
#: An example in messages.
DAY = pd.Timestamp("2024-12-31")
#: A date, a time after it, and a time zone, which is ignored: hours are local time.
DATE_AND_TIME = r"^(\S+?)(?:[T ]+(\d[\d:.,]*(?: ?[AaPp]\.?[Mm]\.?)?)\s*(?:Z|UTC|GMT|[-+]\d\d(?::?\d\d)?)?)?$"


class Dates(NamedTuple):
    """How a column of dates is read and converted to columns of numbers.

    order  what comes first in a date, a key of ``ORDERS``; dates with the year first are always read, too
    start  the earliest day of the table, from which elapsed days are counted; "" if the date is converted to parts: the
           year, and the sine and cosine of the day of the year
    times  whether the dates have times of the day; the hour (sine and cosine) is then a part too
    form   the format of the first date, in which dates are shown
    """

    name: str
    order: str
    start: str = ""
    times: bool = False
    form: str = "%Y-%m-%d"

    def read(self, cells: pd.Series) -> pd.Series:
        """Convert texts to (N,) datetime64, NaT for a text that is no date in this order or with the year first."""
        texts = cells.astype(str).str.extract(DATE_AND_TIME)
        days = pd.Series(pd.NaT, cells.index, dtype="datetime64[us]")
        for form in dict.fromkeys(ORDERS[self.order] + ORDERS["year"]):
            if len(unread := texts[0][days.isna()]):
                days = days.fillna(pd.to_datetime(unread, format=form, errors="coerce"))
        if texts[1].isna().all():
            return days
        times = pd.to_datetime("2000-01-01 " + texts[1].fillna("00:00"), format="mixed", errors="coerce")
        return days + (times - pd.Timestamp("2000-01-01"))

    def numbers(self, cells: pd.Series) -> pd.DataFrame:
        """Convert texts to (N, parts) float64, with NaN for a text that :meth:`read` cannot convert."""
        moments, day = self.read(cells), pd.Timedelta(days=1)
        if self.start:
            values = {f"{self.name} in days since {self.start}": (moments - pd.Timestamp(self.start)) / day}
        else:
            turns = {"day of year": (moments.dt.day_of_year - 1) / 365.25}
            if self.times:
                turns["hour"] = (moments - moments.dt.normalize()) / day
            waves = ((cycle, wave) for cycle in turns for wave in (np.sin, np.cos))
            cycles = {f"{self.name} {cycle} ({f.__name__})": f(2 * np.pi * turns[cycle]) for cycle, f in waves}
            values = {f"{self.name} year": moments.dt.year, **cycles}
        return pd.DataFrame(values, cells.index, dtype=np.float64)

    def texts(self, numbers: np.ndarray) -> list[str]:
        """Convert the numbers (N, parts) of :meth:`numbers` back to (N,) texts, rounded to the minute."""
        if self.start:
            moments = pd.Timestamp(self.start) + pd.to_timedelta(numbers[:, 0], unit="D")
        else:
            turns = np.arctan2(numbers[:, 1::2], numbers[:, 2::2]) / (2 * np.pi)
            turns = (turns + 1e-6) % 1 - 1e-6  # a 0 that 32-bit numbers round to below 0 is not the end of a turn
            days = (turns[:, 0] * 365.25).round() + turns[:, 1:].sum(1)
            moments = pd.to_datetime([f"{year:.0f}-01-01" for year in numbers[:, 0]]) + pd.to_timedelta(days, unit="D")
        return [*moments.round("min").strftime(self.form + " %H:%M" * self.times)]

    def replaced(self, where: str | Path, frame: pd.DataFrame, gaps: pd.DataFrame) -> pd.DataFrame:
        """Replace the column in a table by its numbers, NaN for missing dates. Raises UserError for other texts."""
        made = self.numbers(cells := frame[self.name])
        if (bad := made.iloc[:, 0].isna() & ~gaps[self.name]).any():
            row = bad.idxmax()
            wrong = f"row {row}: '{cells[row]}' {self.no_date}"
            raise UserError(f"{where}: column '{self.name}', {wrong}; correct or remove it")
        others = frame.drop(columns=self.name)
        if twice := [name for name in made if name in others]:
            raise UserError(f"{where}: column '{twice[0]}' has the name of a part of '{self.name}'; rename one of them")
        return made.join(others)

    @property
    def no_date(self) -> str:
        """What is wrong with a text that :meth:`read` cannot convert."""
        return f"is no date such as {DAY:{self.form}}" + f" or {DAY.date()}" * (self.order != "year")

    #: The names of the columns of numbers.
    parts = property(lambda self: list(self.numbers(pd.Series(dtype=str))))


def find_dates(where: str | Path, cells: pd.Series, mode: str = "parts") -> Dates | None:
    """Return how a column of dates is read, or None. Raises UserError if the day or the month may come first."""
    if cells.dtype == "category" or cells.dtype.kind in "iuf" or not len(cells):
        return None
    some = cells.iloc[:: 1 + len(cells) // 200].astype(str)  # a quick look at some cells: most columns have no dates
    orders = ORDERS if some.str.contains(r"\d.*\d").any() else ()
    readers = [Dates(cells.name, order) for order in orders]
    moments = {reader.order: reader.read(cells) for reader in readers if reader.read(some).notna().any()}
    num = {order: values.notna().sum() for order, values in moments.items()}
    order = max(num, key=num.get, default="")
    if not order or num[order] < 0.5 * len(cells):
        return None
    odd = cells[moments[order].notna() & ((order == "year") | Dates(cells.name, "year").read(cells).isna())].astype(str)
    if order != "year" and num.get("day") == num.get("month"):
        raise UserError(f"{where}: column '{cells.name}', row {odd.index[0]}: the day or the month may be first in "
                        f"'{odd.iloc[0]}', and in every other row; write 2024-12-31")  # fmt: skip
    days = moments[order].dropna()
    start, times = str(days.min().date()) if mode == "elapsed" else "", bool((days != days.dt.normalize()).any())
    day = re.match(DATE_AND_TIME, odd.iloc[0])[1]
    form = next(form for form in ORDERS[order] if pd.notna(pd.to_datetime(day, format=form, errors="coerce")))
    return Dates(str(cells.name), order, start, times, form)
