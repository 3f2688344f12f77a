"""A network of one's own: each layer's draws as plain passes, parameters by name, batch norm, what is refused."""

import copy
import warnings
from functools import partial

import pyro.poutine as poutine
import pytest
import torch
from own_networks import LOOPED, NETS, OUT, Wrong, made
from refused import refuses
from torch import nn
from torch.distributions import Normal, kl_divergence

import bnn_pyro as bp
from bnn_pyro.parts.own_module import assign, select
from bnn_pyro.parts.own_start import FACTOR, BatchStatistics, variance_ratio
from bnn_pyro.parts.priors import parse_prior
from bnn_pyro.parts.weights import cut
from bnn_pyro.posterior import read_archive

pytestmark = pytest.mark.usefixtures("seeded")


def rows(num=40, classes=OUT, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num + 16, 4, 6, generator=g)
    y = (x[:, 0, 0] > 0).long() + (x[:, 0, 1] > 0.5).long() if classes else x[:, 0].sum(1)
    y = y.clamp_max(classes - 1) if classes else y
    schema = bp.Schema("classification" if classes else "regression", (4, 6), tuple("abcdef"[:classes]))
    parts = [part for at in (slice(num), slice(num, num + 6), slice(num + 6, None)) for part in (x[at], y[at])]
    return bp.Dataset("by-hand", schema, *parts)


def fit(entry, method=None, data=None, **settings):
    settings = {"seed": 1, "progress": False, "device": "cpu", **settings}
    return bp.fit(entry, data or rows(), method or bp.SVI(epochs=2, batch_size=10), **settings)


def exported(rows):
    net = nn.Sequential(nn.Flatten(), nn.Linear(24, OUT))
    return torch.export.export(net, (torch.zeros(rows, 4, 6),)).module()


def called_before():
    net = nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(24, OUT)))
    net(torch.ones(2, 4, 6))
    return net


def filled(value):
    net = made("linear")
    nn.init.constant_(net[0].weight, value)
    return net


def overwritten(net, draws, s):
    own = copy.deepcopy(net)
    own.load_state_dict({name: value[s] for name, value in draws.items()}, strict=False)
    return own


@pytest.mark.parametrize("name", NETS)
def test_draws_are_plain_passes_of_the_module_with_these_weights(name):
    net, data = made(name), rows()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        posterior = fit(bp.Bayesian(net, start="pretrained"))
        prediction = bp.predict(posterior, data.x_test, num_draws=5, seed=3)
    assert sum("one draw after the other" in str(w.message) for w in told) == (name in LOOPED)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())  # the user's is not touched
    drawn, names = posterior.draw(5, seed=3), [n for n, _ in net.named_parameters()]
    assert list(drawn) == [n.replace("_orig_mod.", "") for n in names]  # of what torch.compile wraps
    draws = dict(zip(names, drawn.values(), strict=True))
    for s in range(5):
        with torch.no_grad():
            f = overwritten(net, draws, s)(data.x_test).log_softmax(-1)
        torch.testing.assert_close(prediction.components.logits[s], f, rtol=1e-4, atol=1e-5)


NUTS = bp.NUTS(draws=4, warmup=4, chains=2)


@pytest.mark.parametrize("method", [bp.Ensemble(members=1, epochs=1, lr=1e-7), bp.SVI(epochs=1, lr=1e-7), NUTS])
def test_a_layer_of_two_names_keeps_its_weights(method):
    """Its draws come one after the other; around them a prior is narrow."""
    with bp.isolated(1):
        conv = nn.Conv1d(4, 4, 1)
        conv.register_forward_hook(lambda layer, _, f: setattr(layer, "last", f))  # with a graph, it cannot be copied
        net = nn.Sequential(conv, nn.Tanh(), conv, nn.Flatten(), nn.Linear(24, OUT))
    data = rows()
    posterior = fit(bp.Bayesian(net, start="pretrained", prior="pretrained:1e-5", init_scale=1e-5), method)
    expected = net(data.x_train).softmax(-1).detach()
    torch.testing.assert_close(bp.predict(posterior, data.x_train).mean, expected, rtol=1e-3, atol=1e-4)


