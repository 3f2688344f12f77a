"""`check` of a module of the user's own: the closed form where it is linear, and planted faults, which are named."""

import functools

import pytest
import torch
import torch.nn.functional as F
from conjugate import correlated
from torch import nn

import bnn_pyro as bp
from bnn_pyro.checks import Subject
from bnn_pyro.checks.estimators import Estimators
from bnn_pyro.checks.joint_distribution import JointDistribution
from bnn_pyro.checks.known_answers import ClosedForm, Logistic
from bnn_pyro.checks.predictive import PredictiveCheck
from bnn_pyro.checks.sbc import Calibration
from bnn_pyro.checks.user_module import linear_module
from bnn_pyro.parts import own_module
from bnn_pyro.run import main


@functools.lru_cache
def data(rows=60):
    return correlated(rows, 2, y_shift=2.0, y_scale=3.0).data


class Net(nn.Module):
    """Two layers, and one of the faults that a user's network can have."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault, self.inner, self.head, self.spare = fault, nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        if self.fault == "dropout":
            h = F.dropout(h, 0.4)
        if self.fault == "detached":
            return F.linear(h, self.head.weight.detach(), self.head.bias) + self.spare(h)
        return self.head(h) if self.fault == "ignored" else self.head(h) + self.spare(h)


@pytest.fixture(autouse=True)
def seeded():
    """Modules draw their initial weights."""
    with bp.isolated(0):
        yield


def made(kind, *args):
    with bp.isolated(0):
        return kind(*args)


def subject(module, method="svi", **settings):
    return Subject("my-network", bp.Bayesian(module, **settings), method, data())


# -- linear in the weights -----------------------------------------------------------------------------------------
def test_the_formulas_of_a_linear_module_are_those_of_the_design_matrix():
    """f = shift + scale (A w + f₀), here by hand; a frozen layer below, and a prior around the module's weights."""
    net = made(nn.Sequential, nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    one = linear_module(subject(net, where="2", frozen="*", prior="pretrained:0.5", noise=1.5))
    with torch.no_grad():
        h = net[1](net[0](data().x_train)).double()
    a = 3 * torch.cat([h, torch.ones(60, 1)], 1)
    w0, s = torch.cat([p.flatten() for p in net[2].parameters()]).double(), torch.tensor([0.5 / 3**0.5] * 3 + [0.5])
    precision = a.T @ a / 1.5**2 + s.double().pow(-2).diag()
    mean = torch.linalg.solve(precision, a.T @ (data().y_train.double() - 2) / 1.5**2 + w0 / s.double() ** 2)
    torch.testing.assert_close(one.gaussian[1], precision, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.gaussian[0], mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.output(mean[None], one.inputs)[0], 2 + a @ mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["nuts", "svi"])
def test_a_linear_module_meets_its_claim_and_another_prior_is_bad(method, monkeypatch):
    check, one = ClosedForm(fits=2, effort=0.25), subject(made(nn.Linear, 2, 1), method)
    assert not check.refuses(one)
    outcome = check.run(one)
    assert outcome.level == ("good" if method == "nuts" else "caution") and "by the module" in outcome.sentence
    exact, own = linear_module(one), Subject.reduced
    monkeypatch.setattr("bnn_pyro.checks.known_answers.linear_module", lambda _: exact)
    monkeypatch.setattr(
        Subject,
        "reduced",
        lambda self, **s: own(subject(made(nn.Linear, 2, 1), prior="normal:0.1"), **s),
    )
    assert check.run(one).level == "bad"


def test_what_is_not_linear_regression_says_why():
    assert "not linear in its Bayesian weights" in ClosedForm().refuses(subject(made(Net)))
    linear = made(nn.Linear, 2, 1)
    for settings in ({"likelihood": "student-t"}, {"prior": "gamma:1,1"}, {"where": "weight"}):
        assert "needs Normal noise and priors" in ClosedForm().refuses(subject(linear, **settings))
    assert "it is a module" in Logistic().refuses(subject(linear))


# -- any module ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", [False, True])
def test_predictions_are_those_of_plain_passes_and_other_outputs_are_bad(norm, monkeypatch):
    layers = [nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)]
    one = subject(made(nn.Sequential, *(layers if norm else layers[:1] + layers[2:])), inputs="raw")
    check = PredictiveCheck(draws=20, effort=0.02)
    assert not check.refuses(one) and check.run(one).level == "good"
    call = own_module.functional_call
    monkeypatch.setattr(own_module, "functional_call", lambda *args: 1.01 * call(*args))
    assert check.run(one).level == "bad"


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "dropout",
            "Net gives other outputs for the same inputs out of training mode: it is random, .* dropout must be",
        ),
        ("ignored", "no gradient along 'spare.weight': its posterior would be its prior"),
        ("detached", "no gradient along 'head.weight': its posterior would be its prior"),
    ],
)
@pytest.mark.filterwarnings("ignore:the outputs of .* have no gradient")
def test_planted_faults_are_named(fault, sentence):
    check, one = Estimators(rows=30, repeats=20, warm=5), subject(made(Net, fault), "nuts")
    if fault == "dropout":
        with pytest.raises(bp.UserError, match=sentence):
            check.run(one)
        assert ClosedForm().refuses(one).startswith("Net gives") and Calibration().refuses(one).startswith("Net gives")
    else:
        outcome = check.run(one)
        assert outcome.level == "bad" and sentence in outcome.sentence
        assert check.run(subject(made(Net), "nuts")).level == "good"


def test_small_modules_are_simulated_and_large_ones_refused():
    one, check = subject(made(nn.Linear, 2, 1), "nuts", noise=1.0), JointDistribution(chains=300, sweeps=2, rows=6)
    assert not check.refuses(one) and not Calibration().refuses(one)
    outcome = check.run(one)
    assert outcome.level in ("good", "caution") and "prior" not in outcome.sentence, outcome.sentence
    large = nn.Sequential(nn.Linear(2, 800), nn.Tanh(), nn.Linear(800, 1))
    assert "2,000 weights" in check.refuses(subject(large, "nuts"))
    trained = subject(made(Net), where="head")
    assert "cannot be" in check.refuses(trained) or "proper prior" in Calibration().refuses(trained)


def test_python_and_the_command_line_take_a_module(tmp_path, monkeypatch, capsys):
    outcomes = bp.checks.run(made(nn.Linear, 2, 1), data(), "nuts", ["estimator", "quadrature"], draws=20)
    assert outcomes["estimator"].level == "good" and "it is a module" in outcomes["quadrature"]
    with pytest.raises(bp.UserError, match="laplace needs a network that is linear in its weights"):
        bp.checks.run(made(nn.Linear, 2, 1), data(), "laplace")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "linear_nets.py").write_text(
        "from torch import nn\ndef one(s):\n    return nn.Linear(*s.input_shape, 1)\n"
    )
    args = ["--module", "linear_nets:one", "--inference", "nuts", "--only", "estimator", "--out", str(tmp_path / "out")]
    assert main(["check", *args, "--quiet"]) == 0
    assert "my-network · nuts · toy-curve" in capsys.readouterr().out
