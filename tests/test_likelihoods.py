"""Likelihoods of numbers with outliers and of counts, and their mixtures: against SciPy, sums and integrals."""

import json
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from conjugate import dataset
from refused import refuses
from scipy import integrate, stats
from test_parts import read
from zoo_problems import check_log_joint

import bnn_pyro as bp
from bnn_pyro.parts import mixtures
from bnn_pyro.parts.components import CDFS, HeavyTailed
from bnn_pyro.parts.likelihoods import LIKELIHOODS, LogNormalMixture, make_likelihood
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.priors import parse_prior

NUMBERS, COUNTS = (bp.Schema(task, (1,), y_shift=5.0, y_scale=2.0) for task in ("regression", "counts"))
F = torch.tensor([[-0.3], [0.0], [0.8]])


@pytest.mark.parametrize("name", ["normal", "laplace", "poisson"])
def test_information_is_the_expected_square_of_the_slope(name):
    """E[(∂ log p / ∂ f)²], and of the likelihood's own site, by sums over y and differences."""
    of_counts, h = LIKELIHOODS[name][1] == "counts", 1e-4
    likelihood = make_likelihood(COUNTS if of_counts else NUMBERS, "learned", name).double()
    own = {site: torch.tensor(-0.5).double() for site in likelihood.own_sites}
    y = torch.arange(300).double() if of_counts else torch.linspace(-60, 70, 400_001, dtype=torch.float64)

    def log_p(f, shift=0.0):
        return read(likelihood, f.view(1, 1), **{site: v + shift for site, v in own.items()}).log_prob(y)

    for f in F.double():
        weight = log_p(f).exp() * (y[1] - y[0])
        slope = (weight * ((log_p(f + h) - log_p(f - h)) / (2 * h)).square()).sum()
        assert likelihood.information(f[None], own).item() == pytest.approx(slope.item(), rel=2e-3)
        for number in likelihood.own_information.values():
            slope = (weight * ((log_p(f, h) - log_p(f, -h)) / (2 * h)).square()).sum()
            assert number == pytest.approx(slope.item(), rel=2e-3)


def test_what_does_not_go_together_is_refused():
    classes, ordinal = (bp.Schema(task, (1,), classes=("a", "b")) for task in ("classification", "ordinal"))
    for schema, noise, name, message in (
        (NUMBERS, "learned", "poisson", "poisson is for counts, and the task is regression"),
        (classes, "learned", "student-t", "student-t is for regression, and the task is classification"),
        (classes, "learned", "ordinal", "is for ordinal, and the task is classification; leave"),
        (ordinal, "learned", "normal", "for regression, and the task is ordinal; take ordinal"),
        (NUMBERS, "heteroscedastic", "laplace", "heteroscedastic goes with likelihood=normal or student-t"),
        (NUMBERS, "learned", "cauchy", "unknown likelihood 'cauchy'"),
    ):
        refuses(message, make_likelihood, schema, noise, name)
    refuses("unknown likelihood 'poison'; did you mean 'poisson'", bp.MLP, likelihood="poison")
    refuses("StudentT defines no 'information'", make_likelihood(NUMBERS, "learned", "student-t").information, F, {})


RATES = np.array([[1.5, 40.0, 0.01], [3.0, 55.0, 2.0]])
DISPERSION = np.array([[0.7], [8.0]])
ONE_WIDE = np.array([[40.0], *[[0.3]] * 40])
DF, LOCS, SCALES = np.array([[2.1], [9.0]]), np.array([[0.0, 5.0, -2.0], [1.0, 8.0, -2.0]]), np.array([[1.0], [0.3]])
SHAPES = LOCS**2 + 0.5
FAR, WIDE = np.array([[0.0, 5, 1], [4, 5, 1.5], [-1, -60, 1]]), np.array([[1, 0.1, 0.5], [0.5, 2, 0.4], [3, 1, 1]])


