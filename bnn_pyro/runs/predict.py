"""Calibrate a run's posterior with rows that it was not trained on, and predict a file of new rows."""

import csv
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnn_pyro.calibration import calibrate, monitor
from bnn_pyro.calibration.calibrated import UNCERTAINTY, Calibrated, fitted_rows, with_calibration
from bnn_pyro.cells import MISSING, coded_cells, gaps_in
from bnn_pyro.datasets import Dataset, load_inputs
from bnn_pyro.datasets.arrays import IMAGE_SUFFIXES
from bnn_pyro.datasets.prepare import inputs_of, quantities
from bnn_pyro.datasets.rows import row_digests
from bnn_pyro.datasets.tables import encode_rows, read_table, row_problems
from bnn_pyro.diagnostics import failure
from bnn_pyro.doubts import FAR
from bnn_pyro.errors import FitFailed, UserError, check_known
from bnn_pyro.files import TABLES
from bnn_pyro.parts.decisions import check_level, columns_of, intervals_of
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import predict
from bnn_pyro.runs.coverage import coverage_table
from bnn_pyro.runs.evaluate import labelled, means_outside, predict_with_progress
from bnn_pyro.runs.folder import GUARANTEES, RunFolder
from bnn_pyro.runs.recipe import Recipe, located

#: How many rows a message names.
MAX_NAMED = 5


def _calibration_rows(data: Dataset, recipe: Recipe, name: str | None) -> tuple[Tensor, Tensor]:
    """Return (x, y) of the calibration rows: other data with labels, rows that were set aside, or validation rows."""
    x, y = labelled(name, data.schema, recipe) if name else data.set_aside or (data.x_val, data.y_val)
    if not len(x):
        raise UserError(f"{data.name} has no validation rows to calibrate by: give --data FILE with rows that did not "
                        "train, or train with --validation ROWS")  # fmt: skip
    return x, y


