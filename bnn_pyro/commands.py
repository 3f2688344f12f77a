"""What each command does: from parsed arguments to a run folder, a file or a table.

Each imports what it needs when it is called.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from bnn_pyro.errors import UserError, unknown

if TYPE_CHECKING:
    import torch

    from bnn_pyro.datasets.dataset import Schema
    from bnn_pyro.runs.folder import RunFolder
    from bnn_pyro.runs.recipe import Recipe

__all__ = ["check", "compare", "diagnose", "evaluate", "predict", "sweep", "train"]

#: Rows of each outside data set, unless --limit says otherwise.
OUTSIDE_ROWS = 10_000


# -- train -------------------------------------------------------------------------------------------------------------
def train(args: Namespace) -> None:
    """Fit a variant and, beside it, the deterministic network; score both and write the run folder.

    Under torchrun every process has a share of the rows of each step, and rank 0 writes and scores.

    Raises KeyboardInterrupt with the way to go on after Ctrl-C or SIGTERM.
    """
    from bnn_pyro.datasets.together import load_together
    from bnn_pyro.distributed import joined
    from bnn_pyro.fitting import check_divisible
    from bnn_pyro.reports.tables import run_table
    from bnn_pyro.runs.evaluate import evaluate_run
    from bnn_pyro.runs.train import fit_run, prepared

    with joined() as ranks, ranks.connected():
        recipe, folder = ranks.first_does(lambda: _asked(args))
        check_divisible(recipe.method(), ranks)
        data = load_together(ranks, recipe.load)
        entry, below = ranks.all_do(lambda: prepared(recipe, data))
        show = not args.quiet
        with ranks.first_holds(lambda: folder.begun(recipe, keep=args.resume)):
            try:
                posterior, baseline = fit_run(folder, recipe, data, entry, below, resume=args.resume, show=show)
                if not ranks.first:
                    return
                run = evaluate_run(folder, recipe, data, posterior, baseline, show=show)
            except KeyboardInterrupt as stopped:
                again = f"python -m bnn_pyro.run train --resume --out {folder.path}"
                raise KeyboardInterrupt(f"{stopped or 'stopped'}; go on to the same result with: {again}") from None
    print(run_table(run))
    print(f"\nreport: {folder.path / 'report.html'}")


def _asked(args: Namespace) -> tuple[Recipe, RunFolder]:
    """What to run, and where, with nothing written yet."""
    from bnn_pyro.runs.folder import RunFolder
    from bnn_pyro.runs.recipe import read_config, resolve

    config = read_config(args.config) if args.config else {}
    begun = args.resume and RunFolder(Path(args.out or "")).is_begun
    stored = read_config(Path(args.out) / "config.json") if begun else {}
    recipe = resolve(args, {**stored, **config})
    name = f"{recipe.variant}-{recipe.data_name}-{recipe.seed}"
    out = args.out or RunFolder.default_path(name, resume=args.resume)
    folder = RunFolder.claim(out, resume=args.resume, overwrite=args.overwrite)
    if args.resume:
        changed = recipe.difference(folder.recipe)
        if changed is not None:
            key, now, then = changed
            raise UserError(
                f"{folder.path} was started with {key} {then}, not {now}; resume it without other settings, "
                "or choose another --out"
            )
    return recipe, folder


# -- evaluate ----------------------------------------------------------------------------------------------------------
def evaluate(args: Namespace) -> None:
    """Score a run on its own test rows (and on --ood), or on other data with labels."""
    from bnn_pyro.files import lock_folder
    from bnn_pyro.reports.tables import run_table, score_table
    from bnn_pyro.runs.evaluate import evaluate_run, load_posterior, outside_inputs, score_mean_weights, score_other
    from bnn_pyro.runs.folder import RunFolder
    from bnn_pyro.runs.prune import prune_run, pruning_table

    folder, show = RunFolder.open(args.run), not args.quiet
    recipe = _with_flags(folder.recipe, args)
    if args.prune and (args.data is not None or args.mean_weights):
        raise UserError("--prune scores draws on the run's own test rows; leave out --data and --mean-weights")
    posterior = load_posterior(folder, recipe.device)
    if args.data is not None:
        if args.ood:
            raise UserError("--data scores on other rows and --ood against the run's own; give one of them")
        print(score_table(score_other(folder, recipe, posterior, args.data, mean_weights=args.mean_weights, show=show)))
        return
    num = OUTSIDE_ROWS if args.limit is None else args.limit
    outside = outside_inputs(args.ood, posterior.schema, num=num, invert=args.invert) if args.ood else None
    data = recipe.load()
    if args.mean_weights:
        print(score_table(score_mean_weights(folder, recipe, data, posterior, outside=outside, show=show)))
        return
    baseline = load_posterior(folder.baseline, recipe.device) if folder.baseline.is_trained else None
    with lock_folder(folder.path):
        pruned = prune_run(folder, data, posterior, recipe.num_draws, show=show) if args.prune else None
        run = evaluate_run(folder, recipe, data, posterior, baseline, outside=outside, show=show)
    print(run_table(run) + (pruning_table(pruned) if pruned is not None else ""))
    print(f"\nreport: {Path(run.folder) / 'report.html'}")


def _with_flags(recipe: Recipe, args: Namespace) -> Recipe:
    given = {"num_draws": args.num_draws, "device": args.device}
    recipe = dataclasses.replace(recipe, **{k: v for k, v in given.items() if v is not None})
    if recipe.num_draws < 1:
        raise UserError(f"--num-draws must be at least 1, got {recipe.num_draws}")
    return recipe


# -- predict -----------------------------------------------------------------------------------------------------------
def predict(args: Namespace) -> None:
    """Predictions with their uncertainty for new inputs, one line a row, as CSV."""
    from bnn_pyro.files import write_whole
    from bnn_pyro.reports.tables import prediction_table
    from bnn_pyro.runs.evaluate import load_posterior
    from bnn_pyro.runs.folder import RunFolder
    from bnn_pyro.runs.score import predicted

    output = Path(args.output)
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; give the name of a CSV file")
    if output.exists() and not args.overwrite:
        raise UserError(f"--output {output} exists; choose another name or add --overwrite")
    folder = RunFolder.open(args.run)
    recipe = _with_flags(folder.recipe, args)
    posterior = load_posterior(folder, recipe.device)
    x = _new_inputs(args.input, posterior.schema, args.invert)
    table = prediction_table(predicted(posterior, x, recipe.num_draws, args.input, not args.quiet), posterior.schema)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, table.to_csv(index=False, float_format="%.7g").encode())
    print(f"{len(table):,} predictions: {output}")


def _new_inputs(path: str, schema: Schema, invert: bool) -> torch.Tensor:
    from bnn_pyro.datasets import load_inputs, read_rows

    if Path(path).suffix.lower() in (".csv", ".tsv"):
        return read_rows(path, schema)[0]
    return load_inputs(path, schema, invert=invert)


# -- compare -----------------------------------------------------------------------------------------------------------
def compare(args: Namespace) -> None:
    """Several runs on the same test rows: tables and HTML with rankings and paired differences to the first."""
    from bnn_pyro.files import write_whole
    from bnn_pyro.runs.compare import compare_runs
    from bnn_pyro.runs.folder import RunFolder

    folders = [RunFolder.open(path) for path in args.runs]
    if len(folders) < 2:
        raise UserError("compare takes two run folders or more")
    out = Path(args.out) if args.out else folders[0].path / "comparison.html"
    if args.out and out.exists():
        raise UserError(f"--out {out} exists; choose another name")
    found = compare_runs({folder: _with_flags(folder.recipe, args) for folder in folders}, show=not args.quiet)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, found.html.encode())
    print(f"{found.text}\n\ncomparison: {out}")


# -- diagnose ----------------------------------------------------------------------------------------------------------
def diagnose(args: Namespace) -> None:
    """Whether a run's posterior can be trusted: verdicts, tables, figures, and its draws for ArviZ."""
    from bnn_pyro.files import lock_folder
    from bnn_pyro.runs.diagnose import diagnose_run, diagnosis_table
    from bnn_pyro.runs.evaluate import load_posterior
    from bnn_pyro.runs.folder import RunFolder

    folder = RunFolder.open(args.run)
    recipe = folder.recipe
    out = None if args.out is None else Path(args.out)
    if out is not None and out.exists():
        raise UserError(f"--out {out} exists; choose another name, or leave it out to write into the run")
    data = recipe.load()
    posterior = load_posterior(folder, args.device or recipe.device)
    with lock_folder(out or folder.path):
        found = diagnose_run(folder, recipe, data, posterior, out=out, netcdf=not args.no_netcdf, show=not args.quiet)
    print(diagnosis_table(found))
    print(f"\ndiagnosis: {(out or folder.path) / 'diagnosis.html'}")


