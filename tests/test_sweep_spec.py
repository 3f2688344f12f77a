"""The SPEC of a sweep: what it expands to, and every error in one line with the file, the table and the way out."""

from dataclasses import replace

import numpy as np
import pytest
from run_folders import small_table

from bnn_pyro.run import main
from bnn_pyro.runs.sweep_config import read_sweep_config

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
        '[recipes.mf.grid]\nprior = ["normal:1", "fan-in:2"]\nlr = [0.1, 0.2]\n[recipes.plain]\nvariant = "mlp"\n'
    )  # fmt: skip
    assert [fit.recipe_name for fit in fits[:5]] == [
        "mf prior=normal:1 lr=0.1", "mf prior=normal:1 lr=0.2", "mf prior=fan-in:2 lr=0.1", "mf prior=fan-in:2 lr=0.2",
        "plain",
    ]  # fmt: skip
    assert len(fits) == 10 and {fit.seed for fit in fits} == {3, 4} == {fit.recipe.seed for fit in fits}
    recipe = fits[1].recipe
    assert (recipe.variant_settings["hidden"], recipe.variant_settings["prior"]) == ([7], "normal:1")
    assert recipe.inference_settings["lr"] == 0.2 and not recipe.baseline
    assert fits[1].name == "mf-prior=normal-1-lr=0.2-toy-curve-seed3-split0"
    assert [fit.recipe.variant for fit in fits[3:5]] == ["mean-field", "mlp"]
    assert plans("[data.toy-curve]\n[recipes.last-layer]\n")[0].recipe.variant == "last-layer", "a name is a variant"


def test_splits_are_those_of_a_file_or_seeds_of_random_ones():
    text = f'splits = "all"\n[data.a]\nname = "houses.csv"\ntarget = "price"\nsplits = "given.npz"\n{RECIPES}'
    assert [fit.recipe.data["split"] for fit in plans(text)] == [0, 1, 7]
    text = f"splits = [5, 6]\n{DATA}{RECIPES}"
    assert [(fit.data, fit.recipe.data["seed"]) for fit in plans(text)] == [
        ("toy-curve", 5), ("houses", 5), ("toy-curve", 6), ("houses", 6)
    ]  # fmt: skip
    text = f"splits = [5]\n[data.toy-curve]\nsplits_to_run = [1, 2]\n{RECIPES}"
    assert [fit.split for fit in plans(text)] == [1, 2]
    assert [fit.split for fit in plans(f"[data.toy-curve]\nseed = 9\n{RECIPES}")] == [9]


def test_a_file_is_the_same_by_whatever_path(tmp_path):
    """Sweeps of earlier versions wrote down paths as they were given."""
    (tmp_path / "net").mkdir()
    (fit,) = plans('[data.houses]\nname = "houses.csv"\n[recipes.last-layer]\ngrid = { backbone = ["net"] }\n')
    assert fit.recipe.variant_settings["backbone"] == str(tmp_path / "net") and fit.recipe_name.endswith("=net")
    former = replace(fit.recipe.changed({"backbone": "net"}), data=fit.recipe.data | {"name": "houses.csv"})
    assert fit.recipe.difference(former) is None
    assert fit.recipe.difference(former.changed({"backbone": "mlp"}))[0] == "backbone"


