"""Markov chains on three small posteriors: effective draws a second, beside Pyro and NumPyro.

    pip install -e ".[peers]"
    python -m benchmarks.mcmc                     # everything that benchmarks/results/mcmc.json does not hold yet
    python -m benchmarks.mcmc --problem logistic --sampler numpyro-parallel chees-64 --repeats 2

Effective draws are of the network's output at 50 test points, the worst of them and the median, per second of the whole
run in a fresh process with empty caches: model, compilation, warm-up, draws. Imports and reading the data are left out
for everyone. All samplers see the same model, priors, likelihood and rows, evaluated in float32; before NumPyro is
timed, the log joint densities of Pyro's, NumPyro's and the package's model are compared at random weights.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from benchmarks.mcmc.problems import PROBLEMS
from benchmarks.mcmc.samplers import SAMPLERS, settings_of
from benchmarks.memory import Failed, run_apart
from benchmarks.provenance import Measurements, add_out, check_tree

#: Seconds after which a run is given up.
LIMIT = 1800
WORKER = "benchmarks.mcmc.worker"


def measure(results: Measurements, problems: list[str], samplers: list[str], repeats: int) -> None:
    """Every seed of every sampler on every problem, ``repeats`` times over; what is in the results already counts."""
    compared: set[str] = set()
    for problem in problems:
        for name in samplers:
            settings = settings_of(SAMPLERS[name], problem)
            for seed in SAMPLERS[name].seeds:
                key = {"problem": problem, "sampler": name, "seed": seed, "settings": settings}
                if len(results.runs(key)) >= repeats:
                    continue
                load = os.getloadavg()[0]
                try:
                    if SAMPLERS[name].kind == "numpyro" and problem not in compared:
                        run_apart(WORKER, problem, "numpyro", "--check")
                        compared.add(problem)
                    run = run_once(problem, name, seed)
                except Failed as reason:
                    print(reason, flush=True)
                    break
                results.add(key, run, load)
                rate = f"{run['ess_min_per_second']:.2f} ({run['ess_median_per_second']:.2f}) effective draws a second"
                print(f"{problem} {name} {seed}: {run['seconds']:.1f} s, {rate}, R-hat {run['rhat_max']}", flush=True)


def run_once(problem: str, name: str, seed: int) -> dict[str, Any]:
    """One run, with empty caches."""
    sampler = SAMPLERS[name]
    with tempfile.TemporaryDirectory(prefix="mcmc-") as cache:
        environment = {
            "OMP_NUM_THREADS": str(sampler.threads),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={sampler.devices}" if sampler.devices > 1 else "",
            "TORCHINDUCTOR_CACHE_DIR": cache + "/torch",
            "XDG_CACHE_HOME": cache + "/user",
        }
        return run_apart(WORKER, problem, name, "--seed", str(seed), timeout=LIMIT, **environment)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, names in (("--problem", list(PROBLEMS)), ("--sampler", list(SAMPLERS))):
        text = f"of {', '.join(names)}; all of them by default"
        parser.add_argument(option, nargs="+", choices=names, default=names, metavar="NAME", help=text)
    parser.add_argument("--repeats", type=int, default=1, help="runs of every seed (1)")
    add_out(parser, "mcmc.json")
    args = parser.parse_args()
    check_tree(args.out)
    measure(Measurements(args.out, "speed"), args.problem, args.sampler, args.repeats)


if __name__ == "__main__":
    main()
