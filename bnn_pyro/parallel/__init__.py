"""Many independent tasks at once, each on one thread, so that its result is the same wherever it runs, bit for bit."""