def calibrate_run(
    folder: RunFolder, recipe: Recipe, data: Dataset, posterior: Posterior, *, name: str | None = None,
    method: str | None = None, level: float = 0.9, groups: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Calibrate a run; write calibration.json and guarantees.json, and return the content of the latter.

    name: other data with labels, to calibrate with instead of the validation rows.   groups: see ``calibrate``.
    Raises FitFailed if predictions are not finite, and UserError for test rows, or groups without calibration rows.
    """
    x, y = _calibration_rows(data, recipe, name)
    folder.check_data(posterior, data)
    if (failed := failure(posterior, data, num_draws=recipe.num_draws)) and not failed.finite:
        raise FitFailed(f"there is nothing to calibrate: {failed}")
    made = calibrate(posterior, x, y, method, level=level, groups=groups, num_draws=recipe.num_draws)
    done = made.provenance["calibration"]["methods"][-1]
    tested = replace(posterior, rows=row_digests(data.x_test, data.y_test))
    if name and len(data.x_test) and (used := fitted_rows(tested, row_digests(x, y))):
        raise UserError(f"{used:,} of {len(x):,} calibration rows are test rows of this run, which would then not show "
                        "what holds for new rows: leave out --data, or give other rows")  # fmt: skip
    rows, note, parts = [], "there are no test rows to see it on", {}
    if len(data.x_test):
        before = predict(posterior, data.x_test, num_draws=made.num_draws, seed=made.seed)
        after = made.predict(data.x_test)
        if made.column not in (None, UNCERTAINTY):
            labels = np.array(made.groups_of(data.x_test, after))
            for group in np.unique(labels):
                if group not in made.conformal.groups:
                    raise UserError(f"no calibration row has '{group}' in column '{groups}', as test rows have: give "
                                    "--data FILE with such rows, or leave --groups out")  # fmt: skip
                parts[f"{groups} {group}"] = torch.from_numpy(np.flatnonzero(labels == group))
        if made.conformal and made.conformal.per_class:
            of_class = {k: (data.y_test == k).nonzero()[:, 0] for k in range(len(posterior.schema.classes))}
            parts = {f"{groups} {posterior.schema.classes[k]}": rows for k, rows in of_class.items() if len(rows)}
        rows = coverage_table({"predictive": before, made.label: after}, data.y_test, level, parts, "all test rows")
        note = (after.set if after.has_classes else after.interval)(level).note
        if after.has_classes and (size := next(row for row in rows if row["prediction"] != "predictive")["size"]) < 1:
            note += (f"; a set has {size:.2g} classes on average, some none, as this model is right in more than "
                     f"{level:g} of the rows: take a larger --level, such as {(1 + level) / 2:g}")  # fmt: skip
    source = located({"name": name or ""})["name"]
    content = {"level": level, "method": done, "data": source, "calibration_rows": len(x), "note": note, "table": rows}
    made.write(folder.path)
    folder.write(GUARANTEES, content)
    return content


def predict_file(
    folder: RunFolder, recipe: Recipe, posterior: Posterior, args: Namespace
) -> tuple[pd.DataFrame, list[str]]:
    """Return (the predictions, one line per row; notes about them).   args: of `predict`, see ``help.toml``.

    Raises UserError for rows that cannot be read or whose predictions are not finite, unless such rows are to be
    skipped or flagged, and for options that do not suit the run.
    """
    posterior, path, on_bad_row = with_calibration(posterior, folder.path), Path(args.input), args.on_bad_row
    schema, calibrated, inputs = posterior.schema, isinstance(posterior, Calibrated), pd.DataFrame()
    y = unseen = None  # unseen: a text about the new categories of each row
    if args.monitor and not calibrated:
        raise UserError(f"--monitor compares with calibration rows, and {args.run} has none: calibrate {args.run}")
    if args.threshold is not None and not (len(schema.classes) == 2 and 0 < args.threshold < 1):
        raise UserError(f"--threshold {args.threshold:g}: give a probability between 0 and 1, for a run of two classes")
    for level in args.levels:
        check_level(level)
    if path.suffix.lower() in TABLES:
        frame = read_table(path, schema)
        names = next(csv.reader([args.keep], skipinitialspace=True), [])
        check_known(f"column of {path} (--keep)", [*frame.columns, "all"], *names)
        inputs = (frame if "all" in names else frame[names]).apply(coded_cells)
        problems = pd.Series("", frame.index) if on_bad_row == "refuse" else row_problems(frame, schema)
        if not (problems == "").any():
            raise UserError(f"{path}: no row can be predicted; row {frame.index[0]}: {problems.iloc[0]}")
        labels = [name for name in schema.target_names if name in frame]
        labelled = args.monitor and not gaps_in(frame[labels], MISSING).any(axis=None)
        frame = frame[problems == ""].drop(columns=[] if labelled else labels)
        try:
            x, y = encode_rows(path, frame, schema, MISSING)
        except UserError as error:
            advice = "; or give --on-bad-row skip or flag" * bool((row_problems(frame, schema) != "").any())
            raise UserError(f"{error}{advice}") from None
        x = schema.standardise(x)
        unseen = row_problems(frame, replace(schema, unseen="refuse")) if schema.unseen == "ignore" else None
    elif args.keep:
        raise UserError(f"--keep takes columns of a CSV, TSV or Parquet file, and {path} is none; leave it out")
    else:
        from bnn_pyro.datasets.images import pictures_in

        files = pictures_in(path) if path.is_dir() else [path] * (path.suffix.lower() in IMAGE_SUFFIXES)
        read, problems = [], pd.Series("", range(len(files)))
        for row, file in enumerate(files):
            try:
                read.append(load_inputs(file, schema, invert=args.invert))
            except UserError as error:
                if on_bad_row == "refuse" or len(files) == 1:
                    raise UserError(f"{error}{'; or give --on-bad-row skip or flag' * (len(files) > 1)}") from None
                problems[row] = str(error)
        if files and not read:
            raise UserError(f"{path}: no picture can be predicted; {problems[0]}")
        x = torch.cat(read) if read else load_inputs(path, schema, invert=args.invert)
        if files:
            home = path if path.is_dir() else path.parent
            inputs = pd.DataFrame({"file": [str(file.relative_to(home)) for file in files]})
        else:
            problems = pd.Series("", range(len(x)))
    prediction = predict_with_progress(posterior, x, recipe.num_draws, str(path))
    columns, notes = columns_of(prediction, schema, args.threshold), []
    judged = {name: values for name, values in columns.items() if values.dtype.kind == "f"}
    if schema.target_scale == "log":  # the mean may overflow while quantiles do not
        judged = {name: values for name, values in judged.items() if name.startswith("q")}
    finite = np.isfinite(list(judged.values())).all(0)
    for level in args.levels:
        names = [f"{bound}_{100 * level:g}" for bound in ("lower", "upper", "set")]
        columns |= intervals_of(prediction, schema, level, names)
    if not schema.is_image and (numeric := quantities(schema.columns, x.shape[1])).any():
        far, furthest = (x.abs() * numeric).max(1)
        names = np.array([name for name, _, place in inputs_of(schema) for _ in range(place.start, place.stop)])
        columns |= {"furthest_input": names[furthest.numpy()], "furthest_sd": far.numpy()}
        if away := int((far > FAR).sum()):
            at = int(far.argmax())
            notes.append(f"{away:,} of {len(x):,} rows are unlike those that trained: a number is over {FAR:g} "
                         "standard deviations from its mean, see the column 'furthest_sd' (row "
                         f"{problems.index[problems == ''][at]}: {names[furthest[at]]}, {far[at]:,.0f})")  # fmt: skip
    if unseen is not None and len(new := unseen[unseen != ""]):
        columns |= {"unseen": unseen.to_numpy()}
        notes.append(f"{len(new):,} rows have a category new to the model, which is none of those that it knows, see "
                     f"the column 'unseen' (row {new.index[0]}: {new.iloc[0]})")  # fmt: skip
    table = pd.DataFrame(columns)
    if "mean" in table and (off := int(means_outside(prediction).sum())):
        notes.append(f"the mean of {off:,} rows is outside their own 95 % interval, as a few draws carry it: take q50")
    if calibrated:
        about = folder.read(GUARANTEES)
        level = about.get("level", 0.9)
        columns = intervals_of(prediction, schema, level, ("low", "high", "set"))
        table = table.join(pd.DataFrame(columns | {"share_as_uncertain": posterior.unusual(prediction)}))
        intervals = map(prediction.interval, () if schema.has_classes else (level, *args.levels))
        notes += [interval.note for interval in intervals if interval.high.isinf().any()]
    if args.monitor:
        calibration, _ = _calibration_rows(recipe.load(), recipe, about.get("data"))
        verdicts = monitor(posterior, calibration, x, y)
        notes.append("\n".join(f"{'ALARM' if v.alarm else 'ok':<7}{v.test:<11}{v.sentence}" for v in verdicts))
    table.index = problems.index[problems == ""]
    for row, values in table[~finite].to_dict("index").items():
        problems[row] = "its prediction is not finite"
        if "furthest_sd" in values:
            problems[row] += f": {values['furthest_input']} is {values['furthest_sd']:.3g} sd from the training mean"
        if on_bad_row == "refuse":
            raise UserError(f"{path}, row {row}: {problems[row]}; correct it, or give --on-bad-row skip or flag")
    table = table[finite]
    if len(bad := problems[problems != ""]):
        named = "; ".join(f"row {row}: {why}" for row, why in bad.head(MAX_NAMED).items())
        done = "left out" if on_bad_row == "skip" else "without a prediction, see the column 'problem'"
        notes.append(f"{len(bad):,} of {len(problems):,} rows are {done} ({named}{'; …' * (len(bad) > MAX_NAMED)})")
    if on_bad_row == "flag":
        table = table.reindex(problems.index).assign(problem=problems)
    inputs = inputs.reindex(table.index).rename(columns={name: f"{name} (input)" for name in inputs if name in table})
    if on_bad_row != "refuse":
        inputs.insert(0, "row", table.index, allow_duplicates=True)
    return pd.concat([inputs, table], axis=1), notes
