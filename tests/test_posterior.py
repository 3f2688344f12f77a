"""What a posterior gives back: draws, the same ones after a round trip on disk, and predictions as an equal mixture."""

import json
import math
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from conjugate import correlated, dataset, model_of
from monte_carlo import fit
from properties import planted
from pyro.distributions import Bernoulli, Categorical, Normal
from refused import refuses
from run_folders import reseal
from scipy.stats import bernoulli
from zoo_problems import problem

import bnn_pyro as bp

PROBLEM = correlated(num=20, y_shift=3.0, y_scale=2.0)
METHODS = {"guide": bp.SVI(epochs=10), "chains": bp.MAP(epochs=10)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{kind: (posterior, its folder)}, one fit each."""
    folders = {kind: tmp_path_factory.mktemp(kind) / "run" for kind in METHODS}
    fitted = partial(fit, bp.MeanField(hidden=(3,)), PROBLEM.data, seed=4)
    return {kind: (fitted(METHODS[kind], out=folder), folder) for kind, folder in folders.items()}


@pytest.fixture(params=METHODS)
def saved(request, trained, tmp_path):
    """(posterior, a copy of its folder)."""
    posterior, folder = trained[request.param]
    return posterior, Path(shutil.copytree(folder, tmp_path / "run"))


chains_alone = pytest.mark.parametrize("saved", ["chains"], indirect=True)


def test_draws_of_a_guide_are_its_own_and_come_in_blocks_of_bounded_memory(trained, monkeypatch):
    posterior, _ = trained["guide"]
    flat = torch.cat([value.reshape(500, -1) for value in posterior.draw(500, seed=1).values()], 1).double()
    loc, scale = posterior.guide.loc.detach(), posterior.guide.scale.detach()
    assert ((flat.mean(0) - loc).abs() < 5 * scale / 500**0.5).all()
    assert ((flat.std(0) / scale - 1).abs() < 5 / 1000**0.5).all()
    monkeypatch.setattr("bnn_pyro.posterior.BLOCK_BYTES", 4 * 20 * 3)  # 20 weights: three draws a block
    with bp.isolated(3):
        blocks = [next(iter(block.values())) for block in posterior.blocks(8)]
    assert [len(block) for block in blocks] == [3, 3, 2]
    assert len(torch.cat(blocks).unique(dim=0)) == 8 and not blocks[0].requires_grad


def test_thinning_is_even():
    """Draw d of chain c is the number 25 c + d."""
    schema = bp.Schema("regression", (1,))
    model = model_of(bp.MeanField(hidden=(), bias=False, noise=1.0), schema)
    posterior = bp.Posterior(model, schema, chains={"layers.0.weight": torch.arange(100.0).view(4, 25, 1, 1)})
    for num in (1, 2, 3, 7, 10, 33, 99, 100):
        kept = posterior.draw(num)["layers.0.weight"].flatten()
        assert len(kept) == len(kept.unique()) == num
        assert num < 3 or ((kept.diff() > 0).all() and kept.diff().amax() - kept.diff().amin() <= 1)
        assert num == 1 or (kept[0] == 0 and kept[-1] == 99)
    assert posterior.draw(1000)["layers.0.weight"].flatten().tolist() == list(range(100))


def test_round_trip_is_exact(saved):
    posterior, folder = saved
    loaded = bp.load(folder)
    x = PROBLEM.data.x_train
    assert torch.equal(bp.predict(posterior, x).locs, bp.predict(loaded, x).locs)
    assert loaded.schema == posterior.schema
    assert loaded.trace == dict(posterior.trace) and loaded.provenance == json.loads(json.dumps(posterior.provenance))
    known = {"entry", "entry_settings", "method", "method_settings", "seed", "fingerprint", "versions", "seconds"}
    assert known <= set(loaded.provenance)
    loaded.save(folder.parent / "again")
    assert (folder / "posterior.pt").read_bytes() == (folder.parent / "again" / "posterior.pt").read_bytes()


@chains_alone
def test_a_damaged_archive_is_refused(saved):
    _, folder = saved
    for name, change in (
        ("posterior.pt", lambda blob: blob[:-1]),
        ("posterior.pt", lambda blob: blob[:999] + bytes([blob[999] ^ 1]) + blob[1000:]),
        ("posterior.json", lambda blob: blob[:-20]),
        ("posterior.json", lambda blob: b"[]"),
        ("posterior.json", lambda blob: blob.replace(b'"schema"', b'"scheme"')),
        ("posterior.json", lambda blob: blob.replace(b'"y_scale": 2.0', b'"y_scale": 1.0')),
    ):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(change(whole))
        refuses(r"posterior\.json\)? is (damaged|truncated or was altered)", bp.load, folder)
        (folder / name).write_bytes(whole)


def test_other_descriptions_are_told(saved):
    posterior, folder = saved
    about = posterior.provenance
    settings = {**about["entry_settings"], "hidden": [4]}
    for changes, words in (
        ({"format": 99}, "format 99; this version reads format 1"),
        ({"format": 1, "provenance": {**about, "entry": "mean-feild"}}, "did you mean 'mean-field'"),
        ({"provenance": {**about, "entry_settings": settings}}, "does not fit its own settings"),
    ):
        reseal(folder, **changes)
        refuses(words, bp.load, folder)
    (folder / "posterior.pt").unlink()
    refuses(r"no posterior\.pt in .*not a finished run", bp.load, folder)
    refuses(r"no posterior\.json in", bp.load, folder / "x")


@chains_alone
def test_code_in_a_file_is_not_executed(saved, tmp_path):
    """Even where whoever wrote the file made the checksum fit."""
    _, folder = saved
    path, mark = folder / "posterior.pt", tmp_path / "executed"
    path.write_bytes(planted(mark))
    reseal(folder)
    refuses("something else than tensors and was not loaded", bp.load, folder)
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists(), "the payload would not have worked"


def test_the_prior_predicts_by_its_own_variance_without_a_row(tmp_path):
    """Var y = σ² + scale² τ² (|x|² + 1) of a linear network."""
    x = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    schema = bp.Schema("regression", (2,), y_shift=40.0, y_scale=8.0)
    data, variant = dataset(x[:0], x[:0, 0], schema, x, x[:, 0]), bp.MeanField(hidden=(), prior="normal:1.5", noise=5.0)
    posterior = bp.prior(variant, data, num_draws=4000)
    prediction = bp.predict(posterior, x, num_draws=4000)
    exact = 25 + (8 * 1.5) ** 2 * (x.square().sum(1) + 1)
    assert (prediction.total / exact - 1).abs().max() < 5 * (2 / 4000) ** 0.5
    assert ((prediction.mean - 40).abs() < 5 * (exact / 4000).sqrt()).all()
    for without, words in (("sparse-dropout", "improper"), ("last-layer", "trained network")):
        refuses(words, bp.prior, without, PROBLEM.data)
    assert bp.prior("auto", PROBLEM.data, num_draws=2).provenance["entry"] == "mean-field"
    assert torch.equal(prediction.log_prob(x[:, 0].numpy()), prediction.log_prob(x[:, 0]))
    posterior.save(tmp_path)
    assert torch.allclose(bp.predict(bp.load(tmp_path), x, num_draws=4000).mean, prediction.mean)
    # It is no fit.
    refuses("other settings, seed or data", fit, variant, PROBLEM.data, "svi", out=tmp_path, resume=True)


# -- predictions, against closed forms ---------------------------------------------------------------------------------
def wide(kind):
    """An untrained posterior with a q of appreciable width, and 12 inputs."""
    entry, data = problem("mean-field", kind)
    entry = replace(entry, hidden=(5, 4), init_scale=0.4)
    with bp.isolated(3):
        model = entry.model(data.schema)
        return bp.Posterior(model, data.schema, guide=entry.guide(model), provenance={"data": "by-hand"}), data.x_train


@pytest.mark.parametrize("kind", ["fixed noise", "learned noise", "heteroscedastic", "binary", "multiclass"])
def test_the_memory_bound_is_kept_and_changes_nothing_nor_do_selection_and_stored_draws(kind):
    posterior, x = wide(kind)
    default, asked = bp.predict(posterior, x, num_draws=7, seed=1), []

    def record(layer, inputs, output):
        assert not output.requires_grad, "the activations of all layers are kept"
        asked.append(4 * output.numel())

    for layer in posterior.model.net.layers:
        layer.register_forward_hook(record)
    for max_memory in (20, 4 * 5 * 4, 4 * 5 * 12 * 3):
        asked.clear()
        bounded = bp.predict(posterior, x, num_draws=7, seed=1, max_memory=max_memory)
        assert max(asked) <= max_memory
        for name in default.components.arg_constraints:
            a, b = (getattr(prediction.components, name) for prediction in (default, bounded))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    chains = {site: value[:, None] for site, value in posterior.draw(7, seed=1).items()}
    stored = bp.predict(bp.Posterior(posterior.model, posterior.schema, chains=chains), x, num_draws=100)  # once each
    for name in default.components.arg_constraints:
        torch.testing.assert_close(getattr(stored.components, name), getattr(default.components, name))
    mask = torch.arange(12) % 3 == 0
    for index in (slice(2, 9, 2), mask, [4, 0, 4], torch.tensor([11])):
        part = default[index]
        assert len(part) == len(x[index]) and part.num_draws == 7
        for name in ("mean", "total", "epistemic"):
            torch.testing.assert_close(getattr(part, name), getattr(default, name)[index])


def test_log_prob_is_the_log_of_the_mean_density_and_entropies_are_decomposed():
    """total = H[E p] = E H[p] + I(y; w): two draws that are sure of opposite classes are all epistemic."""
    logits = torch.tensor([[[60.0, 0.0], [0.0, 0.0], [1.0, 0.0]], [[0.0, 60.0], [0.0, 0.0], [0.0, 0.0]]])
    prediction = bp.Prediction(Categorical(logits=logits))
    p, log2 = np.array([1 / (1 + math.exp(-1)), 0.5]), math.log(2)
    total, aleatoric = bernoulli.entropy(p.mean()), bernoulli.entropy(p).mean()
    assert prediction.total.tolist() == pytest.approx([log2, log2, total])
    assert prediction.aleatoric.tolist() == pytest.approx([0.0, log2, aleatoric], abs=1e-6)
    assert prediction.epistemic.tolist() == pytest.approx([log2, 0.0, total - aleatoric], abs=1e-6)
    logits = torch.tensor([[[0.0, 1.0, -200.0]], [[3.0, 0.0, -250.0]]])
    prediction = bp.Prediction(Categorical(logits=logits))
    terms = logits.double().log_softmax(-1)[:, 0]
    for label in range(3):
        wanted = torch.logsumexp(terms[:, label], 0).item() - math.log(2)
        assert prediction.log_prob(torch.tensor([label])).item() == pytest.approx(wanted, rel=1e-6)
    assert prediction.mean[0].tolist() == pytest.approx(terms.exp().mean(0).tolist(), rel=1e-5)
    f = torch.linspace(-6, 6, 8).view(2, 4)
    one = bp.Prediction(Bernoulli(logits=f))
    two = bp.Prediction(Categorical(logits=torch.stack([torch.zeros_like(f), f], -1)))
    for what in ("mean", "total", "aleatoric", "epistemic", "probs"):
        torch.testing.assert_close(getattr(one, what), getattr(two, what), atol=1e-6, rtol=1e-5)
    y = torch.tensor([0, 1, 1, 0])
    torch.testing.assert_close(one.log_prob(y), two.log_prob(y))
    binary = bp.Prediction(Bernoulli(logits=torch.tensor([[150.0], [150.0]])))
    assert binary.log_prob(torch.tensor([0])).item() == pytest.approx(-150.0)


def test_mistakes_are_told(monkeypatch):
    posterior, x = wide("fixed noise")
    regression, classes = bp.predict(posterior, x, num_draws=2), bp.predict(*wide("binary"), num_draws=2)
    for call, words in (
        (lambda: bp.predict(posterior, torch.zeros(2, 4)), r"inputs have shape \(4,\).*trained on \(3,\)"),
        (lambda: bp.predict(posterior, torch.zeros(3)), r"x of shape \(3,\) is one row .* give x\[None\]"),
        (lambda: bp.predict(posterior, np.zeros((0, 3))), "X: x has 0 rows"),
        (lambda: bp.predict(posterior, x[:0]), "0 rows"),
        (lambda: bp.predict(posterior, x, num_draws=0), "at least 1"),
        (lambda: regression.probs, "'probs' belongs to classification"),
        (lambda: classes.quantile(0.5), "'quantile' belongs to regression"),
        *[(lambda q=q: regression.quantile(q), "strictly between 0 and 1") for q in (0.0, 1.0, [0.5, -1], math.nan)],
    ):
        refuses(words, call)
    monkeypatch.setattr(posterior.model.net, "forward", Mock(side_effect=MemoryError))
    refuses(r"not enough memory .*max_memory", bp.predict, posterior, x, num_draws=2)


def test_tables_and_introductions_of_predictions_and_posteriors():
    """A frame keeps its own index through prediction, calibration and selection; what a notebook shows is escaped."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "<b>": rng.normal(size=60)}, index=[f"r{i}" for i in range(60)])
    data = bp.dataset(frame, (2 * frame.a).rename("<price>"))
    posterior = bp.fit("mean-field", data, bp.SVI(epochs=2), progress=False)
    for fitted in (posterior, bp.calibrate(posterior, data.x_val, data.y_val)):
        prediction = bp.predict(fitted, frame)
        table = prediction[[7, 3]].to_frame()
        assert list(table.index) == ["r7", "r3"]
        np.testing.assert_allclose(table["mean"], prediction.mean[[7, 3]], rtol=1e-5)
    assert list(bp.predict(posterior, frame.to_numpy())[:2].to_frame(index=["u", "v"]).index) == ["u", "v"]
    refuses("to_frame .* bp.predict", bp.Prediction(Normal(torch.zeros(2, 3), 1.0)).to_frame)
    for shown, words in ((data, "&lt;price&gt;"), (posterior, "epochs=2"), (prediction, "<li><code>prediction")):
        assert words in shown._repr_html_() and "<price>" not in shown._repr_html_()


def test_tensors_in_the_users_units_are_noticed():
    x = 1000 + 5 * torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    posterior = bp.fit("mean-field", (x, x[:, 0]), bp.MAP(epochs=1), progress=False)
    with pytest.warns(UserWarning, match="a column of x is 10 standard deviations off, but not so in the units"):
        bp.predict(posterior, x)
    bp.predict(posterior, x.numpy())
    bp.predict(posterior, 50 + posterior.schema.standardise(x))  # far from the data in either units
