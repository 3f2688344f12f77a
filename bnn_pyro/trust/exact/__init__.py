"""Posteriors that are known: by formulas, by numerical integration, by a long run of an exact sampler."""
