"""Layers that stay as they are are computed once for a row: the head on features is the network, whatever its form."""

import pytest
import torch
from torch import Tensor, nn

import bnn_pyro as bp
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.frozen_layers import without_frozen_layers
from bnn_pyro.parts.nets import in_mode, with_weights
from bnn_pyro.parts.own_module import norm_layers


class Net(nn.Module):
    """Parts by name, and a forward of its own."""

    def __init__(self, forward, **parts: nn.Module) -> None:
        super().__init__()
        self.formula = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *x: Tensor) -> Tensor:
        return self.formula(self, *x)


def conv_body() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2))


def by_ids(net: Net, ids: Tensor) -> Tensor:
    kept = (ids != 0).float()[..., None]
    return net.head((net.table(ids) * kept).sum(1) / kept.sum(1).clamp_min(1))


def without_gradient(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.body(x)
    return net.head(h + net.still(x))


def for_few(net: Net, x: Tensor) -> Tensor:
    h, s, few = net.body(x), net.rare(x), x[:, 3] > 0.4  # none of the first seven, by which layers are found
    return net.head(torch.where(few[:, None], s, h) if few.any() else h)


def by_experts(net: Net, x: Tensor) -> Tensor:
    h, first = x.new_zeros(len(x), 4), x[:, 0] < 0.6
    for expert, rows in ((net.a, first), (net.b, ~first)):
        h[rows] = expert(x[rows])
    return net.head(h)


IMAGES, NUMBERS, IDS = torch.zeros(1, 4, 4), torch.zeros(6), torch.zeros(5, dtype=torch.int64)
#: {case: (network, one input, where, what the features are)}.
CASES = {
    "body and head": (lambda: nn.Sequential(conv_body(), nn.Flatten(), nn.Linear(12, 3)), IMAGES, "2", ("1",)),
    "in place after the body": (
        lambda: Net(lambda n, x: n.head(n.body(x).add_(1.0).flatten(1)), body=conv_body(), head=nn.Linear(12, 3)),
        IMAGES, "head", ("body",),
    ),
    "a residual connection": (
        lambda: Net(lambda n, x: n.head(x + n.body(x)), body=nn.Linear(6, 6), head=nn.Linear(6, 3)),
        NUMBERS, "head", ("body", ""),
    ),
    "a layer called twice": (
        lambda: Net(lambda n, x: n.head(n.body(n.body(x).tanh())), body=nn.Linear(6, 6), head=nn.Linear(6, 3)),
        NUMBERS, "head", None,
    ),
    "a mask of the ids": (
        lambda: Net(by_ids, table=nn.Embedding(7, 4), head=nn.Linear(4, 3)), IDS, "head", ("table", ""),
    ),
    "padding": (
        lambda: Net(lambda n, ids: n.head(n.table(ids).mean(1)), table=nn.Embedding(7, 4, padding_idx=0),
                    head=nn.Linear(4, 3)), IDS, "head", ("table",),
    ),
    "two branches": (
        lambda: Net(lambda n, x: n.head(torch.cat([n.left(x), n.right(x)], -1)), left=nn.Linear(6, 2),
                    right=nn.Sequential(nn.Linear(6, 4), nn.ReLU()), head=nn.Linear(6, 3)),
        NUMBERS, "head", ("left", "right"),
    ),
    "compared, not multiplied": (
        lambda: Net(lambda n, x: n.head(torch.where(n.gate(x) > 0, n.body(x), 0.0)), gate=nn.Linear(6, 4),
                    body=nn.Linear(6, 4), head=nn.Linear(4, 3)), NUMBERS, "head", ("gate", "body"),
    ),
    "a branch on values": (
        lambda: Net(lambda n, x: n.head(n.body(x) * (1.0 if n.gate(x).square().sum() > 0 else 0.0)),
                    gate=nn.Linear(6, 4), body=nn.Linear(6, 4), head=nn.Linear(4, 3)),
        NUMBERS, "head", ("body", "gate"),
    ),
    "dropout in the body": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)), nn.Linear(4, 3)), NUMBERS, "1", ("0.0",),
    ),
    "weights without a gradient": (
        lambda: Net(without_gradient, body=nn.Linear(6, 4), still=nn.Linear(6, 4), head=nn.Linear(4, 3)),
        NUMBERS, "head|body", None,
    ),
    "a layer for few rows": (
        lambda: Net(for_few, body=nn.Linear(6, 4), rare=nn.Linear(6, 4), head=nn.Linear(4, 3)), NUMBERS, "head", None,
    ),
    "rows in another order": (
        lambda: Net(lambda n, x: n.head(n.body(x[(o := x[:, 0].argsort())])[o.argsort()]), body=nn.Linear(6, 4),
                    head=nn.Linear(4, 3)), NUMBERS, "head", None,
    ),
    "experts of a part of the rows": (
        lambda: Net(by_experts, a=nn.Linear(6, 4), b=nn.Linear(6, 4), head=nn.Linear(4, 3)), NUMBERS, "head", None,
    ),
    "time first": (
        lambda: Net(lambda n, x: n.head(n.body(x.reshape(-1, 6, 1).transpose(0, 1)).tanh().mean(0)),
                    body=nn.Linear(1, 4), head=nn.Linear(4, 3)), NUMBERS, "head", None,
    ),
    "a transformer": (
        lambda: Net(lambda n, x: n.head(n.body(n.enter(x.reshape(-1, 3, 2))).mean(1)), enter=nn.Linear(2, 4),
                    body=nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0), 2),
                    head=nn.Linear(4, 3)), NUMBERS, "head", ("body",),
    ),
    "first layers of a body": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        NUMBERS, "2|4", ("1",),
    ),
    "no layer stays": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), NUMBERS, "*", None),
}  # fmt: skip


