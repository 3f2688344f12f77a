"""What tests of pictures share: predictions and posteriors to draw, artists to find, and a fixture for every test."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from pyro.distributions import Categorical

import bnn_pyro as bp

DRAWS, POINTS, CLASSES = 20, 60, 4
SCHEMA = bp.Schema("classification", (2,), ("a", "b", "c"), ("first", "second"))


@pytest.fixture(autouse=True)
def clean_matplotlib():
    """Every figure drawn can be laid out (a layout that fails warns), has labels, and leaves no settings behind."""
    settings = dict(matplotlib.rcParams)
    yield
    for page in map(pyplot.figure, pyplot.get_fignums()):
        page.draw_without_rendering()
        assert page.get_suptitle() or any(ax.get_xlabel() or ax.get_ylabel() or ax.get_title() for ax in page.axes)
    pyplot.close("all")
    assert dict(matplotlib.rcParams) == settings, "matplotlib's global settings were changed"


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


#: Draws of logits around common ones, (S, B, K), and labels (B,), every fifth not the most probable one.
CATEGORICAL = bp.Prediction(Categorical(logits=2 * random(1, POINTS, CLASSES) + random(DRAWS, POINTS, CLASSES, seed=1)))
LABELS = torch.where(torch.arange(POINTS) % 5 == 0, 1, 0).add(CATEGORICAL.mean.argmax(1)) % CLASSES


def chains(weight, bias=None):
    """A posterior of a linear classifier of two features; weight (C, D, 3, 2)."""
    bias = torch.zeros(*weight.shape[:2], 3) if bias is None else bias
    with bp.isolated(0):
        model = bp.MeanField(hidden=()).model(SCHEMA)
    return bp.Posterior(model, SCHEMA, chains={"layers.0.weight": weight, "layers.0.bias": bias})


def guided(*hidden, schema=SCHEMA):
    """A mean-field posterior as it starts, untrained."""
    entry = bp.MeanField(hidden=hidden)
    with bp.isolated(0):
        model = entry.model(schema)
        return bp.Posterior(model, schema, guide=entry.guide(model))


def heights(container):
    return np.array([bar.get_height() for bar in container])


def line_of(ax, label):
    return next(line for line in ax.lines if line.get_label().startswith(label))