def tensors(*arrays):
    shape = np.broadcast_shapes(LOCS.shape[1:], *(a.shape for a in arrays))
    return [torch.as_tensor(np.broadcast_to(a, shape).copy(), dtype=torch.float32) for a in arrays]


@pytest.mark.parametrize(("prediction", "reference", "y"), [
    (Mixture(dist.Poisson(*tensors(RATES))), stats.poisson(RATES), [2.0, 44.0, 0.0]),
    (
        Mixture(dist.NegativeBinomial(tensors(DISPERSION)[0], logits=tensors(np.log(RATES / DISPERSION))[0])),
        stats.nbinom(DISPERSION, DISPERSION / (DISPERSION + RATES)),
        [2.0, 44.0, 0.0],
    ),
])  # fmt: skip
def test_mixtures_of_counts_are_sums(prediction, reference, y):
    k, y = np.arange(3000)[:, None, None], np.array(y)
    pmf = reference.pmf(k).mean(1)  # (counts, points)
    cdf, mean = pmf.cumsum(0), (pmf * k[:, 0]).sum(0)
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(prediction.total, (pmf * (k[:, 0] - mean) ** 2).sum(0), rtol=1e-4)
    np.testing.assert_allclose(prediction.epistemic, reference.mean().var(0), rtol=1e-4)
    np.testing.assert_allclose(prediction.aleatoric, reference.var().mean(0), rtol=1e-4)
    at = pmf[y.astype(int), [0, 1, 2]]
    np.testing.assert_allclose(prediction.log_prob(torch.tensor(y)), np.log(at), rtol=1e-4)
    for level, found in zip((0.025, 0.5, 0.9), prediction.quantile((0.025, 0.5, 0.9)), strict=True):
        np.testing.assert_array_equal(found, (cdf < level).sum(0))
    between = prediction.cdf(torch.tensor([-0.5, 43.5, 7.0]))
    np.testing.assert_allclose(between, [0.0, cdf[43, 1], cdf[7, 2]], rtol=1e-5)
    crps = ((cdf - (y <= k[:, 0])) ** 2).sum(0).mean()
    assert bp.metrics.crps(prediction, y) == pytest.approx(crps, rel=1e-4)
    np.testing.assert_allclose(bp.metrics.pit(prediction, y), cdf[y.astype(int), [0, 1, 2]] - at / 2, rtol=1e-4)
    assert prediction.is_discrete and not prediction.has_classes


def test_a_wide_draw_leaves_the_crps_and_risk_of_other_counts_as_they_are():
    rates, y, k = np.array([[3.0, 20.0], [5.0, 60_000.0]]), torch.tensor([2.0, 30_000.0], dtype=torch.float64), 200_000
    found = Mixture(dist.Poisson(torch.from_numpy(rates))).crps(y)
    cdf = stats.poisson(rates).cdf(np.arange(k)[:, None, None]).mean(1)
    expected = ((cdf - (y.numpy() <= np.arange(k)[:, None])) ** 2).sum(0)
    assert found.tolist() == [pytest.approx(expected[0], rel=1e-5), pytest.approx(expected[1], rel=5e-3)]
    # The metric takes the narrow rows first, and has each row's own in its place.
    many = Mixture(dist.Poisson(torch.from_numpy(np.tile(rates, 4000))))
    rows = bp.metrics.METRICS["counts"]["crps"].points(many, y.repeat(4000).numpy())
    np.testing.assert_allclose(rows, np.tile(found.numpy(), 4000), rtol=1e-6)
    # Nor the risk: E |Y − 4|, whose cells are single counts of the first point alone.
    pmf = stats.poisson(rates).pmf(np.arange(k)[:, None, None]).mean(1)
    expected = (pmf * np.abs(np.arange(k) - 4)[:, None]).sum(0)
    risk = Mixture(dist.Poisson(torch.from_numpy(rates))).risk(lambda t: (t - 4).abs()).expected
    assert risk.tolist() == [pytest.approx(expected[0], rel=1e-4), pytest.approx(expected[1], rel=5e-3)]


