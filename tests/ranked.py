"""What the two processes of one fit do, for tests/test_reliability.py: ``main`` writes the results of each to a file.

Calling the other functions gives the results of a process that runs alone.
"""

from dataclasses import replace
from unittest.mock import patch

import torch
from conjugate import correlated
from monte_carlo import interrupted, tensors

import bnn_pyro as bp
from bnn_pyro import distributed as ranks
from bnn_pyro.checkpoint import Run
from bnn_pyro.inference import methods_for, optimise
from bnn_pyro.inference.log_joint import Objective
from bnn_pyro.parts.guides import PointMass
from bnn_pyro.runs.train import load_together

#: 31 rows in batches of 8 at most: 4 steps an epoch, of 8, 8, 8 and 7 rows.
DATA = correlated(num=31, noise=0.5).data
ENTRY = bp.MeanField(hidden=(3,), activation="tanh")
SVI = bp.SVI(epochs=6, batch_size=8, num_particles=2, accumulate=2)
MAP = bp.MAP(epochs=15, batch_size=8, patience=4, lr=0.05)
STOPPED = 7  # a step in the middle of an epoch


def fit(method, out=None, entry=ENTRY, data=DATA, **settings):
    return bp.fit(entry, data, method, **{"seed": 2, "out": out, "progress": False, "device": "cpu", **settings})


def found(posterior):
    return {name: value.clone() for name, value in tensors(posterior).items()}, posterior.trace


def objective(kind, rows):
    """(ELBO, its gradient) of the first rows of the data at the start, with noise that ranks share."""
    here = ranks.process_group()
    entry = replace(ENTRY, noise="learned") if kind == "svi" else bp.MLP(hidden=(3,))
    with bp.isolated(5):
        model = entry.model(DATA.schema)
        guide = entry.guide(model) if kind == "svi" else PointMass(model.initial)
        trained = here.averaged(Objective(model, guide, 1))
        x, y = DATA.x_train[:rows], DATA.y_train[:rows]
        elbo, _ = trained(*here.share_of_step(x, y, len(DATA.x_train)), 0.7)
        elbo.backward()
        return here.total(elbo.detach()) / here.size, torch.cat([p.grad.flatten() for p in guide.parameters()])


def points():
    """The order of rows and the starts are those of one process, and a point estimate has no noise of its own."""
    x, y = DATA.x_train, DATA.y_train
    data = replace(DATA, x_train=x[:24], y_train=y[:24], x_val=x[24:], y_val=y[24:])
    return found(fit(MAP, entry=bp.MLP(hidden=(3,)), data=data))


def contract():
    """{(variant, method): result} of all that can be divided; batches of 1 or 2 rows, fewer than there are ranks."""
    import zoo_problems as zoo

    done = {}
    for name, method in [(n, m) for n, kind in bp.ZOO.items() for m in methods_for(kind)]:
        if getattr(bp.METHODS[method], "divisible", False):
            entry, data = zoo.problem(name, "multiclass")
            few = replace(zoo.quick(method), batch_size=1, epochs=1)
            rows = replace(data, x_train=data.x_train[:4], y_train=data.y_train[:4])
            done[name, method] = found(fit(few, entry=entry, data=rows))
    return done


def stopped(folder):
    """Two ranks stop, as Ctrl-C comes to one, and go on; two stop, and leave a checkpoint for one."""
    for name in ("again", "left"):
        with interrupted(STOPPED, words=f"step {STOPPED} of 24", when=lambda: ranks.process_group().rank == 1):
            fit(SVI, folder / name)
    return found(fit(SVI, folder / "again", resume=True))


def taken_over(folder):
    """The checkpoint of one process, made before, goes on in all."""
    return found(fit(SVI, folder / "alone", resume=True))


def finished(folder):
    """A posterior that is there already is loaded by all."""
    first = found(fit(SVI, folder / "whole"))
    return first, found(fit(SVI, folder / "whole", resume=True))


def drifted():
    """One rank's weights move a little on their own, as all of them do where a plain SVI.step runs on each."""
    here, problem = ranks.process_group(), {}
    with bp.isolated(0):
        model = ENTRY.model(DATA.schema)
        guide = ENTRY.guide(model)

        class Nudged(optimise.Training):
            def advance(self, x, y):
                super().advance(x, y)
                with torch.no_grad():
                    guide.loc[0] += 1e-6 * (here.rank == 1)

        try:
            with patch.object(optimise, "Training", Nudged):
                optimise.Optimisation(epochs=2, batch_size=8).minimise(model, guide, DATA, Run())
        except bp.UserError as error:
            problem = {"kind": type(error).__name__, "told": str(error)}
    return problem


def complaints(folder):
    """What is told where ranks were asked for different things, or the method cannot be divided."""
    here, told = ranks.process_group(), {}
    tries = {
        "seeds": lambda: fit(SVI, seed=here.rank),
        "rows": lambda: fit(SVI, data=replace(DATA, x_train=DATA.x_train + here.rank)),
        "method": lambda: fit(bp.NUTS()),
        "settings of a checkpoint": lambda: fit(replace(SVI, epochs=7), folder / "left", resume=True),
    }
    for name, attempt in tries.items():
        try:
            attempt()
        except bp.UserError as error:
            told[name] = type(error).__name__, str(error)
    return told


def loading(folder):
    """{case: what came of ``load_together``: how often this process loaded, its rows or its error}."""
    here, cases = ranks.process_group(), {}
    for case, broken in {"all": (), "first fails": [0], "second fails": [1]}.items():
        calls, found = [], {"error": None}

        def load(broken=broken, calls=calls):
            calls.append(here.rank)
            if here.rank in broken:
                raise bp.UserError(f"rank {here.rank} has no such file")
            return bp.load_data(folder / "rows.npz")

        try:
            found["data"] = load_together(here, load)
        except bp.UserError as error:
            found["error"] = type(error).__name__, str(error)
        cases[case] = found | {"calls": len(calls)}
    return cases


def main(folder):
    results = {}
    with ranks.joined_processes() as here:
        assert here.size > 1
        results["objectives"] = {(kind, rows): objective(kind, rows) for kind in ("svi", "map") for rows in (31, 5, 1)}
        results["whole"], in_folder = found(fit(SVI)), (stopped, taken_over, finished, complaints, loading)
        for task in (points, contract, drifted, *in_folder):
            results[task.__name__] = task(folder) if task in in_folder else task()
        torch.save(results, folder / f"rank-{here.rank}.pt")
    return 0
