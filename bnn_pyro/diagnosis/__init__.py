"""Diagnosis as a part of a run: verdicts, tables, figures and draws for ArviZ, written, read and shown."""

from bnn_pyro.diagnosis.folder import FILE, Diagnosed, diagnose_run, diagnosis_table, judge_chains, read_diagnosis

__all__ = ["FILE", "Diagnosed", "diagnose_run", "diagnosis_table", "judge_chains", "read_diagnosis"]
