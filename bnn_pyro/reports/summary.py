"""The summary of a run in sentences: the first box of its report, which `train` also prints.

In this order: what makes scores too good, the scores, limits of few test rows, comparisons with predictions without
inputs and with baselines, calibration of probabilities or intervals, doubts about the data, and what to try next. The
reason why a fit failed is shown before the summary (``worries``).
"""

import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from bnn_pyro.errors import counted
from bnn_pyro.metrics import interval_verdict
from bnn_pyro.reports import read_texts, tables

#: Number of test rows below which the summary warns of few rows, and below which no difference is called clear.
FEW_ROWS, TOO_FEW = 30, 10
#: Number of test rows of a class below which it cannot be judged.
FEW_OF_CLASS = 5
#: Values of `interval_verdict` that report no error.
RIGHT = ("about right", "too few rows to tell")
#: Text in a doubt about a column that reveals the target, which comes before the scores; see ``doubts.between``.
LEAK = "not known of new rows"
#: Largest number of classes in a sentence, and largest share of repeated training rows without a sentence.
MAX_NAMED, MAX_REPEATED = 5, 0.05


def summary(run: tables.RunFacts) -> list[str]:
    """The sentences of the summary."""
    names, rows = [name for name in run.headline if name in run.metrics], run.provenance["rows"]["test"]
    data, texts = [], read_texts("summary")
    if doubts := run.provenance["split"].get("doubts", []):
        more = f" {len(doubts) - MAX_NAMED} more are named by `inspect`." if len(doubts) > MAX_NAMED else ""
        data = [f"To look at in the data: {'; '.join(doubts[:MAX_NAMED])}.{more}".replace("?.", "?")]
    if not names:
        return data if run.failed else ["There are no test rows, so nothing was scored.", *data]
    units = {name: f"{name} ({run.unit})" for name in ("rmse", "crps") if run.unit}
    scores = ", ".join(f"{units.get(n, n.replace('_', ' '))} {tables.estimate(run.metrics, n)}" for n in names)
    sentences = [*_classes(run), f"On {rows:,} test rows: {scores}."]
    if rows < FEW_ROWS:
        sentences.append(texts["few"].format(rows=rows, share=100 / rows))
    if (same := run.metrics.get("rows_that_trained", 0)) > MAX_REPEATED * rows:
        way = "" if run.provenance["split"].get("kind") == "groups" else "keep copies together with --groups, or "
        every, different = run.provenance["rows"]["train"] + rows, run.metrics.get("different_inputs", math.inf)
        remark = f", as is likely of {every:,} rows with {different:,} different inputs" * (2 * different <= every)
        sentences.insert(0, texts["repeated"].format(same=same, way=way, likely=remark))
    few = RIGHT[1] if rows < TOO_FEW else ""
    others = {f"the {texts['alone'][run.task]} alone": run.differences(tables.NOTHING)}
    others |= {} if run.baseline is None else {run.baseline.label: run.differences()}
    others |= {tables.BOOSTING: run.boosting["differences"]} if run.boosting else {}
    for other, differences in others.items():
        sentences += tables.headline_differences(run.label, other, differences, run.task, names, few)
    if censored := run.metrics.get("censored_rows"):
        sentences.append(texts["censored"].format(censored=censored))
    if coverage := list(_coverage(run)):
        sentences.append(("; before calibration " if run.guarantees else "; ").join(coverage) + ".")
    classes, change = run.metrics.get("class_rows"), run.metrics.get("if_calibrated")
    # If a model is right more often than the level, some of its sets would be empty.
    if change and not (classes and change["table"][1]["size"] < 1):
        before, after = change["table"][:2]
        forms, level = texts["boxes" if run.task == "targets" else "sets" if classes else "intervals"], change["level"]
        values = {name: text.format(level=100 * level) for name, text in forms.items()}
        values |= dict(other="other " * run.halves_test_rows, way=run.way_to_calibrate)
        values |= dict(level=100 * level, rows=f"{change['calibration_rows']} {change['data']}")
        values |= dict(before=100 * before["covered"], after=100 * after["covered"], before_size=before["size"])
        sentences.append(texts["calibrated"].format(size=after["size"], **values))
    if unsure := run.rows.get("uncertain", ()):
        sentences.append(texts["unsure"].format(numbers=", ".join(row["row"] for row in unsure[:3])))
    if "ece_floor_95" in run.metrics and "ece" in run.metrics:
        above, sure = run.metrics["ece"] > run.metrics["ece_floor_95"], run.metrics.get("mean_confidence", math.nan)
        verdict, place = ("off", "above") if above else ("not off", "within")
        sides = {"over": sure > run.metrics["accuracy_high"], "under": sure < run.metrics["accuracy_low"]}
        tendency = "".join(f", {side}confident on average" for side, holds in sides.items() if holds and above)
        sentences.append(texts["probabilities"].format(verdict=verdict, place=place, how=tendency, **run.metrics))
    if dropped := run.provenance["split"].get("dropped"):
        sentences.append(f"Left out for a missing value: {counted(dropped, 'row')} of the file.")
    sentences = [*data, *sentences] if any(LEAK in doubt for doubt in doubts) else [*sentences, *data]
    return sentences + [f"Next: {'; '.join(steps)}." for steps in [list(_next_steps(run))] if steps]