def test_parameters_are_chosen_by_glob_path_class_or_regex():
    net = made("transformer")
    names = [n for n, _ in net.named_parameters()]
    assert select(net, "*", "where") == names
    assert select(net, "head", "where") == ["head.weight", "head.bias"]
    assert select(net, "head.bias | block.norm*", "where") == [n for n in names if "norm" in n or n == "head.bias"]
    assert select(net, "LayerNorm", "where") == [n for n in names if "norm" in n]
    assert select(net, r"re:.*\.bias", "where") == [n for n in names if n.endswith(".bias")]
    brackets = nn.ModuleDict({"x[0]": nn.Linear(1, 1), "x0": nn.Linear(1, 1)})
    assert select(brackets, "x[0].weight", "where") == ["x[0].weight"] and len(select(brackets, "x[0]*", "where")) == 2
    tied = made("embedding, tied")
    assert select(tied, "head.weight", "where") == ["table.weight"]
    prior = assign(net, {"head.*": "normal:2", "*": "fan-in:1"}, names, "prior")
    assert {n for n, text in prior.items() if text == "normal:2"} == {"head.weight", "head.bias"}
    for call, message in (
        (lambda: select(net, "haed", "where"), "unknown parameter in where 'haed'; did you mean 'head'"),
        (lambda: assign(net, {"head": "normal:1"}, names, "prior"), "prior has no pattern for 'block.*add one"),
        (lambda: select(net, "re:(", "where"), "no regular expression"),
    ):
        refuses(message, call)
    assert bp.Bayesian(net, where=(nn.Linear, "head")).where == "Linear|head"
    assert [*bp.Bayesian(net, prior={nn.Linear: "normal:1", "head": "normal:2"}).prior] == ["Linear", "head"]


def test_what_is_not_bayesian_is_trained_or_stays():
    net = made("conv1d")
    head, conv = {"3.weight", "3.bias"}, {"0.weight", "0.bias"}
    settings = dict(where="3", prior="pretrained:0.5", start="pretrained")
    for entry, trained in ((bp.Bayesian(net, **settings), True), (bp.Bayesian(net, frozen="0", **settings), False)):
        posterior = fit(entry, bp.SVI(epochs=4, batch_size=10, lr=0.05))
        draws = posterior.draw(4, seed=0)
        assert draws.keys() == (head | conv if trained else head)
        assert all(draws[n].std(0).min() > 0 for n in head)
        for n in conv if trained else ():
            assert (draws[n] == draws[n][0]).all() and not torch.equal(draws[n][0], net.get_parameter(n))
        if not trained:
            assert all(torch.equal(dict(posterior.model.net.named_buffers())[n], net.get_parameter(n)) for n in conv)
    still = copy.deepcopy(net)
    still[0].requires_grad_(False)
    assert fit(bp.Bayesian(still)).draw(2).keys() == head
    assert fit(bp.Bayesian(still, where="0|3")).draw(2).keys() == head | conv
    refuses("nuts needs a prior over all weights that can be sampled", fit, bp.Bayesian(net, where="3"), "nuts")


def test_priors_by_pattern_and_around_the_pretrained_weights():
    net = made("norms")
    entry = bp.Bayesian(net, prior={"4": "normal:2", "0.weight": "pretrained:0.1", "*": "fan-in:3"})
    model = entry.model(rows().schema)
    with bp.isolated(0):
        prior = model.prior()
        centred = [prior["0.weight"].sample() for _ in range(200)]
    assert prior["0.weight"].mean.equal(net[0].weight)
    assert prior["4.weight"].scale == 2 and prior["1.weight"].scale == pytest.approx(3 / 6**0.5)
    assert (prior["1.bias"].scale, parse_prior("fan-in:6")(torch.zeros(8, 4, 3, 3), 36).scale) == (3, 1)
    assert torch.stack(centred).mean(0).sub(1).abs().max() < 6 * 0.1 / 200**0.5
    late = bp.Bayesian(net, prior={"*": "fan-in:3", "4": "normal:2"})
    refuses("prior: patterns before '4' match all of its parameters", late.model, rows().schema)
    # The centre is a part of the model, not of the module that it is loaded with.
    model.load_state_dict({"centre": torch.full((6,), 7.0)}, strict=False)
    with bp.isolated(0), poutine.trace() as drawn:
        model(rows().x_train)
    assert drawn.trace.nodes["0.weight"]["fn"].mean.eq(7).all()


