"""What `--help` shows of each command after its options: examples, and what they cannot say."""

from __future__ import annotations

__all__ = ["EXAMPLES", "NOTES"]

#: Examples of each command, without the program's name.
EXAMPLES = {
    "list": (
        "list",
        "list --json",
    ),
    "train": (
        "train",
        "train mean-field --data mnist --seed 0 --out runs/mnist",
        "train mean-field --data houses.csv --target price --drop-missing",
        "train last-layer --data mnist --inference sghmc",
        "train last-layer --data mnist --inference svi --set backbone=runs/convnet-mnist-0 --set family=full",
        "train mean-field --data digits --hidden 400,400 --set prior=normal:0.1 --set temperature=0.1",
        "train --config runs/mnist/config.json --out runs/again",
        "train --resume --out runs/mnist",
        "train mean-field --data breast-cancer --inference nuts --set chains=16 --executor dask://10.0.0.1:8786",
    ),
    "evaluate": (
        "evaluate runs/mnist",
        "evaluate runs/mnist --ood kmnist --ood noise",
        "evaluate runs/mnist --mean-weights",
        "evaluate runs/mnist --prune",
        "evaluate runs/houses --data new.csv",
    ),
    "predict": (
        "predict runs/houses --input new.csv --output predictions.csv",
        "predict runs/mnist --input photo.png --invert --output predictions.csv",
    ),
    "compare": ("compare runs/mean-field-digits-0 runs/mean-field-digits-0/baseline",),
    "sweep": (
        "sweep uci.toml --dry-run",
        "sweep uci.toml",
        "sweep uci.toml --out runs/uci --executor dask://10.0.0.1:8786",
    ),
    "check": (
        "check mean-field --inference nuts",
        'check mean-field --data breast-cancer --features "mean radius,mean texture" --inference svi',
        "check mean-field --inference sghmc --set lr=0.01 --only closed-form --only calibration",
        "check --budget full --out runs/check",
        "check mean-field --inference svi --only calibration --budget full --executor dask://10.0.0.1:8786",
    ),
    "diagnose": (
        "diagnose runs/bc-nuts",
        "diagnose runs/bc-nuts --no-netcdf --out bc-nuts-diagnosis",
    ),
}
CLUSTER = """

a cluster: `dask scheduler` on one machine, `dask worker HOST:8786 --nthreads 1 --nworkers N` on each that is to work,
with bnn_pyro installed on all of them; then --executor dask://HOST:8786."""
DIVIDED = """

one fit in several processes (svi, map, mle, ensemble, mc-dropout), on one machine or many:
  torchrun --nproc-per-node N -m bnn_pyro.run train mean-field --data mnist --out runs/mnist
each has a share of every step's rows, --batch-size stays that of the whole step; any number of them may --resume."""

#: What the help of a command says after its examples.
NOTES = {
    "train": DIVIDED + CLUSTER,
    "check": CLUSTER,
    "sweep": """

The same command again makes what is missing: fits that are finished are kept, one that was cut off goes on from its
checkpoint, one that failed is tried again, and a SPEC with more seeds, data or recipes adds their fits. Every fit is a
run folder, RECIPE-DATA-seedN-splitN, for `evaluate`, `compare`, `predict`, `diagnose`; its own seed is N of the SPEC +
1000 · split, so that splits do not share their starts. Exits with 1 where one failed.

a SPEC:
  seeds = [0, 1]
  splits = [0, 1, 2]            # seeds of random splits, or numbers in a file of given ones ("all" takes them all)

  [data.breast-cancer]          # a name that `list` shows …
  [data.energy]                 # … or a file; keys as `data` in a config.json
  name = "uci/energy.csv"
  target = "y"
  splits = "uci/energy.splits.npz"

  [recipes.mean-field]          # keys of a config.json, over the settings tuned for a data set
  variant = "mean-field"
  variant_settings = { hidden = [50] }
  inference_settings = { epochs = 200, batch_size = 32, lr = 0.01 }
  grid = { prior = ["fan-in:1", "fan-in:3"] }     # a recipe for each value

  [recipes.ensemble]
  variant = "mlp"
  inference = "ensemble"
""",
}
