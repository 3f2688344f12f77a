"""Networks of one's own that are odd: what can be fitted is, and the rest is refused with the way out."""

import pytest
import torch
from own_networks import OUT, OUTPUTS, Wrong
from refused import refuses
from test_own_network import fit, rows
from torch import nn
from torch.nn.utils import prune

import bnn_pyro as bp
from bnn_pyro.inference.cost import multiplications
from bnn_pyro.posterior import read_archive

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("method", [bp.SVI(epochs=2, accumulate=40), bp.MAP(epochs=2, batch_size=1)])
def test_a_single_row_is_no_batch_to_normalise_by(method):
    net = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, OUT))
    refuses("a single row, .* larger batch_size, a smaller accumulate, or batch_norm='frozen'", fit, net, method)
    fit(bp.Bayesian(net, batch_norm="frozen"), method, data=rows(10))


def test_statistics_that_a_trunk_was_not_trained_with_are_said():
    net = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.BatchNorm1d(5).requires_grad_(False), nn.Linear(5, OUT))
    with pytest.warns(UserWarning, match="the weights of 2 stay, .* batch_norm='frozen'"):
        fit(net, bp.MAP(epochs=1))
    for how in ({"start": "pretrained"}, {"batch_norm": "frozen"}, {"batch_norm": "batch"}):
        fit(bp.Bayesian(net, **how), bp.MAP(epochs=1))


def test_priors_of_layers_are_given_by_patterns():
    refuses("of each layer, such as prior={'fc1.weight'", bp.Bayesian, nn.Linear(2, OUT), prior="ard:1,1/normal:1")
    entry = bp.Bayesian(nn.Linear(24, OUT), prior={"weight": "ard:1,1", "*": "normal:2"})
    priors = entry.model(bp.Schema("classification", (24,), classes=("a", "b", "c"))).prior()
    assert priors["weight"].groups == 24 and priors["bias"].scale == 2


def by_numpy(f, net):
    return torch.as_tensor(f.detach().numpy())


def of_another(f, net):
    return f.detach() * OTHER


OTHER = nn.Parameter(torch.ones(OUT))


@pytest.mark.parametrize("outputs", [by_numpy, of_another, torch.no_grad, torch.inference_mode])
def test_a_network_without_any_gradient_is_refused(monkeypatch, outputs):
    net = Wrong("outputs")
    if outputs in (by_numpy, of_another):
        monkeypatch.setitem(OUTPUTS, "outputs", outputs)
    else:
        monkeypatch.setattr(Wrong, "forward", outputs()(Wrong.forward))
    refuses("Wrong has no gradient .* torch.no_grad, .detach.. or numpy in its forward; leave these out", fit, net)


def test_a_parameter_without_a_gradient_is_named():
    net = Wrong("nothing")
    net.unused = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="no gradient along unused.weight, unused.bias:"):
        fit(net)


@torch.enable_grad()
def by_autograd(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


DERIVATIVES = {
    "autograd": by_autograd,
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "by row": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    "forward": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1].expand(-1, OUT),
}


class Slope(nn.Sequential):
    def forward(self, x):
        return DERIVATIVES[self.how](super().forward, x.flatten(1))[:, :OUT]


@pytest.mark.filterwarnings(
    "ignore:.*no gradient along 2.bias", "ignore:.*one draw after the other", "ignore::FutureWarning"
)
@pytest.mark.parametrize("how", DERIVATIVES)
def test_a_network_that_takes_derivatives_is_fitted_by_drawn_weights(how):
    net = Slope(nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 1))
    net.how = how
    assert set(fit(net).describe()["sampled"]) == {"weights"}


class Remembering(nn.Sequential):
    def get_extra_state(self):
        return {"state": 1}

    def set_extra_state(self, state):
        assert state == {"state": 1}


def test_state_that_is_no_tensor_stays_with_the_module(tmp_path):
    net, data = Remembering(nn.Flatten(), nn.Linear(24, OUT)), rows()
    posterior = fit(net, bp.SVI(epochs=3, patience=1), out=tmp_path)
    assert [*read_archive(tmp_path)[0].get("buffers", {})] == []
    here, there = (bp.predict(p, data.x_test, num_draws=3).probs for p in (posterior, bp.load(tmp_path, module=net)))
    assert torch.equal(here, there)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_layers_quantised_by_the_range_of_a_batch_are_refused():
    body = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(24, 5)), {nn.Linear}, dtype=torch.qint8)
    refuses("depend on the other rows of a batch", fit, nn.Sequential(nn.Flatten(), body, nn.Linear(5, OUT)))


@pytest.mark.parametrize("prior", [["normal:1"], torch.distributions.Normal(0, 1), {"*": ("normal:1",)}, None])
def test_a_prior_is_a_text(prior):
    refuses("a prior is a text, as 'normal:1', or {pattern: text}, not", bp.Bayesian, nn.Linear(1, 1), prior=prior)


class Ids(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 2), nn.Linear(48, OUT)

    def forward(self, x):
        return self.head(self.table(x).flatten(1))


