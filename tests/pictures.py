"""What tests of pictures share: predictions to draw, artists to find, and nothing left behind in matplotlib."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from pyro.distributions import Categorical

from bnn_pyro.predictive import Prediction

DRAWS, POINTS, CLASSES = 20, 60, 4


@pytest.fixture(autouse=True)
def clean_matplotlib():
    settings = dict(matplotlib.rcParams)
    yield
    assert pyplot.get_fignums() == [], "a figure was left open in pyplot"
    assert dict(matplotlib.rcParams) == settings, "matplotlib's global settings were changed"


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixed():
    """Draws of logits around common ones, (S, B, K)."""
    logits = 2 * random(1, POINTS, CLASSES) + random(DRAWS, POINTS, CLASSES, seed=1)
    return Prediction(Categorical(logits=logits))


def mostly_right(prediction):
    """Labels (B,), every fifth not the most probable one."""
    y = prediction.mean.argmax(1)
    return torch.where(torch.arange(POINTS) % 5 == 0, (y + 1) % CLASSES, y)


def heights(container):
    return np.array([bar.get_height() for bar in container])


def line_of(ax, label):
    return next(line for line in ax.lines if line.get_label().startswith(label))


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]
