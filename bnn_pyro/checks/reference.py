"""A method against a stored reference posterior: 10,000 verified draws of the same posterior.

The variant, with its class, guide and method, is given the data of a reference (if there is one, that of the subject's
data) and the settings that the posterior depends on: widths, activation, prior and noise. Means of :func:`bounded`
functions of every output are compared.

A reference is an NPZ file of arrays and a JSON file of the rest, made by ``benchmarks/checks`` from 10,000 draws of HMC
that meet the criteria of posteriordb (Magnusson et al. 2024, arXiv:2407.04967) in function space. It has averages over
all draws, and predictions of some. A model has the posterior of the reference if log p(y, w | x) is the same at a few
weights that a formula gives, which is not so for any other prior, noise, data or shape.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import t
from torch import nn

from bnn_pyro.checks.check import ALPHA, Check, Estimate, Finding, Outcome, Subject, concluded, judge
from bnn_pyro.checks.sbc_ranks import LEVELS
from bnn_pyro.datasets import Dataset, load_data
from bnn_pyro.diagnostics.convergence import MIN_CHAIN_DRAWS, ess_mean
from bnn_pyro.diagnostics.draws import sized
from bnn_pyro.errors import UserError, check_known, refusing
from bnn_pyro.features import on_features
from bnn_pyro.files import read_archive
from bnn_pyro.fitting import fit
from bnn_pyro.inference.potential import Potential
from bnn_pyro.isolation import isolated
from bnn_pyro.posterior import archive_digest, weight_space
from bnn_pyro.predictive import predict
from bnn_pyro.progress import Report
from bnn_pyro.zoo import Entry

REFERENCES = Path(__file__).parent / "references"
FORMAT = 1
#: Number of weights at which densities are compared, and relative tolerance for single precision on another machine.
PLACES, SAME = 5, 2e-5
#: The check is inconclusive if it cannot detect this shift of a mean, in posterior standard deviations.
BLIND = 0.5


@dataclass(frozen=True, eq=False)
class ReferencePosterior:
    """One reference. Shapes: B inputs; K classes, or 1 in regression; J outputs: log-odds, 1 for two classes; S draws.

    about: title, variant, entry (settings), data (arguments of ``load_data``), criteria with the values reached, met,
    draws (their number), log_joint, and who made it, when and how; JSON-able.
    """

    name: str  # of its files
    about: Mapping[str, Any]
    x: np.ndarray  # (B, *input_shape) inputs, standardised
    mean: np.ndarray  # (B, K) mean over all draws of class probabilities, or of the network's mean in target units
    mean_sd: np.ndarray  # (B, K) standard deviation of the same over the draws
    centre: np.ndarray  # (B, J) mean of the outputs: log-odds of every class, or the network's mean in target units
    spread: np.ndarray  # (B, J) standard deviation of the outputs
    expected: np.ndarray  # (2, B, J) means of :func:`bounded` of the outputs
    error: np.ndarray  # (2, B, J) Monte-Carlo standard errors of ``expected``
    points: np.ndarray  # (T,) indices of the inputs at which draws are stored
    draws: np.ndarray  # (S, T, J) outputs of S evenly thinned draws, (output − centre) / spread, in half precision
    noise: np.ndarray  # (S, 1) standard deviations of the observations in target units; empty for classification
    backbone: Mapping[str, np.ndarray] = field(default_factory=dict)  # weights of the backbone of a last layer

    def outputs(self) -> np.ndarray:
        """Log-odds, or means in target units, of the stored draws; (S, T, J) float64."""
        return self.centre[self.points] + self.spread[self.points] * self.draws.astype(np.float64)

    def data(self) -> Dataset:
        """The data set of the posterior. Raises UserError if a file of it is not available."""
        return load_data(**self.about["data"])

    def settings(self) -> dict[str, Any]:
        """Settings of the variant that the posterior depends on, with the stored backbone of a last layer."""
        entry = {k: tuple(v) if isinstance(v, list) else v for k, v in self.about["entry"].items()}
        if not self.backbone:
            return entry
        weight, bias = (torch.from_numpy(self.backbone[k].copy()) for k in ("weight", "bias"))
        layer = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": bias})
        return entry | {"backbone": nn.Sequential(nn.Flatten(), layer, nn.ReLU()), "inputs": "raw"}

    def unlike(self, entry: Entry, data: Dataset) -> str:
        """Why a variant and data have another posterior than this one; "" if they have this one."""
        if data.schema.task != self.about["task"] or tuple(data.schema.input_shape) != self.x.shape[1:]:
            return f"its data have another task or input shape than those of {self.about['title']}"
        try:
            density = log_joints_at(entry, data)
        except UserError as reason:
            return str(reason)
        expected = np.asarray(self.about["log_joint"])
        if density.shape != expected.shape or not np.allclose(density, expected, rtol=SAME, atol=1e-3):
            return f"its model or its data are not those of {self.about['title']}: the log joint density differs"
        return ""


def references() -> list[str]:
    """Names of the stored references."""
    return sorted(path.stem for path in REFERENCES.glob("*.json") if path.with_suffix(".npz").is_file())


def load_reference(name: str) -> ReferencePosterior:
    """The reference of that name. Raises UserError if there is none, or if its files are damaged."""
    check_known("reference", references(), name)
    path = REFERENCES / f"{name}.npz"
    damaged = f"{path} or the .json beside it is damaged; install the package again"
    with refusing(damaged, ValueError, KeyError, TypeError):
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if about["format"] != FORMAT or archive_digest(path.read_bytes(), about) != about["sha256"]:
            raise ValueError
    arrays = read_archive(path)
    backbone = {k.removeprefix("backbone."): arrays.pop(k) for k in list(arrays) if k.startswith("backbone.")}
    return ReferencePosterior(name, about, **arrays, backbone=backbone)


def bounded(outputs: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """tanh z and z²/(1 + z²), (2, …, B, J), of outputs (…, B, J), where z = (output − centre)/spread."""
    z = (outputs - centre) / np.where(spread > 0, spread, 1.0)
    square = np.square(z)
    return np.stack([np.tanh(z), square / (1 + square)])


@torch.no_grad()
def log_joints_at(entry: Entry, data: Dataset) -> np.ndarray:
    """log p(y, w | x) in nats, with the Jacobian of any transform, at weights that a formula gives, (PLACES,).

    The weights are sines of incommensurable frequencies, about a third of a prior's usual scale. Raises UserError for a
    model without a density.
    """
    with isolated(0):
        inferred, features = on_features(weight_space(entry.model(data.schema)), data)
        potential = Potential(weight_space(inferred), features.x_train, features.y_train)
        index = torch.arange(1, potential.size + 1, dtype=torch.float64)
        place = torch.arange(1, PLACES + 1, dtype=torch.float64)[:, None]
        return potential.log_density(0.3 * torch.sin(math.sqrt(2) * place * index + place**2)).double().numpy()


@dataclass(frozen=True)
class Reference(Check):
    """Predictions are compared with those of a posterior that is known: 10,000 draws of Hamiltonian Monte Carlo,
    checked by a second sampler. Samplers must agree within their Monte-Carlo error; for approximations the report
    says how far off their means are, how much too narrow they are, and the coverage of their intervals.

    draws  number of draws, of all chains together
    rows   largest number of rows · weights of a reference on which a full-batch sampler is run

    ``Outcome.figures``: sd_ratio; posterior_coverage_50, _80 and _95, shares of the posterior that intervals hold.
    """

    draws: int = 4000
    rows: float = 1e9

    title: ClassVar[str] = "Reference posterior"
    quick: ClassVar[Mapping[str, Any]] = {"draws": 2000, "rows": 1e5}

    def _refuses(self, subject: Subject) -> str:
        reference, _, data = self.pose(subject)
        if subject.temperature != 1:
            return f"references have temperature 1, but this posterior has {subject.temperature:g}"
        if subject.converges_to == "exact" and len(data.x_train) * reference.about["weights"] > self.rows:
            return f"sampling {reference.about['title']} takes minutes; use the full budget"
        return ""

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        reference, entry, data = self.pose(subject)
        tiny, reference_settings = subject.kind.tiny, reference.about.get("settings", {}).get(subject.inference, {})
        if subject.exact and "warmup" not in tiny:  # stochastic gradients
            method = subject.method({"chains": 4, "max_draws": self.draws, **reference_settings})
        else:
            draws = {"draws": max(1, self.draws // tiny.get("chains", 1))} if "warmup" in tiny else {}
            method = subject.tiny_method(1.0, 5.0, **draws | reference_settings)
        report(0, 1, {"fitting": reference.name})
        posterior = fit(entry, data, method, seed=seed, device="cpu", progress=False)
        settings = subject.settings(method, entry) | {"reference": reference.name}
        outputs = np.full(1, np.nan)
        with suppress(ValueError):  # a distribution refuses parameters that are not finite
            shape = sized(posterior, self.draws)
            shape = shape[::-1] if posterior.chains is None else shape  # independent draws: chains of length 1
            values = predict(posterior, torch.from_numpy(reference.x), num_draws=math.prod(shape)).output_values()
            outputs = values.numpy().astype(np.float32).reshape(*shape, len(reference.x), -1)
        if not np.isfinite(outputs).all():
            return Outcome("reference", "bad", f"On {reference.about['title']}: predictions are not finite.", settings)
        (p, largest, visible), exact = compared(outputs, reference), subject.converges_to == "exact"
        flat = outputs.reshape(-1, *outputs.shape[2:])
        point = len(flat) == 1 or subject.converges_to == "point"
        off = not point and p < ALPHA
        level = "bad" if off and exact else "caution" if off or point else "good"
        few = not off and visible >= BLIND
        covered = coverage(outputs, reference)
        centre, spread = flat.mean(0, dtype=np.float64), flat.std(0, dtype=np.float64)
        shift = float(np.sqrt(np.square((centre - reference.centre) / reference.spread).mean()))
        ratio = float(np.median(spread / reference.spread))
        about = "largest difference of an output's mean or width from the reference's, in standard errors"
        findings = [Finding(about, largest, 0.0, 1.0, None if point else p, level)]
        about = f"{'too few draws to tell: ' * few}shift of a mean that would have been seen, in posterior sd"
        findings.append(Finding(about, visible, BLIND if few else None, level="caution" if few else "good"))
        for nominal, (share, error) in covered.items():
            about, far = f"share of the posterior inside its {nominal:.0%} intervals", abs(share - nominal) > 4 * error
            findings.append(Finding(about, share, nominal, error, level=level if far else "good"))
        figures = {"sd_ratio": ratio}
        figures |= {f"posterior_coverage_{nominal * 100:.0f}": share for nominal, (share, _) in covered.items()}
        start = f"On {reference.about['title']} ({reference.about['draws']:,} verified draws of the posterior)"
        wrong = f"{start} it does not sample the posterior that it claims"
        right = f"{start} it cannot be told from the posterior; a mean off by {visible:.2g} sd would have been seen"
        if off or point:
            right = f"{start}, means are off by {shift:.2g} posterior sd (root mean square), its spread is {ratio:.2g} "
            right += f"times the posterior's, and its 95 % intervals hold {covered[0.95][0]:.0%} of it"
        return concluded("reference", findings, settings, right, wrong, figures=figures)

    def pose(self, subject: Subject) -> tuple[ReferencePosterior, Entry, Dataset]:
        """A reference, the variant reduced to its posterior, and its data. Raises UserError if there is none."""
        on_features, stochastic = hasattr(subject.entry, "backbone"), subject.converges_to == "exact as lr → 0"
        if reason := subject.irreducible(hidden=() if on_features else (1,)):
            raise UserError(reason)
        # A last layer needs the backbone of the reference, as any other has other features.
        suits = [r for r in map(load_reference, references()) if bool(r.backbone) == on_features]
        # For the posterior of the curve, steps of stochastic gradients would have to be too small.
        name = "digits-last-layer" if on_features else "breast-cancer" if stochastic else "toy-curve"
        reference = min(suits, key=lambda r: (stochastic or r.about["dataset"] != subject.data.name, r.name != name))
        entry, data = subject.reduced(bias=True, **reference.settings()), reference.data()
        if reason := reference.unlike(entry, data):
            raise UserError(reason)
        return reference, entry, data


def compared(outputs: np.ndarray, reference: ReferencePosterior) -> tuple[float, float, float]:
    """Compare mean and width of every output (C, D, B, J) with the reference, given the Monte-Carlo errors of both.

    (smallest p-value of an output, corrected for the number of outputs; largest difference in standard errors; shift of
    a mean, in posterior standard deviations, that would have been detected at the median output)
    """
    values = bounded(outputs.astype(np.float64), reference.centre, reference.spread)
    values = np.moveaxis(values, 0, 2).reshape(*outputs.shape[:2], -1)  # (C, D, M)
    markov = outputs.shape[1] >= MIN_CHAIN_DRAWS
    sample = Estimate.of_chains(values) if markov else Estimate.of_independent(values.reshape(-1, values.shape[-1]))
    estimate = Estimate(sample.mean, np.hypot(sample.error, reference.error.ravel()), sample.freedom)
    expected = reference.expected.ravel()
    findings = judge([""] * len(expected), estimate, expected)
    # d E tanh(z + δ) / dδ is 0.606 at δ = 0, for a standard Normal z.
    shifts = t.isf(ALPHA / (2 * len(expected)), estimate.freedom) * estimate.error / 0.606
    visible = math.inf if values[..., 0].size == 1 else float(np.median(shifts[: reference.centre.size]))
    return min(f.p for f in findings), float(np.abs((sample.mean - expected) / estimate.error).max()), visible


def coverage(outputs: np.ndarray, reference: ReferencePosterior) -> dict[float, tuple[float, float]]:
    """{level: (share of the reference's draws inside central intervals of the outputs, its error at one point)}."""
    mine, draws = outputs[:, :, reference.points], reference.outputs()
    chains, num = outputs.shape[:2]
    effective = math.inf if chains * num == 1 else chains * num  # a single draw has no known error
    if num >= MIN_CHAIN_DRAWS:
        effective = float(np.nanmedian(ess_mean(np.moveaxis(outputs.reshape(chains, num, -1), 2, 0))))
    number = 1 / effective + 1 / len(draws)
    shares = {}
    for level in LEVELS:
        low, high = np.quantile(mine, [(1 - level) / 2, (1 + level) / 2], axis=(0, 1))
        shares[level] = float(((draws >= low) & (draws <= high)).mean()), math.sqrt(level * (1 - level) * number)
    return shares
