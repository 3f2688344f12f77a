"""The SPEC of a sweep and its errors in one line; its means, errors and differences, by hand and against chance."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from run_folders import small_table
from scipy import stats

from bnn_pyro.reports.tables import NOT_CLEAR
from bnn_pyro.runs.sweep_config import read_sweep_config
from bnn_pyro.runs.sweep_report import summary_sentences
from bnn_pyro.runs.sweep_statistics import BEST, OPEN, WORSE, Mean, mean_of, paired, summarise, worse_than_best

DATA = '[data.toy-curve]\n[data.houses]\nname = "houses.csv"\ntarget = "price"\n'
RECIPES = '[recipes.mlp]\nvariant = "mlp"\n'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_table(tmp_path / "houses.csv")
    np.savez(tmp_path / "given.npz", test_0=np.arange(9), test_1=np.arange(9, 18), test_7=np.arange(20, 25))


def plans(text):
    with open("s.toml", "w") as file:
        file.write(text)
    return read_sweep_config("s.toml").tasks


def test_a_grid_is_every_combination_of_its_values():
    fits = plans(
        'seeds = [3, 4]\n[data.toy-curve]\n[recipes.mf]\nvariant = "mean-field"\nvariant_settings = { hidden = [7] }\n'
        '[recipes.mf.grid]\nprior = ["normal:1", "fan-in:2"]\nlr = [0.1, 0.2]\n[recipes.mlp]\n'
    )
    grid = [f"mf prior={prior} lr={lr}" for prior in ("normal:1", "fan-in:2") for lr in (0.1, 0.2)]
    assert [fit.recipe_name for fit in fits[:5]] == [*grid, "mlp"]
    assert len(fits) == 10 and {fit.seed for fit in fits} == {3, 4} == {fit.recipe.seed for fit in fits}
    recipe = fits[1].recipe
    assert (recipe.variant_settings["hidden"], recipe.variant_settings["prior"]) == ([7], "normal:1")
    assert recipe.inference_settings["lr"] == 0.2 and not recipe.baseline
    assert fits[1].name == "mf-prior=normal-1-lr=0.2-toy-curve-seed3-split0"
    assert [fit.recipe.variant for fit in fits[3:5]] == ["mean-field", "mlp"], "a name is a variant"


def test_splits_are_of_a_file_or_seeds_of_random_ones_and_all_recipes_come_before_the_next():
    text = f'splits = "all"\n[data.a]\nname = "houses.csv"\ntarget = "price"\nsplits = "given.npz"\n{RECIPES}'
    assert [fit.recipe.data["split"] for fit in plans(text)] == [0, 1, 7]
    text = f"splits = [5, 6]\n{DATA}{RECIPES}"
    assert [(fit.data, fit.recipe.data["seed"]) for fit in plans(text)] == [
        ("toy-curve", 5), ("houses", 5), ("toy-curve", 6), ("houses", 6)
    ]  # fmt: skip
    text = f"splits = [5]\n[data.toy-curve]\nsplits_to_run = [1, 2]\n{RECIPES}"
    assert [fit.split for fit in plans(text)] == [1, 2]
    assert [fit.split for fit in plans(f"[data.toy-curve]\nseed = 9\n{RECIPES}")] == [9]
    fits = plans(f"seeds = [0, 1]\nsplits = [0, 1]\n{DATA}{RECIPES}[recipes.mean-field]\n")
    assert [fit.recipe_name for fit in fits[:2]] == ["mlp", "mean-field"]
    assert [(fit.split, fit.seed) for fit in fits[::4]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [fit.recipe.seed for fit in fits[::4]] == [0, 1000, 1, 1001], "splits do not share their starts"


def test_a_file_is_the_same_by_whatever_path(tmp_path):
    """Sweeps of earlier versions wrote down paths as they were given."""
    (tmp_path / "net").mkdir()
    (fit,) = plans('[data.houses]\nname = "houses.csv"\n[recipes.last-layer]\ngrid = { backbone = ["net"] }\n')
    assert fit.recipe.variant_settings["backbone"] == str(tmp_path / "net") and fit.recipe_name.endswith("=net")
    former = replace(fit.recipe.changed({"backbone": "net"}), data=fit.recipe.data | {"name": "houses.csv"})
    assert fit.recipe.difference(former) is None
    assert fit.recipe.difference(former.changed({"backbone": "mlp"}))[0] == "backbone"


WRONG = {
    "seeds = [0": "is not valid TOML",
    f"seed = [0]\n{DATA}{RECIPES}": "unknown key in s.toml 'seed'; did you mean 'seeds'?",
    f"seeds = 3\n{DATA}{RECIPES}": "'seeds' must be a list of whole numbers, such as [0, 1, 2], got 3",
    DATA: "s.toml has no recipes: add a table [recipes.NAME]",
    RECIPES: "s.toml has no data: add a table [data.NAME]",
    f"[data.a]\nlimit = true\n{RECIPES}": "s.toml [data.a]: 'limit' must be a whole number, got True",
    f'splits = "all"\n{DATA}{RECIPES}': "s.toml [data.toy-curve]: \"all\" splits are those of a file",
    f"splits = [1]\n[data.toy-curve]\nseed = 3\n{RECIPES}": "'seed' chooses a split",
    f'splits = [0, 2]\n[data.a]\nname = "houses.csv"\nsplits = "given.npz"\n{RECIPES}': "no split 2 in",
    f'{DATA}[recipes.a]\nvariant = "mpl"\n': "s.toml [recipes.a] (a): unknown variant 'mpl'; did you mean 'mlp'?",
    f"{DATA}[recipes.net]\n": "s.toml [recipes.net] has no 'variant', and 'net' is none; add",
    f"{DATA}{RECIPES}epochs = 3\n": "unknown key in s.toml [recipes.mlp] 'epochs'. Valid: auto, baseline",
    f"{DATA}{RECIPES}inference_settings = {{ epoch = 3 }}\n": "[recipes.mlp] (mlp): unknown MAP setting 'epoch'; did",
    f"{DATA}{RECIPES}grid = {{ hiden = [1] }}\n": "(mlp hiden=1): unknown setting of mlp or map 'hiden'; did",
    f"{DATA}{RECIPES}grid = {{ lr = 0.1 }}\n": "[recipes.mlp]: 'lr' of the grid must be a list of values",
    f'{DATA}{RECIPES}[recipes.MLP]\nvariant = "mlp"\n': "and 'MLP' on 'toy-curve' would share a folder; rename",
    f'{DATA}[recipes.{"a" * 240}]\nvariant = "mlp"\n': "more than 255 characters; give the recipe",
    f'{DATA}[recipes.cnn]\nvariant = "convnet"\n': "s.toml [recipes.cnn] (cnn) on data 'toy-curve': ",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_errors_are_one_line_that_names_the_place_before_anything_is_written(text, tmp_path, command, monkeypatch):
    monkeypatch.setattr("bnn_pyro.parallel.executor.connect", None)  # no cluster is asked to find them
    (tmp_path / "s.toml").write_text(text)
    told = command("sweep", "s.toml", "--executor", "dask://127.0.0.1:1", code=2)
    assert told.startswith(("error: s.toml", "error: unknown key in s.toml")) and told.count("\n") == 1
    assert WRONG[text] in told and not (tmp_path / "runs" / "sweep-s").exists(), "something was written"


def by_unit(values):
    """{(split, seed): value} as the statistics take it."""
    return pd.Series(list(values.values()), pd.MultiIndex.from_tuples(values, names=["split", "seed"]), dtype=float)


def test_means_are_over_splits_or_seeds_differences_in_pairs_and_the_variance_over_test_rows_is_added():
    values = by_unit({(0, 0): 1.0, (0, 1): 3.0, (1, 0): 4.0, (1, 1): 6.0})  # split means 2 and 5: variance 4.5
    assert mean_of(values, share=0.25)[:4] == pytest.approx((3.5, math.sqrt(4.5 * (1 / 2 + 0.25)), 2, 4))
    assert mean_of(values).error == pytest.approx(math.sqrt(4.5 / 2))
    on_one = mean_of(by_unit({(3, 0): 1.0, (3, 1): 2.0, (3, 2): 6.0}), share=0.25)  # variance 7
    assert on_one[:4] == pytest.approx((3.0, math.sqrt(7 / 3), 3, 3)), "it knows no other rows"
    alone = mean_of(by_unit({(0, 0): 2.0}))
    assert alone.value == 2 and math.isnan(alone.error)
    mine = by_unit({(0, 0): 11.0, (1, 0): 22.0, (2, 0): 33.0, (3, 0): 5.0})
    best = by_unit({(0, 0): 10.0, (1, 0): 20.0, (2, 0): 30.0, (4, 0): 5.0})
    found = paired(mine, best)  # differences 1, 2, 3: t = 2√3, two degrees of freedom: P = ½ − t / (2 √(2 + t²))
    t = 2 * math.sqrt(3)
    assert found == pytest.approx((2.0, 1 / math.sqrt(3), 3, 3, 0.5 - t / (2 * math.sqrt(2 + t**2))))
    for other in (best, best + 1):  # equal, or apart by the same everywhere: no error
        assert not worse_than_best({"other": paired(other, best)}, lower=True)
    mine, best = by_unit({(0, 0): 2.0, (0, 1): 3.0}), by_unit({(0, 0): 1.0, (0, 1): 1.0})
    # Differences 1 and 2: variance of the mean 1/4.
    assert paired(mine, best) == pytest.approx((1.5, 0.5, 2, 2, 0.5 - math.atan(3) / math.pi))
    both = paired(mine, best, rows=0.75)  # a quarter of the variance is over seeds: 4² degrees of freedom
    assert both == pytest.approx((1.5, 1.0, 2, 2, float(stats.t.sf(1.5, 16))))
    assert math.isnan(paired(mine, best, rows=math.nan).p), "test rows of which nothing is known leave all open"
    assert paired(best + 1, best, rows=0.25) == pytest.approx((1.0, 0.5, 2, 2, float(stats.norm.sf(2))))


def test_the_level_is_shared_by_those_that_are_compared_and_what_compare_calls_unclear_is_not_worse():
    differences = {"a": Mean(1.0, 0.5, 5, 5, 0.02), "b": Mean(1.0, 0.4, 5, 5, 0.03)}
    assert worse_than_best(differences, lower=True) == {"a"}  # 0.025 each
    assert worse_than_best({"b": differences["b"]}, lower=True) == {"b"}
    assert not worse_than_best(differences, lower=False)
    close = Mean(1.0, 0.55, 9, 9, 0.04)  # 1.8 standard errors, of many degrees of freedom
    assert not worse_than_best({"close": close}, lower=True)
    assert worse_than_best({"far": close._replace(error=0.5)}, lower=True)


def fit(recipe, split, seed=0, *, status="finished", kind="random", **metrics):
    about = {"name": f"{recipe}-{split}", "recipe": recipe, "data": "d", "seed": seed, "split": split, "status": status}
    if status != "finished":
        return about | {"error": "lost"}
    rows = {"train": 80, "val": 0, "test": 20}
    return about | {"task": "regression", "seconds": 2.0, "rows": rows, "split_kind": kind, "metrics": metrics}


def test_a_better_recipe_is_told_equal_ones_are_not_and_one_that_failed_on_the_hard_splits_is_not_best():
    rng, shifts = np.random.default_rng(0), {"good": -1, "as good": -1, "bad": 0, "worse": 1}
    scores = {(name, k): 3 + 2 * k + shift + rng.normal(0, 0.05) for name, shift in shifts.items() for k in range(5)}
    (found,) = summarise([fit(name, k, rmse=score, coverage_95=0.9) for (name, k), score in scores.items()], {})
    contest = found.metrics["rmse"]
    told = dict(contest.verdicts)
    assert sorted([told.pop("good"), told.pop("as good")]) == [BEST, OPEN]
    assert told == {"bad": WORSE, "worse": WORSE}
    assert found.share == 0.25 and "Nadeau" in found.error_sources
    assert contest.best and not found.metrics["coverage_95"].best
    whole = [fit("whole", k, rmse=r) for k, r in enumerate([1.0, 2.0, 9.0])]
    partly = [fit("partly", 0, rmse=1.1), fit("partly", 1, rmse=2.1), fit("partly", 2, status="failed")]
    (found,) = summarise(whole + partly, {})
    rmse = found.metrics["rmse"]
    assert rmse.means["partly"].value < rmse.means["whole"].value
    assert rmse.best == "whole" and rmse.differences["partly"].fits == 2
    assert found.states["partly"] == {"finished": 2, "failed": 1}
    for kind, share in {"groups": 0.25, "time": 0}.items():
        (found,) = summarise([fit("a", k, kind=kind, rmse=1.0) for k in (0, 1)], {})
        assert found.share == share and ("2 group splits of the same rows" in found.error_sources) == (share > 0)


def replicated(kind, rows=40):
    """(fits, replicates) of two recipes on the same test rows: b is worse by 0.1, alike with every seed."""
    rng = np.random.default_rng(0)
    hard, extra = rng.normal(0, 5, rows), rng.normal(0.1, 1, rows)
    extra += 0.1 - extra.mean()
    counts = rng.multinomial(rows, np.full(rows, 1 / rows), size=1000)
    fits, replicates = [], {}
    for recipe, points in (("a", hard), ("b", hard + extra)):
        for k in range(3):
            means, wiggle = counts @ points / rows, rng.normal(0, 1e-4)
            where = (0, k) if kind == "random" else (k, 0)
            low, high = np.quantile(means, (0.025, 0.975)) + wiggle
            one = fit(recipe, *where, kind=kind, nll=points.mean() + wiggle, nll_low=low, nll_high=high)
            fits.append(one | {"name": f"{recipe}-{where}"})
            replicates[fits[-1]["name"]] = {"nll": means + wiggle}
    return fits, replicates, math.sqrt(extra.var(ddof=1) / rows), math.sqrt(hard.var(ddof=1) / rows)


@pytest.mark.parametrize("kind", ["random", "own test part"])
def test_seeds_that_agree_do_not_make_a_difference_on_few_test_rows_clear(kind):
    fits, replicates, paired_error, error = replicated(kind)
    (on,) = summarise(fits, replicates)
    contest, mean = on.metrics["nll"], on.metrics["nll"].means["a"]
    assert contest.best == "a" and contest.differences["b"].error == pytest.approx(paired_error, rel=0.1)
    assert mean.error == pytest.approx(error, rel=0.1)
    assert contest.verdicts["b"] == OPEN == NOT_CLEAR
    said = summary_sentences(on)["nll"]
    assert "; no clear difference: b (given variation over" in said and "the finite number of test rows" in said
    assert ("variation over seeds" if kind == "random" else "variation over splits") in said
    (alone,) = summarise([one for one in fits if one["recipe"] == "b"], replicates)
    assert re.fullmatch(r"the mean of b is \S+ ± \S+\.", summary_sentences(alone)["nll"]), (
        "with nobody to be better than"
    )
    # The same difference on rows enough to show it; where these are not resampled, nothing is clear.
    fits, replicates, *_ = replicated(kind, rows=4000)
    (many,), (without,) = summarise(fits, replicates), summarise(fits, {})
    assert many.metrics["nll"].verdicts["b"] == WORSE
    assert without.metrics["nll"].verdicts["b"] == OPEN


@pytest.mark.parametrize(("fits", "said", "share"), [
    ([fit("a", 0, status="failed"), fit("b", 0, status="missing")], "No fit is finished.", 0),
    ([fit("a", 0, s, rmse=1.0 + s) for s in range(3)], "over 3 seeds on one split", 0),
    ([fit("a", k, rmse=1.0 + k) for k in range(3)], "over 3 random splits of the same rows. The", 0.25),
    ([fit("a", k, kind="own test part", rmse=1.0 + k) for k in range(3)], "The test rows are the same", 0),
])  # fmt: skip
def test_it_says_what_the_error_is_over(fits, said, share):
    (found,) = summarise(fits, {})
    assert said in found.error_sources and found.share == share
    assert "rmse" not in found.metrics or not found.metrics["rmse"].verdicts, "best of one"
    assert json.dumps(found.to_dict(), allow_nan=False)
