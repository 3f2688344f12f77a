"""The contract of the zoo: every variant × method × task, read off the tables; Pyro work that leaves nothing behind."""

import random
from contextlib import suppress

import numpy as np
import pyro
import pyro.poutine as poutine
import pytest
import torch
from conjugate import correlated
from monte_carlo import fit
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from refused import refuses
from zoo_problems import NUM, TASKS, problem, quick

import bnn_pyro as bp
from bnn_pyro.inference import methods_for
from bnn_pyro.inference.log_joint import Rescale
from bnn_pyro.posterior import weight_space

every_entry = pytest.mark.parametrize("name", bp.ZOO)
every_task = pytest.mark.parametrize("task", TASKS)
PAIRS = [(n, m) for n, kind in bp.ZOO.items() for m in methods_for(kind)]
# Every pair has several classes and one more task, in turn; the first method of a variant has them all.
FITS = [
    (n, m, task)
    for k, (n, m) in enumerate(PAIRS)
    for i, task in enumerate(TASKS)
    if task == "multiclass" or k % len(TASKS) == i or m == methods_for(bp.ZOO[n])[0]
]


def sites(trace):
    """{latent site: shape of its value}."""
    nodes = {name: trace.nodes[name] for name in trace.stochastic_nodes}
    drawn = {name: node for name, node in nodes.items() if not poutine.util.site_is_subsample(node)}
    return {name: tuple(n["value"].shape) for name, n in drawn.items() if not n["infer"].get("is_auxiliary")}


@every_task
@every_entry
def test_model_and_guide_are_ordinary_pyro_callables(name, task):
    """Site "y" has y's shape in a plate "data" of len(x); q has exactly the model's sites; prior predictive runs."""
    entry, data = problem(name, task, proper=True)
    with bp.isolated(0), pyro.validation_enabled(True):
        model = entry.model(data.schema)
        guide = entry.guide(model)
        if weight_space(model) is not model:  # a pair over activations: it is ordinary, and so is its twin
            guide(data.x_train)
            assert poutine.trace(model).get_trace(data.x_train).nodes["y"]["value"].shape == data.y_train.shape
            model, guide = weight_space(model), weight_space(guide)
        for num in (NUM, 1, 5):
            trace = poutine.trace(model).get_trace(data.x_train[:num], data.y_train[:num])
            trace.compute_log_prob()
            observed = trace.nodes["y"]
            assert observed["is_observed"] and observed["log_prob"].shape == (num,)
            assert observed["cond_indep_stack"][-1].name == "data"
            free = poutine.trace(model).get_trace(data.x_train[:num])
            assert free.nodes["y"]["value"].shape == data.y_train[:num].shape and not free.nodes["y"]["is_observed"]
            latent = {site: shape for site, shape in sites(free).items() if site != "y"}
            assert latent == sites(trace) == {site: tuple(v.shape) for site, v in model.initial.items()}
            if guide is not None:
                assert sites(poutine.trace(guide).get_trace(data.x_train[:num])) == latent
                assert sites(poutine.trace(guide).get_trace(data.x_train[:num], data.y_train[:num])) == latent
        # Every latent site is drawn once, outside the plate, and afresh each time.
        again = poutine.trace(model).get_trace(data.x_train)
        for site in latent:
            assert not free.nodes[site]["cond_indep_stack"]
            assert not torch.equal(free.nodes[site]["value"], again.nodes[site]["value"])


@every_task
@every_entry
def test_log_joint_of_two_halves_averages_to_the_whole(name, task):
    """Catches a missing plate, an N baked into the model and a prior that is counted twice, or scaled."""
    entry, data = problem(name, task, proper=True)
    with bp.isolated(0):
        model = weight_space(entry.model(data.schema))
        w = poutine.trace(model).get_trace(data.x_train)
        for other in [node for node in w.nodes if node not in model.initial]:
            w.remove_node(other)

        def log_joint(rows, factor):
            scaled = poutine.replay(Rescale(factor)(model), trace=w)
            return poutine.trace(scaled).get_trace(data.x_train[rows], data.y_train[rows]).log_prob_sum().item()

        whole = log_joint(slice(None), 1.0)
        halves = [log_joint(slice(0, 6), 2.0), log_joint(slice(6, None), 2.0)]
        assert halves[0] != pytest.approx(halves[1], rel=1e-4)
        assert sum(halves) / 2 == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(("name", "method", "task"), FITS)
