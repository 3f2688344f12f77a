"""The command `check`: what it asks of whom, that finished checks are never lost; modules of the user's own."""

import json
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from conjugate import correlated
from torch import nn

import bnn_pyro as bp
from bnn_pyro import checks as registry
from bnn_pyro.checks import Check, Finding, Outcome, Subject
from bnn_pyro.checks.estimators import Estimators
from bnn_pyro.checks.joint_distribution import JointDistribution
from bnn_pyro.checks.known_answers import ClosedForm
from bnn_pyro.checks.predictive import PredictiveCheck
from bnn_pyro.checks.sbc import Calibration
from bnn_pyro.checks.user_module import linear_module
from bnn_pyro.parts import own_module
from bnn_pyro.reports import read_texts
from bnn_pyro.runs import check as bench

pytestmark = pytest.mark.usefixtures("seeded")
CALLS: list = []


@dataclass(frozen=True)
class Made(Check):
    """What was found beside what was asked for."""

    effort: int = 100
    title: ClassVar[str] = "Made up"
    quick: ClassVar = {"effort": 3}
    level: ClassVar[str] = "good"
    error: ClassVar[BaseException | None] = None

    def _refuses(self, subject):
        return "points have no spread" if subject.converges_to == "point" else ""

    def _run(self, subject, seed, report):
        if self.error is not None:
            raise self.error
        CALLS.append((type(self).__name__, type(subject.entry).__name__, subject.inference, self.effort, seed))
        finding = Finding("the mean <of w>", 1.0, 0.9, 0.1, 0.3, self.level, z=1.0)
        return Outcome("made", self.level, "Two & two.", {"draws": 7}, (finding,), figures={"coverage_95": 0.875})


Wrong = type("Wrong", (Made,), {"level": "bad", "title": "Wrong", "__doc__": Made.__doc__})
Stopped = type("Stopped", (Made,), {"error": KeyboardInterrupt(), "title": "Stopped"})
Refused = type("Refused", (Made,), {"error": bp.UserError("row 3 of x.csv is not finite"), "title": "Refused"})


@pytest.fixture
def checks(monkeypatch):
    """Puts these checks in the place of the real ones; none was called."""
    CALLS.clear()
    return lambda **kinds: [monkeypatch.setattr(place, "CHECKS", kinds) for place in (registry, bench)]


@pytest.fixture
def check(command):
    return partial(command, "check")


def read(out):
    return json.loads((out / "check.json").read_text())


def test_a_check_that_holds(checks, check, tmp_path):
    checks(made=Made)
    out = tmp_path / "out"
    printed = check("mean-field", "--inference", "nuts", "--hidden", 3, "--set", "chains=2", "--out", out)
    assert CALLS == [("Made", "MeanField", "nuts", 3, 0)]
    assert "Good" in printed and "Two & two." in printed and "claims the exact posterior" in printed
    plan, outcome = read(out)["key"]["plans"][0], read(out)["subjects"][0]["outcomes"]["made"]
    assert plan["variant_settings"]["hidden"] == [3] and plan["given"] == {"chains": 2}
    assert outcome["check_settings"] == {"effort": 3} and "evidence" not in outcome
    html = (out / "check.html").read_text()
    assert "Two &amp; two." in html and "the mean &lt;of w&gt;" in html and "0.300" in html
    assert set(bench.FIGURES) == set(read_texts("figures")["check"])
    (figure,) = outcome["figures_drawn"]  # it has no ranks
    assert figure["title"] == "How far off is each quantity?" and "data:image/png;base64" in html
    assert (out / f"figures/{figure['name']}.png").read_bytes().startswith(b"\x89PNG")


def test_a_claim_that_does_not_hold_and_what_does_not_apply(checks, check, tmp_path):
    checks(made=Made, wrong=Wrong)
    assert "Problem" in check("mean-field", "--budget", "full", "--seed", 4, "--out", tmp_path / "out", code=1)
    assert [(kind, "MeanField", "svi", 100, 4) for kind in ("Made", "Wrong")] == CALLS
    assert "Not checked: made: points have no spread" in check("mlp", "--out", tmp_path / "other") and len(CALLS) == 2


