"""The commands of the command line: each takes parsed arguments and writes a run folder, a file or a table."""

import dataclasses
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bnn_pyro.datasets.prepare import say_doubts
from bnn_pyro.errors import UserError, check_known
from bnn_pyro.files import lock_folder, write_whole
from bnn_pyro.posterior import Posterior
from bnn_pyro.reports.summary import guarantees_section, run_table
from bnn_pyro.runs.folder import CheckFolder, RunFolder
from bnn_pyro.runs.recipe import EXAMPLE, Recipe, read_config, resolve
from bnn_pyro.runs.train import environment, fit_run, load_together, prepare_run, typed_command
from bnn_pyro.settings import defaults
from bnn_pyro.zoo import ZOO
from bnn_pyro.zoo.auto import say


def train(args: Namespace) -> int:
    """Fit a variant and the deterministic network to compare it with; score both and write the run folder.

    Returns ``RunFacts.exit_code``, which is not 0 if the report begins with a problem.
    Under torchrun every process takes a share of the rows of each step; rank 0 writes and scores.
    """
    from bnn_pyro.distributed import joined_processes
    from bnn_pyro.runs.evaluate import evaluate_run

    with joined_processes() as ranks:
        recipe, folder = ranks.on_rank0(lambda: _train_target(args))
        data = load_together(ranks, recipe.load)
        if ranks.is_rank0:
            say_doubts(data)
        with ranks.sharing_errors():
            ready, beside = prepare_run(recipe, data, args.max_minutes)
        if ranks.is_rank0 and recipe.auto:
            say(recipe)
        again = f"go on to the same result with: python -m bnn_pyro.run train --resume --out {folder.path}"
        with folder.begun(recipe, keep=args.resume, new=not (args.resume or args.overwrite)), _stop_says(again):
            posterior, baseline = fit_run(folder, ready, data, beside, resume=args.resume, max_minutes=args.max_minutes)
            if not ranks.is_rank0:
                return 0
            run = evaluate_run(folder, recipe, data, posterior, baseline)
    print(f"{run_table(run)}\n\nreport: {folder.path / 'report.html'}")
    return run.exit_code if ranks.size == 1 or run.failed else 0  # torchrun takes other exit codes for a crash


def _train_target(args: Namespace) -> tuple[Recipe, RunFolder]:
    """Return the recipe and the folder of a run, of which nothing is written yet."""
    config = read_config(args.config) if args.config else {}
    begun = args.resume and args.out and RunFolder(Path(args.out)).is_begun
    stored = read_config(Path(args.out) / "config.json") if begun else {}
    recipe = resolve(args, {**({} if args.data or config else {"data": EXAMPLE}), **stored, **config})
    out = args.out or RunFolder.default_path(f"{recipe.variant}-{recipe.data_name}-{recipe.seed}", resume=args.resume)
    folder = RunFolder.claim(out, resume=args.resume, overwrite=args.overwrite)
    if (changed := recipe.difference(folder.recipe) if args.resume else None) is not None:
        key, now, then = changed
        raise UserError(f"{folder.path} was started with {key} {then}, not {now}; resume it without other settings, or "
                        "choose another --out")  # fmt: skip
    return recipe, folder


def evaluate(args: Namespace) -> int:
    """Score a run on its own test rows (and on --ood), or on other data with labels."""
    from bnn_pyro.runs.evaluate import evaluate_run, labelled, load_posterior, outside_inputs, prune_run, score_rows

    folder, recipe, posterior = _opened(args)
    if args.data is not None:
        if args.prune or args.ood:
            use = "--prune scores draws on" if args.prune else "--ood scores draws against"
            raise UserError(f"{use} the run's own test rows; leave out --data")
        x, y = labelled(args.data, posterior.schema, recipe)
        print(text := score_rows(folder, recipe, posterior, x, y, Path(args.data).stem))
        return 3 if text.startswith("Failed: ") else 0
    data = recipe.load()
    num = 10_000 if args.limit is None else args.limit  # rows of each out-of-distribution data set
    outside = outside_inputs(args.ood, posterior.schema, num=num, invert=args.invert) if args.ood else None
    baseline = load_posterior(folder.baseline, recipe.device, args.module) if folder.baseline.is_trained else None
    with lock_folder(folder.path):
        pruned = prune_run(folder, data, posterior, recipe.num_draws) if args.prune else ""
        run = evaluate_run(folder, recipe, data, posterior, baseline, outside=outside)
    print(f"{run_table(run)}{pruned}\n\nreport: {folder.path / 'report.html'}")
    return run.exit_code


def predict(args: Namespace) -> None:
    """Write predictions with their uncertainty for new inputs to a CSV file, one line per row."""
    from bnn_pyro.runs.predict import predict_file

    output = Path(args.output)
    if output.exists() and not args.overwrite:
        raise UserError(f"--output {output} exists; choose another name or add --overwrite")
    if output.exists() and Path(args.input).exists() and output.samefile(args.input):
        raise UserError(f"--output {output} is the input itself, which predictions would replace; choose another name")
    table, notes = predict_file(*_opened(args), args)
    write_whole(output, table.to_csv(index=False, float_format="%.9g").encode())
    print("\n".join([*notes, f"{len(table):,} predictions: {output}"]))


