"""The network at the mean weights, and pruning by signal-to-noise: by hand, by draws, bit for bit, as commands."""

import json
import math

import pytest
import torch
from conjugate import correlated
from pyro.infer.autoguide import AutoNormal
from refused import refuses
from run_folders import SMALL, small_table

import bnn_pyro as bp
from bnn_pyro import pruning
from bnn_pyro.runs.baselines import against_mean_weights
from bnn_pyro.runs.folder import RunFolder

PROBLEM = correlated(num=30)
X, Y = PROBLEM.data.x_train, PROBLEM.data.y_train
WEIGHT, HIDDEN = "layers.0.weight", "layers.1.weight"


def fit(entry, method=None, **settings):
    return bp.fit(entry, PROBLEM.data, method or bp.SVI(epochs=3), progress=False, device="cpu", **settings)


def test_ratio_by_hand():
    posterior = fit(bp.MeanField(hidden=(), noise=0.5))
    with torch.no_grad():  # 4 weights, then the bias
        posterior.guide.loc.copy_(torch.tensor([2.0, -3.0, 0.0, 0.1, 9.0]))
        posterior.guide.rho.copy_(torch.tensor([0.5, 1.0, 1.0, 2.0, 1.0]).expm1().log())
    ratios = pruning.signal_to_noise(posterior)
    assert ratios.keys() == {WEIGHT}  # not the bias
    assert torch.allclose(ratios[WEIGHT].float(), torch.tensor([[4.0, 3.0, 0.0, 0.05]]))
    # log α = −2 log SNR: −2.77, −2.20, ∞, 5.99.
    assert pruning.share_removed(posterior) == pruning.Removed(0.5, {WEIGHT: 0.5})
    assert (pruning.share_removed(posterior, 6.0).share, pruning.share_removed(posterior, -2.5).share) == (0.25, 0.75)


@pytest.fixture(scope="module", params=["mean-field", "hidden-layer", "variational-dropout", "sparse-dropout"])
def posterior(request):
    return fit(bp.ZOO[request.param](hidden=(3,)))


@pytest.fixture(scope="module")
def mean_field():
    """A mean-field network of 4 · 3 + 3 weights; the noise is learned."""
    return fit(bp.MeanField(hidden=(3,), init_scale=0.3))


def check_mean(posterior, draws):
    mean = posterior.at_mean_weights().chains
    assert mean.keys() == draws.keys()
    for site, value in draws.items():
        assert mean[site].shape == (1, 1, *value.shape[1:])
        assert ((value.mean(0) - mean[site][0, 0]).abs() < 5 * value.std(0) / len(value) ** 0.5 + 1e-6).all()


def test_mean_and_ratio_are_those_of_the_draws(posterior):
    draws, ratios = posterior.draw(20_000, seed=1), pruning.signal_to_noise(posterior)
    check_mean(posterior, draws)
    assert list(ratios) == [WEIGHT, HIDDEN]  # neither biases nor the learned noise
    for site, ratio in ratios.items():
        estimated = draws[site].double().mean(0).abs() / draws[site].double().std(0)
        # Standard error of mean/sd: √((1 + ratio²/2) / S).
        assert ((estimated - ratio).abs() < 5 * ((1 + ratio**2 / 2) / 20_000).sqrt()).all()


def test_removed_weights_are_zero_and_the_others_the_same(posterior):
    before = posterior.draw(7, seed=5)
    some, everything = (pruning.prune(posterior, share).draw(7, seed=5) for share in (0.4, 1.0))
    ratios = torch.cat([r.flatten() for r in pruning.signal_to_noise(posterior).values()])
    removed = []
    for site, value in before.items():
        if "weight" not in site:
            assert torch.equal(some[site], value) and torch.equal(everything[site], value)
            continue
        zero = (some[site] == 0).all(0)
        assert torch.equal(some[site], torch.where(zero, 0.0, value)) and (everything[site] == 0).all()
        removed.append(zero.flatten())
    removed = torch.cat(removed)
    assert removed.sum() == round(0.4 * 15)
    assert ratios[removed].max() <= ratios[~removed].min() * (1 + 2 * pruning.SAME)
    after = posterior.draw(7, seed=5)
    assert all(torch.equal(after[site], value) for site, value in before.items()), "the posterior was changed"


def test_a_network_at_the_mean_weights_is_a_posterior_of_one_draw(tmp_path):
    entry, method = bp.DropoutMLP(hidden=(4,)), bp.MCDropout(epochs=5)
    posterior = fit(entry, method)
    check_mean(posterior, posterior.draw(20_000, seed=0))
    mean = posterior.at_mean_weights()
    prediction = bp.predict(mean, X, num_draws=50)
    assert prediction.num_draws == 1 and (prediction.epistemic == 0).all()
    mean.save(tmp_path)
    assert torch.equal(bp.predict(bp.load(tmp_path), X).locs, prediction.locs)
    refuses("other settings", fit, entry, method, out=tmp_path, resume=True)  # it is not what fit would have returned


