"""Pruning by signal-to-noise: by hand, bit for bit, and on a problem whose relevant weights are known."""

import json
import math

import numpy as np
import pytest
import torch
from conjugate import correlated
from run_folders import SMALL

import bnn_pyro as bp
from bnn_pyro import plots, pruning
from bnn_pyro.run import main

PROBLEM = correlated(num=30)
X, Y = PROBLEM.data.x_train, PROBLEM.data.y_train
WEIGHT, HIDDEN = "layers.0.weight", "layers.1.weight"


def fit(entry, epochs=3, method=None, data=PROBLEM.data):
    return bp.fit(entry, data, method or bp.SVI(epochs=epochs), progress=False, device="cpu")


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


def test_ratio_is_that_of_the_draws(posterior):
    draws, ratios = posterior.draw(20_000, seed=1), pruning.signal_to_noise(posterior)
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
    with pytest.raises(bp.UserError, match="other settings"):  # it is not what fit would have returned
        bp.fit(bp.MeanField(hidden=(3,)), PROBLEM.data, bp.SVI(epochs=3), out=tmp_path, resume=True, progress=False)


def test_points_of_the_curve_are_scores_of_pruned_posteriors(mean_field):
    calls = []
    curve = pruning.pruning_curve(mean_field, X, Y, (0, 0.5, 1), num_draws=9, progress=lambda *done: calls.append(done))
    for point, share, weights in zip(curve, (0, 0.5, 1), (15, 15 - round(7.5), 0), strict=True):
        scores = bp.metrics.evaluate(bp.predict(pruning.prune(mean_field, share), X, num_draws=9), Y)
        assert (point.share, point.weights, point.measure) == (share, weights, "rmse")
        assert point.loss == scores["rmse"] and point.nll == scores["nll"]
    assert calls == [(9, 27), (18, 27), (27, 27)]


def test_errors(mean_field):
    dropout = fit(bp.DropoutMLP(hidden=(3,)), method=bp.MCDropout(epochs=1))
    for posterior, share, words in (
        (fit(bp.MLP(hidden=(3,)), method=bp.MAP(epochs=1)), 0.5, "point estimate or stored draws"),
        (dropout, 0.5, "DroppedInputs has no mean and standard deviation of every weight"),
        *[(mean_field, share, "must lie between 0 and 1") for share in (-0.1, 1.1, math.nan)],
    ):
        with pytest.raises(bp.UserError, match=words):
            pruning.prune(posterior, share)


def test_picture_of_the_ratios():
    ratios = {"a": torch.logspace(-2, 2, 50).view(5, 10), "b": torch.tensor([0.0])}
    ax = plots.signal_to_noise(ratios, shares=(0.5,), bins=10)
    (heap,) = [patch for patch in ax.patches if patch.get_label() == "51 weights"]
    density, edges, _ = heap.get_data()
    assert (density * np.diff(edges)).sum() == pytest.approx(1)  # the 0, −∞ dB, is in the first bin
    half, threshold = (line.get_xdata()[0] for line in ax.lines)
    assert half == pytest.approx(-0.82, abs=0.01)  # the 26th of 51: 10^(−2 + 4 · 24/49) = 0.910
    assert threshold == pytest.approx(20 * math.log10(math.exp(-1.5)))


def test_command(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "sparse-dropout", "--data", "toy-curve", "--no-baseline", *SMALL, "--out", str(out)]) == 0
    assert main(["evaluate", str(out), "--prune", "--quiet"]) == 0
    held, scores = json.loads((out / "pruning.json").read_text()), json.loads((out / "metrics.json").read_text())
    assert held["curve"][0]["rmse"] == scores["rmse"] and held["curve"][0]["nll_high"] == scores["nll_high"]
    assert (held["share_removed"], held["share_removed_by_site"]) == pruning.share_removed(bp.load(out))
    assert f"{held['curve'][2]['rmse']:.3g}" in capsys.readouterr().out
    report = (out / "report.html").read_text()
    assert "With weights removed" in report and "Which weights it is sure of" in report
    assert main(["evaluate", str(out), "--quiet"]) == 0  # what was found stays in the report
    assert (out / "report.html").read_text() == report
    (out / "pruning.json").write_text('{"measure": "rmse"}')
    assert main(["evaluate", str(out), "--quiet"]) == 2
    assert "pruning.json is damaged; remove it, and write it again" in capsys.readouterr().err
