"""The bench as a command: which variants and methods are checked, and the folder that tells what was found."""

from bnn_pyro.checking.bench import check_subjects
from bnn_pyro.checking.folder import CheckFolder
from bnn_pyro.checking.page import check_html, check_table
from bnn_pyro.checking.subjects import Checked, bench_subjects, one_subject

__all__ = ["CheckFolder", "Checked", "bench_subjects", "check_html", "check_subjects", "check_table", "one_subject"]
