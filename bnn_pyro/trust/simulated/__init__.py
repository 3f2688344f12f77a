"""Simulation-based calibration: data from the prior, fits, and the ranks of the truth among the draws."""
