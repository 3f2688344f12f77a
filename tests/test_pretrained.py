"""Networks of the user's own as backbones: saved and loaded exactly, refused where they are others by now."""

import json
import re
import shutil
import warnings
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import test_features
import torch
from properties import Planted, planted
from refused import refuses
from torch import nn
from torchvision import models

import bnn_pyro as bp
from bnn_pyro.parts.backbone import from_text


def rows(shape=(3,), num=20):
    return test_features.rows(num, 0, x_shift=0.5, x_scale=0.25, shape=shape)


def network(seed=0, activation=nn.Tanh):
    with bp.isolated(seed):
        return nn.Sequential(nn.Linear(3, 6), activation(), nn.Dropout(0.5), nn.Linear(6, 4), nn.BatchNorm1d(4))


def fit(backbone, out=None, data=None, **settings):
    entry = backbone if isinstance(backbone, bp.LastLayer | bp.Bayesian) else bp.LastLayer(backbone=backbone)
    return bp.fit(entry, data or rows(), bp.SVI(epochs=2), seed=1, out=out, progress=False, device="cpu", **settings)


def logits(posterior, data=None):
    return bp.predict(posterior, (data or rows()).x_test, num_draws=6, seed=5).components.logits


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the network in 0.pt (TorchScript) and 0.pt2 (torch.export), and another one in 1.pt and 1.pt2."""
    folder, batch = tmp_path_factory.mktemp("files"), ({0: torch.export.Dim("batch")},)
    with bp.isolated(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in (0, 1):
            torch.jit.script(network(seed)).save(folder / f"{seed}.pt")
            program = torch.export.export(network(seed).eval(), (torch.randn(4, 3),), dynamic_shapes=batch)
            torch.export.save(program, folder / f"{seed}.pt2")
    return folder


@pytest.mark.parametrize("inputs", ["standardised", "raw"])
def test_a_module_is_passed_again_to_load(tmp_path, inputs):
    """Archives of before there was a choice say nothing of inputs: their settings are those of raw ones."""
    entry = bp.LastLayer(backbone=network(), inputs=inputs)
    posterior = fit(entry, tmp_path)
    about = posterior.provenance["entry_settings"]["backbone"]
    assert set(about) == {"kind", "class", "layers", "weights"} | ({"inputs"} if inputs == "standardised" else set())
    assert torch.equal(logits(bp.load(tmp_path, entry=entry)), logits(posterior))
    if inputs == "raw":
        assert torch.equal(logits(bp.load(tmp_path, entry=bp.LastLayer(backbone=network()))), logits(posterior))
        assert not torch.equal(logits(fit(network())), logits(posterior))
    assert torch.equal(logits(fit(entry, tmp_path, resume=True)), logits(posterior))
    for other in (network(1), network(activation=nn.ReLU)):
        entry = bp.LastLayer(backbone=other, inputs=inputs)
        refuses("was fitted with backbone module Sequential, and", bp.load, tmp_path, entry=entry)
        refuses("holds a finished posterior of other settings", fit, entry, tmp_path, resume=True)
    refuses(r"your own \(Sequential\).*load\(folder, entry=LastLayer\(backbone=module", bp.load, tmp_path)


@pytest.mark.parametrize(("trained", "other"), [("raw", "standardised"), ("standardised", "raw")])
def test_batch_normalisation_tells_that_a_network_knows_other_inputs(trained, other):
    data = rows(num=200)
    data = replace(data, schema=replace(data.schema, x_shift=(5.0,)))
    with bp.isolated(0):
        net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Tanh())
        for _ in range(200):
            net(data.x_train if trained == "standardised" else data.schema.unstandardise(data.x_train))
    fit(bp.LastLayer(backbone=net, inputs=trained), data=data)  # a warning would be an error
    with pytest.warns(UserWarning, match=f"is given {other} inputs.*inputs='{trained}'"):
        fit(bp.LastLayer(backbone=net, inputs=other), data=data)
    with bp.isolated(0):
        whole = nn.Sequential(net, nn.Linear(4, max(1, len(data.schema.classes))))
    with pytest.warns(UserWarning, match="as a whole network has outputs; give it without its last layer"):
        fit(bp.LastLayer(backbone=whole, inputs=trained), data=data)
    for start in ("initial", "pretrained"):
        fit(bp.Bayesian(whole, inputs=trained, start=start), data=data)
        with pytest.warns(UserWarning, match=rf"Sequential is given {other}.*give Bayesian\(…, inputs='{trained}'"):
            fit(bp.Bayesian(whole, inputs=other, start=start), data=data)


@pytest.mark.parametrize(("unit", "words"), [(255.0, "raw / 255"), (1 / 255, "raw × 255")])
def test_pixels_of_another_range_than_those_of_training_are_noticed(unit, words):
    """Trained on pixels from 0 to 1 and given those to 255, or the reverse, raw or standardised; fresh ones are not."""
    data = rows((16,), 200)
    x = data.x_train.sigmoid() * (1 if unit > 1 else 255)
    data = bp.dataset(unit * x, data.y_train, split=0.0, validation=0)
    with bp.isolated(0):
        net = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        fit(bp.Bayesian(net, inputs="raw"), data=data)  # a warning would be an error
        for _ in range(200):
            net(x)
    for inputs in ("raw", "standardised"):
        with pytest.warns(UserWarning, match=f"given {inputs} inputs.*such as {words} ones; give data in these units"):
            fit(bp.Bayesian(net, start="pretrained", inputs=inputs), data=data)


def test_backbones_and_inputs_that_are_none_are_refused_with_the_valid_forms(tmp_path, weights):
    (tmp_path / "bad.pth").write_bytes(planted(tmp_path / "executed"))
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "other.pth")
    forms = r"none of: auto, convnet, mlp, .*\(\.pt\).*\(\.pt2\).*resnet18:FILE"
    for backbone, inputs, words in (
        ("convnt", None, forms),
        ("none.pt", None, r"there is no file .*none\.pt, a network"),
        (3, None, "a backbone is a text, a module or a posterior"),
        (network(), "rw", "unknown inputs 'rw'"),
        ("mlp", "raw", "the backbone 'mlp' knows its own"),
        (f"shufflenet_v2_x0_5:{weights}", "standardised", "takes raw inputs; leave 'inputs' out"),
        (f"shufflenet_v2_x0_5:{weights}", None, r"does not take inputs of shape \(2, 3\)"),
        (f"shuflenet_v2_x0_5:{weights}", None, "did you mean 'shufflenet_v2_x0_5'"),
        ("shufflenet_v2_x0_5:none.pt", None, r"no weights file none\.pt for torchvision's shufflenet"),
        (f"shufflenet_v2_x0_5:{tmp_path / 'bad.pth'}", None, "holds no weights of torchvision's"),
        (f"shufflenet_v2_x0_5:{tmp_path / 'other.pth'}", None, "it lacks conv1"),
    ):
        settings = {"backbone": backbone, "inputs": inputs} if inputs else {"backbone": backbone}
        refuses(words, lambda settings: fit(bp.LastLayer(**settings)), settings)
    assert not (tmp_path / "executed").exists()
    series = bp.dataset((torch.arange(160.0).view(20, 4, 2),), torch.arange(20.0))
    with bp.isolated(0):
        refuses(r"inputs of shape 0 \(4, 2\): ", fit, bp.LastLayer(backbone=nn.GRU(3, 3)), data=series)


class TwoInputs(nn.Module):
    """Features of a shop's number and of the weather over three days."""

    def __init__(self):
        super().__init__()
        with bp.isolated(0):
            self.shops, self.layer = nn.Embedding(5, 3), nn.Linear(6, 8)

    def forward(self, shop, weather):
        assert weather.shape[1:] == (3, 2) and shop.dtype == torch.int64
        days = weather.mean(1)
        return torch.tanh(self.layer(torch.cat([self.shops(shop[:, 0]), days, days.square()[:, :1]], 1)))


