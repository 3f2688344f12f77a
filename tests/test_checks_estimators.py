"""Estimators of objectives and gradients: right ones pass on any variant, and each kind of mistake is seen."""

import numpy as np
import pytest
import torch
from conjugate import correlated, dataset

import bnn_pyro as bp
from bnn_pyro.checks import Subject
from bnn_pyro.checks.estimators import Estimators, _alike
from bnn_pyro.inference.potential import Potential
from bnn_pyro.zoo import ZOO

QUICK = Estimators(rows=24, repeats=25, warm=20)


def labels(classes):
    data = correlated(24, 2)
    y = torch.bucketize(data.y, data.y.quantile(torch.linspace(0, 1, classes + 1)[1:-1].double()))
    return dataset(data.x, y, bp.Schema("classification", (2,), classes=tuple("abc"[:classes])))


DATA = {"regression": correlated(24, 2, y_shift=5.0, y_scale=3.0).data, "three classes": labels(3)}


def subject(variant, method, task="regression", settings=None, **given):
    small = {} if variant == "last-layer" else {"hidden": (4,)}
    return Subject(variant, ZOO[variant](**{**small, **(settings or {})}), method, DATA[task], given)


@pytest.mark.parametrize(
    ("variant", "method", "task", "settings"),
    [
        ("mean-field", "svi", "regression", {}),
        ("mean-field", "svi", "three classes", {"prior": "scale-mixture:1,0.1,0.5"}),
        ("hidden-layer", "svi", "three classes", {}),
        ("variational-dropout", "svi", "regression", {}),
        ("last-layer", "svi", "regression", {"family": "full", "backbone": "mlp"}),
        ("mlp", "map", "three classes", {}),
        ("dropout-mlp", "mc-dropout", "regression", {}),
        ("mean-field", "nuts", "regression", {"activation": "tanh"}),
        ("mean-field", "sghmc", "three classes", {"prior": "gamma:2,1"}),
        ("last-layer", "sgld", "three classes", {"backbone": "mlp"}),
    ],
)
def test_right_ones_pass(variant, method, task, settings):
    outcome = QUICK.run(subject(variant, method, task, settings))
    assert outcome.level == "good", [f for f in outcome.findings if f.level != "good"]


def test_a_point_estimate_is_held_to_the_log_joint_unless_masks_fall():
    for variant in ("mlp", "dropout-mlp"):
        abouts = [f.about for f in QUICK.run(subject(variant, "map")).findings]
        assert any("log p(y, w)" in about for about in abouts) == (variant == "mlp")


def test_a_reference_that_is_no_number_is_no_pass():
    (finding,) = _alike(["a"], np.ones((5, 1)), np.full((5, 1), np.nan), 0.1)
    assert finding.level == "bad"


def test_a_wrong_gradient_is_seen(monkeypatch):
    own = Potential._gradient

    def wrong(self, z, *rest):
        density, gradient = own(self, z, *rest)
        return density, gradient * torch.linspace(1, 1.1, gradient.shape[1], dtype=gradient.dtype)

    monkeypatch.setattr(Potential, "_gradient", wrong)
    outcome = QUICK.run(subject("mean-field", "nuts"))
    assert outcome.level == "bad" and "finite differences" in outcome.sentence


def test_a_density_that_loses_digits_is_seen(monkeypatch):
    """In half precision, as a careless cast would have it."""
    forward = Potential.log_density

    def coarse(self, u, *rest):
        found = forward(self, u, *rest)
        return found if self.dtype == torch.float64 else found.to(torch.bfloat16).to(found.dtype)

    monkeypatch.setattr(Potential, "log_density", coarse)
    outcome = QUICK.run(subject("mean-field", "nuts"))
    assert outcome.level == "bad" and "32 bits" in outcome.sentence


def test_what_estimates_nothing_is_refused():
    assert "all rows at once" in QUICK.refuses(subject("last-layer", "laplace"))
    assert QUICK.refuses(subject("mean-field", "svi")) == ""
