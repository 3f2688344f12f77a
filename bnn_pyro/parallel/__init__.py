"""Many independent tasks at once: in this process, in processes of this machine (loky), or on a Dask cluster.

A task computes on one thread wherever it runs, so that its result is the same everywhere, bit for bit.
"""
