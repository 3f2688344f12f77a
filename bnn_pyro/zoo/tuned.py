"""Settings tuned for data sets, by variant, data set and method; they go over the defaults and under the user's own.

Chosen by the ELBO or validation rows; those of fashion-mnist and kmnist, of the same shape and size, on mnist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["TUNED", "Fit"]


class Fit(NamedTuple):
    """Tuned settings: of the variant, of the method, and of the way the data are loaded."""

    entry: Mapping[str, Any] = {}
    method: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}


#: {variant: {data set: {method: settings}}}.
TUNED: dict[str, dict[str, dict[str, Fit]]] = {
    "mean-field": {
        "toy-curve": {
            "svi": Fit(
                {"hidden": (32,), "prior": "normal:3", "noise": 1.0, "init_scale": 0.001},
                {"epochs": 3000, "lr": 0.01, "num_particles": 2},
            ),
            **dict.fromkeys(
                ("hmc", "nuts", "chees"), Fit({"hidden": (32,), "prior": "normal:3", "noise": 1.0, "init_scale": 0.001})
            ),
        },
        "breast-cancer": {
            "svi": Fit(
                {"hidden": (5, 5), "activation": "tanh", "prior": "fan-in:1.5", "init_scale": 0.001},
                {"epochs": 450, "lr": 0.02},
            ),
            **dict.fromkeys(
                ("hmc", "nuts", "chees"),
                Fit({"hidden": (5, 5), "activation": "tanh", "prior": "fan-in:1.5", "init_scale": 0.001}),
            ),
        },
        "diabetes": {
            "svi": Fit({"hidden": (50,), "prior": "fan-in:0.5", "init_scale": 0.01}, {"epochs": 800, "lr": 0.02})
        },
        "digits": {
            "svi": Fit(
                {"hidden": (100,), "prior": "normal:3", "init_scale": 0.01},
                {"epochs": 100, "batch_size": 64, "lr": 0.003},
            )
        },
        "mnist": {
            "svi": Fit(
                {"hidden": (400, 400), "prior": "normal:3", "init_scale": 0.01},
                {"epochs": 20, "batch_size": 128, "lr": 0.001},
            )
        },
    },
    "hidden-layer": {
        "toy-curve": {
            "svi": Fit(
                {"hidden": (32,), "prior": "normal:3", "noise": 1.0, "init_scale": 0.01},
                {"epochs": 3000, "lr": 0.01, "num_particles": 2},
            )
        },
        "breast-cancer": {
            "svi": Fit(
                {"hidden": (5, 5), "activation": "tanh", "prior": "fan-in:1.5", "init_scale": 0.01},
                {"epochs": 450, "lr": 0.02},
            )
        },
        "diabetes": {
            "svi": Fit({"hidden": (50,), "prior": "fan-in:0.5", "init_scale": 0.01}, {"epochs": 800, "lr": 0.02})
        },
        "digits": {
            "svi": Fit(
                {"hidden": (100,), "prior": "normal:3", "init_scale": 0.01},
                {"epochs": 100, "batch_size": 64, "lr": 0.003},
            )
        },
        "mnist": {
            "svi": Fit(
                {"hidden": (1024, 1024, 1024), "prior": "normal:1", "init_scale": 0.01},
                {"epochs": 20, "batch_size": 128, "lr": 0.001},
            )
        },
    },
    "variational-dropout": {
        "toy-curve": {"svi": Fit({"hidden": (32,), "noise": 1.0, "init_scale": 0.05}, {"epochs": 3000, "lr": 0.01})},
        "breast-cancer": {"svi": Fit({"hidden": (5, 5), "activation": "tanh"}, {"epochs": 450, "lr": 0.02})},
        "diabetes": {"svi": Fit({"hidden": (50,), "init_scale": 0.05}, {"epochs": 800, "lr": 0.02})},
        "digits": {"svi": Fit({"hidden": (100,), "init_scale": 0.05}, {"epochs": 100, "batch_size": 64, "lr": 0.003})},
        "mnist": {"svi": Fit({"hidden": (1024, 1024, 1024)}, {"epochs": 25, "batch_size": 128, "lr": 0.001})},
    },
    "bayesian-convnet": {
        "digits": {"svi": Fit({"hidden": (64,), "prior": "normal:1"}, {"epochs": 100, "batch_size": 64, "lr": 0.003})},
        "mnist": {
            "svi": Fit(
                {"channels": (16, 32), "kernel": 5, "padding": 0, "prior": "normal:1"},
                {"epochs": 8, "batch_size": 128, "lr": 0.002},
            )
        },
    },
    "last-layer": {
        "digits": {
            "svi": Fit({"prior": "fan-in:8"}, {"epochs": 2000, "lr": 0.02}),
            **dict.fromkeys(("laplace", "sgld", "hmc", "chees", "map", "mle"), Fit({"prior": "fan-in:8"})),
            "sghmc": Fit({"prior": "fan-in:8"}, {"epochs": 5000, "lr": 0.05, "friction": 0.03}),
            "nuts": Fit({"prior": "fan-in:8"}, {"draws": 500, "warmup": 200}),
        },
        "breast-cancer": {
            "svi": Fit({"prior": "fan-in:2"}, {"epochs": 2000, "lr": 0.02}),
            **dict.fromkeys(("laplace", "sgld", "nuts", "hmc", "chees", "map", "mle"), Fit({"prior": "fan-in:2"})),
            "sghmc": Fit({"prior": "fan-in:2"}, {"epochs": 10000, "lr": 0.003}),
        },
        "diabetes": {
            "svi": Fit({"prior": "fan-in:1"}, {"epochs": 2000, "lr": 0.02}),
            **dict.fromkeys(("laplace", "sgld", "nuts", "hmc", "chees", "map", "mle"), Fit({"prior": "fan-in:1"})),
            "sghmc": Fit({"prior": "fan-in:1"}, {"epochs": 10000, "lr": 0.003}),
        },
        "mnist": {
            "svi": Fit({"prior": "fan-in:4"}, {"epochs": 30, "batch_size": 512, "lr": 0.01}),
            **dict.fromkeys(("laplace", "sgld", "hmc", "chees", "map", "mle"), Fit({"prior": "fan-in:4"})),
            "sghmc": Fit(
                {"prior": "fan-in:4"}, {"epochs": 300, "batch_size": 512, "lr": 0.1, "friction": 0.03, "jitter": 0.1}
            ),
            "nuts": Fit({"prior": "fan-in:4"}, {"draws": 400, "warmup": 150, "jitter": 0.1}),
        },
    },
    "mlp": {
        "toy-curve": {"map": Fit({"hidden": (32,), "prior": "normal:3", "noise": 1.0}, {"epochs": 3000, "lr": 0.01})},
        "breast-cancer": {
            "map": Fit({"hidden": (5, 5), "activation": "tanh", "prior": "fan-in:2"}, {"epochs": 600, "lr": 0.02})
        },
        "diabetes": {"map": Fit({"hidden": (50,), "prior": "fan-in:1"}, {"epochs": 800, "lr": 0.02})},
        "digits": {"map": Fit({"hidden": (100,), "prior": "normal:1"}, {"epochs": 100, "batch_size": 64, "lr": 0.003})},
        "mnist": {
            "map": Fit({"hidden": (400, 400), "prior": "normal:1"}, {"epochs": 20, "batch_size": 128, "lr": 0.001})
        },
    },
    "convnet": {
        "digits": {
            **dict.fromkeys(
                ("map", "ensemble"),
                Fit(
                    {"channels": (16, 32), "hidden": (64,), "prior": "normal:1", "dropout": 0.3},
                    {"epochs": 60, "batch_size": 64, "lr": 0.003, "patience": 10},
                ),
            )
        },
        "mnist": {
            **dict.fromkeys(
                ("map", "ensemble"),
                Fit(
                    {"channels": (32, 64), "kernel": 5, "padding": 0, "prior": "normal:1"},
                    {"epochs": 12, "batch_size": 128, "lr": 0.001, "patience": 4},
                ),
            )
        },
    },
    "dropout-mlp": {
        "toy-curve": {
            **dict.fromkeys(
                ("mc-dropout", "map"),
                Fit(
                    {"hidden": (32,), "prior": "normal:3", "noise": 1.0, "input_dropout": 0.0, "hidden_dropout": 0.1},
                    {"epochs": 3000, "lr": 0.01},
                ),
            )
        },
        "breast-cancer": {
            **dict.fromkeys(
                ("mc-dropout", "map"),
                Fit(
                    {"hidden": (50, 50), "prior": "fan-in:2", "input_dropout": 0.0, "hidden_dropout": 0.2},
                    {"epochs": 500, "lr": 0.02},
                ),
            )
        },
        "diabetes": {
            **dict.fromkeys(
                ("mc-dropout", "map"),
                Fit(
                    {"hidden": (50,), "prior": "fan-in:1", "input_dropout": 0.0, "hidden_dropout": 0.1},
                    {"epochs": 800, "lr": 0.02},
                ),
            )
        },
        "digits": {
            **dict.fromkeys(
                ("mc-dropout", "map"),
                Fit(
                    {"hidden": (200, 200), "prior": "normal:1", "input_dropout": 0.1, "hidden_dropout": 0.3},
                    {"epochs": 60, "batch_size": 64, "lr": 0.003},
                ),
            )
        },
        "mnist": {
            **dict.fromkeys(
                ("mc-dropout", "map"),
                Fit(
                    {"hidden": (1024, 1024, 1024), "prior": "normal:1", "input_dropout": 0.2, "hidden_dropout": 0.5},
                    {"epochs": 40, "batch_size": 128, "lr": 0.001},
                ),
            )
        },
    },
}
for by_data in TUNED.values():
    if "mnist" in by_data:
        by_data["fashion-mnist"] = by_data["kmnist"] = by_data["mnist"]
