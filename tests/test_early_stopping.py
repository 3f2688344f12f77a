"""Point estimates: the best epoch by the validation rows is kept; ensembles of them; and how both are resumed."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import goes_on, interrupted, same
from torch import nn

import bnn_pyro as bp
from bnn_pyro.distributed import process_group
from bnn_pyro.inference.early_stopping import EarlyStopping, GuideStopping, hold_out, mixture_log_p
from bnn_pyro.inference.training_loop import Training
from bnn_pyro.parts.guides import PointMass

ENTRY = bp.MLP(hidden=(20,), prior="normal:3", noise=2.0)
DROPOUT = bp.DropoutMLP(hidden=(20,), prior="normal:3", hidden_dropout=0.3)


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


def fit(data, entry=ENTRY, out=None, resume=False, kind=bp.MAP, seed=3, **settings):
    method = kind(**{"epochs": 30, "batch_size": 10, "lr": 0.05, "patience": 0, **settings})
    return bp.fit(entry, data, method, seed=seed, out=out, resume=resume, progress=False, device="cpu")


def validation_nll(posterior, data):
    return -bp.predict(posterior, data.x_val).log_prob(data.y_val).mean().item()


@pytest.mark.parametrize(
    ("classes", "kind", "entry"), [(0, bp.MAP, ENTRY), (2, bp.MLE, ENTRY), (3, bp.MAP, ENTRY), (2, bp.MAP, DROPOUT)]
)
def test_the_weights_of_the_best_epoch_are_kept(classes, kind, entry):
    """Of which the validation NLL is that without dropout; and looking at it does not change the training."""
    data = rows(classes)
    posterior, other = (fit(data, entry, patience=patience, kind=kind) for patience in (30, 0))
    trace = posterior.trace["validation_nll"]
    assert len(trace) == 30 and min(trace) < trace[-1] - 0.05  # the last weights would not do
    assert validation_nll(posterior, data) == pytest.approx(min(trace), rel=1e-5)
    assert validation_nll(other, data) == pytest.approx(trace[-1], rel=1e-5)
    assert other.trace["log_likelihood"] == posterior.trace["log_likelihood"]


@pytest.mark.parametrize(("batch_size", "every"), [(10, 1), (1, 3), (0, 0)])
def test_held_out_rows_score_a_running_mean_until_the_rate_falls(batch_size, every, monkeypatch):
    """Of n iterates the i-th has the weight 4 i (i + 1) (i + 2) / (n … (n + 3)); without noise the last has all."""
    iterates, steady, update = [], [], EarlyStopping.update_mean

    def watched(self, step, per_epoch, rate_falls):
        iterates.append({site: value.detach().clone() for site, value in self.point.sites().items()})
        steady.append(not rate_falls)
        update(self, step, per_epoch, rate_falls)

    monkeypatch.setattr(EarlyStopping, "update_mean", watched)
    data = rows(2)
    posterior = fit(data, patience=30, batch_size=batch_size, lr=0.02, epochs=None)
    steps = [round(epoch * len(iterates) / posterior.trace["epoch"][-1]) for epoch in posterior.trace["epoch"]]
    assert 0 < sum(steady) < len(steady)
    for line in (0, steps.index(sum(steady)), -1):  # the first, the last at the first rate, the last
        first, step = (every - 1, every) if every and line >= 0 else (steps[line] - 1, 1)
        due = iterates[first : steps[line] : step]
        i = np.arange(1, (num := len(due)) + 1)
        weights = i * (i + 1.0) * (i + 2) * 4 / (num * (num + 1) * (num + 2) * (num + 3))
        assert weights.sum() == pytest.approx(1)
        mean = {site: sum(w * one[site] for w, one in zip(weights, due, strict=True)) for site in due[0]}
        by_mean = replace(posterior, chains={site: value.float()[None, None] for site, value in mean.items()})
        assert validation_nll(by_mean, data) == pytest.approx(posterior.trace["validation_nll"][line], rel=1e-4)


@pytest.mark.parametrize("patience", [1, 4])
def test_it_stops_after_patience_epochs_without_a_better_one(patience):
    whole, stopped = (fit(rows(), patience=p).trace for p in (30, patience))
    best, since, epoch = math.inf, 0, 0
    while since < patience:
        nll, epoch = whole["validation_nll"][epoch], epoch + 1
        best, since = (nll, 0) if nll < best else (best, since + 1)
    assert epoch < 30 and stopped == {name: line[:epoch] for name, line in whole.items()}


def test_without_validation_rows_some_of_the_training_rows_stop_it():
    """By rule, and no gradient is taken of them: other targets there leave the path of the weights as it is."""
    data, entry = rows(0, num=60, num_val=0), bp.MLP(hidden=(20,))
    apart, found = hold_out(data, seed=3), fit(data, entry, patience=None)
    whole, held = ([*map(tuple, x.tolist())] for x in (data.x_train, apart.x_val))
    assert len(held) == 9 and sorted([*held, *map(tuple, apart.x_train.tolist())]) == sorted(whole)
    about = found.provenance["early_stopping"]
    assert about == {"rows": 9, "of": "of 60 training rows", "patience": 50}  # 300 steps, 6 an epoch
    assert found.trace["validation_nll"] == fit(apart, entry, patience=None).trace["validation_nll"]
    y = data.y_train.clone()
    y[[whole.index(row) for row in held]] += 100.0
    assert fit(replace(data, y_train=y), entry, patience=None).trace["log_joint"] == found.trace["log_joint"]
    assert "early_stopping" not in fit(rows(0, num=5, num_val=0), patience=None).provenance  # too few
    with pytest.raises(bp.UserError, match=r"of by-hand's 3 training rows none can be held out: set patience to 0"):
        fit(rows(0, num=3, num_val=0), patience=4)


def test_where_epochs_are_left_out_the_rate_falls_when_patience_is_over(tmp_path):
    """Half as many steps again at most. A resumed run knows the weights of the best epoch; a trace's line is ten."""
    data, how = rows(), dict(epochs=None, patience=40)
    whole = fit(data, **how)
    nll, num = whole.trace["validation_nll"], len(whole.trace["epoch"])
    first = next(e for e in range(num) if e - nll.index(min(nll[: e + 1])) >= 4)  # patience is over for the first time
    last = max(first, nll.index(min(nll)))
    assert num == min(first + 1 + math.ceil((first + 1) / 2), last + 5)
    assert whole.provenance["schedule"] == {"epochs": 10 * num, "clip": 10.0}
    steps = 30 * first - 15, 30 * (num - first) - 10
    assert goes_on(whole, steps, fit, data, out=tmp_path, **how)
    assert nll.index(min(nll)) < first - 1 and same(bp.load(tmp_path), whole)


