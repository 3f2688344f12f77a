"""One run of one sampler in a process of its own; started by ``benchmarks/mcmc.py``, prints one line of JSON.

    python benchmarks/mcmc_worker.py breast-cancer numpyro --seed 0

The clock runs from the model and the data to the draws in memory: compilation, initialisation and warm-up are in it.
Imports, reading the data and what is computed of the draws afterwards are not, for anybody; how long the imports took
is told beside.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings


def main() -> None:
    """Run, score, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem")
    parser.add_argument("sampler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="only compare the log joint densities")
    args = parser.parse_args()
    begin = time.perf_counter()
    warnings.simplefilter("ignore")
    import torch
    from mcmc_problems import PROBLEMS, functions
    from mcmc_samplers import SAMPLERS, Absent, run
    from mcmc_score import means, score

    sampler, problem = SAMPLERS[args.sampler], PROBLEMS[args.problem]()
    torch.set_num_threads(sampler.threads)
    if sampler.kind == "numpyro" or args.check:
        import mcmc_numpyro
    elif sampler.kind in ("nuts", "chees"):
        import torch._dynamo
        import torch._inductor
    if args.check:
        print(json.dumps({"log_joint_difference": mcmc_numpyro.check(problem)}))
        return
    imports, memory, cpu, start = time.perf_counter() - begin, anonymous(), os.times(), time.perf_counter()
    try:
        chains, stats = run(sampler, problem, args.seed)
    except Absent as reason:
        print(json.dumps({"absent": str(reason)}))
        return
    seconds, after = time.perf_counter() - start, os.times()
    f = functions(problem, chains)
    superchain = stats["superchain"][:, 0] if "superchain" in stats else None
    found = score(f, superchain)
    centre, error = means(f)
    print(
        json.dumps(
            {
                "chains": f.shape[0],
                "draws": f.shape[1],
                "seconds": round(seconds, 3),
                "cpu_seconds": round(sum(after[:4]) - sum(cpu[:4]), 2),
                "import_seconds": round(imports, 2),
                **found,
                "ess_min_per_second": round(found["ess_min"] / seconds, 3),
                "ess_median_per_second": round(found["ess_median"] / seconds, 3),
                "gradients": int(stats["n_steps"].sum()),
                "divergences": int(stats["diverging"].sum()),
                "memory_before_mb": round(memory, 1),
                "mean": [round(v, 5) for v in centre.tolist()],
                "mcse": [round(v, 6) for v in error.tolist()],
            }
        )
    )


def anonymous(pid: int | str = "self") -> float:
    """Memory that a process has asked for (no files, no shared libraries), MB."""
    with open(f"/proc/{pid}/smaps_rollup") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Anonymous:")) / 1024


if __name__ == "__main__":
    main()