def classes_of(row: Tensor, num: int = 40) -> bp.datasets.Dataset:
    """Three classes at random, of inputs like this one."""
    generator = torch.Generator().manual_seed(1)
    shape, y = (num, *row.shape), torch.randint(3, (num,), generator=generator)
    if row.dtype == torch.int64:
        return bp.dataset((torch.randint(7, shape, generator=generator).numpy(),), y.numpy(), split=0.2)
    return bp.dataset(torch.rand(shape, generator=generator).numpy(), y.numpy(), split=0.2)


def made(case: str, **how):
    make, row, where, used = CASES[case]
    with isolated(2):
        entry = bp.Bayesian(make(), where=where, frozen="*", batch_norm="frozen" if row is IMAGES else None, **how)
    return entry, classes_of(row), used


@pytest.mark.parametrize("case", CASES)
def test_the_head_on_features_is_the_network(case):
    entry, data, used = made(case)
    model = entry.model(data.schema)
    split = without_frozen_layers(model, data.x_train, data.x_test, training=True)
    assert (split is None) == (used is None)
    if split is None:
        return
    head, (_, z) = split
    assert head.net._plan.used == used and dict(head.net.named_parameters()).keys() == model.initial.keys()
    for training in (False, True):
        for seed in (3, 4):  # at weights far from its own
            with isolated(seed):
                w = {name: torch.randn_like(value) for name, value in model.initial.items()}
            norms = norm_layers(model.net).values()
            with in_mode(model, head, training=training), in_mode(*norms, training=False), torch.no_grad():
                kept, outputs = z.clone(), []
                for net, x in ((model.net, data.x_test.clone()), (head.net, z)):
                    with isolated(5):  # of dropout's masks
                        outputs.append(with_weights(net, w, x))
            torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
            assert torch.equal(z, kept)  # which no layer has changed in place


def test_fit_and_prediction_are_those_of_the_whole_network(monkeypatch):
    """By SVI, a point, HMC and draws of the prior: with the layers computed once, and in every pass."""
    entry, data, _ = made("body and head")
    methods = [bp.SVI(epochs=30), bp.MAP(epochs=30), bp.HMC(chains=2, warmup=1, draws=2)]
    results = []
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr("bnn_pyro.parts.frozen_layers.without_frozen_layers", lambda *_, **__: None)
        posteriors = [bp.fit(entry, data, method, seed=1, progress=False) for method in methods]
        posteriors.append(bp.prior(entry, data, num_draws=20, seed=1))
        results.append([bp.predict(p, data.x_test, num_draws=10, seed=2).probs for p in posteriors])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        assert a.std() > 1e-3


def test_a_fit_passes_frozen_layers_once(monkeypatch):
    entry, data, _ = made("body and head")
    passes, counts, before = [], [], nn.Conv2d.forward
    monkeypatch.setattr(nn.Conv2d, "forward", lambda layer, x: passes.append(len(x)) or before(layer, x))
    for epochs in (2, 40):
        passes.clear()
        posterior = bp.fit(entry, data, bp.SVI(epochs=epochs), seed=1, progress=False)
        counts.append(len(passes))
    assert counts[0] == counts[1]
    passes.clear()
    bp.predict(posterior, data.x_test, num_draws=50)
    assert sum(passes) < 10 * len(data.x_test)  # for 50 draws