def smoothed(nll):
    """Means of five lines up to each."""
    return [np.mean(nll[max(0, i - 4) : i + 1]) for i in range(len(nll))]


@pytest.mark.parametrize("num_val", [256, 12])
def test_held_out_rows_stop_svi_of_a_network_of_ones_own(num_val, tmp_path):
    """With the q of the lowest NLL, a mean of five lines, when patience is over. In the zoo they do not."""
    data = rows(3, num=60, num_val=num_val)
    method = dict(kind=bp.SVI, epochs=None, patience=100, lr=0.05, scale_lr=0.05, batch_size=20)
    own = bp.Bayesian(lambda schema: nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 3)))
    whole = fit(data, own, **method)
    nll, epochs = (whole.trace[name] for name in ("validation_nll", "epoch"))
    means = smoothed(nll)
    best = means.index(min(means))
    drawn = bp.predict(whole, data.x_val, num_draws=8, seed=0).log_prob(data.y_val)
    stopping = {"rows": num_val, "of": "validation rows", "patience": 100, "epoch": epochs[best]}
    assert whole.provenance["early_stopping"] == stopping | {"sd_factor": 1.0}
    assert nll[best] == pytest.approx(-drawn.mean().item(), rel=1e-4) and (num_val == 12 or best < len(nll) - 1)
    by_rule = {**method, "patience": None, "epochs": 1}
    assert fit(data, own, **by_rule).provenance["early_stopping"]["patience"] == 334  # 1,000 steps, 3 an epoch
    zoo = fit(data, bp.MeanField(hidden=(4,)), **by_rule)
    assert len(whole.rows) == 60 + num_val and "early_stopping" not in zoo.provenance
    first = next(i for i in range(len(nll)) if epochs[i] - epochs[means.index(min(means[: i + 1]))] >= 100)
    assert first == len(nll) - 1
    for slope, factor in ((100.0, 1.0), (0.0, 0.5)):  # below the highest objective; made narrower
        about = whole.provenance | {"early_stopping": stopping | {"sd_factor": factor}}
        told = replace(whole, trace={"elbo": [slope * epoch for epoch in range(40)]}, provenance=about)
        said = " ".join(verdict.sentence for verdict in bp.diagnostics.diagnose(told, data).verdicts)
        narrowed = ", 0.5 times as wide as it was trained" * (factor < 1)
        assert f"{num_val} held-out rows chose q{narrowed}: the objective rose by another" in said
    steps = [len(nll), 3 * len(nll) // 2]
    steps.append(round(3 * epochs[-1]) - sum(steps))  # after the step with which it ends
    assert goes_on(whole, steps, fit, data, own, out=tmp_path, **method)


def test_svi_goes_on_while_held_out_rows_gain_although_the_objective_has_settled():
    """That of a linear module settles before the running mean has come as far; then the rate falls, a third more."""
    by_rule = dict(kind=bp.SVI, epochs=None, batch_size=None, lr=None)
    entry = bp.Bayesian(lambda schema: nn.Linear(3, 1))
    watched, alone = (fit(rows(0, num=300), entry, patience=patience, **by_rule) for patience in (None, 0))
    assert 2 / 3 * alone.trace["epoch"][-1] < watched.trace["epoch"][-1] < 9000
    assert watched.provenance["early_stopping"]["epoch"] == watched.trace["epoch"][-1]  # ten rows a weight: the last q


@pytest.mark.parametrize("epochs", [200, None])
@pytest.mark.parametrize(("num", "num_val", "held"), [(60, 0, 9), (60, 20, 20), (14, 3, 5), (17, 0, 5)])
def test_a_learned_noise_is_that_of_the_rows_that_stop_it(num, num_val, held, epochs):
    """Targets are noise of sd 12, and 50 units learn 51 rows by heart; without epochs a running mean."""
    data, entry = rows(0, num=num, num_val=num_val), bp.MLP(hidden=(50,), prior="normal:5")
    posterior, apart = fit(data, entry, patience=None, epochs=epochs), hold_out(data, seed=3)
    assert len(apart.x_val) == posterior.provenance["early_stopping"]["rows"] == held
    assert len(apart.x_train) + held == num + num_val and torch.equal(apart.y_val[:num_val], data.y_val)
    residuals = apart.y_val - bp.predict(posterior, apart.x_val).mean
    noise = 8.0 * posterior.draw(1)["log_noise"].exp().item()
    assert noise == pytest.approx((residuals.square().sum() / (len(residuals) - 2)).sqrt().item(), rel=1e-4)
    assert validation_nll(posterior, apart) == pytest.approx(min(posterior.trace["validation_nll"]), rel=1e-5)


def test_a_noise_by_nine_rows_gives_new_rows_the_highest_density():
    """Of 4,000 targets of sd 1 and mean 0. E log Normal(y; 0, σ_t) = −log σ_t − ½/σ_t², less for a multiple of σ_t."""
    names, ones = tuple(f"t{k}" for k in range(4000)), torch.ones(4000)
    schema = bp.Schema("targets", (1,), targets=names, y_shift=tuple((0 * ones).tolist()), y_scale=tuple(ones.tolist()))
    with bp.isolated(0):
        model, x, y = bp.MLP(hidden=()).model(schema), torch.zeros(9, 1), torch.randn(9, 4000)
        watch = EarlyStopping(model, PointMass({k: v * 0 for k, v in model.initial.items()}), x, y, patience=1)
        watch.score(process_group())
    sd = watch.noise["log_noise"].double().exp()
    density = {factor: -(factor * sd).log() - 0.5 / (factor * sd).square() for factor in (0.88, 1.0, 1.14)}
    for factor in (0.88, 1.14):  # 0.88 is 1/M in place of 1/(M − 2)
        less = density[1.0] - density[factor]
        assert less.mean() > 4 * less.std() / math.sqrt(4000)


def test_few_rows_do_not_make_a_point_certain():
    """Of 17 rows 3 validate: a network that learns the others by heart is wrong by tens of its standard deviations."""
    data, new = rows(0, num=14, num_val=3), rows(0, num=200, num_val=0, seed=1)
    entry, nll = bp.MLP(hidden=(50,), prior="normal:5"), {}
    for patience in (None, 0):
        found = fit(data, entry, patience=patience, epochs=1000)
        nll[patience] = -bp.predict(found, new.x_train).log_prob(new.y_train).mean().item()
    assert nll[None] < 5.0 < 50.0 < nll[0]  # a Normal of their own mean and sd has 4.1


# -- trained weights to start from --------------------------------------------------------------------------------
def test_given_weights_that_no_epoch_improves_are_kept(seeded):
    """The NLL of the held-out rows by the weights of a network that is given is the first to be beaten."""
    data = rows(2, num=40, num_val=20)
    net = torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
    given = bp.Bayesian(net, start="pretrained")
    first, trained = (fit(data, given, patience=None, epochs=20, lr=lr) for lr in (1e-6, 0.02))
    assert validation_nll(trained, data) < validation_nll(first, data) - 0.01
    net.load_state_dict({name: value[0] for name, value in trained.draw(1).items()})
    again = fit(replace(data, y_train=1 - data.y_train), given, patience=None, epochs=20)  # all labels are wrong
    assert validation_nll(again, data) == pytest.approx(validation_nll(trained, data), abs=1e-6)
    assert min(again.trace["validation_nll"]) > validation_nll(again, data) + 0.01


@pytest.mark.parametrize(("num_val", "lr"), [(12, 0.02), (20, 0.5)], ids=["an epoch", "the start"])
def test_with_trained_points_beside_q_the_epoch_of_the_lowest_nll_is_kept(num_val, lr):
    """Or the start, where none is lower; and these begin with a tenth of the learning rate."""
    data = rows(2, num=40, num_val=num_val)
    with bp.isolated(0):
        net = torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
    given = bp.Bayesian(net, where="2.*", start="pretrained", prior="pretrained:0.5")
    found = fit(data, given, kind=bp.SVI, patience=20, epochs=20, lr=lr, scale_lr=0.03)
    nll, seen = -mixture_log_p(found, data.x_val, data.y_val).mean().item(), found.trace["validation_nll"]
    kept = int(found.provenance["early_stopping"]["epoch"])
    assert (kept == 0) == (lr == 0.5)
    assert nll == pytest.approx(seen[kept - 1], abs=1e-6) if kept else nll < min(seen)
    assert not kept or (kept > 5 and min(smoothed(seen)[4:]) == smoothed(seen)[kept - 1])  # the start is in the others
    with bp.isolated(0):
        model = given.model(data.schema)
        training = Training(bp.SVI(lr=0.02, scale_lr=0.03), model, given.guide(model), data)
    assert [group.get("initial_lr") for group in training.optimiser.param_groups] == [None, 0.03, 0.002]


def test_a_fit_that_nothing_watched_goes_on_watched():
    """As few rows were not in an earlier version, whose checkpoints say None."""
    data = rows(0, num=30, num_val=9)
    with bp.isolated(0):
        model = bp.MLP(hidden=(4,)).model(data.schema)
        point = PointMass(model.initial)
        watch = EarlyStopping(model, point, data.x_val, data.y_val, patience=5)
        training = Training(bp.MAP(epochs=3, batch_size=10), model, point, data, watch=watch)
        training.load_state_dict(training.state_dict() | {"watch": None})
        assert all(figures is None or figures["validation NLL"] > 0 for figures in training.steps())
        assert watch.state["best_nll"] == min(training.trace["validation_nll"])


# -- ensembles ----------------------------------------------------------------------------------------------------
PROBLEM = correlated(num=30, noise=0.5)
SETTINGS = dict(entry=bp.MLP(hidden=(3,)), epochs=6, batch_size=8, lr=0.001)  # starts stay apart


def test_members_are_point_estimates_from_different_starts():
    three, two, other = (
        fit(PROBLEM.data, kind=bp.Ensemble, members=m, seed=seed, **SETTINGS) for m, seed in ((3, 2), (2, 2), (3, 1))
    )
    alone, first = fit(PROBLEM.data, seed=2, **SETTINGS), three.chains["layers.0.weight"]
    for site, value in three.chains.items():
        assert value.shape[:2] == (3, 1) and torch.equal(value[0], alone.chains[site][0])
        assert torch.equal(value[:2], two.chains[site])
    assert (first[0] - first[1]).abs().max() > 0.1 and (first[1] - first[2]).abs().max() > 0.1
    assert not any(torch.equal(a, b) for a, b in zip(first, other.chains["layers.0.weight"], strict=True))


def test_an_ensemble_that_is_stopped_goes_on_where_its_members_were(tmp_path):
    how = dict(kind=bp.Ensemble, members=3, cores=1, out=tmp_path, resume=True, **SETTINGS)
    for step, own in ((30, 6), (20, 2)):
        with interrupted(step, words=f"after step {own} of 24"):
            fit(PROBLEM.data, **how)
    assert same(fit(PROBLEM.data, **how), fit(PROBLEM.data, **{**how, "out": None, "resume": False}))


@pytest.mark.parametrize("scale", [3.0, 0.02])
def test_a_guide_that_is_too_wide_is_narrowed_while_held_out_rows_gain_by_more_than_chance(scale):
    """By steps of √2, against log-probabilities by hand; a narrow one stays as it is, bit for bit."""
    data = rows(classes=3, num_val=2000)
    entry = bp.MeanField(hidden=(), prior="normal:1", init_scale=scale)
    with bp.isolated(0):
        model = entry.model(data.schema)
        guide = entry.guide(model)
        before, sd = guide.rho.detach().clone(), guide.scale.detach().clone()
        watch = GuideStopping(model, guide, data, patience=1)
        watch.x, watch.y = data.x_val, data.y_val
        watch.finish()

    def log_p(factor):
        guide.rho.data = torch.expm1(sd * factor).log()
        w = bp.Posterior(model, data.schema, guide=guide).draw(32, seed=0)
        f = torch.einsum("soi,ni->sno", w["layers.0.weight"], data.x_val) + w["layers.0.bias"][:, None]
        return f.double().softmax(-1).mean(0)[torch.arange(2000), data.y_val].log()

    assert torch.allclose(guide.scale, sd * watch.factor, rtol=1e-4)
    assert (watch.factor < 1) == (scale > 1) and (scale > 1 or torch.equal(guide.rho, before))
    tried = [watch.factor * 2 ** (k / 2) for k in range(-1, round(-2 * math.log2(watch.factor)) + 1)]
    gains = [log_p(a) - log_p(b) for a, b in itertools.pairwise(tried)]  # by the narrower one
    clear = [bool(g.mean() > max(0.002, g.std().item() / math.sqrt(2000))) for g in gains]
    assert clear == [False] + [True] * (len(clear) - 1)


def test_a_row_far_from_the_others_does_not_end_the_learning_of_a_noise_that_depends_on_the_input():
    x, noise = torch.randn(2, 2000, 1, generator=torch.Generator().manual_seed(0))
    y = (x + 0.05 * noise)[:, 0]
    x[7], y[7] = 60.0, -20.0
    data = bp.dataset(x, y, split=0.1, scale="standard")
    entry = bp.ZOO["hidden-layer"](hidden=(20, 20), noise="heteroscedastic")
    fits = [bp.fit(entry, data, bp.SVI(epochs=40, batch_size=64, clip=c), seed=0, progress=False) for c in (None, 0.0)]
    kept, lost = (bp.metrics.nll(bp.predict(fit, data.x_test), data.y_test) for fit in fits)
    assert kept < -1 < 0 < lost  # of the true noise: -1.58
