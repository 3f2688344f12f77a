"""Means, errors and differences of a sweep: against numbers worked out by hand, and against chance."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from bnn_pyro.reports.tables import NOT_CLEAR
from bnn_pyro.runs.sweep_report import summary_sentences
from bnn_pyro.runs.sweep_statistics import ALPHA, BEST, OPEN, WORSE, Mean, mean_of, paired, summarise, worse_than_best


def by_unit(values):
    """{(split, seed): value} as the statistics take it."""
    return pd.Series(list(values.values()), pd.MultiIndex.from_tuples(values, names=["split", "seed"]), dtype=float)


def test_means_are_over_splits_and_on_one_split_over_seeds():
    values = by_unit({(0, 0): 1.0, (0, 1): 3.0, (1, 0): 4.0, (1, 1): 6.0})  # split means 2 and 5: variance 4.5
    assert mean_of(values, share=0.25)[:4] == pytest.approx((3.5, math.sqrt(4.5 * (1 / 2 + 0.25)), 2, 4))
    assert mean_of(values).error == pytest.approx(math.sqrt(4.5 / 2))
    on_one = mean_of(by_unit({(3, 0): 1.0, (3, 1): 2.0, (3, 2): 6.0}), share=0.25)  # variance 7
    assert on_one[:4] == pytest.approx((3.0, math.sqrt(7 / 3), 3, 3)), "it knows no other rows"
    alone = mean_of(by_unit({(0, 0): 2.0}))
    assert alone.value == 2 and math.isnan(alone.error)


def test_differences_are_taken_in_pairs_where_both_are():
    mine = by_unit({(0, 0): 11.0, (1, 0): 22.0, (2, 0): 33.0, (3, 0): 5.0})
    best = by_unit({(0, 0): 10.0, (1, 0): 20.0, (2, 0): 30.0, (4, 0): 5.0})
    found = paired(mine, best)  # differences 1, 2, 3: t = 2√3, two degrees of freedom: P = ½ − t / (2 √(2 + t²))
    t = 2 * math.sqrt(3)
    assert found == pytest.approx((2.0, 1 / math.sqrt(3), 3, 3, 0.5 - t / (2 * math.sqrt(2 + t**2))))


def test_differences_without_spread_tell_nothing():
    same = by_unit({(0, 0): 1.0, (1, 0): 2.0})
    assert math.isnan(paired(same, same).p) and not worse_than_best({"same": paired(same, same)}, lower=True)
    shifted = paired(same + 1, same)  # equal to the last digit: no error
    assert not worse_than_best({"shifted": shifted}, lower=True)


def test_the_level_is_shared_by_those_that_are_compared_and_what_compare_calls_unclear_is_not_worse():
    differences = {"a": Mean(1.0, 0.5, 5, 5, 0.02), "b": Mean(1.0, 0.4, 5, 5, 0.03)}
    assert worse_than_best(differences, lower=True) == {"a"}  # 0.025 each
    assert worse_than_best({"b": differences["b"]}, lower=True) == {"b"}
    assert not worse_than_best(differences, lower=False)
    close = Mean(1.0, 0.55, 9, 9, 0.04)  # 1.8 standard errors, of many degrees of freedom
    assert not worse_than_best({"close": close}, lower=True)
    assert worse_than_best({"far": close._replace(error=0.5)}, lower=True)


def by_split(line):
    return by_unit({(k, 0): value for k, value in enumerate(line)})


def overlapping(rng, sims, splits, rho):
    """(sims, splits) of variance 1 and correlation rho, as splits of the same rows have."""
    shared, own = rng.normal(size=(sims, 1)), rng.normal(size=(sims, splits))
    return math.sqrt(rho) * shared + math.sqrt(1 - rho) * own


def test_the_error_over_overlapping_splits_is_that_of_their_mean():
    rho, splits = 0.2, 5
    drawn = overlapping(np.random.default_rng(0), 4000, splits, rho)
    shares = rho / (1 - rho), 0
    errors = np.array([[mean_of(one, share).error for share in shares] for one in map(by_split, drawn)])
    corrected, plain = (errors**2).mean(0)
    true = rho + (1 - rho) / splits
    assert corrected == pytest.approx(true, rel=0.05)
    assert plain < 0.5 * true, "the plain error would do, and this test shows nothing"


def test_the_best_in_truth_is_told_to_be_worse_as_seldom_as_is_said():
    rng, sims, splits, rho = np.random.default_rng(1), 600, 5, 0.1
    wrong = 0
    for _ in range(sims):
        values = {f"r{k}": by_split(line) for k, line in enumerate(overlapping(rng, 5, splits, rho))}
        best = min(values, key=lambda name: values[name].sum())
        others = {n: paired(by, values[best], rho / (1 - rho)) for n, by in values.items() if n != best}
        wrong += "r0" in worse_than_best(others, lower=True)  # all are alike, so r0 is best as well
    assert wrong / sims < ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / sims)


def test_the_variance_over_test_rows_is_added_to_that_over_seeds():
    mine, best = (
        by_unit({(0, 0): 2.0, (0, 1): 3.0}),
        by_unit({(0, 0): 1.0, (0, 1): 1.0}),
    )  # differences 1 and 2: variance of the mean 1/4
    assert paired(mine, best) == pytest.approx((1.5, 0.5, 2, 2, 0.5 - math.atan(3) / math.pi))
    both = paired(mine, best, rows=0.75)  # a quarter of the variance is over seeds: 4² degrees of freedom
    assert both == pytest.approx((1.5, 1.0, 2, 2, float(stats.t.sf(1.5, 16))))
    assert math.isnan(paired(mine, best, rows=math.nan).p), "test rows of which nothing is known leave all open"
    alike = paired(best + 1, best, rows=0.25)
    assert alike == pytest.approx((1.0, 0.5, 2, 2, float(stats.norm.sf(2))))


# -- summary -----------------------------------------------------------------------------------------------------------
def fit(recipe, split, seed=0, *, status="finished", kind="random", **metrics):
    about = {"name": f"{recipe}-{split}", "recipe": recipe, "data": "d", "seed": seed, "split": split, "status": status}
    if status != "finished":
        return about | {"error": "lost"}
    rows = {"train": 80, "val": 0, "test": 20}
    return about | {"task": "regression", "seconds": 2.0, "rows": rows, "split_kind": kind, "metrics": metrics}


def noisy(rng, recipe, shift):
    """Five splits whose rows are hard or easy for all recipes alike, and a little of its own."""
    return [fit(recipe, k, rmse=3 + 2 * k + shift + rng.normal(0, 0.05), coverage_95=0.9) for k in range(5)]


def test_a_better_recipe_is_told_and_equal_ones_are_not():
    rng = np.random.default_rng(0)
    fits = [*noisy(rng, "good", -1), *noisy(rng, "as good", -1), *noisy(rng, "bad", 0), *noisy(rng, "worse", 1)]
    (found,) = summarise(fits, {})
    contest = found.metrics["rmse"]
    told = {name: contest.verdicts[name] for name in found.states}
    assert sorted([told.pop("good"), told.pop("as good")]) == [BEST, OPEN]
    assert told == {"bad": WORSE, "worse": WORSE}
    assert found.share == 0.25 and "Nadeau" in found.error_sources
    assert {name: bool(metric.best) for name, metric in found.metrics.items()} == {"rmse": True, "coverage_95": False}
    # Without pairs nothing could be told: the splits differ by much more than the recipes.
    assert contest.means["good"].error > 1 > 20 * contest.differences["bad"].error


def replicated(kind, rows=40, num=3):
    """(fits, replicates) of two recipes on the same test rows: b is worse by 0.1, alike with every seed."""
    rng = np.random.default_rng(0)
    hard, extra = rng.normal(0, 5, rows), rng.normal(0.1, 1, rows)
    extra += 0.1 - extra.mean()
    counts = rng.multinomial(rows, np.full(rows, 1 / rows), size=1000)
    fits, replicates = [], {}
    for recipe, points in (("a", hard), ("b", hard + extra)):
        means = counts @ points / rows
        for k in range(num):
            wiggle = rng.normal(0, 1e-4)
            where = (0, k) if kind == "random" else (k, 0)
            found = {"nll": points.mean() + wiggle, "nll_low": np.quantile(means, 0.025) + wiggle,
                     "nll_high": np.quantile(means, 0.975) + wiggle}  # fmt: skip
            fits.append(fit(recipe, *where, kind=kind, **found) | {"name": f"{recipe}-{where}"})
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
    # The same difference on rows enough to show it.
    (many,) = summarise(*replicated(kind, rows=4000)[:2])
    assert many.metrics["nll"].verdicts["b"] == WORSE
    assert "; worse: b (given variation over" in summary_sentences(many)["nll"]


def test_without_resampled_test_rows_nothing_is_clear_where_all_fits_share_them():
    fits, replicates, *_ = replicated("random", rows=4000)
    replicates.pop(fits[0]["name"])
    (on,) = summarise(fits, replicates)
    assert math.isnan(on.metrics["nll"].differences["b"].error) and on.metrics["nll"].verdicts["b"] == OPEN
    for number, one in enumerate(fits):  # splits with test rows of their own have both errors already
        one["split"] = number % 3
    without, with_ = (summarise(fits, r)[0].metrics["nll"] for r in ({}, replicates))
    assert without.differences == with_.differences and without.means == with_.means


def test_one_that_failed_on_the_hard_splits_is_not_best():
    whole = [fit("whole", k, rmse=r) for k, r in enumerate([1.0, 2.0, 9.0])]
    partly = [fit("partly", 0, rmse=1.1), fit("partly", 1, rmse=2.1), fit("partly", 2, status="failed")]
    (found,) = summarise(whole + partly, {})
    rmse = found.metrics["rmse"]
    assert rmse.means["partly"].value < rmse.means["whole"].value
    assert rmse.best == "whole" and rmse.differences["partly"].fits == 2
    assert found.states["partly"] == {"finished": 2, "failed": 1}


@pytest.mark.parametrize(
    ("fits", "said", "share"),
    [
        ([fit("a", 0, status="failed"), fit("b", 0, status="missing")], "No fit is finished.", 0),
        ([fit("a", 0, rmse=1.0)], "nothing can be told apart", 0),
        ([fit("a", 0, s, rmse=1.0 + s) for s in range(3)], "over 3 seeds on one split", 0),
        ([fit("a", k, rmse=1.0 + k) for k in range(3)], "over 3 random splits of the same rows. The", 0.25),
        ([fit("a", k, s, rmse=1.0 + k) for k in range(3) for s in range(2)], "each the mean of its 2 seeds", 0.25),
        ([fit("a", k, kind="own test part", rmse=1.0 + k) for k in range(3)], "The test rows are the same", 0),
    ],
)
def test_it_says_what_the_error_is_over(fits, said, share):
    (found,) = summarise(fits, {})
    assert said in found.error_sources and found.share == share
    assert "rmse" not in found.metrics or not found.metrics["rmse"].verdicts, "best of one"
    assert json.dumps(found.to_dict(), allow_nan=False)
