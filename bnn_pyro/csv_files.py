"""Read text files as tables: detect the separator, commas in numbers and row names."""

import csv
import re
import unicodedata
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from bnn_pyro.cells import MISSING, parsed, text_columns
from bnn_pyro.errors import UserError

#: Separators of cells, the most common one first.
SEPARATORS = (",", ";", "\t", "|")
#: Numbers with a thousands comma: 1,234 and 1,234,567.89.
THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
#: Numbers with a decimal comma: 1,5 and 1.234,5.
COMMA = re.compile(r"[-+]?(\d+|\d{1,3}(\.\d{3})+),\d+")
#: Numbers whose points separate thousands if another column has decimal commas: 950 and 1.234.567.
POINTS = re.compile(r"[-+]?[1-9]\d{0,2}(\.\d{3})*")


def read_cells(path: Path, text: Collection[str] | None = None) -> pd.DataFrame:
    """Read every cell as text of one line in Unicode NFC, indexed by the row number in the file, without empty lines.

    text: names of the columns to read as text; a column not named becomes numeric if all of its cells are numbers,
        which is several times as fast. None reads all columns as text.
    Commas in columns of numbers are interpreted: 1,234 has a thousands comma if commas also separate the cells; 1,5
    (and any comma, if another character separates the cells) is a decimal comma.
    A first column without a name whose whole numbers or texts all differ is an index, and is left out.
    ``frame.attrs`` has "separator"; "commas", {column: "thousands" or "decimal comma"}; "row_names", whether there was
    such an index; and "unnamed", a remark for error messages if row 1 seems to lack the names.
    Raises UserError for a file that is not a table of UTF-8 text with unique names in row 1.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = file.readline()
        fields = {separator: len(next(csv.reader([line], delimiter=separator), [])) for separator in SEPARATORS}
        separator = "\t" if path.suffix.lower() == ".tsv" else max(SEPARATORS, key=fields.__getitem__)
        frame, header = _read_csv(path, separator, text)
    except UnicodeDecodeError as error:
        is_utf16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
        problem = "is UTF-16 text, by its byte order mark" if is_utf16 else f"byte {error.start} is not UTF-8 text"
        raise UserError(f"{path}: {problem}; save the table as CSV in UTF-8") from None
    except pd.errors.EmptyDataError:
        raise UserError(f"{path}: is empty; row 1 must name the columns") from None
    except (pd.errors.ParserError, csv.Error) as error:
        reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
        reason += "; remove the lines above the names that start with '#'" * line.startswith("#")
        raise UserError(f"{path}: rows of unequal length or an open quote: {reason}") from None
    for name in text_columns(frame):
        frame[name] = _plain(frame[name].fillna("").to_numpy(object))
    values = parsed(first := frame[0][frame[0] != ""])
    may_be_names = first.is_unique and (np.isnan(values) | (values == np.round(values))).all()
    if row_names := bool(len(header) > 1 and not header[0] and may_be_names):
        frame, header = frame.drop(columns=0), header[1:]
    mark = re.search(r"[:\s]", header[0]) if len(header) == 1 else None
    if mark and all(str(cell).count(mark[0]) == header[0].count(mark[0]) for cell in frame.iloc[:9, 0]):
        raise UserError(f"{path}: row 1 is one name, '{header[0]:.60}': a comma, semicolon, tab or vertical bar "
                        f"separates cells, and not '{mark[0]}'; save the table so")  # fmt: skip
    for number, name in enumerate(header, 1):
        if not name:
            raise UserError(f"{path}: column {number} has no name in row 1; name it, or remove it (a saved index?)")
        if name in header[: number - 1]:
            first = header.index(name) + 1
            raise UserError(f"{path}: columns {first} and {number} are both called '{name}'; rename or remove one")
    frame = frame.set_axis(header, axis=1).set_axis(range(2, len(frame) + 2))
    if len(text_columns(frame)) == len(header):  # a column with an empty line is never numeric
        frame = frame[(frame != "").any(axis=1)]
    if frame.empty:
        raise UserError(f"{path}: has a header and no rows")
    kinds = {name: _commas(frame[name], separator) for name in text_columns(frame)}
    if "decimal comma" in kinds.values():
        if text is not None:  # numbers such as 248.000 have been read with a decimal point
            return read_cells(path)
        for name in [name for name, kind in kinds.items() if not kind and "." in "".join(frame[name])]:
            if all(cell in MISSING or POINTS.fullmatch(cell) for cell in frame[name]):
                kinds[name] = "decimal comma"
    commas = {name: kind for name, kind in kinds.items() if kind}
    unnamed = " (numbers where names of columns belong: is that line missing?)" * (not np.isnan(parsed(header)).any())
    frame.attrs = {"separator": separator, "commas": commas, "row_names": row_names, "unnamed": unnamed}
    for name, kind in commas.items():
        drop, point = (",", ".") if kind == "thousands" else (".", ",")
        cells = frame[name].where(frame[name].isin(MISSING), frame[name].str.replace(drop, "", regex=False))
        frame[name] = cells.str.replace(point, ".", regex=False)
    return frame


def _read_csv(path: Path, separator: str, text: Collection[str] | None) -> tuple[pd.DataFrame, list[str]]:
    """Return the cells below row 1, with columns numbered from 0, and row 1."""
    args = dict(sep=separator, header=None, keep_default_na=False, na_filter=False, skip_blank_lines=False)
    args |= dict(encoding="utf-8-sig") | ({"float_precision": "high"} if pd.__version__ < "3" else {})  # as ``parsed``
    top = pd.read_csv(path, dtype=object, nrows=200, **args).fillna("")  # enough to see codes with leading zeros
    header = list(_plain(top.iloc[0].tolist()))
    if text is not None and len(top) > 1 and "" not in top.iloc[1].tolist():
        zeros = [top[number].iloc[1:].str.match(r"[-+]?0\d").any() for number in top]  # would be lost in numbers
        as_text = [number for number, name in enumerate(header) if name in text or zeros[number]]
        for _ in range(2):  # the second time booleans and texts, which are to be read as they are written
            frame = pd.read_csv(path, skiprows=1, dtype=dict.fromkeys(as_text, object), **args)
            if not (others := [name for name in text_columns(frame) if name not in as_text]):
                break
            as_text += others
    else:
        frame = pd.read_csv(path, dtype=object, **args).iloc[1:]
    return frame, header


def _plain(cells: Sequence[str]) -> Sequence[str]:
    """Return texts of one line in Unicode NFC; most columns are unchanged."""
    if (text := "".join(cells)).isascii() and not re.search(r"\s", text):
        return cells
    return [unicodedata.normalize("NFC", " ".join(cell.split())) for cell in cells]


def _commas(cells: pd.Series, separator: str) -> str:
    """Return what the commas in a column of numbers stand for; "" if it has none, or a cell that is not a number."""
    if "," not in "".join(cells.to_numpy(object)):
        return ""
    written = [cell for cell in cells if "," in cell]
    plain = [cell for cell in cells if "," not in cell and cell not in MISSING]
    if separator == "," and all(THOUSANDS.fullmatch(cell) for cell in written):
        return "" if np.isnan(parsed(plain)).any() else "thousands"
    all_integers = all(re.fullmatch(r"[-+]?(\d+|\d{1,3}(\.\d{3})+)", cell) for cell in plain)
    return "decimal comma" if all_integers and all(COMMA.fullmatch(cell) for cell in written) else ""
