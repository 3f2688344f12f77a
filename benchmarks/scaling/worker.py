"""One measurement in a process of its own, started by the modules beside this one; prints a line of JSON.

python -m benchmarks.scaling.worker mean-field '{"width": 1600}'
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import replace

from benchmarks.scaling.processes import time_fit
from benchmarks.scaling.subjects import SUBJECTS, measure


def main() -> None:
    """Measure, print."""
    warnings.simplefilter("ignore")
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    found = time_fit(**settings) if name == "fit" else measure(name, replace(SUBJECTS[name].sizes, **settings))
    if os.environ.get("RANK", "0") == "0":  # of torchrun's processes the first
        print(json.dumps(found))


if __name__ == "__main__":
    main()
