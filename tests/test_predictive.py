"""The predictive distribution: an equal mixture of the draws' own likelihoods, checked against closed forms."""

import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from pyro.distributions import Bernoulli, Categorical, Normal
from refused import refuses
from scipy.stats import bernoulli
from zoo_problems import problem

import bnn_pyro as bp


def wide(kind):
    """An untrained posterior with a q of appreciable width, and 12 inputs."""
    entry, data = problem("mean-field", kind)
    entry = replace(entry, hidden=(5, 4), init_scale=0.4)
    with bp.isolated(3):
        model = entry.model(data.schema)
        return bp.Posterior(model, data.schema, guide=entry.guide(model), provenance={"data": "by-hand"}), data.x_train


@pytest.mark.parametrize("kind", ["fixed noise", "learned noise", "heteroscedastic", "binary", "multiclass"])
def test_the_memory_bound_is_kept_and_changes_nothing_nor_does_selection(kind):
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
        (lambda: bp.predict(posterior, torch.zeros(3)), r"inputs have shape \(\)"),
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
