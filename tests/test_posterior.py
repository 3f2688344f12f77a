"""What a posterior gives back: its draws, evenly thinned chains, and the very same ones after a round trip on disk."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conjugate import correlated, dataset
from properties import Planted, planted
from run_folders import reseal

import bnn_pyro as bp
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.isolation import isolated
from bnn_pyro.posterior import Posterior

PROBLEM = correlated(num=20, y_shift=3.0, y_scale=2.0)
METHODS = {"guide": bp.SVI(epochs=10), "chains": bp.MAP(epochs=10)}


def fit(kind, out=None, seed=4):
    # a σ of 0.1 keeps 500 draws of one float32 apart
    return bp.fit(
        bp.MeanField(hidden=(3,), init_scale=0.1), PROBLEM.data, METHODS[kind], seed=seed, out=out, progress=False
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{kind: (posterior, its folder)}, one fit each."""
    folders = {kind: tmp_path_factory.mktemp(kind) / "run" for kind in METHODS}
    return {kind: (fit(kind, folder), folder) for kind, folder in folders.items()}


@pytest.fixture(params=METHODS)
def saved(request, trained, tmp_path):
    """(posterior, a copy of its folder)."""
    posterior, folder = trained[request.param]
    return posterior, Path(shutil.copytree(folder, tmp_path / "run"))


chains_alone = pytest.mark.parametrize("saved", ["chains"], indirect=True)


# -- draws -------------------------------------------------------------------------------------------------------
def test_draws_of_a_guide(trained, monkeypatch):
    posterior, _ = trained["guide"]
    draws = posterior.draw(500, seed=1)
    for site, initial in posterior.model.initial.items():
        assert draws[site].shape == (500, *initial.shape)
        assert len(draws[site].reshape(500, -1).unique(dim=0)) == 500
        assert not draws[site].requires_grad
    flat = torch.cat([value.reshape(500, -1) for value in draws.values()], 1).double()
    loc, scale = posterior.guide.loc.detach(), posterior.guide.scale.detach()
    assert ((flat.mean(0) - loc).abs() < 5 * scale / 500**0.5).all()
    assert ((flat.std(0) / scale - 1).abs() < 5 / 1000**0.5).all()
    again, other = posterior.draw(500, seed=1), posterior.draw(500, seed=2)
    assert all(torch.equal(draws[site], again[site]) and not torch.equal(draws[site], other[site]) for site in draws)
    with pytest.raises(bp.UserError, match="at least 1, got 0"):
        posterior.draw(0)
    monkeypatch.setattr("bnn_pyro.posterior.BLOCK_BYTES", 4 * 20 * 3)  # 20 weights: three draws a block
    with isolated(3):
        sizes = [next(iter(block.values())).shape[0] for block in posterior.blocks(8)]
    assert sizes == [3, 3, 2] and all(value.shape[0] == 8 for value in posterior.draw(8, seed=3).values())
    for both in ({}, dict(guide=posterior.guide, chains={})):
        with pytest.raises(ValueError, match="either a guide or chains"):
            Posterior(posterior.model, posterior.schema, **both)


def numbered(chains, length):
    """A posterior whose draw d of chain c is the number c·length + d."""
    with isolated(0):
        model = bp.MeanField(hidden=(), bias=False, noise=1.0).model(bp.Schema("regression", (1,)))
    value = torch.arange(chains * length).float().view(chains, length, 1, 1)
    return Posterior(model, bp.Schema("regression", (1,)), chains={"layers.0.weight": value})


def test_posterior_and_data_say_what_they_are(trained):
    guide, chains = (trained[kind][0] for kind in METHODS)
    size = sum(value.numel() for value in guide.model.initial.values())
    assert f"Posterior of mean-field by svi on {PROBLEM.data.name}: {size} weights; a guide" in repr(guide)
    assert "by map" in repr(chains) and "1 chain of 1" in repr(chains) and "bp.predict(posterior" in repr(chains)
    assert list(guide.history["elbo"]) == guide.trace["elbo"] and {"kl", "epoch"} <= set(guide.history)
    rows = len(PROBLEM.data.x_train)
    assert f"regression of {PROBLEM.data.schema.target} (numbers)" in repr(PROBLEM.data)
    assert f"{rows} train" in repr(PROBLEM.data) and len(repr(PROBLEM.data)) < 300