# -- check -------------------------------------------------------------------------------------------------------------
def check(args: Namespace) -> int:
    """Whether posteriors are right, by what is known without them. Returns 1 where a claim does not hold, else 0.

    Raises KeyboardInterrupt with the way to go on after Ctrl-C or SIGTERM.
    """
    from bnn_pyro.checks import CHECKS
    from bnn_pyro.files import lock_folder
    from bnn_pyro.runs.check import BUDGETS, check_subjects
    from bnn_pyro.runs.check_page import check_table, level_of
    from bnn_pyro.runs.check_subjects import bench_subjects, one_subject
    from bnn_pyro.runs.environment import environment
    from bnn_pyro.runs.folder import CheckFolder

    if args.budget not in BUDGETS:
        raise unknown("budget", args.budget, BUDGETS)
    for name in args.only:
        if name not in CHECKS:
            raise unknown("check", name, CHECKS)
    checks = [name for name in CHECKS if name in args.only] if args.only else list(CHECKS)
    plans = bench_subjects(args) if args.variant is None else [one_subject(args).prepare()]
    recipe = plans[0].recipe
    name = "zoo" if args.variant is None else f"{recipe.variant}-{recipe.inference}-{recipe.data_name}"
    out = args.out or CheckFolder.default_path(f"check-{name}", resume=args.resume)
    place = CheckFolder.claim(out, resume=args.resume)
    facts = {**environment("cpu"), "budget": args.budget}
    try:
        with lock_folder(place.path):
            results = check_subjects(
                plans, checks, place, budget=args.budget, seed=args.seed or 0, facts=facts, show=not args.quiet
            )
    except KeyboardInterrupt as stopped:
        said = str(stopped) or "stopped"
        raise KeyboardInterrupt(f"{said}; finished checks are kept: --resume --out {place.path} goes on") from None
    print(check_table(results))
    print(f"\nchecks: {place.path / place.page}")
    return int(any(level_of(found) == "bad" for found in results["subjects"]))


