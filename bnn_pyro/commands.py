"""What each command does: from parsed arguments to a run folder, a file or a table.

Loaded when a command runs; each imports what it alone needs when it is called.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.files import lock_folder, write_whole
from bnn_pyro.reports.tables import prediction_table, run_table, score_table
from bnn_pyro.runs.folder import CheckFolder, RunFolder
from bnn_pyro.runs.recipe import Recipe, environment, read_config, resolve, typed_command

__all__ = ["check", "compare", "diagnose", "evaluate", "predict", "sweep", "train"]

#: Rows of each outside data set, unless --limit says otherwise.
OUTSIDE_ROWS = 10_000


def train(args: Namespace) -> None:
    """Fit a variant and, beside it, the deterministic network; score both and write the run folder.

    Under torchrun every process has a share of the rows of each step, and rank 0 writes and scores.
    """
    from bnn_pyro.datasets.dataset import load_together
    from bnn_pyro.distributed import joined
    from bnn_pyro.fitting import check_divisible
    from bnn_pyro.runs.evaluate import evaluate_run
    from bnn_pyro.runs.train import fit_run, prepared

    with joined() as ranks:
        recipe, folder = ranks.first_does(lambda: _train_target(args))
        check_divisible(recipe.method(), ranks)
        data = load_together(ranks, recipe.load)
        entry, below = ranks.all_do(lambda: prepared(recipe, data))
        show = not args.quiet
        again = f"go on to the same result with: python -m bnn_pyro.run train --resume --out {folder.path}"
        with ranks.first_holds(lambda: folder.begun(recipe, keep=args.resume)), _stop_says(again):
            posterior, baseline = fit_run(folder, recipe, data, entry, below, resume=args.resume, show=show)
            if not ranks.first:
                return
            run = evaluate_run(folder, recipe, data, posterior, baseline, show=show)
    print(run_table(run))
    print(f"\nreport: {folder.path / 'report.html'}")


def _train_target(args: Namespace) -> tuple[Recipe, RunFolder]:
    """What to run, and where, with nothing written yet."""
    config = read_config(args.config) if args.config else {}
    begun = args.resume and RunFolder(Path(args.out or "")).is_begun
    stored = read_config(Path(args.out) / "config.json") if begun else {}
    recipe = resolve(args, {**stored, **config})
    name = f"{recipe.variant}-{recipe.data_name}-{recipe.seed}"
    out = args.out or RunFolder.default_path(name, resume=args.resume)
    folder = RunFolder.claim(out, resume=args.resume, overwrite=args.overwrite)
    changed = recipe.difference(folder.recipe) if args.resume else None
    if changed is not None:
        key, now, then = changed
        raise UserError(
            f"{folder.path} was started with {key} {then}, not {now}; resume it without other settings, or choose "
            "another --out"
        )
    return recipe, folder


def evaluate(args: Namespace) -> None:
    """Score a run on its own test rows (and on --ood), or on other data with labels."""
    from bnn_pyro.runs.evaluate import evaluate_run, load_posterior, outside_inputs, score_mean_weights, score_other
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


def predict(args: Namespace) -> None:
    """Predictions with their uncertainty for new inputs, one line a row, as CSV."""
    from bnn_pyro.datasets import load_inputs, read_rows
    from bnn_pyro.runs.evaluate import load_posterior, predict_with_progress

    output = Path(args.output)
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; give the name of a CSV file")
    if output.exists() and not args.overwrite:
        raise UserError(f"--output {output} exists; choose another name or add --overwrite")
    folder = RunFolder.open(args.run)
    recipe = _with_flags(folder.recipe, args)
    posterior = load_posterior(folder, recipe.device)
    if Path(args.input).suffix.lower() in (".csv", ".tsv"):
        x, _ = read_rows(args.input, posterior.schema)
    else:
        x = load_inputs(args.input, posterior.schema, invert=args.invert)
    prediction = predict_with_progress(posterior, x, recipe.num_draws, args.input, not args.quiet)
    table = prediction_table(prediction, posterior.schema)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, table.to_csv(index=False, float_format="%.7g").encode())
    print(f"{len(table):,} predictions: {output}")


def compare(args: Namespace) -> None:
    """Several runs on the same test rows: tables and HTML with rankings and paired differences to the first."""
    from bnn_pyro.runs.compare import compare_runs

    folders = [RunFolder.open(path) for path in args.runs]
    if len(folders) < 2:
        raise UserError("compare takes two run folders or more")
    out = Path(args.out) if args.out else folders[0].path / "comparison.html"
    if args.out and out.exists():
        raise UserError(f"--out {out} exists; choose another name")
    text, html = compare_runs({folder: _with_flags(folder.recipe, args) for folder in folders}, show=not args.quiet)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, html.encode())
    print(f"{text}\n\ncomparison: {out}")


def diagnose(args: Namespace) -> None:
    """Whether a run's posterior can be trusted: verdicts, tables, figures, and its draws for ArviZ."""
    from bnn_pyro.runs.diagnose import diagnose_run
    from bnn_pyro.runs.evaluate import load_posterior

    folder = RunFolder.open(args.run)
    recipe = folder.recipe
    out = None if args.out is None else Path(args.out)
    if out is not None and out.exists():
        raise UserError(f"--out {out} exists; choose another name, or leave it out to write into the run")
    data = recipe.load()
    posterior = load_posterior(folder, args.device or recipe.device)
    with lock_folder(out or folder.path):
        print(diagnose_run(folder, recipe, data, posterior, out=out, netcdf=not args.no_netcdf, show=not args.quiet))
    print(f"\ndiagnosis: {(out or folder.path) / 'diagnosis.html'}")