def test_finished_checks_survive_a_stop_and_failed_ones_are_made_again(checks, check, tmp_path):
    out = tmp_path / "out"
    checks(refused=Refused, made=Made, stopped=Stopped)
    assert f"--resume --out {out}" in check("mean-field", "--out", out, code=130)
    subject = read(out)["subjects"][0]
    assert subject["failed"] == {"refused": "row 3 of x.csv is not finite"} and list(subject["outcomes"]) == ["made"]
    assert "could not be finished: row 3 of x.csv is not finite" in (out / "check.html").read_text()
    checks(refused=Made, made=Made, stopped=Wrong)
    check("mean-field", "--resume", "--out", out, code=1)
    assert [name for name, *_ in CALLS] == ["Made", "Made", "Wrong"], "a finished check is not made again"
    subject = read(out)["subjects"][0]
    assert subject["failed"] == {} and set(subject["outcomes"]) == {"made", "stopped", "refused"}


def test_a_folder_with_something_else_stays_as_it_is(checks, check, tmp_path):
    out, mine = tmp_path / "out", tmp_path / "mine.txt"
    checks(made=Made)
    mine.write_text("mine")
    check("mean-field", "--out", out)
    before = (out / "check.json").read_bytes()
    for place, args, said in (
        (tmp_path, (), "is not a check"),
        (out, (), "is a check already"),
        (out, ("--resume", "--budget", "full"), "are of budget quick"),
        (out, ("--resume", "--hidden", 9), "other variants, methods, data or settings"),
    ):
        assert said in check("mean-field", *args, "--out", place, code=2)
    assert (out / "check.json").read_bytes() == before and {p.name for p in tmp_path.iterdir()} == {"out", "mine.txt"}
    (out / "check.json").write_text("{")
    assert "damaged" in check("mean-field", "--resume", "--out", out, code=2)


# -- a module of the user's own: the closed form where it is linear, and planted faults, which are named --------
DATA = correlated(60, 2, y_shift=2.0, y_scale=3.0).data


class Net(nn.Module):
    """Two layers, and one of the faults that a user's network can have."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault, self.inner, self.head, self.spare = fault, nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        h = F.dropout(h, 0.4) if self.fault == "dropout" else h
        weight = self.head.weight.detach() if self.fault == "detached" else self.head.weight
        out = F.linear(h, weight, self.head.bias)
        return out if self.fault == "ignored" else out + self.spare(h)


def subject(module, method="svi", **settings):
    return Subject(bp.Bayesian(module, **settings), bp.METHODS[method], DATA)


def test_the_formulas_of_a_linear_module_are_those_of_the_design_matrix():
    """f = shift + scale (A w + f₀), here by hand; a frozen layer below, and a prior around the module's weights."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    one = linear_module(subject(net, where="2", frozen="*", prior="pretrained:0.5", noise=1.5))
    with torch.no_grad():
        h = net[1](net[0](DATA.x_train)).double()
    a = 3 * torch.cat([h, torch.ones(60, 1)], 1)
    w0, s = torch.cat([p.flatten() for p in net[2].parameters()]).double(), torch.tensor([0.5 / 3**0.5] * 3 + [0.5])
    precision = a.T @ a / 1.5**2 + s.double().pow(-2).diag()
    mean = torch.linalg.solve(precision, a.T @ (DATA.y_train.double() - 2) / 1.5**2 + w0 / s.double() ** 2)
    torch.testing.assert_close(one.gaussian[1], precision, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.gaussian[0], mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.output(mean[None], one.inputs)[0], 2 + a @ mean, rtol=1e-5, atol=1e-5)


