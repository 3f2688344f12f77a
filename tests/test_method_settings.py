"""Settings of methods that are refused: the message says what would do."""

import json
import math

import pytest
from refused import refuses

import bnn_pyro as bp
from bnn_pyro.fitting import provenance_of
from bnn_pyro.runs.folder import ARCHIVE, RunFolder
from bnn_pyro.runs.recipe import Recipe
from bnn_pyro.settings import build, plain
from bnn_pyro.zoo.auto import make_setup

HMCS, SG, POINTS = (bp.NUTS, bp.HMC, bp.ChEES), (bp.SGHMC, bp.SGLD), (bp.MAP, bp.MLE, bp.Ensemble)
REFUSED = [
    (HMCS, dict(start="mode"), "unknown start 'mode'"),
    (HMCS, dict(draws=0), "draws must be at least 1"),
    (HMCS, dict(thin=0), "thin must be at least 1"),
    (HMCS, dict(target_accept=1.0), "target_accept must be above 0 and below 1"),
    ((*HMCS, *SG, bp.SVI, bp.Laplace), dict(temperature=0.0), "temperature must be above 0"),
    ((*HMCS, *SG, bp.SVI, bp.Laplace), dict(temperature=math.nan), "temperature must be above 0"),
    ((*HMCS, *SG), dict(jitter=-1.0), "jitter must be at least 0"),
    (HMCS, dict(compiled="maybe"), "unknown compiled 'maybe'"),
    ([bp.NUTS], dict(max_tree_depth=0), "max_tree_depth must be"),
    ([bp.HMC], dict(length=0.0), "length must be"),
    ([bp.HMC, bp.Ensemble], dict(cores=-1), "cores must be at least 0"),
    ([bp.ChEES], dict(chains=1), "needs at least 2"),
    ([bp.ChEES], dict(chains=24), "24 chains cannot be shared out evenly to 16 superchains"),
    ((*SG, bp.SVI, *POINTS), dict(epochs=0), "epochs must be at least 1"),
    ((*SG, bp.SVI, *POINTS), dict(lr=0.0), "lr must be above 0"),
    ((*SG, bp.SVI, *POINTS), dict(batch_size=-1), "batch_size must be at least 0"),
    (SG, dict(chains=0), "chains must be at least 1"),
    (SG, dict(burn_in=5000, epochs=5000), "burn_in must lie between 0 and the 5000 epochs"),
    (SG, dict(max_draws=0), "max_draws must be at least 1"),
    ([bp.SGHMC], dict(friction=1.1), "friction must be above 0 and at most 1"),
    ([bp.SVI], dict(num_particles=0), "num_particles must be at least 1"),
    ((bp.SVI, *POINTS), dict(final_lr=2.0), "final_lr must be at least 0 and at most 1"),
    (POINTS, dict(patience=-1), "patience must be at least 0"),
    ([bp.Ensemble], dict(members=0), "members must be at least 1"),
    ([bp.Laplace], dict(max_iterations=0), "max_iterations must be at least 1"),
]


@pytest.mark.parametrize(("methods", "settings", "message"), REFUSED, ids=str)
def test_a_value_out_of_bounds(methods, settings, message):
    for method in methods:
        refuses(message, method, **settings)


@pytest.mark.parametrize("method", [bp.NUTS, bp.MILE, bp.SGHMC, bp.SGLD, bp.SVI, bp.Ensemble, bp.Laplace])
def test_settings_of_earlier_versions_have_one_value(method):
    """They are in the key of a fit as before, so that a run of then is resumed; with another value it is refused."""
    setup = make_setup({bp.Laplace: "last-layer", bp.Ensemble: "mlp"}.get(method, "mean-field"), method())
    key = provenance_of(setup, bp.load_data("toy-curve"), 0)["key"][3]
    assert method.former and method.former.items() <= key.items() and not method.former.keys() & plain(method()).keys()
    written = plain(method()) | method.former
    assert build(method, written) == method()
    for name, value in method.former.items():
        refuses(rf"takes {name}={value} alone, not other; leave '{name}' out", build, method, written | {name: "other"})


def test_a_run_of_earlier_settings_is_read_but_not_fitted_again(tmp_path):
    """What has been fitted is evaluated whatever its method's settings were then; the rest of the fit is refused."""
    recipe = Recipe.from_dict({"variant": "mean-field", "inference": "sghmc", "data": {"name": "toy-curve"}}).to_dict()
    recipe["inference_settings"] |= {"schedule": "cyclical:3", "chains": 7}
    (tmp_path / "config.json").write_text(json.dumps(recipe))
    with pytest.raises(bp.UserError, match="takes schedule=constant alone, not cyclical:3"):
        _ = RunFolder(tmp_path).recipe
    for name in ARCHIVE:
        (tmp_path / name).touch()
    assert RunFolder(tmp_path).recipe.method == bp.SGHMC(chains=7)
    assert RunFolder(tmp_path).former_settings["schedule"] == "cyclical:3"
    recipe |= {"inference": "nuts", "inference_settings": {"draws": 7, "start": "svi", "mass": "dense"}}
    (tmp_path / "config.json").write_text(json.dumps(recipe))
    assert RunFolder(tmp_path).recipe.method == bp.NUTS(draws=7)
    assert RunFolder(tmp_path).former_settings == {"start": "svi", "mass": "dense"}
