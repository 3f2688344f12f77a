"""Sets that need no network: scikit-learn's, the six points of a curve, and noise as out-of-distribution inputs."""

from __future__ import annotations

import numpy as np
import torch

from bnn_pyro.datasets.dataset import Raw, Schema
from bnn_pyro.errors import UserError, unknown

__all__ = ["breast_cancer", "curve", "diabetes", "digits", "noise_images", "toy_curve"]


def curve(x: torch.Tensor) -> torch.Tensor:
    """The truth behind toy-curve: y = −x⁴ + 3x² + 1."""
    return -(x**4) + 3 * x**2 + 1


def toy_curve() -> Raw:
    """Six points of y = −x⁴ + 3x² + 1, all to train on; the test part is the curve itself on a grid."""
    x = torch.tensor([-2.0, -1.8, -1.0, 1.0, 1.8, 2.0], dtype=torch.float64)
    grid = torch.linspace(-2, 2, 101, dtype=torch.float64)
    return Raw(
        name="toy-curve",
        task="regression",
        x=x.unsqueeze(1),
        y=curve(x),
        features=("x",),
        source="six points of y = -x^4 + 3x^2 + 1; tested on the curve itself between -2 and 2",
        test=(grid.unsqueeze(1), curve(grid)),
        validation=0,
    )


def breast_cancer() -> Raw:
    """569 tumours, 30 measurements of their cell nuclei: malignant (1) or benign (0)."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    return Raw(
        name="breast-cancer",
        task="classification",
        x=torch.from_numpy(bunch.data),
        y=torch.from_numpy(1 - bunch.target.astype(np.int64)),  # scikit-learn has benign as 1
        classes=("benign", "malignant"),
        features=tuple(map(str, bunch.feature_names)),
        target="diagnosis",
        source="Breast Cancer Wisconsin (Diagnostic), Wolberg et al. 1995, in scikit-learn",
    )


def digits() -> Raw:
    """1,797 handwritten digits of 8 × 8 pixels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Raw(
        name="digits",
        task="classification",
        x=torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1),
        y=torch.from_numpy(bunch.target.astype(np.int64)),
        classes=tuple(str(k) for k in range(10)),
        target="digit",
        source="Optical Recognition of Handwritten Digits (test part), Alpaydin & Kaynak 1998, in scikit-learn",
        white=16.0,
    )


def diabetes() -> Raw:
    """442 patients, 10 measurements: how far the disease went in a year."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    return Raw(
        name="diabetes",
        task="regression",
        x=torch.from_numpy(bunch.data),
        y=torch.from_numpy(bunch.target),
        features=tuple(bunch.feature_names),
        target="progression",
        source="Diabetes, Efron, Hastie, Johnstone & Tibshirani 2004, in scikit-learn",
    )


def noise_images(kind: str, num: int, schema: Schema, seed: int = 0) -> torch.Tensor:
    """Standardised noise (num, channels, height, width), every pixel drawn by itself.

    kind  "uniform": in [0, 1]; "gaussian": standard Normal after standardisation, so with the schema's shift and scale
          in pixels; not clipped
    """
    if not schema.is_image:
        raise UserError(f"noise images don't fit a model of {len(schema.features)} features; give it a table")
    if kind not in ("gaussian", "uniform"):
        raise unknown("kind of noise", kind, ("gaussian", "uniform"))
    if num < 1:
        raise UserError(f"num={num}: give the number of noise images, 1 or more")
    generator = torch.Generator().manual_seed(seed)
    shape = (num, *schema.input_shape)
    if kind == "gaussian":
        return torch.randn(shape, generator=generator)
    return schema.standardise(torch.rand(shape, generator=generator))
