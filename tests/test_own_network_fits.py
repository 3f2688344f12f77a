"""Networks of one's own, fitted: as the zoo's of the same layers, by samplers, of several inputs; saved, resumed."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import interrupted
from own_networks import convnet
from refused import refuses
from run_folders import reseal
from test_own_network import fit, rows
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm

import bnn_pyro as bp
from bnn_pyro.parts import nets
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.posterior import read_archive
from bnn_pyro.settings import plain

pytestmark = pytest.mark.usefixtures("seeded")
SMALL = dict(prior="normal:1", noise=0.5, init_scale=1e-3)
REGRESSION = correlated(20).data


def own_layers(schema):
    return nets.MLP(schema.input_shape, (4,), 1, "tanh")


METHODS = {
    "svi": bp.SVI(epochs=30, batch_size=7, lr=0.02, lr_warmup=9, clip=3.0, patience=0),
    "nuts": bp.NUTS(draws=3, warmup=3, chains=2, compiled="no", max_tree_depth=3),
    "sghmc": bp.SGHMC(start="jitter", epochs=6, batch_size=5, chains=2, lr=1e-3),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_module_of_the_packages_layers_is_the_zoos_variant_bit_for_bit(method):
    zoo = fit(bp.MeanField(hidden=(4,), activation="tanh", **SMALL), METHODS[method], REGRESSION)
    torch.set_default_dtype(torch.float64)  # as in a user's script
    try:
        with torch.inference_mode():
            data = replace(REGRESSION, x_train=REGRESSION.x_train.clone())
            own = fit(bp.Bayesian(own_layers, sampling="weights", **SMALL), METHODS[method], data)
    finally:
        torch.set_default_dtype(torch.float32)
    here, there = (posterior.draw(3, seed=5) for posterior in (own, zoo))
    assert here.keys() == there.keys() and all(torch.equal(here[site], there[site]) for site in there)


def test_a_network_that_is_not_defined_at_weights_of_0_is_fitted_and_predicts():
    net = nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(24, 5)), nn.Tanh(), nn.Linear(5, 3))
    assert bp.predict(fit(net, bp.SVI(epochs=2), data=rows()), rows().x_test, num_draws=3).probs.isfinite().all()


def test_an_archive_is_loaded_with_the_users_module_and_differences_are_named(tmp_path):
    net, data = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 3)), rows()
    posterior = fit(bp.Bayesian(net, where="3", prior="pretrained:0.3", start="pretrained"), out=tmp_path)
    other = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 3))
    for module in (net, other, lambda: other):
        again = bp.load(tmp_path, module=module)
        here, there = (bp.predict(p, data.x_test, num_draws=3) for p in (posterior, again))
        assert torch.equal(here.components.logits, there.components.logits)
        assert torch.equal(again.model.centre, posterior.model.centre)
    another = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, 3))
    for module in (another, lambda: another):
        with pytest.warns(UserWarning, match="the module prints other layers"):
            bp.load(tmp_path, module=module)
    wrong = nn.Sequential(nn.Flatten(), nn.Linear(24, 6, bias=False), nn.Tanh(), nn.Linear(6, 3))
    named = r"missing: 1.bias; of another shape: 1.weight \(6, 24\), not \(5, 24\), 3.weight \(3, 6\), not \(3, 5\)"
    refuses(named, bp.load, tmp_path, module=wrong)
    refuses(r"a module of your own \(Sequential\).*load\(folder, module=…\)", bp.load, tmp_path)
    fit(bp.MLP(hidden=(3,)), bp.MAP(epochs=2), out=tmp_path / "mlp")
    refuses("is not of a module of your own", bp.load, tmp_path / "mlp", module=net)
    text = (tmp_path / "posterior.json").read_text()
    assert json.loads(text)["provenance"]["entry"] == "my-network" and "Sequential" in text


def test_a_function_of_other_layers_resumes_no_fit(tmp_path):
    """Those of before, whose key and facts say nothing of layers, still do, and load without a warning."""
    act, method = nn.Tanh, METHODS["svi"]
    how = bp.Bayesian(lambda: nn.Sequential(nn.Linear(4, 3), act(), nn.Linear(3, 1))), method, REGRESSION
    with interrupted(5):
        fit(*how, out=tmp_path)
    for words in ("or another module", "or of another module"):  # of a checkpoint, and of a finished fit
        act = nn.ReLU
        refuses(words, fit, *how, out=tmp_path, resume=True)
        act = nn.Tanh
        fit(*how, out=tmp_path, resume=True)
    about = json.loads((tmp_path / "posterior.json").read_text())["provenance"]
    del about["module"]["layers"], about["key"][1]["module_layers"]
    reseal(tmp_path, provenance=about)
    act = nn.ReLU
    fit(*how, out=tmp_path, resume=True)


def test_a_resumed_fit_is_the_same_and_other_weights_are_another_fit(tmp_path):
    with bp.isolated(7):
        net = convnet()
    how = net, bp.SVI(epochs=3, batch_size=50), bp.load_data("digits", limit=100)
    whole, again = fit(*how, out=tmp_path), fit(*how, out=tmp_path, resume=True)
    assert torch.equal(whole.guide.loc, again.guide.loc) and again.provenance["module"]["batch_norm"] == "batch"
    with torch.no_grad():
        net[2].weight.add_(1)
    refuses("finished posterior of other settings", fit, *how, out=tmp_path, resume=True)
    json.dumps(plain(bp.Bayesian(net)))


@dataclass(frozen=True)
class Own:
    normalised: bool = True

    summary: ClassVar[str] = "a network of one's own"
    paper: ClassVar[str] = "none"
    has: ClassVar[frozenset] = frozenset({"guide", "weights", "proper prior", "deterministic"})
    fits: ClassVar[dict] = {}

    def model(self, schema):
        norm = nn.BatchNorm1d(5) if self.normalised else nn.Identity()
        net = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), norm, nn.Tanh(), nn.Linear(5, 3))
        return BayesianNet(net, make_likelihood(schema), "normal:1")

    def guide(self, model):
        return MeanFieldNormal(model.initial, 0.05)


@pytest.mark.parametrize("method", ["svi", "sghmc"])
def test_statistics_of_a_variant_of_ones_own_are_kept_with_the_posterior(tmp_path, method):
    """Samplers run out of training mode; archives of before had none, and there are none without buffers."""
    posterior = fit(Own(), METHODS[method], out=tmp_path)
    assert (method == "sghmc") == bool((posterior.model.net[2].running_mean == 0).all())
    before, after = (bp.predict(p, rows().x_test, num_draws=4) for p in (posterior, bp.load(tmp_path, Own())))
    assert torch.equal(before.components.logits, after.components.logits)
    archive, _ = read_archive(tmp_path)
    torch.save({k: v for k, v in archive.items() if k != "buffers"}, tmp_path / "posterior.pt")
    reseal(tmp_path)
    assert (bp.load(tmp_path, Own()).model.net[2].running_mean == 0).all()
    fit(Own(normalised=False), METHODS[method], out=tmp_path / "plain")
    assert "buffers" not in read_archive(tmp_path / "plain")[0]
    refuses("layer or group normalisation, not batch", fit, Own(), bp.Ensemble(members=2, epochs=3))


def test_an_interrupted_fit_goes_on_with_its_batch_statistics(tmp_path):
    method = bp.MAP(epochs=8, batch_size=10, patience=3)
    whole = fit(Own(), method).model.net.state_dict()
    with interrupted(10):
        fit(Own(), method, out=tmp_path)
    resumed = fit(Own(), method, out=tmp_path, resume=True).model.net.state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_run_of_ones_own_module(tmp_path, monkeypatch, command, no_figures):
    monkeypatch.syspath_prepend(tmp_path)
    layers = "nn.Flatten(), nn.Linear(n, len(schema.classes))"
    code = f"from torch import nn\ndef small(n=64, schema=None):\n    return nn.Sequential({layers})\n"
    (tmp_path / "mynets.py").write_text(code)
    out, own = tmp_path / "run", ["--module", "mynets:small"]
    train = ["train", "my-network", "--data", "digits", "--limit", 120, "--epochs", 2, "--num-draws", 3, "--out", out]
    assert "needs a prior" in command(*train[:6], *own, "--inference", "nuts", "--set", "where=1.weight", code=2)
    command(*train, *own, "--prior", "fan-in:2")
    config = json.loads((out / "config.json").read_text())
    assert config["variant_settings"]["module"] == "mynets:small" and config["variant_settings"]["prior"] == "fan-in:2"
    report, sites = ((out / name).read_text() for name in ("report.html", "sites.json"))
    shares = [int(site["KL, nats"].split("(")[1].rstrip("%)")) for site in json.loads(sites)["sites"]]
    assert "variance ratio" in report and "<td>10×64</td>" in report and len(shares) == 2 and abs(sum(shares) - 100) < 2
    # Nothing is imported that was not asked for.
    assert "on the command line --module mynets:small" in command("evaluate", out, code=2)
    command("evaluate", out, *own)
    assert "there is no module: give bp.Bayesian(module)" in command(*train, "--overwrite", code=2)
    (tmp_path / "others.py").write_text(code.replace("nn.Flatten()", "nn.Flatten(), nn.Linear(n, n)"))
    other = ["--module", "others:small"]
    command(*train[:-1], tmp_path / "other", *other)
    for given in ([], own):
        said = command("compare", out, tmp_path / "other", *given, code=2)
        assert "of 2 modules: --module mynets:small,others:small gives that of each" in said
    command("compare", out, tmp_path / "other", *own, *other)


def test_an_exported_module_is_fitted_and_loaded_without_its_code(tmp_path, command, no_figures):
    data, file = bp.load_data("digits", limit=60), str(tmp_path / "net.pt2")
    with bp.isolated(1):
        net = nn.Sequential(nn.Conv2d(1, 2, 5), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 10)).eval()
    rows = {0: torch.export.Dim("rows", min=1)}
    torch.export.save(torch.export.export(net, (torch.zeros(4, 1, 8, 8),), dynamic_shapes=(rows,)), file)
    posterior = bp.fit(bp.Bayesian(file, start="pretrained"), data, bp.SVI(epochs=1, patience=0), seed=0)
    posterior.save(tmp_path / "own")
    mean = bp.predict(posterior, data.x_test, num_draws=2, seed=1).mean
    for module in (file, net):
        again = bp.load(tmp_path / "own", module=module)
        torch.testing.assert_close(bp.predict(again, data.x_test, num_draws=2, seed=1).mean, mean)
    train, out = ["train", "my-network", "--data", "digits", "--limit", 60, "--epochs", 1], tmp_path / "run"
    command(*train, "--num-draws", 2, "--out", out, "--module", file)
    command("evaluate", out, "--module", file)
    assert "no.pt2" in command("evaluate", out, "--module", tmp_path / "no.pt2", code=2).splitlines()[-1]


# -- several inputs -------------------------------------------------------------------------------------------------
RNG = np.random.default_rng(0)
NUM = 60
IMAGE, META = RNG.normal(5, 2, (NUM, 1, 3, 3)).astype(np.float32), RNG.normal(size=(NUM, 2)).astype(np.float32)
WORDS = RNG.integers(1, 8, (NUM, 4))
Y = META[:, 0] + IMAGE[:, 0, 0, 0] + 0.1 * RNG.normal(size=NUM)


class Two(nn.Linear):
    def forward(self, image, meta):
        return super().forward(torch.cat([image.flatten(1), meta], 1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 3), nn.Linear(5, 1)

    def forward(self, words, meta):
        assert words.dtype == torch.int64 and words.shape[1:] == (4,)
        f = self.head(torch.cat([self.words(words - 1).mean(1), meta], 1))
        return f + 0 * self.head.bias if words.max() > 1 else f


def test_two_inputs_are_fitted_as_one_that_joins_them():
    one, two = nn.Linear(11, 1), Two(11, 1)
    two.load_state_dict(one.state_dict())
    joined = np.concatenate([IMAGE.reshape(NUM, -1), META], 1)
    method = bp.SVI(epochs=5)
    parts = joined[:, :9], META
    sets = bp.dataset(joined, Y), bp.dataset(parts, Y), bp.dataset({"meta": META, "image": parts[0]}, Y)
    assert torch.equal(sets[0].x_train, sets[1].x_train)
    first, second = (bp.fit(bp.Bayesian(net), data, method) for net, data in zip((one, two), sets, strict=False))
    for site, draws in first.draw(4, seed=0).items():
        assert torch.equal(draws, second.draw(4, seed=0)[site])
    by_name = bp.fit(bp.Bayesian(two), sets[2], method)
    x = sets[2].schema.unstandardise(sets[2].x_test)
    given = {"image": x[:, 2:].numpy(), "meta": x[:, :2].numpy()}  # in another order
    torch.testing.assert_close(bp.predict(by_name, given).mean, bp.predict(by_name, sets[2].x_test).mean)


def test_whole_numbers_reach_an_embedding_as_they_are(tmp_path):
    data = bp.dataset({"words": WORDS, "meta": META}, Y, task="regression")
    pixels = bp.dataset({"image": IMAGE.astype(np.uint8), "meta": META}, Y, task="regression")
    assert pixels.schema.x_scale[0] != 1 and not pixels.schema.input_parts[0].is_whole
    assert data.schema.x_scale[:4] == (1.0,) * 4
    net = Words()
    posterior = bp.fit(bp.Bayesian(net), data, bp.SVI(epochs=3))
    prediction, draws = bp.predict(posterior, data.x_test, num_draws=5), posterior.draw(5, seed=0)
    words, meta = data.x_test[:, :4].long(), data.x_test[:, 4:]
    for s in range(5):  # plain passes of the user's own module
        plain = functional_call(net, {name: value[s] for name, value in draws.items()}, (words, meta)).squeeze(-1)
        expected = data.schema.y_shift + data.schema.y_scale * plain
        torch.testing.assert_close(prediction.components.loc[s], expected, rtol=1e-4, atol=1e-4)
    posterior.save(tmp_path / "posterior")
    loaded = bp.load(tmp_path / "posterior", module=Words())
    again = bp.predict(loaded, {"words": WORDS[:3], "meta": META[:3]}, num_draws=5)
    same = bp.predict(posterior, {"meta": META[:3], "words": WORDS[:3]}, num_draws=5)
    assert torch.equal(again.components.loc, same.components.loc)
    assert [*loaded.describe()["sampled"]] == [*posterior.describe()["sampled"]] == ["weights", "rows", "weights"]


class Masked(nn.Linear):
    def forward(self, x, mask, weight):
        return super().forward((x * weight).masked_fill(mask, 0.0)) + float(mask.dtype != torch.bool)


def test_masks_reach_the_module_as_they_are():
    mask, weight = WORDS % 2 == 0, np.float32(WORDS > 3)
    given = {"x": np.float32(WORDS), "mask": mask, "weight": weight}
    data = bp.dataset(given, Y, task="regression")
    posterior = bp.fit(bp.Bayesian(Masked(4, 1)), data, bp.SVI(epochs=2))
    draws, schema = posterior.draw(5, seed=0), bp.Schema.from_dict(json.loads(json.dumps(data.schema.to_dict())))
    assert schema == data.schema
    x = (torch.tensor(given["x"]) - torch.tensor(schema.x_shift[:4])) / torch.tensor(schema.x_scale[:4])
    x = torch.where(torch.tensor(mask), 0.0, x * torch.tensor(weight))
    plain = torch.einsum("noi,bi->nbo", draws["weight"], x)[..., 0] + draws["bias"]
    prediction = bp.predict(posterior, given, num_draws=5)
    torch.testing.assert_close(prediction.components.loc, schema.y_shift + schema.y_scale * plain, rtol=1e-4, atol=1e-4)
    refuses(r"X\['mask'\] must be true or false", bp.predict, posterior, {**given, "mask": 2 * WORDS})


GAP = np.where(np.arange(NUM)[:, None] == 2, np.float32("nan"), META)


def test_inputs_that_cannot_be_fitted_and_new_rows_that_training_did_not_have_are_refused():
    def fitted(x):
        return bp.fit(bp.Bayesian(Words()), bp.dataset(x, Y), bp.SVI(epochs=1))

    for x, words in (
        ({"words": WORDS[:9], "meta": META}, r"different numbers of rows \('words' 9, 'meta' 60\)"),
        ({"words": WORDS.astype(str), "meta": META}, r"X\['words'\] is no array of numbers"),
        ({"words": WORDS + 2**25, "meta": META}, r"X\['words'\] has whole numbers above 2\^24"),
        (({"words": WORDS}, META), r"X\['0'\] is no array of numbers"),
        ({"words": WORDS + 7, "meta": META}, "index that it has not.*none of its 7 numbers"),
        ({"words": WORDS[:, :2], "meta": META}, r"'words': \(2, 2\)"),
    ):
        refuses(words, fitted, x)
    posterior = fitted({"words": WORDS, "meta": META})
    for x, words in (
        ({"meta": META}, r"X has the inputs 'meta' \(N, 2\); this model takes 'words' \(N, 4\)"),
        ({"words": WORDS, "meta": GAP}, r"X\[2, 4\] is nan|x\[2, 4\] is nan"),
        ({"words": WORDS + 0.5, "meta": META}, r"X\['words'\] must be whole numbers"),
        ({"words": WORDS + 7, "meta": META}, "index that it has not.*none of its 7 numbers"),
        ([WORDS, META], "is no tuple or dict"),
    ):
        refuses(words, bp.predict, posterior, x)
