"""Run independent tasks in parallel, each on one thread, so that results are bit for bit the same wherever they run."""
