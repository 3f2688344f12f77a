"""A ranking of posteriors by their log predictive densities of the same rows, with standard errors."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd

from bnn_pyro.metrics.metric import intervals, mean_of
from bnn_pyro.reports.tables import NOT_CLEAR


def ranking_table(standings: pd.DataFrame) -> pd.DataFrame:
    """The result of :func:`ranked` as a table of texts."""
    if standings.empty:
        return standings
    texts = standings.drop(columns="note").map("{:,.1f}".format).replace("nan", "–")
    texts["difference"] = ["best", *map("{:+,.1f}".format, standings["difference"][1:])]
    texts.iloc[0, -1] = ""
    heads = ["log density, nats", "se", "difference to the best", "se of the difference", ""]
    return texts.assign(note=standings["note"]).set_axis(heads, axis=1)


def ranked(densities: Mapping[str, np.ndarray], notes: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Rank {label: log predictive density (N,) in nats of the same N rows}, the best first; empty if there are no rows.

    Columns: density and se, the sum over the rows and its standard error; difference and its_error, the same of the
    difference to the best; note, which is "worse" if the 95 % interval of the difference, by bootstrap over the rows as
    in ``metrics.paired``, is below 0. The standard error of a sum over N rows is √(N · var), for a difference with the
    variance of the row-wise differences, which is smaller if two predict alike (Vehtari, Gelman & Gabry 2017,
    arXiv:1507.04544, section 5.2).
    """
    if (points := pd.DataFrame(densities, dtype=np.float64)).empty:
        return points
    points = points[points.sum().sort_values(ascending=False, kind="stable").index]
    gaps = points.sub(points.iloc[:, 0], axis=0)
    sums = {"density": points.sum(), "se": np.sqrt(len(points) * points.var())}
    sums |= {"difference": gaps.sum(), "its_error": np.sqrt(len(points) * gaps.var())}
    differences = {label: partial(mean_of, column.to_numpy()) for label, column in gaps.items()}
    around, notes = intervals(differences, (len(gaps),)), notes or {}
    verdicts = ["", *("worse" if around[label].high < 0 else NOT_CLEAR for label in list(gaps)[1:])]
    remarks = [filter(None, (v, notes.get(label))) for v, label in zip(verdicts, points, strict=True)]
    return pd.DataFrame(sums | {"note": list(map("; ".join, remarks))})
