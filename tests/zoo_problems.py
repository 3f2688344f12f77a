"""Small problems of every variant and task, methods that are quick on them, and log joints by hand."""

from functools import lru_cache, partial

import pyro.poutine as poutine
import pytest
import torch
from conjugate import dataset
from torch import nn
from torch.distributions import Normal

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import LogJoint

NUM, FEATURES = 12, 3
# Settings that make a method quick, whichever of them it has.
QUICK = dict(epochs=3, batch_size=5, lr=0.01, steps=3, warmup=3, draws=3, chains=2, members=2, max_steps=8, thin=1)
QUICK |= dict(max_tree_depth=3)
# Settings of a variant that belong to a task, whichever of them it has.
TASKS = {
    "fixed noise": ("regression", dict(noise=0.5)),
    "learned noise": ("regression", dict(noise="learned")),
    "heteroscedastic": ("regression", dict(noise="heteroscedastic")),
    "binary": ("classification", dict(classes=2)),
    "multiclass": ("classification", dict(classes=3)),
    "counts": ("counts", dict(likelihood="poisson")),
    "times": ("survival", dict(likelihood="weibull")),
}


def quick(method):
    # The noise of 5 rows is large; and where optimised members end, which chains would start from, noise has collapsed.
    settings = QUICK | ({"lr": 1e-3, "start": "jitter"} if method in ("sghmc", "sgld") else {})
    return bp.METHODS[method](**{k: v for k, v in settings.items() if k in bp.METHODS[method].__dataclass_fields__})


@lru_cache
def problem(name, task, proper=False):
    """(variant with small settings, data) for a task; ``proper``: with a prior that has samples."""
    (kind, settings), own = TASKS[task], bp.ZOO[name].__dataclass_fields__
    settings = dict(settings)
    classes = tuple("abc"[: settings.pop("classes", 0)])
    if not settings.keys() <= own.keys():
        pytest.skip(f"{name} has no {task}")
    small = {k: v for k, v in dict(hidden=(4,), channels=(2,), init_scale=0.01).items() if k in own}
    if proper and "prior" in own and bp.ZOO[name]().prior == "log-uniform":
        small["prior"] = "fan-in:1"
    shape = (1, 4, 4) if getattr(bp.ZOO[name], "images_only", False) else (FEATURES,)
    schema = bp.Schema(kind, shape, classes=classes, y_shift=0.0 if classes else 5.0, y_scale=1.0 if classes else 2.0)
    g = torch.Generator().manual_seed(8)
    x = torch.randn(NUM, *shape, generator=g)
    y = torch.arange(NUM) % len(classes) if classes else 5 + 2 * torch.randn(NUM, generator=g)
    y = y.round() if kind == "counts" else y
    y = y.abs().add(0.1) * torch.tensor([1, 1, -1]).repeat(NUM // 3) if kind == "survival" else y  # some are censored
    data = dataset(x, y, schema, x[:7] + 0.1, y[:7])
    if "backbone" in own:  # its backbone, trained for a moment
        small["backbone"] = bp.fit(bp.MLP(hidden=(4,)), data, quick("map"), seed=8, progress=False, device="cpu")
    if "module" in own:  # a function that makes one
        small["module"] = partial(own_network, 2 if settings.get("noise") == "heteroscedastic" else 1)
    return bp.ZOO[name](**small, **settings), data


def own_network(outputs, schema):
    outputs = {0: outputs, 2: 1}.get(len(schema.classes), len(schema.classes))
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, outputs))


def traced_log_joint(model, w, x, y, temperature=1.0):
    """log p(w) + log p(y | x, w)/T of one set of weights, term by term, by Pyro's trace."""
    nodes = poutine.trace(poutine.condition(model, data=w)).get_trace(x, y).nodes
    terms = {site: nodes[site]["fn"].log_prob(nodes[site]["value"]).double().sum() for site in (*w, "y")}
    return terms.pop("y") / temperature + sum(terms.values())


def check_log_joint(data, law, priors, offset=lambda x: 0.0, **settings):
    """Three chains of a linear network: ``law(f, w)`` is that of y, and ``priors`` those of the likelihood's own sites.

    Of all rows, of a mini-batch that stands for all, and of one of each chain's own. offset: what is added to f.
    """
    x, y, sites = data.x_train, data.y_train, ("layers.0.weight", "layers.0.bias")
    with bp.isolated(0):
        model = bp.MLP(**{"hidden": (), "prior": "normal:2", **settings}).model(data.schema)
        log_joint = LogJoint(model, x, y)
    noise = torch.randn(3, log_joint.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = log_joint.initial + 0.3 * noise

    priors = {**dict.fromkeys(sites, Normal(0.0, 2.0)), **priors}

    def expected(x, y, weight=1.0, u=u):
        total = []
        for w in [{site: value[s] for site, value in log_joint.sites(u).items()} for s in range(3)]:
            f = x[:, : w[sites[0]].shape[1]] @ w[sites[0]].T + w[sites[1]] + offset(x)
            likelihood = law(f, w).log_prob(y.double()).sum()
            total.append(weight * likelihood + sum(prior.log_prob(w[site]).sum() for site, prior in priors.items()))
        return torch.stack(total).double()

    torch.testing.assert_close(log_joint.log_density(u), expected(x, y), rtol=1e-5, atol=1e-3)
    each = tuple(part[:6].expand(3, *part[:6].shape) for part in (x, y))
    for rows in ((x[:6], y[:6]), each):
        found = sum(log_joint.terms(u, *rows))
        torch.testing.assert_close(found, expected(x[:6], y[:6], len(x) / 6), rtol=1e-5, atol=1e-3)
        place = u.clone().requires_grad_()
        (slope,) = torch.autograd.grad(expected(x[:6], y[:6], len(x) / 6, place).sum(), place)
        torch.testing.assert_close(log_joint.gradient(u, *rows)[1], slope, rtol=1e-4, atol=1e-3, check_dtype=False)