def test_all_recipes_come_before_the_next_split():
    fits = plans(f"seeds = [0, 1]\nsplits = [0, 1]\n{DATA}{RECIPES}[recipes.mean-field]\n")
    assert [fit.recipe_name for fit in fits[:2]] == ["mlp", "mean-field"]
    assert [(fit.split, fit.seed) for fit in fits[::4]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [fit.recipe.seed for fit in fits[::4]] == [0, 1000, 1, 1001], "splits do not share their starts"


WRONG = {
    "seeds = [0": "is not valid TOML",
    f"seed = [0]\n{DATA}{RECIPES}": "unknown key in s.toml 'seed'; did you mean 'seeds'?",
    f"seeds = 3\n{DATA}{RECIPES}": "'seeds' must be a list of whole numbers, such as [0, 1, 2], got 3",
    f"seeds = [true]\n{DATA}{RECIPES}": "'seeds' must be a list of whole numbers",
    f"seeds = [1, 2, 1]\n{DATA}{RECIPES}": "none twice, got [1, 2, 1]",
    f"splits = []\n{DATA}{RECIPES}": "'splits' must be whole numbers",
    DATA: "s.toml has no recipes: add a table [recipes.NAME]",
    RECIPES: "s.toml has no data: add a table [data.NAME]",
    f"data = 3\n{RECIPES}": "'data' must be a table, got 3",
    f"[data]\ntoy-curve = 3\n{RECIPES}": "s.toml [data]: 'toy-curve' must be a table, got 3",
    f'[data.a]\nnmae = "b"\n{RECIPES}': "unknown key in s.toml [data.a] 'nmae'; did you mean 'name'?",
    f"[data.a]\nlimit = true\n{RECIPES}": "s.toml [data.a]: 'limit' must be a whole number, got True",
    f'splits = "all"\n{DATA}{RECIPES}': "s.toml [data.toy-curve]: \"all\" splits are those of a file",
    f"splits = [1]\n[data.toy-curve]\nseed = 3\n{RECIPES}": "'seed' is which split to take",
    f'splits = [0, 2]\n[data.a]\nname = "houses.csv"\nsplits = "given.npz"\n{RECIPES}': "no split 2 in",
    f'splits = "all"\n[data.a]\nname = "houses.csv"\nsplits = "gone.npz"\n{RECIPES}': "gone.npz: no such file",
    f'{DATA}[recipes.a]\nvariant = "mpl"\n': "s.toml [recipes.a] (a): unknown variant 'mpl'; did you mean 'mlp'?",
    f'{DATA}[recipes.a]\nvariant = ["mlp"]\n': "s.toml [recipes.a]: 'variant' must be a text",
    f"{DATA}[recipes.net]\n": "s.toml [recipes.net] has no 'variant', and 'net' is not the name of one; add",
    f'{DATA}[recipes.svi]\ninference = "svi"\n': "s.toml [recipes.svi] has no 'variant'",
    f'{DATA}{RECIPES}inference = "svi"\n': "svi needs a guide",
    f"{DATA}{RECIPES}epochs = 3\n": "unknown key in s.toml [recipes.mlp] 'epochs'. Valid: auto, baseline",
    f"{DATA}{RECIPES}seed = 3\n": "unknown key in s.toml [recipes.mlp] 'seed'",
    f"{DATA}{RECIPES}inference_settings = {{ epoch = 3 }}\n": "[recipes.mlp] (mlp): unknown MAP setting 'epoch'; did",
    f"{DATA}{RECIPES}inference_settings = {{ epochs = 0.5 }}\n": "[recipes.mlp] (mlp): epochs takes whole numbers",
    f"{DATA}{RECIPES}num_draws = 0\n": "num_draws must be at least 1",
    f"{DATA}{RECIPES}grid = {{ hiden = [1] }}\n": "(mlp hiden=1): unknown setting of mlp or map 'hiden'; did",
    f"{DATA}{RECIPES}grid = {{ lr = 0.1 }}\n": "[recipes.mlp]: 'lr' of the grid must be a list of values",
    f"{DATA}{RECIPES}grid = {{ lr = [1, 1] }}\n": "would share a folder",
    f'{DATA}{RECIPES}[recipes.MLP]\nvariant = "mlp"\n': "and 'MLP' on 'toy-curve' would share a folder; rename",
    '[data.b-c]\nname = "digits"\n[data.c]\nname = "digits"\n[recipes.mlp]\n[recipes.mlp-b]\nvariant = "mlp"\n':
    "share a folder",
    f'{DATA}[recipes.{"a" * 240}]\nvariant = "mlp"\n': "more than 255 characters; give the recipe",
}  # fmt: skip


UNFIT = {
    f'[data.a]\nname = "gone.csv"\n{RECIPES}': "s.toml [data.a]: gone.csv: no such file",
    f"[data.toy-cruve]\n{RECIPES}": "s.toml [data.toy-cruve]: unknown data set 'toy-cruve'; did you mean 'toy-curve'?",
    f'[data.a]\nname = "houses.csv"\ntarget = "prize"\n{RECIPES}': "s.toml [data.a]: ",
    f'{DATA}[recipes.cnn]\nvariant = "convnet"\n': "s.toml [recipes.cnn] (cnn) on data 'toy-curve': ",
    f"{DATA}{RECIPES}variant_settings = {{ prior = \"nrmal:1\" }}\n": "[recipes.mlp] (mlp) on data 'toy-curve': ",
}  # fmt: skip


@pytest.mark.parametrize("text", [*WRONG, *UNFIT])
def test_errors_are_one_line_that_names_the_place_before_anything_is_written(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bnn_pyro.parallel.executor.connect", None)  # no cluster is asked to find them
    (tmp_path / "s.toml").write_text(text)
    assert main(["sweep", "s.toml", "--executor", "dask://127.0.0.1:1", "--quiet"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: s.toml") or told.startswith("error: unknown key in s.toml"), told
    assert told.count("\n") == 1 and {**WRONG, **UNFIT}[text] in told
    assert not (tmp_path / "runs" / "sweep-s").exists(), "something was written"
    assert main(["sweep", "gone.toml"]) == 2
    assert capsys.readouterr().err == "error: no sweep file gone.toml\n"