def calibrate(args: Namespace) -> None:
    """Calibrate a run with rows that it was not trained on, and write its report again."""
    from bnn_pyro.runs.evaluate import evaluate_run, load_posterior
    from bnn_pyro.runs.predict import calibrate_run

    folder, recipe, posterior = _opened(args)
    baseline = load_posterior(folder.baseline, recipe.device, args.module) if folder.baseline.is_trained else None
    level, data = args.level if args.level is not None else recipe.conformal or 0.9, recipe.load()
    with lock_folder(folder.path):
        options = dict(name=args.data, method=args.method, level=level, groups=args.groups)
        done = calibrate_run(folder, recipe, data, posterior, **options)
        evaluate_run(folder, recipe, data, posterior, baseline)
    print(f"{guarantees_section(done).text()}\n\nreport: {folder.path / 'report.html'}")


def compare(args: Namespace) -> None:
    """Compare runs on the same test rows: rankings and paired differences to the first run, as tables and HTML."""
    from bnn_pyro.runs.compare import compare_runs

    files = [Path(path) for path in args.runs[1:] if path.lower().endswith(".csv")]
    folders = [RunFolder.open(path) for k, path in enumerate(args.runs) if not k or Path(path) not in files]
    if len(args.runs) < 2:
        raise UserError("compare takes two or more run folders, or one run folder and files of predictions")
    out = Path(args.out) if args.out else folders[0].path / "comparison.html"
    if args.out and out.exists():
        raise UserError(f"--out {out} exists; choose another name")
    recipes = {folder: _with_flags(folder.recipe, args) for folder in folders}
    text, html = compare_runs(recipes, args.module, files, args.form)
    write_whole(out, html.encode())
    print(f"{text}\n\ncomparison: {out}")


def diagnose(args: Namespace) -> None:
    """Diagnose whether a run's posterior can be trusted: verdicts, tables, figures, and its draws for ArviZ."""
    from bnn_pyro.runs.diagnose import diagnose_run, write_draws

    if args.out is not None and Path(args.out).exists():
        raise UserError(f"--out {args.out} exists; choose another name, or leave it out to write into the run")
    folder, recipe, posterior = _opened(args)
    place = folder if args.out is None else RunFolder(Path(args.out))
    with lock_folder(place.path):
        data = recipe.load()
        print(diagnose_run(folder, recipe, data, posterior, place))
        print(f"\ndiagnosis: {place.path / 'diagnosis.html'}", flush=True)
        if not args.no_netcdf:
            write_draws(posterior, data, place)


def check(args: Namespace) -> int:
    """Check posteriors against independently known answers. Returns 1 if a claim does not hold, else 0."""
    from bnn_pyro.checks import CHECKS
    from bnn_pyro.runs.check import BUDGETS, check_subjects, check_table, level_of, one_subject, zoo_subjects

    check_known("budget", BUDGETS, args.budget)
    check_known("check", CHECKS, *args.only)
    checks = [name for name in CHECKS if name in args.only] if args.only else list(CHECKS)
    if args.module:
        args.variant = args.variant or next(name for name, kind in ZOO.items() if "module" in defaults(kind))
    specs = zoo_subjects(args) if args.variant is None else [one_subject(args, prepare=True)]
    recipe = specs[0].recipe
    name = "zoo" if args.variant is None else f"{recipe.variant}-{recipe.inference}-{recipe.data_name}"
    out = args.out or CheckFolder.default_path(f"check-{name}", resume=args.resume)
    place = CheckFolder.claim(out, resume=args.resume)
    options = dict(budget=args.budget, seed=args.seed or 0, facts={**environment("cpu"), "budget": args.budget})
    with _stop_says(f"finished checks are kept: --resume --out {place.path} goes on"), lock_folder(place.path):
        results = check_subjects(specs, checks, place, **options)
    print(f"{check_table(results)}\n\nchecks: {place.path / place.page}")
    return int(any(level_of(subject) == "bad" for subject in results["subjects"]))


def sweep(args: Namespace) -> int:
    """Make the missing fits of a sweep, and write its report. Returns 1 if a fit failed, else 0."""
    from bnn_pyro.parallel.executor import parse_executor
    from bnn_pyro.runs.sweep import SweepFolder, run_sweep
    from bnn_pyro.runs.sweep_config import FAILED, read_sweep_config
    from bnn_pyro.runs.sweep_report import sweep_text, write_report

    config = read_sweep_config(args.spec)
    folder = SweepFolder.claim(args.out or Path("runs") / f"sweep-{config.path.stem}")
    if args.executor is not None:
        parse_executor(args.executor)
    facts = environment("cpu") | {"executor": args.executor or ""}
    with _stop_says(f"finished fits are kept, the same command goes on: {typed_command()}"), lock_folder(folder.path):
        results, summaries = run_sweep(config, folder, facts, cores=args.cores or 0, overwrite=args.overwrite)
        write_report(folder, results, summaries)
    print(f"{sweep_text(results, summaries, args.form)}\n\nsweep: {folder.path / folder.page}")
    return int(any(fit["status"] == FAILED for fit in results["fits"]))


def _opened(args: Namespace) -> tuple[RunFolder, Recipe, Posterior]:
    """Return the run that a command names, its recipe (with the command's own flags) and its posterior."""
    from bnn_pyro.runs.evaluate import load_posterior

    folder = RunFolder.open(args.run)
    recipe = _with_flags(folder.recipe, args)
    return folder, recipe, load_posterior(folder, recipe.device, args.module)


def _with_flags(recipe: Recipe, args: Namespace) -> Recipe:
    flags = {k: getattr(args, k, None) for k in ("num_draws", "device")}
    return dataclasses.replace(recipe, **{k: v for k, v in flags.items() if v is not None})


@contextmanager
def _stop_says(again: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(f"{str(stopped) or 'stopped'}; {again}") from None