def test_methods_fit_predict_save_and_load(name, method, task, tmp_path):
    entry, data = problem(name, task)
    thorough = task == "multiclass"
    seeds = ((3, tmp_path), (3, None), (4, None)) if thorough else ((3, None),)
    runs = [fit(entry, data, quick(method), seed=seed, out=out) for seed, out in seeds]
    draws = [run.draw(2, data.x_test, seed=1) for run in runs]
    shapes = {site: tuple(v.shape) for site, v in runs[0].model.initial.items()}
    assert {site: tuple(v.shape[1:]) for site, v in draws[0].items()} == shapes
    if thorough:
        assert all(torch.equal(draws[0][site], draws[1][site]) for site in shapes)
        # In a Laplace approximation nothing is random: what differs with the seed is where the variant starts.
        assert method == "laplace" or any(not torch.equal(draws[0][site], draws[2][site]) for site in shapes)

    module = getattr(entry, "module", None)  # a user's own is no part of an archive
    again = bp.load(tmp_path, module=module) if thorough else runs[0]
    prediction, same = (bp.predict(run, data.x_test, num_draws=5, seed=0) for run in (runs[0], again))
    s, b = prediction.components.batch_shape
    shape = (7, *([len(data.schema.classes)] if data.schema.classes else []))
    assert b == 7 and 1 <= s <= 5 and prediction.has_classes == data.schema.has_classes
    assert prediction.mean.shape == shape
    assert (prediction.probs if data.schema.classes else prediction.locs).shape == (s, *shape)
    for result in ("mean", "total", "aleatoric", "epistemic"):
        value = getattr(prediction, result)
        assert torch.isfinite(value).all() and torch.equal(value, getattr(same, result))
    assert torch.isfinite(prediction.log_prob(data.y_test)).all()

    provenance = runs[0].provenance
    assert (provenance["entry"], provenance["method"], provenance["seed"]) == (name, method, 3)
    lengths = {len(line) for line in runs[0].trace.values()}
    assert len(lengths) <= 1 and all(torch.isfinite(torch.tensor(line)).all() for line in runs[0].trace.values())


def test_what_is_no_variant_method_or_setting_is_refused_and_classes_are_made(tmp_path):
    data, net = problem("mlp", "multiclass")[1], torch.nn.Identity()
    made = bp.fit(bp.MLP, data, bp.MAP(epochs=1), progress=False, out=tmp_path)
    assert torch.equal(bp.load(tmp_path, bp.MLP).draw(2)["layers.0.weight"], made.draw(2)["layers.0.weight"])
    for call, words in (
        (lambda: bp.fit("mlp", data, "bogus"), "unknown .* 'bogus'"),
        (lambda: bp.fit(object(), data, "map"), "neither a name nor a dataclass"),
        (lambda: bp.fit(torch.nn.Sequential, data), r"of a class give an instance, Sequential\("),
        (lambda: bp.fit(bp.Bayesian(torch.nn.Sequential), data), r"is a class; give an instance, Sequential\("),
        (lambda: bp.fit(data.schema, data, "map"), "no class attribute 'has'"),
        (lambda: bp.MeanField(net), r"hidden must be at least 1, got Identity.*bp\.Bayesian\(module\)"),
        (lambda: bp.Bayesian(net, likelihood=type(net)), "likelihood=Identity is a class; give an instance"),
        (lambda: bp.MeanField(noise=net.forward), "noise takes .* such as .learned., got <bound method"),
        (lambda: bp.load(tmp_path, "mlp"), "entry is a variant"),
        (lambda: bp.checks.run(net), "data is missing"),
        (lambda: bp.checks.run("mlp", only="bogus"), "unknown check 'bogus'"),
    ):
        refuses(words, call)