class Blend:
    """SciPy's mixture of two Gammas."""

    def __init__(self, share, rate):
        self.parts = (share, stats.gamma(2, scale=1 / rate)), (1 - share, stats.gamma(9, scale=1 / rate))
        self.pdf, self.cdf, self.mean = (partial(self.of, name) for name in ("pdf", "cdf", "mean"))

    def of(self, name, *y):
        return sum(share * getattr(part, name)(*y) for share, part in self.parts)

    def var(self):
        return sum(s * (p.var() + p.mean() ** 2) for s, p in self.parts) - self.mean() ** 2


SHARE = np.array([[0.3, 0.6, 0.01], [0.9, 0.2, 0.5]])
BLEND = dist.MixtureSameFamily(
    dist.Categorical(torch.tensor(np.stack([SHARE, 1 - SHARE], -1))),
    dist.Gamma(torch.tensor([2.0, 9.0]), torch.tensor(DISPERSION)[..., None]).expand([2, 3, 2]),
)


@pytest.mark.parametrize(
    ("prediction", "reference", "y", "lowest"),
    [
        (bp.Prediction(dist.Normal(*tensors(LOCS, SCALES))), stats.norm(LOCS, SCALES), [0.7, 6.0, -9.0], -400),
        (bp.Prediction(dist.Normal(*tensors(FAR, WIDE))), stats.norm(FAR, WIDE), [0.3, 5.05, 2.0], -400),
        (Mixture(dist.StudentT(*tensors(DF, LOCS, SCALES))), stats.t(DF, LOCS, SCALES), [0.7, 6.0, -9.0], -400),
        (Mixture(HeavyTailed(*tensors(DF, LOCS, SCALES))), stats.t(DF, LOCS, SCALES), [0.7, 6.0, -9.0], -400),
        (Mixture(HeavyTailed(*tensors(9 + 0 * ONE_WIDE, LOCS[:1], ONE_WIDE))), stats.t(9, LOCS[:1], ONE_WIDE),
         [0.1, 5.1, -2.2], -1000),
        (Mixture(dist.Laplace(*tensors(LOCS, SCALES))), stats.laplace(LOCS, SCALES + 0 * LOCS), [0.7, 6.0, -9.0], -400),
        (LogNormalMixture(dist.LogNormal(*tensors(LOCS / 4, SCALES))), stats.lognorm(SCALES, scale=np.exp(LOCS / 4)),
         [0.5, 3.0, 20.0], 0),
        # Of which there is no class of its own, and whose cdf PyTorch has for positive numbers alone.
        (Mixture(dist.Gamma(*tensors(SHAPES, DISPERSION))), stats.gamma(SHAPES, scale=1 / DISPERSION), [2.0, 44, 1], 0),
        (Mixture(BLEND), Blend(SHARE, DISPERSION), [2.0, 9, 1], 0),
    ],
    ids=["normal", "three normals", "student-t", "one df a draw", "one wide draw", "laplace", "log-normal", "gamma",
         "mixtures of gammas"],
)  # fmt: skip
def test_mixtures_of_numbers_are_integrals(prediction, reference, y, lowest, monkeypatch):
    y = np.array(y)
    np.testing.assert_allclose(prediction.mean, reference.mean().mean(0), rtol=1e-5)
    np.testing.assert_allclose(prediction.aleatoric, reference.var().mean(0), rtol=1e-4)
    np.testing.assert_allclose(prediction.epistemic, reference.mean().var(0), rtol=1e-4, atol=1e-9)
    at = torch.tensor(y, dtype=torch.float32)
    np.testing.assert_allclose(prediction.log_prob(at), np.log(reference.pdf(y).mean(0)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(prediction.cdf(at), reference.cdf(y).mean(0), rtol=1e-5, atol=1e-9)
    assert lowest < 0 or (prediction.cdf(-at) == 0).all()
    quantiles = prediction.quantile((0.005, 0.5, 0.95))
    monkeypatch.setattr(mixtures, "BLOCK", 1)  # one point at a time
    assert torch.equal(prediction.quantile((0.005, 0.5, 0.95)), quantiles)
    for level, values in zip((0.005, 0.5, 0.95), quantiles, strict=True):
        np.testing.assert_allclose(reference.cdf(values.double().numpy()).mean(0), level, rtol=1e-4)

    def squared(t, point):
        return (reference.cdf(t).mean(0)[point] - (y[point] <= t)) ** 2

    crps = []
    for p in range(3):
        ends = sorted((lowest, y[p], *reference.mean()[:, p], 1000.0))
        crps += [integrate.quad(squared, a, b, args=(p,), limit=400)[0] for a, b in pairwise(ends)]
    assert bp.metrics.crps(prediction, y) == pytest.approx(np.sum(crps) / 3, rel=3e-3)


INFLATED = dist.MixtureSameFamily(
    dist.Categorical(torch.tensor([[0.3, 0.7], [0.6, 0.4]])), dist.Poisson(torch.tensor([[1e-6, 3.0], [1e-6, 9.0]]))
)


@pytest.mark.parametrize(("components", "cdf"), [
    (INFLATED, lambda y: np.array([0.3, 0.6]) * (y >= 0) + np.array([0.7, 0.4]) * stats.poisson.cdf(y, [3, 9])),
    (dist.Binomial(*map(torch.tensor, ([5.0, 9], [0.2, 0.7]))), partial(stats.binom.cdf, n=[5, 9], p=[0.2, 0.7])),
    (dist.Beta(torch.tensor([2.0, 0.5]), torch.tensor([3.0, 0.7])), partial(stats.beta.cdf, a=[2, 0.5], b=[3, 0.7])),
])  # fmt: skip
def test_families_without_a_cdf_in_pytorch_have_quantiles(components, cdf):
    prediction, y = Mixture(components.expand((4, 2))), np.array([-1.0, 0.0, 0.4, 1.0, 5.3])
    np.testing.assert_allclose(prediction.cdf(torch.tensor(y)[:, None]), cdf(y[:, None]), rtol=1e-5, atol=1e-5)
    for point, value in enumerate(prediction.quantile(0.6)[0].double().numpy()):
        assert cdf(value + 1e-4)[point] >= 0.6 >= cdf(value - (1 if prediction.is_discrete else 1e-4))[point]
    assert prediction[:0].quantile((0.1, 0.9)).shape == (2, 0)


def test_the_table_of_students_t_is_within_a_ten_millionth():
    far = np.logspace(0, 5, 3000)
    z = np.concatenate([np.linspace(-150, 150, 9001), far, -far, [np.inf, -np.inf, np.nan]])
    df = np.array([[2.01], [2.3], [3.0], [9.0], [1000.0]]).repeat(len(z), 1)
    np.testing.assert_allclose(CDFS[HeavyTailed](z, df, 0 * df, 1.0), stats.t.cdf(z, df), rtol=0, atol=1e-7)
    assert CDFS[HeavyTailed](z[:0], df[:, :0], df[:, :0], 1.0).shape == (5, 0)


def negative_binomial(f, w, mean=5):
    r = w["log_dispersion"].double().exp()
    return dist.NegativeBinomial(r, logits=(mean * f.double().exp() / r).log())


NOISE, DF = dist.Normal(-1.0, 1.0), dist.Normal(2.0, 1.0)
#: Of y, given f and the likelihood's own sites, and the priors of these.
LAWS = {
    "poisson": (lambda f, w: dist.Poisson(5 * f.exp()), {}),
    "negative-binomial": (negative_binomial, {"log_dispersion": dist.Normal(2.0, 1.5)}),
    "student-t": (lambda f, w: dist.StudentT(2 + w["log_df"].exp(), 5 + 2 * f, 2 * w["log_noise"].exp()),
                  {"log_noise": NOISE, "log_df": DF}),
    "laplace": (lambda f, w: dist.Laplace(5 + 2 * f, 2 * w["log_noise"].exp()), {"log_noise": NOISE}),
    "normal": (lambda f, w: dist.Normal(5 + 2 * f, 2 * w["log_noise"].exp()), {"log_noise": NOISE}),
}  # fmt: skip


#: Of the weight and the bias, too.
GAMMA = dict.fromkeys(("layers.0.weight", "layers.0.bias"), parse_prior("gamma:2,1")(torch.zeros(1), 1))


@pytest.mark.parametrize("prior", ["normal:2", "gamma:2,1"])
@pytest.mark.parametrize("name", LAWS)
def test_log_joints_have_the_priors_of_own_sites(name, prior):
    law, priors = LAWS[name]
    schema = COUNTS if LIKELIHOODS[name][1] == "counts" else NUMBERS
    data = dataset(torch.linspace(-1, 1, 8)[:, None], torch.tensor([3.0, 0, 4, 2, 6, 1, 2, 5]), schema)
    priors = priors | (GAMMA if prior.startswith("gamma") else {})
    check_log_joint(data, lambda f, w: law(f[:, 0], w), priors, likelihood=name, prior=prior)


@pytest.mark.parametrize("mean", [1e2, 1e4, 1e7])
def test_gamma_functions_do_not_cancel(mean):
    """In 32 bits those of 10⁷ are off by nats, in predictions and from one set of weights to the next."""
    o, sd = torch.zeros(1, 8), mean**0.5
    y = np.round(mean + sd * np.linspace(-2, 2, 8))
    for made, exact in (
        (dist.Poisson(o + mean), stats.poisson(mean).logpmf),
        (dist.NegativeBinomial(o + 3, logits=o + np.log(mean / 3)), stats.nbinom(3, 3 / (3 + mean)).logpmf),
        (HeavyTailed(o + mean, o + mean, o + sd), stats.t(mean, mean, sd).logpdf),
    ):
        np.testing.assert_allclose(bp.Prediction(made).log_prob(torch.tensor(y)), exact(y), rtol=0, atol=1e-5)
    data = dataset(torch.linspace(-1, 1, 8)[:, None], torch.tensor(y), bp.Schema("counts", (1,), y_shift=mean))
    check_log_joint(data, lambda f, w: negative_binomial(f[:, 0], w, mean), LAWS["negative-binomial"][1])


def test_commands_take_ordered_classes(tmp_path, command):
    x, sizes = np.random.default_rng(0).uniform(-1, 1, 120), ["low", "middle", "high", "top"]
    y = np.random.default_rng(1).negative_binomial(3, 3 / (3 + 4 * np.exp(x)))
    pd.DataFrame({"x": x, "y": np.array(sizes)[np.searchsorted([1, 3, 6], y)]}).to_csv(tmp_path / "t.csv", index=False)
    file, run, predictions = (tmp_path / name for name in ("t.csv", "run", "p.csv"))
    train = ["train", "hidden-layer", "--data", file, "--target", "y", "--task", "ordinal", "--epochs", 20]
    assert "--classes" in command(*train, "--out", run, code=2)
    command(*train, "--classes", ",".join(sizes), "--num-draws", 20, "--out", run)
    command("evaluate", run, "--data", file)
    command("predict", run, "--input", file, "--output", predictions)
    table, report = pd.read_csv(predictions), (run / "report.html").read_text()
    scores, boosted = (json.loads((run / name).read_text()) for name in ("metrics.json", "boosting.json"))
    assert "Ordinal · inference by svi" in report
    assert set(table["y"]) <= set(sizes) and [*table.filter(like="p(")] == [f"p({name})" for name in sizes]
    assert "rps" in boosted["differences"] and "rps_minus_baseline" in scores
    assert (run / "figures/confusion-matrix.png").is_file()