@pytest.mark.parametrize("names", [None, ("shop", "weather")])
def test_a_last_layer_takes_the_features_of_several_inputs(names, tmp_path):
    numbers = np.random.default_rng(0)
    shop, weather = numbers.integers(0, 5, (200, 1)), 5 + 3 * numbers.normal(size=(200, 3, 2))
    y, parts = shop[:, 0] + weather[:, 0, 0] + numbers.normal(size=200), (shop, weather)
    data = bp.dataset(dict(zip(names, parts, strict=True)) if names else parts, y, split=0.2)
    net, how = TwoInputs(), dict(progress=False, out=tmp_path)
    posterior = bp.fit(bp.LastLayer(backbone=net, noise=1.0), data, bp.Laplace(), **how)
    rows = data.index_test.numpy()
    plain = (weather - weather[data.index_train.numpy()].mean((0, 1))) / weather[data.index_train.numpy()].std((0, 1))
    with torch.no_grad():
        features = net(torch.from_numpy(shop[rows]), torch.from_numpy(plain[rows]).float())
    found = posterior.model.backbone(data.x_test) * posterior.model.backbone.scale
    torch.testing.assert_close(found, features, rtol=1e-4, atol=1e-5)
    again = bp.load(tmp_path, bp.LastLayer(backbone=TwoInputs(), noise=1.0))
    means = (bp.predict(one, data.x_test, seed=0).mean for one in (again, posterior))
    torch.testing.assert_close(*means, rtol=0, atol=0)


class Packed(nn.Module):
    """Features of series of given lengths, of which none is 0."""

    def __init__(self):
        super().__init__()
        with bp.isolated(0):
            self.norm, self.layer = nn.BatchNorm1d(2), nn.GRU(2, 4, batch_first=True)

    def forward(self, series, lengths):
        x = self.norm(series.mT).mT
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths[:, 0], batch_first=True, enforce_sorted=False)
        return self.layer(packed)[1][0]