def _classes(run: tables.RunFacts) -> Iterator[str]:
    rows, predicted = (run.metrics.get(f"class_{part}", {}) for part in ("rows", "predictions"))
    most, never = max(rows, key=rows.get, default=""), [name for name in rows if rows[name] and not predicted[name]]
    if run.is_unbalanced:
        every = ", and this run says it of every row" if predicted[most] == sum(rows.values()) else ""
        rare = next(name for name in rows if name != most) if len(rows) == 2 else ""
        measures = f"how P({rare}) ranks the rows" if rare else "the others"
        share = f"{rows[most] / sum(rows.values()):.1%} of the test rows are '{most}'"
        yield f"{share}{every}: accuracy says little, look at {measures}."
    elif never:
        yield f"No test row is given the class {_named(rows, never)}."
    if few := [name for name in rows if rows[name] < FEW_OF_CLASS]:
        yield f"Too few test rows to judge the class {_named(rows, few)}."


def _named(rows: dict[str, int], names: list[str]) -> str:
    parts = [f"'{name}' ({rows[name]} of the test rows)" for name in names[:MAX_NAMED]]
    return ", ".join(parts) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def _coverage(run: tables.RunFacts) -> Iterator[str]:
    """Sentences on the coverage of 90 % intervals, and on that of 50 % intervals if it is wrong, but not for counts.

    For a calibrated run, the calibrated intervals or sets that `predict` writes come first.
    """
    rows = run.provenance["rows"]["test"]
    for row in run.guarantees.get("table", [])[1:2]:
        level, regions = run.guarantees["level"], "sets of classes" if run.metrics.get("class_rows") else "intervals"
        verdict = interval_verdict(level, row["covered"], rows)
        yield (f"{100 * level:g} % {regions} that `predict` writes ({row['prediction']}) hold "
               f"{100 * row['covered']:.0f} % of {rows:,} test rows: {verdict}")  # fmt: skip
    for name, metrics in run.metrics.get("targets", {}).items():
        share = metrics.get("coverage_90")
        if share is not None and (verdict := interval_verdict(0.9, share, rows)) not in RIGHT:
            yield f"90 % intervals of {name} hold {100 * share:.0f} % of {rows:,} test rows: {verdict}"
    yield from _intervals(run.metrics, run.task, f"{rows:,} test rows", rows)


def _intervals(scores: Mapping[str, Any], task: str, part: str, rows: int) -> Iterator[str]:
    for level in (90,) if task == "counts" else (90, 50):
        share = scores.get(f"coverage_{level}")
        verdict = "" if share is None else interval_verdict(level / 100, share, rows)
        if task == "counts" and verdict == "too wide":
            verdict = "those of whole numbers hold more, and the calibration figure tells whether these are too wide"
        if verdict and (level == 90 or verdict not in RIGHT):
            yield f"{level} % intervals hold {100 * share:.0f} % of {part}: {verdict}"


def of_new_rows(scores: Mapping[str, Any], test: Mapping[str, Any], task: str, rows: int) -> str:
    """Sentences on new rows: coverage of intervals, and whether they score clearly worse than the run's test rows.

    scores, test: flat metrics of the new rows and of the test rows; ``test`` is {} if there were none.
    """
    parts = ["; ".join(_intervals(scores, task, f"these {rows:,} rows", rows))] if task != "counts" else []
    enough = min(rows, test.get("test_rows", 0)) >= TOO_FEW
    if enough and scores.get("nll_low", -math.inf) > test.get("nll_high", math.inf):
        parts.append(read_texts("summary")["unlike"].format(rows=rows, nll=scores["nll"], own=test["nll"]))
    return "".join(textwrap.fill(f"{part}.", tables.WIDTH) + "\n\n" for part in parts if part)