def test_a_linear_module_meets_its_claim_others_are_refused_and_another_prior_is_bad(monkeypatch):
    check, one = ClosedForm(fits=2, effort=0.25), subject(nn.Linear(2, 1), "nuts")
    assert not check.refuses(one)
    assert "not linear in its Bayesian weights" in check.refuses(subject(Net()))
    assert "needs Normal noise and priors" in check.refuses(subject(nn.Linear(2, 1), likelihood="student-t"))
    large = nn.Sequential(nn.Linear(2, 800), nn.Tanh(), nn.Linear(800, 1))
    assert "2,000 weights" in JointDistribution().refuses(subject(large, "nuts"))
    outcome = check.run(one)
    assert outcome.level == "good" and "by the module" in outcome.sentence
    exact, own = linear_module(one), Subject.reduced
    monkeypatch.setattr("bnn_pyro.checks.known_answers.linear_module", lambda _: exact)
    other = subject(nn.Linear(2, 1), prior="normal:0.1")
    monkeypatch.setattr(Subject, "reduced", lambda self, **s: own(other, **s))
    assert check.run(one).level == "bad"


def test_predictions_are_those_of_plain_passes_and_other_outputs_are_bad(monkeypatch):
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))
    check, one, call = PredictiveCheck(draws=20, effort=0.02), subject(net, inputs="raw"), own_module.with_weights
    assert not check.refuses(one) and check.run(one).level == "good"
    monkeypatch.setattr(own_module, "with_weights", lambda *args: 1.01 * call(*args))
    assert check.run(one).level == "bad"


class Two(nn.Linear):
    def forward(self, a, b):
        return super().forward(torch.cat([a[:, 0], b], 1))


def test_modules_of_several_inputs_or_targets_are_checked():
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(40, 2, generator=g).numpy() for _ in range(2))
    data, two = bp.dataset({"a": x[:, None], "b": x}, y[:, 0], task="regression"), bp.dataset(x, y * [1, 100])
    assert PredictiveCheck(draws=20, effort=0.02).run(replace(subject(Two(4, 1)), data=data)).level == "good"
    one = replace(subject(nn.Linear(2, 2), "chees"), data=two)
    assert "one target" in ClosedForm().refuses(one) and not Calibration().refuses(one)
    outcome = JointDistribution(chains=100, sweeps=2).run(one)
    assert outcome.level != "bad" and "mean of mean of target 1 at input 2" in [f.about for f in outcome.findings]


@pytest.mark.filterwarnings("ignore:the outputs of .* have no gradient")
def test_planted_faults_are_named():
    check = Estimators(rows=30, repeats=20, warm=5)
    for fault, site in (("ignored", "spare.weight"), ("detached", "head.weight")):
        outcome = check.run(subject(Net(fault), "nuts"))
        assert outcome.level == "bad" and f"along '{site}': its posterior would be" in outcome.sentence
    assert check.run(subject(Net(), "nuts")).level == "good"
    random = subject(Net("dropout"), "nuts")
    with pytest.raises(bp.UserError, match="Net gives other outputs for the same inputs"):
        check.run(random)
    assert ClosedForm().refuses(random).startswith("Net gives")


def test_python_and_the_command_line_take_a_module(tmp_path, monkeypatch, check):
    outcomes = bp.checks.run(nn.Linear(2, 1), DATA, "nuts", ["estimator", "quadrature"], draws=20)
    assert outcomes["estimator"].level == "good" and "it is a module" in outcomes["quadrature"]
    told = "chain 1 of 4: every transition was rejected, and tells of its start alone; try start=map"
    assert type("Idle", (Check,), {"_run": lambda *_: warnings.warn(told, stacklevel=2)})().run(None) is None
    own = type("Own", (bp.SVI,), {})(epochs=5)
    assert bp.checks.run("mean-field", method=own, only=["estimator"])["estimator"].level == "good"
    monkeypatch.syspath_prepend(tmp_path)
    code = "from torch import nn\ndef one(s):\n    return nn.Linear(*s.input_shape, 1)\n"
    (tmp_path / "linear_nets.py").write_text(code)
    args = ["--module", "linear_nets:one", "--inference", "nuts", "--only", "estimator", "--out", tmp_path / "out"]
    assert "my-network · nuts · toy-curve" in check(*args)