def test_series_of_unequal_length_and_wrong_units_of_several_inputs_are_noticed():
    numbers = np.random.default_rng(0)
    series, lengths = 20 + 3 * numbers.normal(size=(80, 5, 2)), numbers.integers(1, 6, (80, 1))
    data, net = bp.dataset((series, lengths), numbers.normal(size=80), split=0.2), Packed()
    with torch.no_grad():  # trained on the series as they are
        net.train()(torch.from_numpy(series).float(), torch.from_numpy(lengths))
        net.norm.running_mean.fill_(20.0), net.norm.running_var.fill_(9.0)
    with pytest.warns(UserWarning, match="given standardised inputs.*such as raw ones"):
        bp.fit(bp.LastLayer(backbone=net), data, bp.Laplace(), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bp.fit(bp.LastLayer(backbone=net, inputs="raw"), data, bp.Laplace(), progress=False)


@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_features_are_those_of_the_module_in_the_file(files, suffix):
    data, path, module = rows(), files / f"0{suffix}", network().eval()
    for entry, shown in (
        (bp.LastLayer(backbone=path), data.schema.unstandardise),
        (bp.LastLayer(backbone=from_text(str(path)), inputs="standardised"), lambda x: x),
    ):
        with bp.isolated(0):
            backbone = entry.model(data.schema).backbone
        for num in (0, 1, 2, 9):
            x = data.x_test[:num]
            torch.testing.assert_close(backbone(x), module(shown(x)).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_a_posterior_on_a_file_is_loaded_exactly_and_not_if_it_went_or_changed(tmp_path, files, suffix, monkeypatch):
    path = shutil.copy(files / f"0{suffix}", tmp_path / f"net{suffix}")
    posterior = fit(bp.LastLayer(backbone=str(path), inputs="standardised"), tmp_path / "run")
    monkeypatch.chdir("/")
    assert torch.equal(logits(bp.load(tmp_path / "run")), logits(posterior))
    shutil.copy(files / f"1{suffix}", path)
    monkeypatch.setattr(torch.export, "load", None)  # it is not even read
    monkeypatch.setattr(torch.jit, "load", None)
    refuses(r"is not the one that this posterior was made with \(SHA-256 ", bp.load, tmp_path / "run")
    path.unlink()
    refuses(f"there is no file {path}", bp.load, tmp_path / "run")


@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_files_of_another_kind_are_refused_and_nothing_is_unpickled(tmp_path, suffix):
    path, mark = tmp_path / f"net{suffix}", tmp_path / "executed"
    for write in (
        lambda: path.write_bytes(planted(mark)),
        lambda: torch.save(Planted(mark), path),
        lambda: torch.save(network().state_dict(), path),
    ):
        write()
        refuses(re.escape(str(path)), from_text, str(path))
        assert not mark.exists()


@pytest.mark.parametrize("what", ["object", "subclass", "compiled"])
def test_an_export_that_holds_more_than_tensors_is_not_read(tmp_path, files, what):
    """``torch.export.load`` would unpickle the first two and run the third."""
    path, mark = tmp_path / "net.pt2", tmp_path / "executed"
    with zipfile.ZipFile(files / "0.pt2") as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            blob = old.read(name)
            if what == "subclass" and name.endswith("weights_config.json"):
                config = json.loads(blob)
                next(iter(config["config"].values()))["use_pickle"] = True
                blob = json.dumps(config).encode()
            new.writestr(name, blob)
        top = name.partition("/")[0]
        if what == "object":
            new.writestr(f"{top}/data/constants/opaque_obj_0", planted(mark))
        if what == "compiled":
            new.writestr(f"{top}/data/aotinductor/model/x.so", b"")
    refuses("pickled objects or compiled code", from_text, str(path))
    assert not mark.exists()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A small architecture with random weights, in a file that is called .pt as many are."""
    path = tmp_path_factory.mktemp("weights") / "squeezed.pt"
    with bp.isolated(0):
        torch.save(models.shufflenet_v2_x0_5(weights=None).state_dict(), path)
    return path


IMAGES = rows((1, 32, 32), num=6)


def test_a_torchvision_posterior_outlives_its_file_and_has_imagenets_inputs_and_no_last_layer(tmp_path, weights):
    file = shutil.copy(weights, tmp_path / "w.pt")
    posterior = fit(f"shufflenet_v2_x0_5:{file}", tmp_path / "run", IMAGES)
    file.unlink()
    assert torch.equal(logits(bp.load(tmp_path / "run"), IMAGES), logits(posterior, IMAGES))
    tensors = torch.load(tmp_path / "run" / "posterior.pt", weights_only=True)
    assert tensors["backbone"]["scale"] == posterior.model.backbone.scale
    about = posterior.provenance["entry_settings"]["backbone"]
    assert (about["kind"], about["name"]) == ("torchvision", "shufflenet_v2_x0_5")
    with bp.isolated(0):
        net = models.shufflenet_v2_x0_5(weights=None)
        model = bp.LastLayer(backbone=f"shufflenet_v2_x0_5:{weights}").model(IMAGES.schema)
    net.load_state_dict(torch.load(weights, weights_only=True))
    net.fc = nn.Identity()
    pixels = IMAGES.schema.unstandardise(IMAGES.x_test).expand(-1, 3, -1, -1)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    own = net.eval()((pixels - mean) / std).detach()
    torch.testing.assert_close(model.backbone(IMAGES.x_test), own)