def test_thinning_is_even():
    posterior = numbered(4, 25)
    for num in (1, 2, 3, 7, 10, 33, 99, 100):
        kept = posterior.draw(num)["layers.0.weight"].flatten()
        assert len(kept) == num and len(kept.unique()) == num
        assert (kept.diff() > 0).all() and kept.diff().amax() - kept.diff().amin() <= 1 if num > 2 else True
        if num >= 4:
            share = torch.bincount((kept // 25).long(), minlength=4)
            assert share.amax() - share.amin() <= 1
        if num > 1:
            assert kept[0] == 0 and kept[-1] == 99
    assert posterior.draw(1000)["layers.0.weight"].flatten().tolist() == list(range(100))


# -- pooling -----------------------------------------------------------------------------------------------------
def sampled(seed, chains=4, **settings):
    method = bp.ChEES(**{"chains": chains, "superchains": 2, "warmup": 10, "draws": 3, "compiled": "no", **settings})
    return bp.fit(PROBLEM.entry(), PROBLEM.data, method, seed=seed, progress=False, device="cpu")


def test_pooled_chains_stand_side_by_side(tmp_path):
    first, second = sampled(0), sampled(1, chains=6)
    second.save(tmp_path)  # read back, its settings are JSON
    pooled = bp.pool([first, bp.load(tmp_path)])
    for site, values in pooled.chains.items():
        assert torch.equal(values, torch.cat([first.chains[site], second.chains[site]]))
    assert torch.equal(pooled.stats["lp"], torch.cat([first.stats["lp"], second.stats["lp"]]))
    assert pooled.stats["superchain"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 3, 3]
    assert pooled.provenance["seeds"] == [0, 1] and "key" not in pooled.provenance
    assert bp.predict(pooled, PROBLEM.data.x_train, num_draws=30).num_draws == 30
    pooled.save(tmp_path / "pooled")
    assert torch.equal(bp.load(tmp_path / "pooled").stats["superchain"], pooled.stats["superchain"])


def test_what_belongs_to_different_posteriors_is_not_pooled(trained):
    first = sampled(0)
    others = {
        "another length of chains": sampled(1, draws=4),
        "another temperature": sampled(1, temperature=0.5),
        "another training rows": replace(first, provenance={**first.provenance, "fingerprint": "other"}),
        "another variant or setting": replace(first, provenance={**first.provenance, "entry": "mlp"}),
        "is a guide and has no chains": trained["guide"][0],
    }
    for words, other in others.items():
        with pytest.raises(bp.UserError, match=f"posterior 2 .*{words}"):
            bp.pool([first, other])
    with pytest.raises(bp.UserError, match="no posteriors"):
        bp.pool([])


# -- the archive -------------------------------------------------------------------------------------------------
def test_round_trip_is_exact(saved):
    posterior, folder = saved
    loaded = bp.load(folder)
    for seed in (0, 1):
        before, after = posterior.draw(5, seed=seed), loaded.draw(5, seed=seed)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[site], after[site]) for site in before)
    x = PROBLEM.data.x_train
    assert torch.equal(bp.predict(posterior, x).locs, bp.predict(loaded, x).locs)
    assert loaded.schema == posterior.schema
    assert loaded.trace == dict(posterior.trace) and loaded.provenance == json.loads(json.dumps(posterior.provenance))
    known = {"entry", "entry_settings", "method", "method_settings", "seed", "fingerprint", "versions", "seconds"}
    assert known <= set(loaded.provenance)
    loaded.save(folder.parent / "again")
    assert (folder / "posterior.pt").read_bytes() == (folder.parent / "again" / "posterior.pt").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["posterior.json", "posterior.pt"]


def one_bit(blob):
    middle = len(blob) // 2
    return blob[:middle] + bytes([blob[middle] ^ 1]) + blob[middle + 1 :]


DAMAGE = {
    "truncated": ("posterior.pt", lambda blob: blob[:-1]),
    "one bit": ("posterior.pt", one_bit),
    "cut": ("posterior.json", lambda blob: blob[:-20]),
    "empty": ("posterior.json", lambda blob: b""),
    "list": ("posterior.json", lambda blob: b"[]"),
    "schema": ("posterior.json", lambda blob: blob.replace(b'"schema"', b'"scheme"')),
    "units": ("posterior.json", lambda blob: blob.replace(b'"y_scale": 2.0', b'"y_scale": 1.0')),
    "not UTF-8": ("posterior.json", lambda blob: b"\xff"),
}


