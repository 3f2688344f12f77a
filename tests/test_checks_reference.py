"""Reference posteriors: what is stored, that nothing else is taken for it, and that the check sees what is off."""

import dataclasses
import io
import json
import shutil

import numpy as np
import pytest
import torch
from scipy.special import expit

import bnn_pyro as bp
from bnn_pyro.checks import ALPHA, Subject, reference
from bnn_pyro.checks.reference import Reference
from bnn_pyro.checks.reference_posterior import REFERENCES, bounded, load_reference, references
from bnn_pyro.errors import UserError
from bnn_pyro.plots import reference_outputs
from bnn_pyro.settings import build
from bnn_pyro.zoo import ZOO

#: References whose data every installation has.
EMBEDDED = ("breast-cancer", "digits-last-layer", "toy-curve")
ENDS = (".npz", ".json")
TOY = {"hidden": (32,), "prior": "normal:3", "noise": 1.0}


def subject(variant="mean-field", inference="svi", data="toy-curve", given=None, **settings):
    return Subject(variant, build(ZOO[variant], settings), inference, bp.load_data(data), given or {})


# -- what is stored ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", references())
def test_a_stored_reference_meets_the_bar_and_its_parts_fit(name):
    found = load_reference(name)
    criteria = found.about["criteria"]
    assert found.about["met"] == all(met for *_, met in criteria.values())
    assert found.about["met"] and criteria["draws"][0] >= 10_000 and criteria["divergences"][0] == 0
    assert max(criteria["rhat_split_max"][0], criteria["rhat_of_starts_max"][0]) < 1.01
    assert criteria["bfmi_min"][0] > 0.2 and criteria["lag1_max"][0] < 0.05 and criteria["second_run_p"][0] > ALPHA
    assert (REFERENCES / f"{name}.npz").stat().st_size < 300_000
    # The stored draws are some of those that the averages are of.
    z, draws = found.draws.astype(float), len(found.draws)
    assert np.abs(z.mean(0)).max() < 5 / np.sqrt(draws) and np.abs(z.std(0) - 1).max() < 0.35
    outputs, known = found.outputs(), found.mean[found.points]
    assert outputs.shape[:2] == (draws, len(found.points))
    means = (outputs if len(found.noise) else expit(outputs)).mean(0)
    means = np.concatenate([1 - means, means], 1) if known.shape[1] == 2 else means
    assert (np.abs(means - known) <= 5 * found.mean_sd[found.points] / np.sqrt(draws) + 1e-3).all()
    assert np.abs(bounded(found.outputs(), *(a[found.points] for a in (found.centre, found.spread))).mean(1)
                  - found.expected[:, found.points]).max() < 5 * 0.7 / np.sqrt(draws)  # fmt: skip


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_density_knows_its_own_posterior_and_no_other(name):
    stored = load_reference(name)
    data, own = stored.data(), build(ZOO[stored.about["variant"]], stored.settings())
    assert stored.unlike(own, data) == stored.unlike(dataclasses.replace(own, init_scale=0.3), data) == ""
    others = [{"prior": "normal:2.99"}, {"bias": False}]
    others += [{"noise": 1.001}] if stored.about["task"] == "regression" else []
    others += [] if stored.backbone else [{"activation": "gelu"}, {"hidden": (5, 4)}]
    for change in others:
        assert "is another one" in stored.unlike(dataclasses.replace(own, **change), data)
    if stored.about["task"] == "classification":  # the same rows, one of them with another label
        wrong = data.y_train.clone()
        wrong[0] = 1 - wrong[0].clamp(max=1)
        assert "is another one" in stored.unlike(own, dataclasses.replace(data, y_train=wrong))
    assert "of another kind" in stored.unlike(own, bp.load_data("diabetes"))


