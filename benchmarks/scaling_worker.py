"""One measurement in a process of its own, started by ``benchmarks/scaling.py``; prints a line of JSON.

python benchmarks/scaling_worker.py mean-field '{"width": 1600}'
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace

from scale.features import run_features
from scale.fits import time_fit
from scale.many import run_job
from scale.subjects import SUBJECTS, measure

from bnn_pyro.distributed import launched


def main() -> None:
    """Measure, print."""
    warnings.simplefilter("ignore")
    name, given = sys.argv[1], json.loads(sys.argv[2])
    if name == "features":
        found = run_features(**given)
    elif name == "fit":
        found = time_fit(**given)
    elif name == "many":
        found = run_job(**given)
    else:
        found = measure(name, replace(SUBJECTS[name].sizes, **given))
    if launched()[0] == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
