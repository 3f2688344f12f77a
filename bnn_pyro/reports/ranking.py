"""Which of several posteriors predicts best: log predictive densities of the same rows, with standard errors."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd

from bnn_pyro.metrics.metric import intervals, mean_of
from bnn_pyro.reports.tables import NOT_CLEAR


def ranking_table(standings: pd.DataFrame) -> pd.DataFrame:
    """What :func:`ranked` returns, as texts."""
    if standings.empty:
        return standings
    texts = standings.drop(columns="note").map("{:,.1f}".format).replace("nan", "–")
    texts["difference"] = ["best", *map("{:+,.1f}".format, standings["difference"][1:])]
    texts.iloc[0, -1] = ""
    heads = ["log density, nats", "se", "difference to the best", "se of the difference", ""]
    return texts.assign(note=standings["note"]).set_axis(heads, axis=1)


def ranked(densities: Mapping[str, np.ndarray], notes: Mapping[str, str] | None = None) -> pd.DataFrame:
    """From the best on, of {label: log predictive density (N,) in nats of the same N rows}; no line for no rows.

    A line a label: density, se, the sum over the rows and its standard error over other such rows; difference,
    its_error, that minus the best one's; note, what to know of it: "worse" where the 95 % interval of the difference,
    by bootstrap over the rows as in ``metrics.paired``, is below 0. The standard error of a sum over N rows is
    √(N · var), of a difference with the variance of the row-wise differences, which is smaller where two predict alike
    (Vehtari, Gelman & Gabry 2017, arXiv:1507.04544, section 5.2).
    """
    if (points := pd.DataFrame(densities, dtype=np.float64)).empty:
        return points
    points = points[points.sum().sort_values(ascending=False, kind="stable").index]
    apart = points.sub(points.iloc[:, 0], axis=0)
    sums = {"density": points.sum(), "se": np.sqrt(len(points) * points.var())}
    sums |= {"difference": apart.sum(), "its_error": np.sqrt(len(points) * apart.var())}
    differences = {label: partial(mean_of, column.to_numpy()) for label, column in apart.items()}
    around, own = intervals(differences, (len(apart),)), notes or {}
    verdicts = ["", *("worse" if around[label].high < 0 else NOT_CLEAR for label in list(apart)[1:])]
    words = [filter(None, (v, own.get(label))) for v, label in zip(verdicts, points, strict=True)]
    return pd.DataFrame(sums | {"note": list(map("; ".join, words))})
