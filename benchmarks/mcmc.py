"""Markov chains on three small posteriors: speed against Pyro and NumPyro, results beside mean-field SVI, pictures.

    pip install numpyro "jax[cpu]"                # for the benchmark only
    python benchmarks/mcmc.py speed               # everything that results/mcmc_speed.json does not hold yet
    python benchmarks/mcmc.py speed --problem logistic --sampler numpyro-parallel chees-64 --again
    python benchmarks/mcmc.py posteriors          # SVI, HMC, NUTS and ChEES, results/mcmc_posteriors.json
    python benchmarks/mcmc.py figures             # from what `posteriors` left in --runs
    python benchmarks/write_results.py            # the tables of docs/results

Speed is effective draws of what the network says at 50 test points, the worst of them and the median, per second of
the whole run in a fresh process with empty caches: model, compilation, warm-up, draws. Imports and reading the data
are left out for everyone. All samplers see the same model, priors, likelihood and rows, evaluated in float32; before a
problem is timed, the log joint densities of Pyro's, NumPyro's and the package's model are compared at random weights.
A result is only as good as the machine was quiet: the load average before every run is kept beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    """One of the three."""
    from mcmc_speed import choices

    problems, samplers = choices()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    speed = commands.add_parser("speed", help="effective draws per second")
    for option, names in (("--problem", problems), ("--sampler", samplers)):
        text = f"of {', '.join(names)}; all of them by default"
        speed.add_argument(option, nargs="+", choices=names, default=names, metavar="NAME", help=text)
    speed.add_argument("--seed", nargs="+", type=int, help="by default those of every sampler's line")
    speed.add_argument("--again", action="store_true", help="run what is known, too")
    for name, text in (("posteriors", "test metrics and convergence by method"), ("figures", "the pictures")):
        other = commands.add_parser(name, help=text)
        other.add_argument("--runs", type=Path, default=Path("runs/mcmc"), help="where fitted posteriors are kept")
        if name == "posteriors":
            other.add_argument("--again", action="store_true", help="fit what is there, too")
    args = parser.parse_args()
    if args.what == "speed":
        from mcmc_speed import measure

        measure(args.problem, args.sampler, args.seed, args.again)
    elif args.what == "posteriors":
        from mcmc_posteriors import fit_and_score

        fit_and_score(args.runs, args.again)
    else:
        from mcmc_figures import draw

        draw(args.runs)


if __name__ == "__main__":
    main()
