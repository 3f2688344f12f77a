"""Tables that no rule was made on: what `auto` makes of them, beside models of scikit-learn.

    python -m benchmarks.accuracy.unseen FOLDER [--only PACKAGE/NAME …] [--short]     # FOLDER/PACKAGE/NAME.csv
    python -m benchmarks.accuracy.unseen FOLDER --short --priors normal:1 fan-in:4    # of validation rows alone

The tables are those of R packages (https://vincentarelbundock.github.io/Rdatasets), read as `train` reads them: random
split, standardised by the training part. Linear is BayesianRidge or LogisticRegression; boosting HistGradientBoosting,
with Normal errors of the size of cross-validated ones. These two are given the validation rows to train on.
"""

import argparse
import itertools
import json
import math
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import cross_val_predict

import bnn_pyro as bp
from benchmarks.accuracy.peers import mixture, rows_of
from benchmarks.provenance import RESULTS, Measurements, check_tree, source, table
from bnn_pyro import metrics
from bnn_pyro.datasets import Dataset
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.zoo.auto import set_up

KEPT = Measurements(RESULTS / "unseen.json", "tables")
#: Table -> target, and columns to leave out. Rows with a missing value are dropped.
SETS: dict[str, tuple[str, list[str]]] = {
    "datasets/cars": ("dist", []), "datasets/trees": ("Volume", []), "MASS/mcycle": ("accel", []),
    "MASS/mammals": ("brain", []), "car/Prestige": ("prestige", ["census"]), "texmex/liver": ("ALT.M", []),
    "Ecdat/Cigarette": ("packpc", []), "vcd/Baseball": ("sal87", ["name1", "name2"]),
    "Ecdat/Crime": ("crmrte", ["county"]), "HSAUR/Forbes2000": ("marketvalue", ["name"]),
    "COUNT/medpar": ("los", ["provnum"]), "Ecdat/Workinghours": ("hours", []), "Ecdat/Computers": ("price", []),
    "ggplot2/diamonds": ("price", []), "rpart/kyphosis": ("Kyphosis", []), "datasets/iris": ("Species", []),
    "MASS/fgl": ("type", []), "MASS/Pima.te": ("type", []), "gap/crohn": ("crohn", ["pid", "id", "fid", "mid"]),
    "Ecdat/Fishing": ("mode", []), "COUNT/titanic": ("survived", []), "psych/bfi": ("gender", []),
    "car/Chile": ("vote", []), "survival/nwtco": ("rel", ["seqno", "edrel"]), "lme4/VerbAgg": ("resp", ["id", "r2"]),
}  # fmt: skip
#: Chains of a few thousandths of their default length.
SHORT = {"chains": 4, "warmup": 1200, "thin": 32, "draws": 25, "epochs": 150, "patience": 30, "cores": 1}


def scores(prediction: Any, data: Dataset) -> dict[str, float]:
    """NLL, in units of the targets' standard deviation, with its interval, and coverage."""
    found, shift = metrics.evaluate(prediction, data.y_test).flat(), math.log(data.schema.y_scale)
    kept = {name: found[name] - shift for name in ("nll", "nll_low", "nll_high")}
    return kept | {name: found[name] for name in ("coverage_90", "ece", "accuracy") if name in found}


def auto(data: Dataset, short: bool, prior: str | None = None) -> dict[str, Any]:
    """What `auto` chooses for five minutes; with short chains where it is chains, and another prior."""
    setup = set_up("auto", None, lambda: data, settings={"prior": prior} if prior else {})
    setup = setup.changed(settings=SHORT) if short and setup.inference == "mile" else setup
    posterior = bp.fit(setup.entry, data, setup.method, progress=False)
    found = scores(bp.predict(posterior, data.x_test, num_draws=200), data)
    return {**found, "chosen": f"{setup.variant}, {setup.inference}"}


def peer(data: Dataset, boosted: bool) -> dict[str, Any]:
    """Linear models, or boosting."""
    x, y, x_test = rows_of(data)
    if data.schema.has_classes:
        model = HistGradientBoostingClassifier(random_state=0) if boosted else LogisticRegression(max_iter=2000)
        probs = model.fit(x, y.astype(int)).predict_proba(x_test).clip(1e-12)
        return scores(Mixture(dist.Categorical(torch.from_numpy(probs)[None])), data)
    if boosted:
        model = HistGradientBoostingRegressor(random_state=0)
        scale = np.full(len(x_test), np.sqrt(np.square(cross_val_predict(model, x, y, cv=3) - y).mean()))
        loc = model.fit(x, y).predict(x_test)
    else:
        loc, scale = BayesianRidge().fit(x, y).predict(x_test, return_std=True)
    return scores(mixture(loc[None], scale[None], data), data)


