"""Early stopping: the best epoch by the validation rows is kept, and that is all that these rows do."""

import math
from dataclasses import replace

import pytest
import torch
from monte_carlo import stop_at

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.inference.early_stopping import EarlyStopping, hold_out
from bnn_pyro.inference.potential import log_likelihood

ENTRY = bp.MLP(hidden=(20,), prior="normal:3", noise=2.0)
LONG = dict(epochs=30, batch_size=10, lr=0.05, patience=0)


def rows(classes=3, num=30, num_val=20, seed=0):
    """Few rows whose labels are half noise: a network soon fits too much of them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num + num_val, 3, generator=g)
    signal, noise = x[:, 0], 1.5 * torch.randn(len(x), generator=g)
    if classes:
        y, schema = (signal + noise > 0).long(), bp.Schema("classification", (3,), tuple("abc"[:classes]))
        y = y + (classes == 3) * (x[:, 1] > 1).long()
    else:
        y, schema = 40 + 8 * (signal + noise), bp.Schema("regression", (3,), y_shift=40.0, y_scale=8.0)
    return bp.Dataset("by-hand", schema, x[:num], y[:num], x[num:], y[num:], x[:0], y[:0])


def fit(data, entry=ENTRY, out=None, resume=False, kind=bp.MAP, **settings):
    method = kind(**{**LONG, **settings})
    return bp.fit(entry, data, method, seed=3, out=out, resume=resume, progress=False, device="cpu")


def validation_nll(posterior, data):
    return -bp.predict(posterior, data.x_val).log_prob(data.y_val).mean().item()


@pytest.mark.parametrize(("classes", "kind"), [(0, bp.MAP), (2, bp.MLE), (3, bp.MAP)])
def test_the_weights_of_the_best_epoch_are_kept(classes, kind):
    data = rows(classes)
    posterior = fit(data, patience=30, kind=kind)
    trace = posterior.trace["validation_nll"]
    assert len(trace) == 30 and min(trace) < trace[-1] - 0.05  # the last weights would not do
    assert validation_nll(posterior, data) == pytest.approx(min(trace), rel=1e-5)
    assert validation_nll(fit(data, kind=kind), data) == pytest.approx(trace[-1], rel=1e-5)


@pytest.mark.parametrize("patience", [1, 4])
def test_it_stops_after_patience_epochs_without_a_better_one(patience):
    whole, stopped = (fit(rows(), patience=p).trace for p in (30, patience))
    best, since, epoch = math.inf, 0, 0
    while since < patience:
        nll = whole["validation_nll"][epoch]
        best, since = (nll, 0) if nll < best else (best, since + 1)
        epoch += 1
    assert epoch < 30  # else nothing was tested
    assert stopped == {name: line[:epoch] for name, line in whole.items()}


def test_validation_rows_choose_the_epoch_and_nothing_else():
    """Other labels there: the very same path of the weights, of which another epoch may be kept."""
    data = rows()
    other = replace(data, y_val=(data.y_val + 1) % 3)
    first, second = fit(data, patience=30), fit(other, patience=30)
    assert first.trace["log_joint"] == second.trace["log_joint"]
    assert first.trace["validation_nll"] != second.trace["validation_nll"]
    kept = [p.trace["validation_nll"].index(min(p.trace["validation_nll"])) + 1 for p in (first, second)]
    assert kept[0] != kept[1]
    # Each is where training with the labels of no validation row at all was after so many epochs.
    path = []
    seen = EarlyStopping.seen

    def remember(self, *scored):
        path.append({site: value.detach().clone() for site, value in self.point.sites().items()})
        return seen(self, *scored)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyStopping, "seen", remember)
        fit(replace(data, y_val=data.y_val * 0), patience=30)
    for posterior, epoch in zip((first, second), kept, strict=True):
        assert all(torch.equal(posterior.chains[site][0, 0], value) for site, value in path[epoch - 1].items())


def test_dropout_is_off_while_it_looks_and_on_again_after(monkeypatch):
    schema = bp.Schema("classification", (1, 8, 8), tuple("abc"))
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 1, 8, 8, generator=g), torch.arange(24) % 3
    data = bp.Dataset("by-hand", schema, x[:16], y[:16], x[16:], y[16:], x[:0], y[:0])
    modes, look = [], EarlyStopping.score
    forward = bp.parts.nets.ConvNet.features

    def note(self, x):
        if len(x) > 1:  # with one row, memory is measured
            modes.append(self.training)
        return forward(self, x)

    def looking(self, *rows):
        modes.append("looks")
        return look(self, *rows)

    monkeypatch.setattr(bp.parts.nets.ConvNet, "features", note)
    monkeypatch.setattr(EarlyStopping, "score", looking)
    posterior = fit(data, bp.ConvNet(channels=(2,), hidden=(5,), dropout=0.5), patience=3, epochs=2, batch_size=0)
    assert modes == [True, "looks", False, True, "looks", False]
    assert validation_nll(posterior, data) == pytest.approx(min(posterior.trace["validation_nll"]), rel=1e-5)


def test_without_validation_rows_some_of_the_training_rows_stop_it():
    """By rule, and no gradient is taken of them: other targets there leave the path of the weights as it is."""
    data = rows(0, num=60, num_val=0)
    entry, apart = bp.MLP(hidden=(20,)), hold_out(data, seed=3)
    assert len(apart.x_val) == 9 and len(apart.x_train) == 51
    found = fit(data, entry, patience=None)
    whole = [*map(tuple, data.x_train.tolist())]
    held = torch.tensor([whole.index(row) for row in map(tuple, apart.x_val.tolist())])
    assert sorted(map(tuple, torch.cat([apart.x_train, apart.x_val]).tolist())) == sorted(whole)
    about = found.provenance["early_stopping"]
    assert about == {"rows": 9, "of": "of 60 training rows", "patience": 50}  # 300 steps, 6 an epoch
    assert found.trace["validation_nll"] == fit(apart, entry, patience=None).trace["validation_nll"]
    y = data.y_train.clone()
    y[held] += 100.0
    assert fit(replace(data, y_train=y), entry, patience=None).trace["log_joint"] == found.trace["log_joint"]
    assert hold_out(data, 4).x_val.tolist() != apart.x_val.tolist()


def test_where_epochs_are_left_out_the_rate_falls_when_patience_is_over(tmp_path, monkeypatch):
    """Half as many steps again at most; the run may be cut off before and after. A line of the trace is ten epochs."""
    data, how = rows(), dict(epochs=None, patience=40)
    whole = fit(data, **how)
    nll, num = whole.trace["validation_nll"], len(whole.trace["epoch"])
    first = next(e for e in range(num) if e - nll.index(min(nll[: e + 1])) >= 4)  # patience is over for the first time
    last = max(first, nll.index(min(nll)))
    assert num == min(first + 1 + math.ceil((first + 1) / 2), last + 5)
    assert whole.provenance["schedule"] == {"epochs": 10 * num}
    for step in (30 * first - 15, 30 * (num - first) - 10):
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(Checkpoint, "due", stop_at(step))
            fit(data, out=tmp_path, resume=True, **how)
    assert fit(data, out=tmp_path, resume=True, **how).trace == whole.trace


def test_few_rows_stop_no_training_unless_asked_to():
    few = rows(0, num=40, num_val=0)
    plain, found = fit(few), fit(few, patience=None)
    assert "early_stopping" not in found.provenance and found.trace == plain.trace
    assert fit(few, patience=4).provenance["early_stopping"]["rows"] == 6
    with pytest.raises(bp.UserError, match=r"of by-hand's 3 training rows none can be held out: set patience to 0"):
        fit(rows(0, num=3, num_val=0), patience=4)


@pytest.mark.parametrize("num_val", [0, 20])
def test_a_learned_noise_is_that_of_the_rows_that_stop_it(num_val):
    """Targets are noise of sd 12, and 50 units learn 51 rows by heart."""
    data, entry, how = rows(0, num=60, num_val=num_val), bp.MLP(hidden=(50,), prior="normal:5"), dict(epochs=200)
    posterior = fit(data, entry, patience=None, **how)
    apart, weights = hold_out(data, seed=3), posterior.draw(1)
    residuals = apart.y_val - bp.predict(posterior, apart.x_val).mean
    noise = 8.0 * weights["log_noise"].exp().item()
    assert noise == pytest.approx(residuals.square().mean().sqrt().item(), rel=1e-4)
    nll = -bp.predict(posterior, apart.x_val).log_prob(apart.y_val).mean().item()
    assert nll == pytest.approx(min(posterior.trace["validation_nll"]), rel=1e-5)
    by_heart = fit(data, entry, **how)
    assert 8.0 * by_heart.draw(1)["log_noise"].exp().item() < 0.7 * noise


def test_members_of_an_ensemble_are_stopped_by_rows_of_their_own(monkeypatch):
    seen, make = [], EarlyStopping.__init__
    monkeypatch.setattr(EarlyStopping, "__init__", lambda self, *how: (seen.append(how[2]), make(self, *how))[1])
    data = rows(0, num=60, num_val=0)
    posterior = fit(data, kind=bp.Ensemble, members=3, patience=None, epochs=2)
    assert len({tuple(map(tuple, x.tolist())) for x in seen}) == 3
    assert posterior.provenance["early_stopping"]["rows"] == 9


def test_a_stopped_run_goes_on_to_the_same_result(tmp_path, monkeypatch):
    """After the best epoch, whose weights the resumed run must still know; and where it would end early anyhow."""
    data, settings = rows(), dict(patience=4, lr=0.1)
    whole = fit(data, **settings)
    nll = whole.trace["validation_nll"]
    assert 3 * (nll.index(min(nll)) + 1) < 8 < 17 < 3 * len(nll) < 90
    for step in (8, 3 * len(nll) - 8):
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(Checkpoint, "due", stop_at(step))
            fit(data, out=tmp_path, resume=True, **settings)
    resumed = fit(data, out=tmp_path, resume=True, **settings)
    assert resumed.trace == whole.trace
    for posterior in (resumed, bp.load(tmp_path)):
        assert all(torch.equal(posterior.chains[site], value) for site, value in whole.chains.items())


def test_log_likelihood_of_several_draws_in_chunks(monkeypatch):
    for classes in (0, 3):
        data = rows(classes)
        posterior = bp.fit(bp.MeanField(hidden=(4,)), data, bp.SVI(epochs=2), progress=False, device="cpu")
        draws = posterior.draw(5, seed=0)
        whole = log_likelihood(posterior.model, draws, data.x_val, data.y_val)
        with monkeypatch.context() as patch:
            patch.setattr("bnn_pyro.inference.potential.ROWS_MEMORY", 4 * 5 * 4 * 7)
            parts = log_likelihood(posterior.model, draws, data.x_val, data.y_val)
        torch.testing.assert_close(parts, whole)
        predicted = bp.predict(posterior, data.x_val, num_draws=5, seed=0).log_prob(data.y_val)
        torch.testing.assert_close(whole.logsumexp(0) - math.log(5), predicted, rtol=1e-5, atol=1e-5)


def test_defaults_learn_from_few_pictures():
    """Under a prior by fan-in the mode of this network is one of zeros (NLL log 10 = 2.30)."""
    data = bp.load_data("digits", limit=300)
    posterior = bp.fit(bp.ConvNet(hidden=(64,)), data, bp.MAP(epochs=25, batch_size=64, lr=0.003), progress=False)
    assert bp.metrics.evaluate(bp.predict(posterior, data.x_val), data.y_val).flat()["nll"] < 1
