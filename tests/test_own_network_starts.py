"""Where fits of modules of the user's own start, what they leave on the module, and what a fit goes on with."""

import copy
import math
import pickle

import pytest
import torch
from refused import refuses
from torch import nn

import bnn_pyro as bp
from bnn_pyro.zoo.auto import set_up

pytestmark = pytest.mark.usefixtures("seeded")
SETTINGS = dict(seed=0, progress=False, device="cpu")


class Own(nn.Module):
    """Two parameters that no ``reset_parameters`` draws, and a scale that is constant."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 1))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return torch.tanh(x @ self.first) * self.scale @ self.last


class Kept(nn.Module):
    """Its passes leave a tensor on the module."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave, self.map = nn.Linear(2, 4), nn.Linear(4, 1), None

    def forward(self, x):
        self.map = torch.tanh(self.enter(x))
        return self.leave(self.map)


class Clamped(nn.Module):
    """Changes its inputs in place where they are large."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x.clamp_(-2, 2))


def data(num=60, **how):
    x = torch.randn(num, 2)
    return bp.dataset(x, torch.sin(2 * x[:, 0]), **how)


def test_members_differ_where_nothing_draws_the_weights_anew():
    members = bp.fit(Own(), data(), bp.Ensemble(members=3, epochs=5, cores=1), **SETTINGS).chains
    first, scale = members["first"][:, 0], members["scale"][:, 0]
    assert all(not torch.allclose(first[a], first[b], atol=0.3) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert torch.allclose(scale, torch.ones_like(scale), atol=0.3)
    chains = bp.fit(Own(), data(), bp.NUTS(start="members", chains=2, warmup=1, draws=1), **SETTINGS).chains
    assert not torch.allclose(chains["first"][0], chains["first"][1], atol=0.1)
    layer = nn.Linear(2, 1)
    layer.reset_parameters = lambda radius: None
    refuses(r"member 2 of 2.* reset_parameters\(\) of Linear, .* fails", bp.fit, layer, data(),
            bp.Ensemble(members=2, epochs=1, cores=1), **SETTINGS)  # fmt: skip


def test_a_start_has_the_statistics_and_frozen_weights_of_its_own_rows_and_module():
    def made():
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    one, other, few, more = made(), made(), data(), data(90)
    for net in (one, other):
        net[0].requires_grad_(False)
    method = bp.MAP(epochs=1, patience=0)
    before = bp.fit(one, few, method, **SETTINGS)
    after = bp.fit(other, more, method, start=before, **SETTINGS)
    assert len(after.model.statistics.rows) == len(more.x_train) > len(few.x_train)
    assert torch.equal(after.model.net[0].weight, other[0].weight)
    how = dict(prior="pretrained:1", batch_norm="frozen")
    before = bp.fit(bp.Bayesian(one, **how), few, method, **SETTINGS)
    after = bp.fit(bp.Bayesian(other, **how), few, method, start=before, **SETTINGS)
    assert torch.equal(after.model.prior()["3.weight"].mean, other[3].weight)
    tied = [nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 1)) for _ in range(2)]
    for net in tied:
        net[2].weight = net[0].weight.requires_grad_(False)  # frozen under both of its names
    after = bp.fit(tied[1], few, method, start=bp.fit(tied[0], few, method, **SETTINGS), **SETTINGS)
    assert torch.equal(after.model.net[0].weight, tied[1][0].weight)
    assert torch.equal(after.model.net[2].weight, tied[1][0].weight)


def test_a_start_is_of_the_same_network():
    first, second = (
        nn.Sequential(nn.Linear(2, k, bias=b), nn.Tanh(), nn.Linear(k, 1, bias=b)) for k, b in ((5, True), (7, False))
    )
    before = bp.fit(first, data(), bp.SVI(epochs=2), **SETTINGS)  # 21 weights, as the other
    refuses("weights of the same network; these have other shapes", bp.fit, second, data(), bp.SVI(epochs=2),
            start=before, **SETTINGS)  # fmt: skip


@pytest.mark.parametrize(("method", "word", "of_module", "of_chains"), [
    ("nuts", "prior", "initial", "prior"), ("nuts", "pretrained", "pretrained", "auto"),
    ("mile", "pretrained", "pretrained", "members"), ("sghmc", "members", "initial", "members"),
    ("map", "pretrained", "pretrained", None),
])  # fmt: skip
def test_a_word_for_the_start_goes_to_the_one_that_knows_it(method, word, of_module, of_chains):
    setup = set_up(bp.Bayesian(nn.Linear(2, 1)), method, data, settings={"start": word})
    assert (setup.entry.start, getattr(setup.method, "start", None)) == (of_module, of_chains)
    refuses("unknown start", set_up, bp.Bayesian(nn.Linear(2, 1)), method, data, settings={"start": "priro"})


def test_a_fit_with_other_weights_frozen_is_another(tmp_path):
    net, rows = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)), data()
    how = dict(out=tmp_path / "run", resume=True, **SETTINGS)
    bp.fit(net, rows, bp.SVI(epochs=2), **how)
    bp.fit(net, rows, bp.SVI(epochs=2), **how)
    net[0].requires_grad_(False)
    refuses("give out=", bp.fit, net, rows, bp.SVI(epochs=2), resume=True, **SETTINGS)
    refuses("or of another module", bp.fit, net, rows, bp.SVI(epochs=2), **how)


@pytest.mark.parametrize("method", [bp.SVI(epochs=2), bp.NUTS(chains=2, warmup=1, draws=2, cores=2)], ids=str)
def test_what_a_pass_leaves_on_a_module_is_not_kept(method):
    rows = data()
    posterior = bp.fit(Kept(), rows, method, **SETTINGS)
    prediction = bp.predict(posterior, rows.x_test)
    again = pickle.loads(pickle.dumps(copy.deepcopy(posterior)))
    assert torch.equal(bp.predict(again, rows.x_test).mean, prediction.mean)
    net = Kept()
    net(torch.ones(1, 2))
    refuses("attention maps, is to be None", bp.fit, net, data(), method, **SETTINGS)


def test_inputs_changed_in_place_where_they_are_large_are_noticed_and_stay():
    x = torch.rand(90, 2)
    x[20] = 30.0
    rows = bp.dataset(x, x[:, 0], split=0.0)
    before = rows.x_train.clone()
    refuses("Clamped changes its inputs in place", bp.fit, Clamped(), rows, bp.SVI(epochs=2), **SETTINGS)
    assert torch.equal(rows.x_train, before) and before.max() > 2


def test_a_sigmoid_of_several_labels_is_noticed():
    x = torch.randn(60, 2)
    labels = bp.dataset(x, (torch.stack([x[:, 0], x[:, 1], x.sum(1)], 1) > 0).long())
    assert labels.schema.task == "labels"
    with pytest.warns(UserWarning, match="look like probabilities"):
        bp.fit(nn.Sequential(nn.Linear(2, 3), nn.Sigmoid()), labels, bp.MAP(epochs=1), **SETTINGS)


@pytest.mark.parametrize("groups", [1, 2])
def test_units_of_a_transposed_convolution_have_its_inputs(groups):
    layer = nn.ConvTranspose1d(8, 4, 3, groups=groups)
    net = nn.Sequential(nn.Unflatten(1, (8, 1)), layer, nn.Flatten(), nn.Linear(12, 1))
    rows = bp.dataset(torch.randn(20, 8), torch.randn(20))
    for prior in ("fan-in:3", "pretrained:3"):
        model = bp.Bayesian(net, prior=prior).model(rows.schema)
        scale = model.prior()["1.weight"].stddev
        assert torch.allclose(scale, torch.tensor(3 / math.sqrt(8 / groups * 3)))
        assert torch.allclose(model.prior()["1.bias"].stddev, torch.tensor(3.0))


def test_provenance_has_the_rows_that_stopped_a_fit():
    rows = data(500, validation=300)
    stopped = bp.fit(nn.Linear(2, 1), rows, bp.SVI(epochs=2), **SETTINGS).provenance["early_stopping"]
    assert stopped["rows"] == 256 < len(rows.x_val)


class Products(nn.Module):
    """f = V (x W), once as products from the right and once by layers."""

    def __init__(self, layers=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 1, bias=False)) if layers else None
        if not layers:
            self.W, self.V = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(6, 1))

    def forward(self, x):
        return torch.matmul(x @ self.W, self.V) if self.layers is None else self.layers(x)


def test_weights_of_products_from_the_right_have_the_prior_of_layers():
    """The inputs of w in x @ w are on its first axis, where ``nn.Linear`` has the outputs."""
    schema = bp.dataset(torch.randn(20, 4), torch.randn(20)).schema
    priors = [bp.Bayesian(Products(layers)).model(schema).prior().values() for layers in (False, True)]
    scales = [[p.stddev.max().item() for p in each] for each in priors]
    assert scales[0] == scales[1] == pytest.approx([2 / 4**0.5, 2 / 6**0.5])
    refuses("not for 'W', whose outputs are not its first axis", bp.Bayesian(Products(), prior="ard:0.5").model, schema)