# -- sweep -------------------------------------------------------------------------------------------------------------
def sweep(args: Namespace) -> int:
    """Every recipe on every data set, split and seed: the fits that are missing, and one report of all.

    Returns 1 where a fit failed, else 0. Raises KeyboardInterrupt with the way to go on after Ctrl-C or SIGTERM.
    """
    from bnn_pyro.files import lock_folder
    from bnn_pyro.parallel.executor import parse_executor
    from bnn_pyro.runs.environment import typed_command
    from bnn_pyro.runs.sweep import SweepFolder, planned_text, run_sweep
    from bnn_pyro.runs.sweep_config import read_sweep_config
    from bnn_pyro.runs.sweep_report import sweep_text

    config, show = read_sweep_config(args.spec), not args.quiet
    folder = SweepFolder.claim(args.out or Path("runs") / f"sweep-{config.path.stem}")
    if args.dry_run:
        print(planned_text(config, folder, show=show))
        return 0
    if args.executor is not None:
        parse_executor(args.executor)
    try:
        with lock_folder(folder.path):
            how = dict(executor=args.executor, cores=args.cores or 0, overwrite=args.overwrite)
            results, summaries = run_sweep(config, folder, **how, show=show)
    except KeyboardInterrupt as stopped:
        text = f"{stopped or 'stopped'}; finished fits are kept, the same command goes on: {typed_command()}"
        raise KeyboardInterrupt(text) from None
    print(sweep_text(results, summaries))
    print(f"\nsweep: {folder.path / folder.page}")
    return int(any(fit["status"] == "failed" for fit in results["fits"]))