def test_a_description_has_what_each_site_has_learned():
    """By formulas from μ and σ; the KL of all sites is that of the ELBO, which one draw with its q also has."""
    prior = {"0.weight": "pretrained:0.5", "*": "normal:2"}
    entry = bp.Bayesian(made("linear"), where="0", frozen="3.bias", prior=prior)
    posterior = fit(entry, bp.SVI(epochs=4, batch_size=10, lr=0.1))
    table = posterior.describe().set_index("site")
    guide = posterior.guide.random
    loc, scale = (cut(value.detach(), guide.shapes) for value in (guide.loc, guide.scale))
    for site, centre, width in (("0.weight", made("linear")[0].weight.detach(), 0.5 / 6**0.5), ("0.bias", 0.0, 2.0)):
        kl = kl_divergence(Normal(loc[site], scale[site]), Normal(centre, width)).sum()
        assert table.loc[site, "KL"] == pytest.approx(kl.item(), rel=1e-4)
        assert table.loc[site, "σ/prior"] == pytest.approx((scale[site] / width).mean().item(), rel=0.2)
        ratio = (loc[site].abs() / scale[site]).median().item()
        assert table.loc[site, "|μ|/σ"] == pytest.approx(ratio, rel=0.3)
    assert table.loc["3.weight", ["KL", "σ/prior", "|μ|/σ"]].isna().all()
    assert table["sampled"].tolist() == ["flipout", "flipout", "point", "frozen"]
    assert list(table.index)[2:] == ["3.weight", "3.bias"]
    for family, method in (("full", bp.SVI(epochs=1)), ("mean-field", bp.SGHMC(epochs=2, chains=2))):
        posterior = fit(bp.Bayesian(made("linear"), family=family), method, device=torch.device("cpu"))
        assert set(posterior.describe()["sampled"]) == {"weights"}


def test_batch_statistics_are_those_of_each_draw_on_the_training_rows():
    """Predictions are those of the user's module in torch's training mode on all training rows and the new one."""
    net, data = made("batch norm"), rows(30)
    posterior = fit(bp.Bayesian(net), data=data)
    assert posterior.provenance["module"]["batch_norm"] == "batch"
    draws = posterior.draw(3, seed=2)
    found = bp.predict(posterior, data.x_test, num_draws=3, seed=2).components.logits
    for s in range(3):
        with torch.no_grad():
            own = overwritten(net, draws, s).train()
            own[1].reset_running_stats()
            own[1].momentum = 1.0
            own(data.x_train)
            own[1].running_var *= 1 - 1 / (30 * 4)  # torch keeps the unbiased one
            f = own.eval()(data.x_test).log_softmax(-1)
        torch.testing.assert_close(found[s], f, rtol=1e-4, atol=1e-5)
    passes = []
    posterior.model.statistics._probe[0].register_forward_pre_hook(lambda *_: passes.append(1))
    each = bp.predict(posterior, data.x_test, num_draws=3, seed=2, max_memory=1).components.logits  # row by row
    torch.testing.assert_close(each, found, rtol=1e-4, atol=1e-5)  # whatever rows come with it
    assert len(passes) == 1 + 3  # one that measures memory, one for each draw, and not for each row


def test_batch_statistics_are_saved_and_frozen_ones_stay(tmp_path):
    net, data = made("batch norm"), rows()
    net[1].running_mean.fill_(0.3)
    for how in ("batch", "frozen"):
        posterior = fit(bp.Bayesian(net, batch_norm=how), out=tmp_path / how)
        again = bp.load(tmp_path / how, module=made("batch norm"))
        assert ("statistics.rows" in read_archive(tmp_path / how)[0]["buffers"]) == (how == "batch")
        assert (posterior.model.net[1].running_mean == 0.3).all()
        here, there = (bp.predict(p, data.x_test, num_draws=3).components.logits for p in (posterior, again))
        assert torch.equal(here, there)
    one, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.weight = one.weight
    tied = BatchStatistics(net := nn.Sequential(one, other, nn.BatchNorm1d(4)))
    tied.take(data.x_train)
    found = tied(net, dict(net.named_parameters()))["2.running_mean"]
    torch.testing.assert_close(found, net[:2](data.x_train).mean((0, 2)))
    with pytest.raises(bp.UserError, match="normalises several times in one call"):
        norm = nn.BatchNorm1d(4)
        twice = BatchStatistics(net := nn.Sequential(norm, nn.Tanh(), norm))
        twice.take(data.x_train)
        twice(net, {n: p[None] for n, p in net.named_parameters()})


def test_a_deep_network_starts_with_the_variance_of_the_pass_at_its_means():
    with bp.isolated(3):
        layers = [part for _ in range(30) for part in (nn.Linear(24, 24), nn.ReLU())]
        deep = nn.Sequential(nn.Flatten(), *layers, nn.Linear(24, OUT))
        for part in layers[::2]:
            nn.init.kaiming_normal_(part.weight)
    data, facts = rows(), {}
    for scale, prior in ((None, "normal:1e-4"), (0.3, "normal:1"), (None, "normal:1")):
        entry = bp.Bayesian(deep, init_scale=scale, prior=prior)
        with bp.isolated(0):
            model = entry.model(data.schema)
            guide = entry.guide(model)
            facts[scale] = entry.prepare(model, guide, data)
            assert prior == "normal:1" or guide.scale.max() < 1.01e-4  # that of the prior at most
            assert variance_ratio(model, guide, data.x_train) == pytest.approx(facts[scale]["variance_ratio"], rel=1e-3)
    assert 1 / FACTOR <= facts[None]["variance_ratio"] <= FACTOR < facts[0.3]["variance_ratio"]


