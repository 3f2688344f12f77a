"""One run of one sampler in a process of its own; started by ``__main__.py``, prints one line of JSON.

    python -m benchmarks.mcmc.worker breast-cancer numpyro --seed 0

The clock runs from the model and the data to the draws in memory: compilation, initialisation and warm-up are in it.
Imports, reading the data and the statistics of the draws are not, for anybody; how long the imports took is there too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings

import numpy as np

from benchmarks.memory import tree


def main() -> None:
    """Sample, score, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem")
    parser.add_argument("sampler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="only compare the log joint densities")
    args = parser.parse_args()
    begin = time.perf_counter()
    warnings.simplefilter("ignore")
    import torch

    from benchmarks.mcmc.problems import PROBLEMS, functions
    from benchmarks.mcmc.samplers import SAMPLERS, sample

    sampler, problem = SAMPLERS[args.sampler], PROBLEMS[args.problem]()
    torch.set_num_threads(sampler.threads)
    if sampler.kind == "numpyro" or args.check:
        from benchmarks.mcmc import numpyro_peer
    elif sampler.kind in ("nuts", "chees"):
        import torch._dynamo
        import torch._inductor
    if args.check:
        print(json.dumps({"log_joint_difference": numpyro_peer.check(problem)}))
        return
    imports, before, cpu, start = time.perf_counter() - begin, tree(), os.times(), time.perf_counter()
    chains, stats = sample(sampler, problem, args.seed)
    seconds, after = time.perf_counter() - start, os.times()
    superchain = stats["superchain"][:, 0] if "superchain" in stats else None
    found = {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(sum(after[:4]) - sum(cpu[:4]), 2),
        "import_seconds": round(imports, 2),
        "memory_before": before,
        "gradients": int(stats["n_steps"].sum()) if "n_steps" in stats else None,  # Pyro does not count them
        "divergences": int(stats["diverging"].sum()),
        **score(functions(problem, chains), superchain),
    }
    rates = {f"{name}_per_second": round(found[name] / seconds, 3) for name in ("ess_min", "ess_median")}
    print(json.dumps(found | rates))


def score(f: np.ndarray, superchain: np.ndarray | None = None) -> dict:
    """Bulk effective draws and R-hat of f (C, D, M), worst and median; nested by ``superchain`` (C,): starts shared."""
    from bnn_pyro.diagnostics.convergence import chain_statistics

    series = np.moveaxis(f[:, : f.shape[1] // 2 * 2], 2, 0)
    found = chain_statistics(series, superchain)
    rhat = found.rhat if len(f) > 1 else chain_statistics(series.reshape(len(series), 2, -1)).rhat
    return {
        "chains": f.shape[0],
        "draws": f.shape[1],
        "ess_min": round(float(found.ess_bulk.min()), 1),
        "ess_median": round(float(np.median(found.ess_bulk)), 1),
        "rhat": "split" if superchain is None else "nested",
        "rhat_max": round(float(rhat.max()), 4),
    }


if __name__ == "__main__":
    main()