def check(args: Namespace) -> int:
    """Whether posteriors are right, by what is known without them. Returns 1 where a claim does not hold, else 0."""
    from bnn_pyro.checks import CHECKS
    from bnn_pyro.runs.check import BUDGETS, check_subjects, one_subject, zoo_subjects
    from bnn_pyro.runs.check_report import check_table, level_of

    if args.budget not in BUDGETS:
        raise unknown("budget", args.budget, BUDGETS)
    for name in args.only:
        if name not in CHECKS:
            raise unknown("check", name, CHECKS)
    checks = [name for name in CHECKS if name in args.only] if args.only else list(CHECKS)
    specs = zoo_subjects(args) if args.variant is None else [one_subject(args).prepare()]
    recipe = specs[0].recipe
    name = "zoo" if args.variant is None else f"{recipe.variant}-{recipe.inference}-{recipe.data_name}"
    out = args.out or CheckFolder.default_path(f"check-{name}", resume=args.resume)
    place = CheckFolder.claim(out, resume=args.resume)
    facts = {**environment("cpu"), "budget": args.budget}
    how = dict(budget=args.budget, seed=args.seed or 0, facts=facts, show=not args.quiet)
    with _stop_says(f"finished checks are kept: --resume --out {place.path} goes on"), lock_folder(place.path):
        results = check_subjects(specs, checks, place, **how)
    print(check_table(results))
    print(f"\nchecks: {place.path / place.page}")
    return int(any(level_of(found) == "bad" for found in results["subjects"]))


def sweep(args: Namespace) -> int:
    """Every recipe on every data set, split and seed: the fits that are missing, and one report of all.

    Returns 1 where a fit failed, else 0.
    """
    from bnn_pyro.parallel.executor import parse_executor
    from bnn_pyro.runs.sweep import SweepFolder, planned_text, run_sweep
    from bnn_pyro.runs.sweep_config import FAILED, read_sweep_config
    from bnn_pyro.runs.sweep_report import sweep_text, write_report

    config, show = read_sweep_config(args.spec), not args.quiet
    folder = SweepFolder.claim(args.out or Path("runs") / f"sweep-{config.path.stem}")
    if args.dry_run:
        print(planned_text(config, folder, show=show))
        return 0
    if args.executor is not None:
        parse_executor(args.executor)
    how = dict(executor=args.executor, cores=args.cores or 0, overwrite=args.overwrite, show=show)
    again = f"finished fits are kept, the same command goes on: {typed_command()}"
    with _stop_says(again), lock_folder(folder.path):
        results, summaries = run_sweep(config, folder, **how)
        write_report(folder, config.tasks, results, summaries)
    print(sweep_text(results, summaries))
    print(f"\nsweep: {folder.path / folder.page}")
    return int(any(fit["status"] == FAILED for fit in results["fits"]))


def _with_flags(recipe: Recipe, args: Namespace) -> Recipe:
    flags = {"num_draws": args.num_draws, "device": args.device}
    return dataclasses.replace(recipe, **{k: v for k, v in flags.items() if v is not None})


@contextmanager
def _stop_says(again: str) -> Iterator[None]:
    """Raise KeyboardInterrupt with the way to go on after Ctrl-C or SIGTERM."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(f"{stopped or 'stopped'}; {again}") from None
