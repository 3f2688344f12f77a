"""What ``benchmarks/scaling.py`` measures: how time and memory grow, and what several processes bring."""
