"""The contents of a run's files, and tables of its metrics, whose cells have a value, an interval and a verdict."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd

from bnn_pyro.errors import counted
from bnn_pyro.metrics import METRICS, SCORES
from bnn_pyro.reports import read_texts

#: Verdict on a difference whose interval contains 0.
NOT_CLEAR = "no clear difference"
#: {level of a verdict: word}.
WORDS = {"good": "Good", "caution": "Caution", "bad": "Problem", "failed": "Failed"}

#: Metrics that are shares of the test rows, which are written in per cent.
SHARES = tuple(name for table in METRICS.values() for name, metric in table.items() if metric.share)
#: {task: the metrics of a summary}.
HEADLINE = {"classification": ("error", "nll"), "regression": ("rmse", "nll"), "counts": ("rmse", "nll"),
            "ordinal": ("rps", "nll"), "survival": ("concordance", "nll"), "targets": ("nrmse", "nll"),
            "labels": ("label_error", "nll")}  # fmt: skip
SCORE_NAMES = {"total_entropy": "total entropy", "max_prob": "1 − max p", "mutual_information": "mutual information"}
#: Suffixes of paired differences in metrics.json: to the baseline, and to a prediction without inputs.
AGAINST, NOTHING = "_minus_baseline", "_minus_nothing"
#: The column with the meaning of each row.
MEANING = "what it is"
BOOSTING = "gradient boosting"
#: Characters of a line in a terminal.
WIDTH = 110


class Cell(NamedTuple):
    """A number as text; ``interval`` and ``verdict`` may be empty."""

    value: str
    interval: str = ""
    verdict: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in self if part)


class Section(NamedTuple):
    """A table of texts, with row names in its index, its title, and the sentences before and after it."""

    title: str
    sentence: str
    table: pd.DataFrame
    notes: Sequence[str] = ()

    def text(self, form: str = "text") -> str:
        """Title, table and notes as text; for ``form`` see :func:`as_text`."""
        return "\n".join([self.title, *([as_text(self.table, form)] if len(self.table) else []), *self.notes])


@dataclass(frozen=True)
class RunFacts:
    """The contents of a run's files, its folder, and the label of its column in tables.

    baseline: the deterministic network's facts, or None. A field with the name of a JSON file is {} if there is none.
    """

    label: str
    folder: str
    task: str
    recipe: Mapping[str, Any]
    metrics: Mapping[str, Any]
    environment: Mapping[str, Any]
    provenance: Mapping[str, Any]
    baseline: "RunFacts | None" = None
    convergence: Mapping[str, Any] = field(default_factory=dict)
    guarantees: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, Any] = field(default_factory=dict)
    sites: Mapping[str, Any] = field(default_factory=dict)
    boosting: Mapping[str, Any] = field(default_factory=dict)

    #: The run, and its baseline if there is one.
    runs = property(lambda self: [self] if self.baseline is None else [self, self.baseline])

    def differences(self, end: str = AGAINST) -> dict[str, float]:
        """Paired differences whose names have this suffix: {metric, metric_low, metric_high: number}."""
        return {k.replace(end, ""): v for k, v in self.metrics.items() if end in k}

    #: Coverage before and after calibration; for an uncalibrated run, as calibration would change it; or {}.
    coverage = property(lambda self: self.guarantees or self.metrics.get("if_calibrated", {}))

    #: Whether ``coverage`` is that of half of the test rows, as the others were used for calibration.
    halves_test_rows = property(lambda s: not s.guarantees and s.coverage.get("data", "").startswith("test rows"))

    @property
    def way_to_calibrate(self) -> str:
        """The command that calibrates the posterior."""
        rows = "" if self.provenance["rows"]["val"] else "--validation ROWS "
        return f"train … {rows}--conformal 0.9" if self.halves_test_rows else f"calibrate {self.folder}"

    @property
    def unit(self) -> str:
        """The unit in brackets at the end of the name of a number to predict, such as price (EUR), or ""."""
        unit = re.search(r"[\[(]([^\[\]()]+)[\])]$", str(self.recipe["data"].get("target", "")))
        return unit[1] if unit and self.task == "regression" else ""

    @property
    def is_unbalanced(self) -> bool:
        """Whether nearly all test rows are of one class, and accuracy says little."""
        rows = self.metrics.get("class_rows", {}).values()
        return max(rows, default=0) > 0.8 * sum(rows)

    #: Whether `diagnose` can report more on the chains, which needs a single target.
    can_be_diagnosed = property(lambda self: bool(self.convergence) and self.task not in ("targets", "labels"))

    #: The temperature; 1 if the method has none.
    temperature = property(lambda self: self.recipe["inference_settings"].get("temperature", 1.0))

    @property
    def headline(self) -> Sequence[str]:
        """The metrics of its summary, without RMSE if a few draws may make a mean, and its error, large."""
        if self.is_unbalanced and "auroc" in self.metrics:
            return "nll", "auroc", "average_precision"
        large = self.recipe["data"].get("target_scale") == "log" or self.metrics.get("means_outside")
        return ("crps", "nll") if large else HEADLINE[self.task]

    #: Why the fit failed, and what to change; "" if it did not.
    failed = property(lambda self: self.metrics.get("failed", ""))

    #: The first of ``worries`` if its level is "failed" or "bad"; or {}.
    problem = property(lambda self: next((w for w in self.worries[:1] if w["level"] in ("failed", "bad")), {}))

    #: Exit code of the command that made or scored the run.
    exit_code = property(lambda self: {"failed": 3, "bad": 4}.get(self.problem.get("level"), 0))

    @property
    def worries(self) -> list[Mapping[str, str]]:
        """{level, about, sentence} of each problem: a failed fit, or one worse than predictions without inputs; chains
        that have not converged; confident predictions of out-of-distribution inputs; a q that is too wide.
        """
        kinds, texts = {"failed": ("failed", "fit"), "worse": ("bad", "test rows")}.items(), read_texts("summary")
        problems = ((*kind, self.metrics[key]) for key, kind in kinds if self.metrics.get(key))
        failed = [dict(zip(("level", "about", "sentence"), problem, strict=True)) for problem in problems]
        cut = f" It was cut short: {why}." if "limit" in (why := self.provenance.get("stopped", "")) else ""
        chains = [verdict for verdict in self.convergence.get("verdicts", []) if verdict["level"] != "good"]
        failed += [{**one, "sentence": one["sentence"] + cut} for one in chains[:1]] + chains[1:]
        if outside := self.metrics.get("means_outside"):
            infinite = ", which are infinite" * ("rmse" not in self.metrics)
            sentence = texts["outside"].format(outside=outside, infinite=infinite)
            failed.append({"level": "caution", "about": "predicted means", "sentence": sentence})
        for key in filter(None, (re.fullmatch("ood_(.+)_total_entropy", name) for name in self.metrics)):
            if self.metrics.get(f"{key[0]}_high", 1.0) < 0.5:
                sentence = texts["familiar"].format(name=key[1], auroc=self.metrics[key[0]])
                failed.append({"level": "caution", "about": "out-of-distribution inputs", "sentence": sentence})
        if self.metrics.get("nll_over_mean_weights_low", 0.0) > 0.01:  # nats per row
            sites, values = self.metrics.get("signal_to_noise_of_sites", {}), dict(self.metrics)
            if len(sites) > 1:
                values["lowest"] = ", ".join(f"{site} {sites[site]:.2g}" for site in sorted(sites, key=sites.get)[:3])
            figures = [form.format(**values) for key, form in texts["of_mean_weights"].items() if key in values]
            longer = "more --minutes" if self.recipe.get("auto") and "stopped" in self.provenance else "more epochs"
            last = f"or {longer}" if self.recipe.get("auto") else f"{longer}, or auto"
            sentence = texts["mean_weights"].format(figures=", ".join(figures), last=last)
            failed.append({"level": "caution", "about": "mean weights", "sentence": sentence})
        return failed

    @property
    def converged(self) -> str:
        """The sentence on converged chains; "" if they have not converged, or if there are none."""
        first = next(iter(self.convergence.get("verdicts", [])), {"level": ""})
        return first["sentence"] if first["level"] == "good" and not self.failed else ""

    #: Names of the variant and the data.
    title = property(lambda self: f"{self.recipe['variant']} on {self.provenance['data']}")

    #: Number of draws of every prediction.
    num_draws = property(lambda self: self.metrics.get("num_draws") or self._stored_draws)
    _stored_draws = property(lambda self: min(n := self.recipe["num_draws"], self.provenance.get("stored_draws", n)))

    @property
    def subtitle(self) -> str:
        """One line under the title."""
        rows, num, stored = self.provenance["rows"], self.num_draws, self.provenance.get("stored_draws", 0)
        draws = counted(num, "draw") + f" of {stored:,}" * (stored > num)
        return (
            f"{self.task.capitalize()} · inference by {self.recipe['inference']} · seed {self.recipe['seed']} · "
            f"{rows['train']:,} training rows · {rows['test']:,} test rows · predictions by {draws}"
            + (f" · chosen by auto: {self.recipe['auto'].get('reason')}" if self.recipe.get("auto") else "")
        )


def metric_table(
    task: str, metrics: Mapping[str, Mapping[str, float]], differences: Mapping[str, Mapping[str, float]] | None = None
) -> pd.DataFrame:
    """A row for each metric with a value; columns {head: metrics}, then {head: paired differences}."""
    columns = {label: {name: estimate(values, name) for name in METRICS[task]} for label, values in metrics.items()}
    for label, values in (differences or {}).items():
        columns[label] = {name: difference(values, name, task) for name in METRICS[task]}
    table = _table(columns)
    return table.assign(**{MEANING: [METRICS[task][name].description for name in table.index]})


def run_metrics(run: RunFacts, differences: bool = True) -> pd.DataFrame:
    """Metrics of a run and of its baselines, and the paired difference to each."""
    metrics, paired = {r.label: r.metrics for r in run.runs}, {}
    if against := run.differences():
        paired[f"difference to {run.baseline.label}" if run.boosting else "difference"] = against
    if run.boosting:
        metrics[BOOSTING] = run.boosting["metrics"]
        paired[f"difference to {BOOSTING}"] = run.boosting["differences"]
    table = metric_table(run.task, metrics, paired if differences else {})
    return table.replace({MEANING: {"target units$": run.unit}}, regex=True) if run.unit else table


def target_table(run: RunFacts) -> pd.DataFrame:
    """Metrics of each of several targets in a row; no rows if there is one target."""
    names = ("rmse", "crps", "coverage_90", "error", "brier", "auroc", "nll")
    return _table({name: {t: estimate(m, name) for t, m in run.metrics.get("targets", {}).items()} for name in names})


def outside_table(runs: Sequence[RunFacts]) -> pd.DataFrame:
    """Rows for out-of-distribution inputs: for each data set the AUROC by each score, and the mean entropy."""
    keys = [re.fullmatch(f"ood_(.+)_({'|'.join(SCORES)})", key) for key in runs[0].metrics]
    names = list(dict.fromkeys(match[1] for match in keys if match))
    labels = {f"ood_{name}_{score}": f"{name}: AUROC by {SCORE_NAMES[score]}" for name in names for score in SCORES}
    labels |= {"mean_entropy": "test rows: mean entropy, nats"} if names else {}
    labels |= {f"ood_{name}_mean_entropy": f"{name}: mean entropy, nats" for name in names}
    return _table({run.label: {label: estimate(run.metrics, key) for key, label in labels.items()} for run in runs})


def _table(columns: Mapping[str, Mapping[str, Cell | None]]) -> pd.DataFrame:
    """The columns as texts, without rows and columns that have no value."""
    texts = {head: {name: None if c is None else str(c) for name, c in by.items()} for head, by in columns.items()}
    return pd.DataFrame(texts, dtype=object).dropna(how="all").dropna(axis=1, how="all")


def estimate(metrics: Mapping[str, float], name: str, sign: str = "") -> Cell | None:
    """The value of a metric with its interval, if it has one; None if there is no value."""
    if name not in metrics:
        return None
    ends_given = (metrics[key] for key in (f"{name}_low", f"{name}_high") if key in metrics)
    ends = [_number(name, end, sign).split(" ")[0] for end in ends_given]
    return Cell(_number(name, metrics[name], sign), f"[{', '.join(ends)}]" if ends else "")


def difference(differences: Mapping[str, float], name: str, task: str) -> Cell | None:
    """A paired difference with its interval, and a verdict: "better", "worse", or not clear if the interval contains 0.

    The verdict is "" for metrics with a nominal value, and for widths, as narrower is better only with right coverage.
    """
    cell, better = estimate(differences, name, "+"), METRICS[task][name].better
    if cell is None or better == "nominal" or name.startswith("width"):
        return cell
    low, high = differences[f"{name}_low"], differences[f"{name}_high"]
    rounding = 1e-6 * (task in ("classification", "ordinal"))  # probabilities are in float32
    if low <= rounding and high >= -rounding:
        return cell._replace(verdict=NOT_CLEAR)
    return cell._replace(verdict="better" if (high < 0) == (better == "lower") else "worse")


def headline_differences(
    label: str, other: str, differences: Mapping[str, float], task: str, names: Sequence[str] = (), verdict: str = ""
) -> list[str]:
    """A sentence on the paired differences of the headline metrics (or ``names``), or no sentence.

    verdict: replaces that of each difference.
    """
    parts = []
    for name in names or HEADLINE[task]:
        if cell := difference(differences, name, task):
            value = f"{name.replace('_', ' ')} {cell.value}{' nats' if name == 'nll' else ''} {cell.interval}"
            parts.append(", ".join(filter(None, (value, verdict or cell.verdict))))
    return [f"{label} beside {other}, paired differences: {'; '.join(parts)}."] if parts else []


def as_text(table: pd.DataFrame, form: str = "text") -> str:
    """The table as "text" for a terminal, "markdown" or "latex", without the meaning of rows; dashes for no value."""
    table = table.drop(columns=MEANING, errors="ignore").astype(object).fillna("–")
    if form == "latex":
        return re.sub(r"(?<=[\s\[&])-(?=\d)", "$-$", table.to_latex(escape=True)).replace("±", r"$\pm$")
    if form == "markdown":
        rows = [["", *table.columns], ["---"] * (1 + len(table.columns)), *table.itertuples()]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return table.to_string()


def verdict_lines(verdicts: Sequence[Mapping[str, str]], named: bool = False) -> str:
    """A line per verdict: its level as a word, what it is about if ``named``, and its sentence."""
    indent = max(map(len, WORDS.values())) + 2
    abouts = [f"{v['about']}: " if named and v["about"] else "" for v in verdicts]
    lines = [f"{WORDS[v['level']]:<{indent}}{a}{v['sentence']}" for v, a in zip(verdicts, abouts, strict=True)]
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * indent) for line in lines)


def _number(name: str, value: float, sign: str = "") -> str:
    share = f"{100 * value:{sign}.2f} {'pp' if sign else '%'}"
    return share if name in SHARES else f"{value:{sign}.3g}" if abs(value) < 1000 else f"{value:{sign},.0f}"
