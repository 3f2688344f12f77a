"""How well an uncertainty tells inputs from elsewhere: AUROC with out-of-distribution points as the positives."""

from __future__ import annotations

from functools import partial

import numpy as np
from scipy.special import entr

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.metrics.classification import entropy, mean_probs
from bnn_pyro.metrics.metric import Evaluation, Undefined, auroc_of
from bnn_pyro.metrics.metric import bootstrap as _bootstrap
from bnn_pyro.predictive import Prediction

__all__ = ["SCORES", "ood_auroc", "ood_table"]


def _doubt(prediction: Prediction) -> np.ndarray:
    """1 − max p as the sum of the other probabilities, which keeps its digits where max p rounds to 1."""
    return np.sort(mean_probs(prediction), 1)[:, :-1].sum(1)


def _mutual_information(prediction: Prediction) -> np.ndarray:
    if prediction.num_draws == 1:
        raise Undefined("mutual information needs more than one draw: a single one has none to disagree with")
    aleatoric = []
    for probs in prediction.probs.split(1000, dim=1):
        p = probs.double().numpy()
        aleatoric.append(entr(p / p.sum(-1, keepdims=True)).sum(-1).mean(0))
    return np.maximum(entropy(prediction) - np.concatenate(aleatoric), 0.0)


#: What is high where the network should not trust itself: Prediction -> (B,).
SCORES = {"total_entropy": entropy, "max_prob": _doubt, "mutual_information": _mutual_information}


def ood_auroc(inside: Prediction, outside: Prediction, score: str = "total_entropy") -> float:
    """P(an outside point scores above an inside one), ties counting ½.

    score: "total_entropy" (H[E p]), "max_prob" (1 − max p) or "mutual_information" (epistemic part).
    Raises UserError for an unknown score, for no points or NaN, and for mutual information of a single draw.
    """
    points = _points(inside, outside, score)
    return float(auroc_of(points, np.ones((1, len(points))))[0])


def ood_table(
    inside: Prediction, outside: Prediction, *, bootstrap: int = 1000, seed: int = 0, confidence: float = 0.95
) -> Evaluation:
    """Score name -> AUROC with its interval; inside and outside points are resampled each by themselves."""
    points, notes = {}, {}
    for score in SCORES:
        try:
            points[score] = _points(inside, outside, score)
        except Undefined as reason:
            notes[score] = str(reason)
    reductions = {score: partial(auroc_of, p) for score, p in points.items()}
    sizes = (len(inside), len(outside))
    return Evaluation(
        _bootstrap(reductions, sizes, replicates=bootstrap, seed=seed, confidence=confidence),
        notes,
    )


def _points(inside: Prediction, outside: Prediction, score: str) -> np.ndarray:
    if score not in SCORES:
        raise unknown("uncertainty score", score, SCORES)
    parts = []
    for name, prediction, positive in (("inside", inside, 0.0), ("outside", outside, 1.0)):
        if len(prediction) == 0:
            raise UserError(f"there are no {name} points to score")
        values = SCORES[score](prediction)
        if np.isnan(values).any():
            raise UserError(f"the {name} prediction is NaN at row {int(np.argmax(np.isnan(values)))}")
        parts.append(np.stack([values, np.full(len(values), positive)], 1))
    return np.concatenate(parts)
