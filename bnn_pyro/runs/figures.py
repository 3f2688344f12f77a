"""Which picture a report shows for which task and shape of data: one table, and the drawing of it into files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bnn_pyro import plots
from bnn_pyro.datasets.bundled import curve
from bnn_pyro.files import write_whole
from bnn_pyro.pruning import signal_to_noise
from bnn_pyro.reports.page import Picture
from bnn_pyro.runs.scene import Outside, Scene

__all__ = ["FIGURES", "Figure", "Outside", "Scene", "draw_all", "figures_of"]

#: The function behind a data set that was made from one.
TRUTHS = {"toy-curve": curve}
#: How far the zoomed-out band reaches on both sides, in ranges of the training inputs (±100 for toy-curve).
FAR = 25
#: Test rows at most on which an ensemble is watched as it grows: every stored draw predicts them once more.
GROWING_ROWS = 10_000


@dataclass(frozen=True)
class Figure:
    """A line of the table: when it applies (a property of the scene), how it is drawn, and what it honestly shows."""

    title: str
    sentence: str
    applies: str
    draw: Callable[[Scene], object]
    wide: bool = False


# -- how ---------------------------------------------------------------------------------------------------------------
def _band(scene: Scene) -> object:
    x = plots.line(scene.data)
    return plots.predictive_band(scene.at(x), x, scene.data, truth=TRUTHS.get(scene.data.name))


def _far_band(scene: Scene) -> object:
    raw = scene.data.schema.unstandardise(scene.data.x_train)
    low, high = raw.amin().item(), raw.amax().item()
    middle, reach = (low + high) / 2, FAR * (high - low)
    x = plots.line(scene.data, middle - reach, middle + reach)
    return plots.predictive_band(scene.at(x), x, scene.data)


def _map(scene: Scene, draw: Callable, margin: float) -> object:
    mesh = plots.grid(scene.data, margin=margin)
    return draw(scene.at(mesh.x), mesh, scene.data.x_train, scene.data.y_train)


def _softmax_draws(scene: Scene) -> object:
    rows = scene.prediction.epistemic.argsort(descending=True)[:6]
    return plots.softmax_draws(scene.prediction, rows, scene.data.y_test, scene.data.schema)


def _growing(scene: Scene) -> object:
    x, y = scene.data.x_test[:GROWING_ROWS], scene.data.y_test[:GROWING_ROWS]
    baseline = None if scene.baseline is None else scene.baseline[:GROWING_ROWS]
    return plots.growing_ensemble(scene.posterior, x, y, baseline=baseline)


def _entropies(scene: Scene) -> object:
    outside = {other.name: other.prediction for other in scene.outside[:4]}
    return plots.entropy_histograms(scene.prediction, outside, name=f"{scene.data.name} (test)")


FIGURES: dict[str, Figure] = {
    "predictive-band": Figure(
        "Prediction and its uncertainty",
        "The fan is where a new observation is expected; the hatched band is where the mean curve may lie, and that is "
        "the part which more data would shrink. It should widen where there are no points.",
        "one_input",
        _band,
    ),
    "predictive-band-far": Figure(
        "Far away from the data",
        "The same prediction over 50 times the range of the inputs: a network that knows its limits has a band that "
        "keeps growing. How fast it grows is the prior's choice, not the data's.",
        "one_input",
        _far_band,
    ),
    "decision-boundary": Figure(
        "Decision boundary",
        "Probability of the class, averaged over the draws, with the training rows. Values near 0.5 mix noise in the "
        "labels with doubt about the weights.",
        "two_inputs",
        lambda s: _map(s, plots.decision_boundary, 0.15),
    ),
    "epistemic-map": Figure(
        "What the draws disagree on",
        "Mutual information between label and weights, reaching beyond the data. Bright means that the draws "
        "contradict one another, so that more data there would help; dark far away means confidence, not knowledge.",
        "two_inputs",
        lambda s: _map(s, plots.epistemic_map, 1.0),
    ),
    "uncertain-images": Figure(
        "The most uncertain test images",
        "Sorted by total entropy. Lines that part are draws that disagree about an image (the epistemic part, which "
        "more data would shrink); lines that agree on several classes call it ambiguous.",
        "images",
        lambda s: plots.uncertain_images(s.prediction, s.data.x_test, s.data.y_test, s.data.schema),
        wide=True,
    ),
    "softmax-draws": Figure(
        "Single draws",
        "Class probabilities of the draws for the six test rows with the largest epistemic uncertainty: tall boxes are "
        "disagreement between draws, short boxes at middling heights an ambiguous row.",
        "draws_of_rows",
        _softmax_draws,
        wide=True,
    ),
    "reliability": Figure(
        "Is its confidence deserved?",
        "Share of right answers among rows of like confidence; on the diagonal, confidence is accuracy. Bins with few "
        "rows have wide whiskers and prove little.",
        "classified",
        lambda s: plots.reliability(s.prediction, s.data.y_test),
    ),
    "doubt-calibration": Figure(
        "Is its doubt deserved?",
        "Most rows lie in the last bin of the diagram before; here their doubt, 1 − confidence, is spread out. Bins "
        "without an error only bound it from above: more rows would be needed to say whether so little doubt is right.",
        "sure",
        lambda s: plots.doubt_calibration(s.prediction, s.data.y_test),
    ),
    "confidence-histogram": Figure(
        "Confidence where it is right and where it is wrong",
        "Errors made with high confidence are those that no threshold on confidence would have caught.",
        "classified",
        lambda s: plots.confidence_histogram(s.prediction, s.data.y_test),
    ),
    "selective-risk": Figure(
        "Leaving the uncertain rows to a person",
        "Error among the rows that are kept when the most uncertain ones are set aside: the lower and the nearer to "
        "the oracle, the better uncertainty ranks errors.",
        "classified",
        lambda s: plots.selective_risk(s.prediction, s.data.y_test, baseline=s.baseline),
    ),
    "confusion-matrix": Figure(
        "What is taken for what",
        "Rows are the true classes. It counts errors and says nothing of how sure the network was.",
        "classified",
        lambda s: plots.confusion_matrix(s.prediction, s.data.y_test, s.data.schema),
    ),
    "entropy-histograms": Figure(
        "Test rows and inputs from elsewhere",
        "Entropy of the mean prediction. Inputs from elsewhere should lie to the right; where the histograms overlap, "
        "entropy cannot tell them from test rows.",
        "elsewhere",
        _entropies,
    ),
    "predicted-observed": Figure(
        "Predicted and observed",
        "Each test row's median with its central 95 % interval; about one in twenty should miss.",
        "regressed",
        lambda s: plots.predicted_observed(s.prediction, s.data.y_test, s.data.schema),
    ),
    "calibration": Figure(
        "Are its intervals as wide as they should be?",
        "Share of test rows inside the central intervals against the share promised; below the diagonal is "
        "overconfident. Grey is what chance alone does to a perfect model on as many rows.",
        "regressed",
        lambda s: plots.regression_calibration(s.prediction, s.data.y_test),
        wide=True,
    ),
    "growing-ensemble": Figure(
        "What each further draw is worth",
        "NLL of the test rows under the first draws of the stored ensemble. A flat end says that more draws of these "
        "chains would not help; chains that end apart have not explored the same posterior.",
        "stored",
        _growing,
    ),
    "pruning": Figure(
        "With weights removed",
        "Scores on the test rows without the weights of the lowest signal-to-noise ratio: where the curve is flat, the "
        "posterior could do without them. The rest was not trained again.",
        "pruned",
        lambda s: plots.pruning_curve(s.pruning.curve, removed=s.pruning.removed.share),
        wide=True,
    ),
    "signal-to-noise": Figure(
        "Which weights it is sure of",
        "Signal-to-noise ratios of all weights but the biases; removed are those to the left of a line. A single heap "
        "means that no share of the weights stands out as needless.",
        "pruned",
        lambda s: plots.signal_to_noise(signal_to_noise(s.posterior)),
    ),
    "training-curves": Figure(
        "Training",
        "The objective and its parts. With validation rows, the lowest NLL is marked; early stopping keeps its "
        "weights. A flat end says that the optimiser has come to rest, not that the posterior is right.",
        "optimised",
        lambda s: plots.training_curves(s.posterior.trace),
        wide=True,
    ),
    "transitions": Figure(
        "The chains",
        "Log joint density of every kept draw, one line a chain. Chains on different levels, or one that drifts, have "
        "not converged; chains on one level may still have missed a mode. Divergent transitions point to a bias.",
        "transitions",
        lambda s: plots.chain_traces(s.posterior.stats),
        wide=True,
    ),
    "sampler-trace": Figure(
        "The sampler at work",
        "A kinetic temperature of 1 is what the right step size and noise estimate give; it does not show that the "
        "chains have been everywhere. The NLL is that of the ensemble, not of its last draw.",
        "sampled",
        lambda s: plots.sampler_trace(s.posterior.trace),
        wide=True,
    ),
}


def figures_of(scene: Scene) -> dict[str, Figure]:
    """The figures that apply to a run, with one more for each set of images from elsewhere."""
    found = {name: figure for name, figure in FIGURES.items() if getattr(scene, figure.applies)}
    last = {name: found.pop(name) for name in ("training-curves", "transitions", "sampler-trace") if name in found}
    for other in scene.outside:
        if other.baseline is not None and scene.data.schema.is_image:
            found[f"outside-{other.name}"] = Figure(
                f"{other.name}: Bayesian and deterministic",
                "None of the classes is right here, so a network that knows its limits spreads its bars. These are "
                "the first inputs, not chosen ones.",
                "elsewhere",
                lambda s, o=other: plots.ood_bars(o.prediction, o.baseline, o.x, s.data.schema),
                wide=True,
            )
    return found | last


def draw_all(scene: Scene, folder: Path) -> list[Picture]:
    """Draw every figure that applies into ``folder``, and remove those of an earlier evaluation that no longer do."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = figures_of(scene)
    for old in folder.glob("*.png"):
        if old.stem not in figures and (old.stem in FIGURES or old.stem.startswith("outside-")):
            old.unlink()
    pictures = []
    for name, figure in figures.items():
        pictures.append(Picture.of(name, figure.draw(scene), figure.title, figure.sentence, figure.wide))
        write_whole(folder / f"{name}.png", pictures[-1].png)
    return pictures