def _next_steps(run: tables.RunFacts) -> Iterator[str]:
    rows, texts = run.provenance["rows"]["test"], read_texts("summary")
    for name, ratio in run.metrics.get("errors_by", {}).items():
        place, other = ("largest", "smallest") if ratio > 1 else ("smallest", "largest")
        yield texts["uneven"].format(ratio=max(ratio, 1 / ratio), name=name, there=place, other=other)
    if not rows or any(worry["about"] != "training" for worry in run.worries):  # which say what to do
        return
    others = run.differences(tables.NOTHING), run.boosting["differences"] if run.boosting else {}
    boosting = tables.difference(others[1], "nll", run.task)
    nothing = filter(None, (tables.difference(others[0], name, run.task) for name in run.headline))
    if boosting is not None and boosting.verdict == "worse" and rows >= TOO_FEW:
        cut = "more --max-minutes" if "limit" in run.provenance.get("stopped", "") else "train auto, more --epochs"
        more = "more --minutes" if run.recipe.get("auto") else cut
        yield f"gradient boosting predicts better: {more}, or take its predictions"
    elif any(cell.verdict != "better" for cell in nothing):
        settings = run.recipe["inference_settings"]  # epochs of samplers are those of their start
        more = next((f"more_{name}" for name in ("draws", "epochs") if settings.get(name)), "")
        cut = "limit" in run.provenance.get("stopped", "")
        first = "more --minutes or --max-minutes; else " if cut else texts[more].format(**settings) if more else ""
        yield texts["named" if run.provenance["split"].get("doubts") else "little"].format(first=first)
    off = run.metrics.get("ece", 0.0) > run.metrics.get("ece_floor_95", 1.0)
    off = off or any(text.endswith((": too narrow", ": too wide")) for text in _coverage(run))
    if off and rows >= TOO_FEW and not run.guarantees and run.task not in ("survival", "targets"):
        corrected, command = "the intervals", run.way_to_calibrate
        if "ece" in run.metrics:  # conformal sets do not change them
            corrected, command = "the probabilities", f"calibrate {run.folder} --method temperature"
            command += " --data FILE" * run.halves_test_rows
        yield f"`{command}` corrects {corrected} by rows that did not train"
    if run.is_unbalanced and len(classes := run.metrics["class_rows"]) == 2:
        rare, more = min(classes, key=classes.get), "finds more of the rare class; a figure says how many"
        # Twice the number of missed rows of the rare class.
        missed = classes[rare] - run.metrics["class_predictions"][rare] + rows * run.metrics["error"]
        yield from [f"a threshold on P({[*classes][1]}) (`predict --threshold`) {more}"] * (missed > 0.5)


def run_table(run: tables.RunFacts) -> str:
    """Text for a terminal: summary, metrics of the run and its baselines, and of out-of-distribution inputs."""
    metrics, targets = tables.run_metrics(run, differences=False), tables.target_table(run)
    outside = tables.outside_table(run.runs)
    parts = [f"\n{run.title}: {run.subtitle}\n"]
    if run.worries:
        more = [f"`diagnose {run.folder}` shows where, with figures."] if run.can_be_diagnosed else []
        parts += [tables.verdict_lines(run.worries), *more, ""]
    parts += map(textwrap.TextWrapper(tables.WIDTH, subsequent_indent="  ", break_on_hyphens=False).fill, summary(run))
    if len(metrics):
        parts += ["\n" + tables.as_text(table) for table in (metrics, targets) if len(table)]
        parts.append("\n[…] 95 % intervals over the test rows: bootstrap, of shares exact binomial")
    if len(outside):
        parts.append(f"\nOut-of-distribution inputs against the test rows\n{tables.as_text(outside)}")
    if run.guarantees:
        parts.append(guarantees_section(run.guarantees).text())
    if run.temperature != 1:
        parts.append(f"\ntemperature {run.temperature}: not the posterior of the stated model")
    return "\n".join(parts)


def guarantees_section(guarantees: Mapping[str, Any]) -> tables.Section:
    """The table of guarantees.json: coverage with its exact interval, mean width or number of classes."""
    rows = []
    for row in guarantees["table"]:
        size = "infinite" if row["size"] is None else f"{row['size']:{',.0f' if row['size'] >= 1e4 else '.4g'}}"
        ends = f"[{row['covered_low']:.1%}, {row['covered_high']:.1%}]"
        cells = {"prediction": row["prediction"], "covered": f"{row['covered']:.1%} {ends}", "mean size": size}
        rows.append({"test rows": row["rows"], **cells, "nll": f"{row['nll']:.4g}"})
    table = pd.DataFrame(rows).set_index("test rows").rename_axis(None) if rows else pd.DataFrame()
    return tables.Section(f"\nLevel {guarantees['level']:g}: {guarantees['note']}\n", "", table)