@every_entry
def test_guides_share_nothing_with_one_another_or_with_fits_even_in_the_global_store(name):
    """Pyro's default: modules of one name are one module. Two guides and a fit's: each stays what it was."""
    entry, data = problem(name, "binary")
    batch = data.x_train, data.y_train
    with bp.isolated(0), pyro.settings.context(module_local_params=False):
        model = entry.model(data.schema)
        first, second = entry.guide(model), entry.guide(model)
        if first is None:
            pytest.skip(f"{name} has no guide")
        kept = {k: v.clone() for k, v in second.state_dict().items()}
        SVI(model, first, Adam({"lr": 0.05}), Trace_ELBO()).step(*batch)
        trained = {k: v.clone() for k, v in first.state_dict().items()}
        assert all(not torch.equal(kept[k], p) for k, p in first.named_parameters()), "Pyro's own SVI trains all of it"
        fitted = bp.fit(entry, data, quick(methods_for(bp.ZOO[name])[0]), progress=False, device="cpu")
        before = fitted.draw(2, seed=0)
        fitted.guide(data.x_test)
        second(data.x_train)
        SVI(model, first, Adam({"lr": 0.05}), Trace_ELBO()).step(*batch)
        assert any(not torch.equal(trained[k], v) for k, v in first.state_dict().items())
        assert all(torch.equal(kept[k], v) for k, v in second.state_dict().items())
        assert all(torch.equal(before[site], value) for site, value in fitted.draw(2, seed=0).items())


@pytest.mark.parametrize("task", ["heteroscedastic", "multiclass"])
@every_entry
def test_vectorised_particles_and_pyros_predictive(name, task):
    """The vectorised estimate is the same number as the mean over its particles, one at a time."""
    entry, data = problem(name, task, proper=True)
    batch = data.x_train, data.y_train
    with bp.isolated(0), pyro.validation_enabled(True):
        pair = entry.model(data.schema)
        own, model = entry.guide(pair), weight_space(pair)
        guide = weight_space(own) or AutoNormal(model)
        guide(*batch)
        vectorised = Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
        (model_trace, guide_trace), *_ = vectorised._get_traces(model, guide, batch, {})
        for particle, log_prob in enumerate(model_trace.nodes["y"]["log_prob"]):
            # The particles are the first dimension; the plate's own, of size 1, follows.
            w = {s: guide_trace.nodes[s]["value"][particle].reshape(v.shape) for s, v in model.initial.items()}
            one = poutine.trace(poutine.condition(model, data=w)).get_trace(*batch)
            one.compute_log_prob()
            torch.testing.assert_close(log_prob, one.nodes["y"]["log_prob"], rtol=1e-4, atol=1e-5)
        prior = Predictive(model, num_samples=4, parallel=True)(data.x_test)
        again = Predictive(model, posterior_samples={s: prior[s] for s in model.initial}, parallel=True)(data.x_test)
        assert prior["y"].reshape(4, -1).shape == again["y"].reshape(4, -1).shape == (4, 7)
        assert own is None or Predictive(pair, guide=own, num_samples=4, parallel=True)(data.x_test)["y"].shape[-1] == 7


# -- isolation: nothing is left behind, and nothing left behind is reached --------------------------------------------
PROBLEM = correlated(num=20, seed=1)
HOW = PROBLEM.entry(), PROBLEM.data, bp.SVI(epochs=20)


def state():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


def use_everything():
    """Draw from all generators and leave a parameter in the global store."""
    random.random()
    np.random.rand()  # noqa: NPY002 (the generator that Pyro seeds)
    torch.rand(1)
    pyro.param(f"p{len(pyro.get_param_store())}", torch.zeros(2))


def test_the_seed_decides_whatever_the_caller_did_before():
    expected = fit(*HOW, seed=7).guide.loc.detach()
    with bp.isolated(123):  # another state of every generator, and a full store
        use_everything()
        assert torch.equal(fit(*HOW, seed=7).guide.loc, expected)
        with bp.isolated(5):
            first = torch.rand(2)
    with bp.isolated(5):
        assert torch.equal(torch.rand(1), first[:1])
        with bp.isolated():  # without a seed the generators are the caller's
            assert torch.equal(torch.rand(1), first[1:])
    assert not torch.equal(fit(*HOW, seed=8).guide.loc, expected)


@pytest.mark.parametrize("seed", [None, 3])
def test_everything_comes_back(seed):
    with bp.isolated(0):
        mine, before = pyro.param("mine", torch.ones(1)).unconstrained(), state()
        with suppress(KeyError), bp.isolated(seed):
            assert not list(pyro.get_param_store()) and pyro.settings.get("module_local_params")
            with pyro.settings.context(module_local_params=False):
                use_everything() if seed is not None else pyro.param("other", torch.zeros(1))
            raise KeyError
        assert list(pyro.get_param_store()) == ["mine"] and pyro.param("mine").unconstrained() is mine
        assert state() == before
    assert not pyro.settings.get("module_local_params")
