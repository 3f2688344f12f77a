"""Runs of several chains: to the same draws in this process and in others, stopped, resumed, interrupted and killed."""

import itertools
import os
import signal
import time
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import fit, interrupted, run_method, same

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.inference.chains import Record
from bnn_pyro.inference.coordinates import coordinates
from bnn_pyro.inference.sampler import warn_of_idle_chains
from bnn_pyro.isolation import chain_seed
from bnn_pyro.parallel.map import WorkerDied

SMALL = {
    "nuts": bp.NUTS(chains=2, draws=8, warmup=30, max_tree_depth=3, compiled="yes"),
    "hmc": bp.HMC(chains=2, draws=8, warmup=30, max_steps=3),
    "chees": bp.ChEES(chains=6, superchains=3, draws=8, warmup=60, thin=2, max_steps=4),
    "sghmc": bp.SGHMC(lr=0.01, start="jitter", epochs=38, batch_size=15, chains=2, burn_in=15, max_draws=20),
    "sgld": bp.SGLD(lr=0.01, start="jitter", epochs=76, chains=2),
}  # fmt: skip
PROBLEM = correlated(num=30, noise=0.5)
NET = bp.MeanField(hidden=(3,))
BLOCK = bp.NUTS(chains=2, draws=12, warmup=14, thin=2, max_tree_depth=3, start="prior", compiled="no")
run = partial(run_method, NET, PROBLEM.data)


@pytest.mark.parametrize("name", SMALL)
def test_a_stopped_run_goes_on_to_the_same_draws(name, tmp_path):
    """In warm-up windows, among the draws, at the end of a chain, and after the last step; twice in one run."""
    data = replace(PROBLEM.data, x_val=PROBLEM.data.x_train[:9], y_val=PROBLEM.data.y_train[:9])
    entry = replace(NET, prior="gamma:2,1") if name.startswith("sg") else NET
    whole = fit(entry, data, SMALL[name])
    assert not any(torch.equal(chains[0], chains[-1]) for chains in whole.chains.values())  # each has a seed of its own
    for stops in ((10, 23), (50, 26)):
        out, done = tmp_path / "-".join(map(str, stops)), 0
        for stop in stops:
            done += stop
            with interrupted(stop, words=f"step {done} of 76"):
                fit(entry, data, SMALL[name], out=out, resume=True)
        other = replace(SMALL[name], cores=2) if name == "nuts" and done == 76 else SMALL[name]  # no other result
        assert same(fit(entry, data, other, out=out, resume=True), whole), stops


@pytest.mark.parametrize(("name", "centred"), [("nuts", 0), ("nuts", 1), ("chees", 0)])
def test_what_an_earlier_version_began_goes_on_in_its_coordinates(name, centred, tmp_path, monkeypatch):
    """Of linear models with a learned noise these were others, and checkpoints hold positions in them."""
    entry = bp.MeanField(hidden=(), noise="learned", prior="gamma:1,0.1")
    of, out = (entry, PROBLEM.data, SMALL[name]), tmp_path / "out"
    save = Checkpoint.save

    def older(potential):
        potential.centred = centred
        return coordinates(potential)

    def unmarked(self, state):
        for part in (state, state.get("kernel", {})):
            if part.pop("centred", None) is not None and centred:
                part["centred"] = True
        save(self, state)

    with monkeypatch.context() as patch:
        patch.setattr("bnn_pyro.inference.coordinates.coordinates", older)
        patch.setattr(Checkpoint, "save", unmarked)
        whole = fit(*of)
        with interrupted(12):
            fit(*of, out=out)
    assert not same(fit(*of), whole)
    with interrupted(12):
        fit(*of, out=out, resume=True)
    assert same(fit(*of, out=out, resume=True), whole)


def test_thinning_keeps_every_third_transition_and_counts_every_divergence():
    record = Record(draws=2, warmup=1, thin=3)
    for t in range(7):
        means, others = dict.fromkeys(("acceptance_rate", "trajectory_length"), t / 10), {"n_steps": t, "lp": -t}
        record.add(np.array([float(t)]), means | others | {"diverging": float(t in (0, 2)), "tree_depth": t % 4})
    assert record.finished and record.divergent == 1 and record.columns["z"].tolist() == [[3.0], [6.0]]
    expected = {"acceptance_rate": [0.2, 0.5], "trajectory_length": [0.2, 0.5], "n_steps": [6, 15], "lp": [-3, -6]}
    for name, values in {**expected, "diverging": [1, 0], "tree_depth": [3, 2]}.items():
        assert record.columns[name].tolist() == pytest.approx(values)


@pytest.fixture(scope="module")
def whole():
    return run(BLOCK)