def test_numbers_that_are_no_ids_are_refused():
    ids = torch.randint(9, (40, 24)).numpy()
    for x in (ids, (ids.astype(float),)):
        refuses(r"whole numbers in a tuple: bp.dataset\(\(ids,\), y\)", fit, Ids(), data=bp.dataset(x, rows().y_train))
    fit(Ids(), data=bp.dataset((ids,), rows().y_train))


def test_pruned_layers_are_refused_until_they_are_plain_ones():
    net = nn.Sequential(nn.Flatten(), prune.l1_unstructured(nn.Linear(24, OUT), "weight", 0.5))
    refuses(r"cannot be copied .*pruned layers after prune\.remove;", fit, net)
    prune.remove(net[1], "weight")
    fit(net)


@pytest.mark.parametrize("outputs", [lambda f, net: (f, f), lambda f, net: {"logits": f}])
def test_outputs_come_alone(monkeypatch, outputs):
    monkeypatch.setitem(OUTPUTS, "outputs", outputs)
    refuses(r"for the 3 classes; return the logits \(or the mean\) alone", fit, Wrong("outputs"))


def test_weights_that_are_not_finite_are_refused_though_outputs_are():
    net = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.Hardtanh(), nn.Linear(5, OUT))
    nn.init.constant_(net[1].bias, torch.inf)
    refuses("has weights or gives outputs that are not finite for training rows", fit, net)


class Masked(nn.Module):
    """In training mode it changes its inputs in place: a mask, by a coin ("seldom"), or to the same ("same")."""

    def __init__(self, how="mask", training=True):
        super().__init__()
        self.how, self.only_training, self.layer = how, training, nn.Linear(24, OUT)

    def forward(self, x):
        if self.training >= self.only_training:
            if self.how == "mask":
                nn.functional.dropout(x, 0.1, inplace=True)
            elif self.how == "same":
                x.clamp_(-1e6, 1e6)
            elif torch.rand(()) < 0.05:
                x.mul_(0.9)
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("method", [bp.SVI(epochs=40), bp.MAP(epochs=2, batch_size=9), "nuts"])
def test_inputs_changed_in_training_mode_alone_are_noticed_on_a_copy(method):
    table = rows()
    for data in (table, bp.dataset((table.x_train,), table.y_train), bp.dataset({"x": table.x_train}, table.y_train)):
        before = data.x_train.clone()
        refuses("Masked changes its inputs in place", fit, Masked(), method, data)
        assert torch.equal(data.x_train, before)
    if method != "nuts":  # what that one pass does not show changes a copy
        before = table.x_train.clone()
        for how in ("seldom", "same"):
            fit(Masked(how), bp.SVI(epochs=99, patience=0), table)
            assert torch.equal(table.x_train, before)


def test_the_network_that_looks_for_it_gets_copies():
    data = rows()
    before = data.x_train.clone()
    refuses("changes its inputs in place", fit, Wrong("in place"), data=data)
    with_norm = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, OUT))
    with_norm(data.x_train.clone())
    refuses("changes its inputs in place", fit, bp.Bayesian(with_norm, start="pretrained"), data=data)
    backbone = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, 5))
    fit(bp.LastLayer(backbone=backbone), data=data)
    assert torch.equal(data.x_train, before)


def test_a_network_that_loses_the_axis_of_a_single_row_is_refused(monkeypatch):
    monkeypatch.setitem(OUTPUTS, "outputs", lambda f, net: f.squeeze())
    refuses(r"Wrong gives outputs of shape \(3,\) for one row, .*take squeeze\(-1\)", fit, Wrong("outputs"))


def test_a_function_that_makes_a_module_is_given_to_bayesian():
    refuses(r"give bp.Bayesian\(function\)$", bp.fit, lambda schema: Masked(), rows(), progress=False)


class Packed(nn.LSTM):
    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [4] * len(x), True, enforce_sorted=False)
        return super().forward(packed)[1][0][-1]


class PackedGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, OUT, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [4] * len(x), True, enforce_sorted=False)
        return self.gru(packed)[1][-1]


@pytest.mark.filterwarnings("ignore:PackedGRU runs one draw after the other")
def test_members_of_an_ensemble_may_read_packed_sequences():
    assert multiplications(PackedGRU(), torch.zeros(1, 7, 6)) == 4 * 3 * OUT * (6 + OUT)
    assert fit(PackedGRU(), bp.Ensemble(members=2, epochs=2)).chains["gru.weight_ih_l0"].shape[0] == 2


class Counter(nn.Linear):
    def forward(self, x):
        self.calls += self.training
        return super().forward(x[:, 0])


def test_a_counter_of_calls_is_no_buffer_of_an_ensemble():
    net = Counter(6, OUT)
    net.register_buffer("calls", torch.tensor(0))
    refuses("training changes 'net.calls', .* or buffer of calls", fit, net, bp.Ensemble(members=2))
    del net.calls
    net.calls = 0
    fit(net, bp.Ensemble(members=2, epochs=2))


def test_draws_one_after_the_other_are_said_in_plain_words():
    with pytest.warns(UserWarning, match=r"one draw after the other, which is slower, .* for aten::[\w.]+\)$"):
        bp.predict(fit(Packed(6, OUT, batch_first=True)), rows().x_test)