# -- reading -------------------------------------------------------------------------------------------------------
def test_damaged_files_are_refused_and_nothing_is_executed(tmp_path):
    copies, arrays = tmp_path, dict(np.load(REFERENCES / "toy-curve.npz"))
    npz, text = (shutil.copy(REFERENCES / f"toy-curve{end}", copies) and copies / f"toy-curve{end}" for end in ENDS)
    blob, words = npz.read_bytes(), text.read_text()

    def damaged():
        with pytest.raises(UserError, match=r"toy-curve\.npz or the .json beside it is damaged"):
            load_reference("toy-curve", copies)

    assert load_reference("toy-curve", copies).title == load_reference("toy-curve").title
    with pytest.raises(UserError, match=r"unknown reference 'toy'.*toy-curve"):
        load_reference("toy", copies)
    for share in (0.0, 0.3, 0.999):
        npz.write_bytes(blob[: int(share * len(blob))])
        damaged()
    flipped = bytearray(blob)
    flipped[len(blob) // 2] ^= 1
    npz.write_bytes(bytes(flipped))
    damaged()
    for change in (
        {"draws": arrays["draws"][:, :5]}, {"points": arrays["points"] + 80}, {"centre": arrays["centre"] * np.nan},
        {"mean": np.array([print], dtype=object)}, {"extra": np.zeros(1)},
    ):  # fmt: skip
        buffer = io.BytesIO()
        np.savez(buffer, **{**arrays, **change})
        npz.write_bytes(buffer.getvalue())
        damaged()
    npz.write_bytes(blob)
    for wrong in ("", "[]", "{", words.replace('"title"', '"titel"'), words.replace('"format": 1', '"format": 2')):
        text.write_text(wrong)
        damaged()


# -- the check -----------------------------------------------------------------------------------------------------
QUICK = build(Reference, Reference.quick)


def test_a_sampler_passes_and_a_broken_one_does_not(monkeypatch):
    of = subject(inference="chees", given={"draws": 60, "warmup": 200}, **TOY)
    fit, kept = reference.fit, []

    def remembered(*args, **settings):
        kept.append(fit(*args, **settings))
        return kept[-1]

    monkeypatch.setattr(reference, "fit", remembered)
    right = QUICK.run(of)
    assert right.level == "good", right.sentence
    assert right.settings["reference"] == "toy-curve" and "cannot be told" in right.sentence
    assert set(right.figures) == {"sd_ratio", *(f"posterior_coverage_{share}" for share in (50, 80, 95))}
    assert right.figures["posterior_coverage_95"] == pytest.approx(0.95, abs=0.04)
    json.dumps(right.to_dict())

    def too_wide(*args, **settings):
        return dataclasses.replace(kept[0], chains={k: 1.05 * v for k, v in kept[0].chains.items()})

    monkeypatch.setattr(reference, "fit", too_wide)
    wrong = QUICK.run(of)
    assert wrong.level == "bad" and "does not sample the posterior" in wrong.sentence
    assert min(f.p for f in wrong.findings if f.p is not None) < ALPHA


def test_an_approximation_is_told_by_how_much(monkeypatch):
    of = subject(data="breast-cancer", given={"epochs": 150, "lr": 0.02}, hidden=(4,))
    check = dataclasses.replace(QUICK, draws=1000)
    found = check.run(of)
    assert found.level == "caution" and found.settings["reference"] == "breast-cancer"
    assert found.settings["variant"]["prior"] == "fan-in:1.5" and found.settings["variant"]["hidden"] == [5, 5]
    assert found.figures["posterior_coverage_95"] < 0.9 and found.figures["sd_ratio"] < 0.9
    assert f"hold {found.figures['posterior_coverage_95']:.0%}" in found.sentence
    evidence = found.evidence
    axes = reference_outputs(evidence)
    assert "log-odds" in axes[0].get_xlabel()
    across, up = axes[1].lines[1].get_data()
    assert len(across) == 150 and (np.asarray(up) < np.asarray(across)).mean() > 0.5  # below the diagonal: too sure


def test_what_is_not_finite_is_bad(monkeypatch):
    fit = reference.fit

    def broken(*args, **settings):
        posterior = fit(*args, **settings)
        return dataclasses.replace(posterior, chains={k: v * torch.nan for k, v in posterior.chains.items()})

    monkeypatch.setattr(reference, "fit", broken)
    found = QUICK.run(subject("mlp", "map", given={"epochs": 2}))
    assert found.level == "bad" and "not finite" in found.sentence


def test_which_reference_is_taken():
    def taken(of):
        reference, entry, data = QUICK.pose(of)
        assert not reference.unlike(entry, data)
        return reference.name, entry.prior, data.name

    assert taken(subject(**TOY)) == taken(subject(data="diabetes")) == ("toy-curve", "normal:3", "toy-curve")
    assert taken(subject(data="breast-cancer"))[0] == taken(subject(inference="sghmc"))[0] == "breast-cancer"
    last = "digits-last-layer", "fan-in:8", "digits"
    assert taken(subject("last-layer", data="digits")) == taken(subject("last-layer", data="toy-curve")) == last


def test_refusals():
    assert QUICK.refuses(subject(**TOY)) == ""
    assert "temperature 1, and this is of 0.5" in QUICK.refuses(subject(given={"temperature": 0.5}, **TOY))
    sampler = subject("last-layer", "nuts", data="digits")
    assert "take the full budget" in QUICK.refuses(sampler) and Reference().refuses(sampler) == ""
    assert "convolutions" in QUICK.refuses(subject("bayesian-convnet", data="digits"))
    assert "no posterior that is known" in QUICK.refuses(subject("dropout-mlp", "mc-dropout"))


# -- pictures ------------------------------------------------------------------------------------------------------