class Token(nn.Embedding):
    def forward(self, x):
        return nn.functional.embedding(x.long(), self.weight, self.padding_idx)[..., 0]


def test_bad_modules_are_told_in_one_line():
    padded = nn.ReLU(), Token(9, 2, padding_idx=0), nn.Flatten(), nn.Linear(24, OUT)
    fit(bp.Bayesian(nn.Sequential(*padded), where="3.*", frozen="*"))
    assert "0.bias" in bp.Bayesian(made("linear"), frozen="0.bias").model(rows().schema).still
    refuses(r"'0.bias' is in both where='0\.\*' and frozen='0.bias'", fit,
            bp.Bayesian(made("linear"), where="0.*", frozen="0.bias"))  # fmt: skip
    for module, sentence in (
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(OUT)), "is lazy and has no shape yet"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, OUT)).double(), "is torch.float64, and inputs are float32"),
        (called_before, r"torch.nn.utils.parametrizations.weight_norm and spectral_norm are copied, .* Only Tensors"),
        (lambda: nn.Flatten(), "Flatten has no parameters"),
        (lambda: nn.Linear(24, OUT, device="meta"), "'weight' of Linear is on the meta device and has no values"),
        (lambda: filled(torch.nan), "has weights or gives outputs that are not finite for training rows"),
        *((lambda rows=rows: exported(rows), r"any number of rows, .*dynamic_shapes=\({0: torch") for rows in (2, 3)),
        (lambda: nn.Linear(6, OUT), r"shape \(2, 4, 3\) for 2 rows; outputs must be floats of shape \(2, 3\)"),
        *((partial(Wrong, how), "'_others' of Wrong .* not registered") for how in ("nested", "plain", "unregistered")),
        *((partial(Wrong, how), f"the parameter '{how}' has the name of another site") for how in ("y", "data")),
        (lambda: Wrong("empty"), "parameter 'empty' of Wrong has no numbers"),
        (lambda: Wrong("whole"), "gives a torch.int64 for 2 rows; outputs must be floats"),
        (lambda: Wrong("checkpoint"), "no gradient by other weights .* checkpoints of activations"),
        (lambda: Wrong("training"), r"Wrong gives tuple in training mode, and outputs of shape \(40, 3\) out of it"),
        (lambda: Wrong("fails in training"), "Wrong fails in training mode: shape"),
        (lambda: Wrong("bounded"), r"changes its own 'layer\.weight' in a forward pass"),
        (lambda: Wrong("in place"), "changes its inputs in place"),
        *((partial(Wrong, how), "other outputs for the same inputs") for how in ("random", "remembers")),
        *((partial(Wrong, how), "depend on the other rows .*batch_first=True") for how in ("rows", "earlier rows")),
        (lambda: Wrong("weights"), r"changes its own 'layer\.weight' out of training mode"),
        (lambda: nn.Sequential(*padded), "^F.embedding with padding_idx alters .* or freeze the weight"),
        (lambda: Wrong("nan"), "Wrong has weights or gives outputs that are not finite"),
        (lambda: Wrong("buffer"), "changes its own 'seen' out of training mode"),
        (lambda: nn.Linear(5, OUT), r"does not take inputs of shape \(2, 4, 6\): .*mat1 and mat2"),
        (lambda: 3, "a module is a torch.nn.Module, or package.module:function, not 3"),
        (lambda: "own_networks:nonsense", "there is no own_networks:nonsense: .*no attribute"),
        (lambda: "own_networks.pt", "no package.module:function, nor a network.s file"),
    ):
        refuses(sentence, lambda make: fit(bp.Bayesian(make())), module)
    whole = torch.arange(960).reshape(40, 4, 6)
    words = r"shape {'0': \(2, 4, 6\)} \(whole numbers, in '0', stay .* nn.Embedding; .*X.astype\(float\)\): mat1"
    refuses(words, lambda: fit(bp.Bayesian(made("linear")), data=bp.dataset((whole,), rows().y_train)))


@pytest.mark.parametrize("classes", [2, OUT])
def test_outputs_that_are_probabilities_are_noticed(classes):
    last = nn.Sigmoid() if classes == 2 else nn.Softmax(-1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(24, 1 if classes == 2 else OUT), last)
    with pytest.warns(UserWarning, match="look like probabilities, and must be logits"):
        fit(nn.DataParallel(net), data=rows(classes=classes))
    fit(net[:2], data=rows(classes=classes))  # a warning would be an error