def failing(at, fail, slow=0.0):
    """``BLOCK`` of a class that no other process could import, as one of a notebook: chain 1 fails at a transition."""

    class Failing(bp.NUTS):
        def kernel(self, potential, start, seed):
            kernel = super().kernel(potential, start, seed)
            step, steps, mine = kernel.step, itertools.count(1), seed == chain_seed(0, 0, stream=2)

            def failing():
                time.sleep(slow)
                if next(steps) == at and mine:
                    fail()
                return step()

            kernel.step = failing
            return kernel

    return Failing(**vars(BLOCK))


def test_processes_one_of_which_is_killed_draw_the_same_and_are_stopped_and_resumed(tmp_path, whole):
    """A chain goes on in another process; SIGTERM while it is at it; then this process has the rest to do."""
    killed, lines = tmp_path / "killed", []

    def kill():
        if not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def signalled(done, of, figures):
        assert list(figures) == ["chain"] or figures["ms/gradient"] > 0  # a chain that has just begun has no figures
        if done >= 38 + 12 and not checkpoint.stop:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match=r"step \d+ of 76") as stopped, Checkpoint(tmp_path, every=0.0) as checkpoint:
        run(replace(failing(8, kill, slow=0.04), cores=2), checkpoint=checkpoint, report=signalled)
    reached = int(str(stopped.value).split()[3])
    assert killed.exists() and 50 <= reached < 76
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = run(BLOCK, checkpoint=Checkpoint(tmp_path), report=lambda done, *_: lines.append(done))
    assert lines[0] == reached + 1 and same(again, whole)


def test_a_chain_that_dies_each_time_is_named_and_nothing_is_lost(tmp_path, whole):
    with pytest.raises(bp.UserError, match=r"chain 1 of 2 died in its process .* go on with --resume"):
        run(failing(20, dies), checkpoint=Checkpoint(tmp_path, every=0.0))
    lines = []
    assert same(run(BLOCK, checkpoint=Checkpoint(tmp_path), report=lambda done, *_: lines.append(done)), whole)
    assert lines[0] == 38 + 19 + 1  # the other was run to its end, and its own file has what it drew
    with pytest.warns(UserWarning, match=r"chain 1 of 2 died .*: 1 of 2 chains with 12 of 12 draws each are kept"):
        rest = run(failing(20, dies))  # without a checkpoint
    assert all(torch.equal(whole.chains[site][1:], v) for site, v in rest.chains.items())
    assert "chain 1 of 2 died" in rest.provenance["stopped"]


def interrupt_at(step):
    def report(done, of, figures):
        if done == step:  # as Python's own handler does
            raise KeyboardInterrupt

    return report


def dies():
    raise WorkerDied("its process died each time")


def test_ctrl_c_keeps_the_draws_so_far(tmp_path):
    nuts = bp.NUTS(chains=3, draws=20, warmup=10, max_tree_depth=3, compiled="yes")
    chees = SMALL["chees"]  # whose chains go side by side
    for method, step, chains, draws in ((nuts, 75, 2, 20), (nuts, 17, 1, 7), (chees, 65, 6, 2)):
        whole, of = run(method), f"{chains} of {method.chains} chains with {draws} of {method.draws} draws each"
        with pytest.warns(UserWarning, match=f"stopped by Ctrl-C: {of} are kept"):
            some = run(method, report=interrupt_at(step))
        assert all(torch.equal(whole.chains[site][:chains, :draws], v) for site, v in some.chains.items())
        some.save(tmp_path)
        assert bp.load(tmp_path, NET).provenance["stopped"] == f"stopped by Ctrl-C: {of}"
        assert some.stats["lp"].shape == (chains, draws)
    with pytest.raises(KeyboardInterrupt, match=r"in the warm-up, before the first draw; .*--out"):
        run(nuts, report=interrupt_at(9))


def test_chains_that_tell_of_nothing_but_their_starts():
    z, diverging = torch.arange(5.0 * 12).reshape(5, 12, 1), torch.zeros(5, 12)
    z[1], z[3] = 1.0, 2.0
    diverging[[0, 3, 4]] = 1.0
    with pytest.warns(UserWarning) as said:
        warn_of_idle_chains(z, diverging, (0, 2, 4, 5, 7), 8)
    every, none = (str(w.message) for w in said)
    assert every.startswith("3 chains (1, 6, 8) of 8: every draw diverged") and "start=map" in every
    assert none.startswith("chain 3 of 8: every transition was rejected")
    diverging[:, 3], z[:, 5] = 0.0, -1.0  # one of them moved, or did not diverge
    warn_of_idle_chains(z, diverging, range(5), 8)
    warn_of_idle_chains(torch.ones(2, 9, 1), torch.ones(2, 9), range(2), 2)  # too few to tell