@chains_alone
def test_a_damaged_archive_is_refused(saved):
    _, folder = saved
    for name, change in DAMAGE.values():
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(change(whole))
        with pytest.raises(bp.UserError, match=r"posterior\.json\)? is (damaged|truncated or was altered)"):
            bp.load(folder)
        (folder / name).write_bytes(whole)


def test_other_descriptions_are_told(saved):
    posterior, folder = saved
    reseal(folder, format=99)
    with pytest.raises(bp.UserError, match="format 99; this version reads format 1"):
        bp.load(folder)
    reseal(folder, format=1, provenance={**posterior.provenance, "entry": "mean-feild"})
    with pytest.raises(bp.UserError, match="did you mean 'mean-field'"):
        bp.load(folder)
    settings = {**posterior.provenance["entry_settings"], "hidden": [4]}
    reseal(folder, provenance={**posterior.provenance, "entry_settings": settings})
    with pytest.raises(bp.UserError, match="does not fit its own settings"):
        bp.load(folder)
    (folder / "posterior.pt").unlink()
    with pytest.raises(bp.UserError, match=r"no posterior\.pt in .*not a finished run"):
        bp.load(folder)
    with pytest.raises(bp.UserError, match=r"no posterior\.json in"):
        bp.load(folder / "nowhere")


@chains_alone
@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_code_in_a_file_is_not_executed(saved, tmp_path, writer):
    """Even where whoever wrote the file made the checksum fit."""
    _, folder = saved
    path, mark = folder / "posterior.pt", tmp_path / "executed"
    if writer == "torch":
        torch.save({"guide": Planted(mark), "chains": None, "stats": {}}, path)
    else:
        path.write_bytes(planted(mark))
    reseal(folder)
    with pytest.raises(bp.UserError, match="something else than tensors and was not loaded"):
        bp.load(folder)
    assert not mark.exists()
    # the payload would have worked
    torch.load(path, weights_only=False) if writer == "torch" else pickle.loads(path.read_bytes())
    assert mark.exists()


# -- the prior ---------------------------------------------------------------------------------------------------------
def test_the_prior_predicts_by_its_own_variance_without_a_row(tmp_path):
    """Var y = σ² + scale² τ² (|x|² + 1) of a linear network."""
    x = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    schema = Schema("regression", (2,), y_shift=40.0, y_scale=8.0)
    data = dataset(x[:0], x[:0, 0], schema, x, x[:, 0])
    posterior = bp.prior(bp.MeanField(hidden=(), prior="normal:1.5", noise=5.0), data, num_draws=4000)
    prediction = bp.predict(posterior, x, num_draws=4000)
    exact = 25 + (8 * 1.5) ** 2 * (x.square().sum(1) + 1)
    assert (prediction.total / exact - 1).abs().max() < 5 * (2 / 4000) ** 0.5
    assert ((prediction.mean - 40).abs() < 5 * (exact / 4000).sqrt()).all()
    assert "Prediction of a number for 2 points by 4,000 draws>\nnext: prediction.mean" in repr(prediction)
    again = bp.prior(bp.MeanField(hidden=(), prior="normal:1.5", noise=5.0), data, num_draws=4000)
    assert all(torch.equal(again.chains[site], w) for site, w in posterior.chains.items()) and "prior" in repr(again)
    posterior.save(tmp_path)
    assert torch.allclose(bp.predict(bp.load(tmp_path), x, num_draws=4000).mean, prediction.mean)


def test_a_saved_prior_is_not_resumed_as_a_fit(tmp_path):
    variant, data = bp.MeanField(hidden=()), PROBLEM.data
    bp.prior(variant, data, num_draws=3).save(tmp_path)
    with pytest.raises(bp.UserError, match="other settings, seed or data"):
        bp.fit(variant, data, out=tmp_path, resume=True, progress=False)


@pytest.mark.parametrize(("variant", "said"), [("sparse-dropout", "improper"), ("last-layer", "trained network")])
def test_a_prior_that_cannot_be_drawn_is_refused(variant, said):
    with pytest.raises(bp.UserError, match=said):
        bp.prior(variant, PROBLEM.data)