def test_a_pruned_posterior_is_a_posterior(mean_field, tmp_path):
    pruned = pruning.prune(mean_field, 0.6)
    zero = pruned.draw(1, seed=0)[WEIGHT][0] == 0
    mean, whole = pruned.at_mean_weights().chains[WEIGHT][0, 0], mean_field.at_mean_weights().chains[WEIGHT][0, 0]
    assert 0 < zero.sum() < zero.numel() and torch.equal(mean, torch.where(zero, 0.0, whole))
    ratio, former = (pruning.signal_to_noise(p)[WEIGHT] for p in (pruned, mean_field))
    assert torch.equal(ratio, torch.where(zero, 0.0, former))
    twice, once = pruning.prune(pruned, 0.8).draw(3, seed=1), pruning.prune(mean_field, 0.8).draw(3, seed=1)
    assert all(torch.equal(twice[site], value) for site, value in once.items())
    pruned.save(tmp_path)
    again = bp.load(tmp_path).draw(3, seed=2)
    assert all(torch.equal(again[site], value) for site, value in pruned.draw(3, seed=2).items())
    assert bp.load(tmp_path).provenance["pruned"] == 0.6
    refuses("other settings", fit, bp.MeanField(hidden=(3,)), out=tmp_path, resume=True)


def test_points_of_the_curve_are_scores_of_pruned_posteriors(mean_field):
    calls = []
    curve = pruning.pruning_curve(mean_field, X, Y, (0, 0.5, 1), num_draws=9, progress=lambda *done: calls.append(done))
    for point, share, weights in zip(curve, (0, 0.5, 1), (15, 15 - round(7.5), 0), strict=True):
        scores = bp.metrics.evaluate(bp.predict(pruning.prune(mean_field, share), X, num_draws=9), Y)
        assert (point.share, point.weights, point.measure) == (share, weights, "rmse")
        assert point.loss == scores["rmse"] and point.nll == scores["nll"]
    assert calls == [(9, 27), (18, 27), (27, 27)]


def test_errors(mean_field):
    dropout, point = fit(bp.DropoutMLP(hidden=(3,)), bp.MCDropout(epochs=1)), fit(bp.MLP(hidden=(3,)), bp.MAP(epochs=1))
    refuses("stored draws have no mean weights", point.at_mean_weights)
    for posterior, share, words in (
        (point, 0.5, "point estimate or stored draws"),
        (dropout, 0.5, "DroppedInputs has no mean and standard deviation of every weight"),
        *[(mean_field, share, "must lie between 0 and 1") for share in (-0.1, 1.1, math.nan)],
    ):
        refuses(words, pruning.prune, posterior, share)
    with bp.isolated(0):
        model = bp.MeanField(hidden=(4,)).model(PROBLEM.schema)
        guide = AutoNormal(model)  # draws "w_unconstrained", and w is a point at its value
        guide(X)
        posterior = bp.Posterior(model, PROBLEM.schema, guide=guide)
        refuses("AutoNormal has no mean of every weight", posterior.at_mean_weights)


def test_command_that_prunes(tmp_path, command):
    out = tmp_path / "run"
    command("train", "sparse-dropout", "--data", "toy-curve", "--no-baseline", *SMALL, "--out", out)
    said = command("evaluate", out, "--prune")
    held, scores = json.loads((out / "pruning.json").read_text()), json.loads((out / "metrics.json").read_text())
    assert held["curve"][0]["rmse"] == scores["rmse"] and held["curve"][0]["nll_high"] == scores["nll_high"]
    assert (held["share_removed"], held["share_removed_by_site"]) == pruning.share_removed(bp.load(out))
    report = (out / "report.html").read_text()
    assert f"{held['curve'][2]['rmse']:.3g}" in said
    assert "With weights removed" in report
    command("evaluate", out)  # what was found stays in the report
    assert (out / "report.html").read_text() == report
    (out / "pruning.json").write_text('{"measure": "rmse"}')
    assert "pruning.json is damaged; remove it, and write it again" in command("evaluate", out, code=2)


def test_a_report_says_where_the_mean_weights_predict_better_than_the_draws(tmp_path, command):
    table, run = small_table(tmp_path / "houses.csv"), tmp_path / "run"
    train = ["train", "mean-field", "--data", table, "--target", "price", "--out", run, "--no-baseline"]
    command(*train, *SMALL, "--epochs", 200, "--lr", 0.02)
    posterior, data = bp.load(run), bp.load_data(str(table), target="price")
    scores = against_mean_weights(posterior, bp.predict(posterior, data.x_test), data)
    assert scores["nll_over_mean_weights_low"] < 0.01 and "mean weights" not in (run / "report.html").read_text()
    with torch.no_grad():  # a q as wide as the prior, at the same means
        for name, value in posterior.guide.named_parameters():
            value.copy_(torch.full_like(value, 0.5) if "rho" in name or "scale" in name else value)
    wide = against_mean_weights(posterior, bp.predict(posterior, data.x_test), data)
    assert wide["nll_over_mean_weights_low"] > 0.01 and 0 < wide["signal_to_noise"] < scores["signal_to_noise"]
    assert 0 < wide["kl_share"] < 1 and not against_mean_weights(posterior.at_mean_weights(), None, data)
    (run / "metrics.json").write_text(json.dumps({**json.loads((run / "metrics.json").read_text()), **wide}))
    unfinished, worry = RunFolder(run).facts().worries
    assert worry["level"] == "caution" and "q is too wide" in worry["sentence"]
    assert "had not settled when the learning rate fell" in unfinished["sentence"]
    sites = {site: ratio.median().item() for site, ratio in pruning.signal_to_noise(posterior).items()}
    assert f"lowest in {min(sites, key=sites.get)} {min(sites.values()):.2g}" in worry["sentence"]
