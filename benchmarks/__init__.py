"""Measurements of this package: ``python -m benchmarks.FOLDER``; see README.md."""