def measure(folder: Path, name: str, short: bool, prior: str | None = None) -> dict[str, Any]:
    """Scores of one table's test rows by all models; with a prior, of its validation rows, which then only score."""
    target, exclude = SETS[name]
    data = bp.load_data(folder / f"{name}.csv", target=target, exclude=exclude, drop_missing=True)
    if prior is not None:
        data = replace(data, x_test=data.x_val, y_test=data.y_val, index_test=data.index_val,
                       x_val=data.x_val[:0], y_val=data.y_val[:0], index_val=data.index_val[:0])  # fmt: skip
    start = time.monotonic()
    own = auto(data, short, prior)
    seconds = round(time.monotonic() - start, 1)
    kind = f"{len(data.schema.classes)} classes" if data.schema.has_classes else "numbers"
    about = {"rows": len(data.x_train), "inputs": data.schema.input_shape[0], "task": kind, "seconds": seconds}
    return about | {"short": short, "auto": own, "linear": peer(data, False), "boosting": peer(data, True)}


def page() -> str:
    """A row for each table, and mean ranks."""
    lines = [line for line in KEPT.lines() if "prior" not in line["key"]]
    rows, models = [], ("auto", "linear", "boosting")
    runs = [(line["key"]["table"], line["runs"][-1]) for line in lines]
    for name, run in runs:
        own = run["auto"]
        nll = [f"{run[m]['nll']:.2f}" for m in models]
        nll[0] += f" ({own['nll_low']:.2f} to {own['nll_high']:.2f})"
        size = f"{run['rows']:,} × {run['inputs']}"
        right = f"{own['coverage_90']:.0%} in 90 %" if "coverage_90" in own else f"ECE {own['ece']:.2f}"
        rows.append([name, size, run["task"], own["chosen"], *nll, right, f"{run['seconds']:.0f}"])
    order = [sorted(models, key=lambda m, run=run: run[m]["nll"]) for _, run in runs]
    ranks = ", ".join(f"{m} {mean(1 + o.index(m) for o in order):.2f}" for m in models)
    clear = [name for name, run in runs if run["auto"]["nll_low"] > run["linear"]["nll"]]
    worse = f"auto's interval lies above linear's NLL on: {', '.join(clear) or 'none'}."
    head = ["table", "training rows × inputs", "task", "auto", "NLL of auto", "linear", "boosting", "auto is right",
            "seconds"]  # fmt: skip
    last = f"Mean rank by NLL over {len(runs)} tables: {ranks}; {worse}"
    return f"{table(head, rows)}\n\n{last}\n\nCommit{source(lines).partition('; commit')[2]}"


def priors_page() -> str:
    """NLL of the validation rows, a row for each table and a column for each prior."""
    lines = [line for line in KEPT.lines() if "prior" in line["key"]]
    runs = {(line["key"]["table"], line["key"]["prior"]): line["runs"][-1] for line in lines}
    names, priors = (list(dict.fromkeys(key[k] for key in runs)) for k in (0, 1))
    rows = []
    for name in names:
        one = runs[name, priors[0]]
        cells = [f"{runs[name, p]['auto']['nll']:.3f}" if (name, p) in runs else "" for p in priors]
        rows.append([name, f"{one['rows']:,} × {one['inputs']}", *cells,
                     *(f"{one[m]['nll']:.3f}" for m in ("linear", "boosting"))])  # fmt: skip
    head = ["table", "training rows × inputs", *(f"`{prior}`" for prior in priors), "linear", "boosting"]
    return f"{table(head, rows)}\n\nCommit{source(lines).partition('; commit')[2]}"


def main(argv: list[str] | None = None) -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--short", action="store_true", help="chains of a few thousandths of their default length")
    parser.add_argument("--priors", nargs="+", default=[None], help="score validation rows under each of these")
    args = parser.parse_args(argv)
    check_tree(KEPT.path)
    for name, prior in itertools.product(args.only, args.priors):
        if not KEPT.runs(key := {"table": name} | ({"prior": prior} if prior else {})):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                KEPT.add(key, run := measure(args.folder, name, args.short, prior), load=os.getloadavg()[0])
            print(name, prior or "", json.dumps(run))


TABLES = {"unseen": page, "priors": priors_page}

if __name__ == "__main__":
    main()
