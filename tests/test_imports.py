"""The direction of flow, read off the imports: nothing imports to its right, so there is no cycle."""

import ast
import json
import resource
import subprocess
import sys
from dataclasses import asdict
from graphlib import TopologicalSorter
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.inference import methods_for
from bnn_pyro.listing import _read, tables
from bnn_pyro.parts.nets import keep_freed_memory

PACKAGE = Path(bp.__file__).parent
#: Packages and top-level modules from left to right: each imports only what stands before it.
ORDER = [
    "lazy", "errors", "settings", "progress", "isolation", "c_code", "files", "cells", "csv_files", "dates", "doubts",
    "distributed",
    "parallel", "checkpoint", "datasets", "parts", "posterior", "inference", "zoo", "features", "loading",
    "fitting", "predictive", "sklearn", "metrics", "calibration", "pruning", "diagnostics", "checks", "explanation",
    "plots", "reports", "runs", "listing", "inspection", "commands", "run",
]  # fmt: skip
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported(path, nodes=ast.walk):
    """Every module that a file imports: dotted names, without "bnn_pyro." for its own.

    nodes: ``ast.walk``, wherever in the file, or ``ast.iter_child_nodes``, outside of its functions.
    """
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            # "from bnn_pyro.parts import nets" imports the module, "from bnn_pyro.parts.nets import mlp" a name in it.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            names = [n for n in names if n.removeprefix("bnn_pyro.") in FILES or n == node.module]
        else:
            continue
        yield from (name.removeprefix("bnn_pyro.") for name in names if name != "bnn_pyro")


def unit(module):
    return module.partition(".")[0]


@pytest.mark.parametrize("module", [name for name in FILES if name != "__init__"])
def test_nothing_imports_to_its_right(module):
    assert unit(module) in ORDER, f"say in ORDER where the new '{unit(module)}' stands"
    for other in imported(FILES[module]):
        if other in FILES and unit(other) != unit(module):
            assert ORDER.index(unit(other)) < ORDER.index(unit(module)), f"{module} imports {other}, to its right"


def test_no_cycle_inside_a_unit():
    graph = {module: {o for o in imported(path) if o in FILES and o != module} for module, path in FILES.items()}
    list(TopologicalSorter(graph).static_order())  # CycleError, with the cycle


def test_files_stay_short_and_one_alone_touches_the_store_and_the_global_generators():
    words = ("get_param_store", "clear_param_store", "set_rng_seed", "manual_seed(", "get_rng_state", "random.seed(")
    for module, path in FILES.items():
        assert len(path.read_text().splitlines()) <= 300, f"{module} is long: two subjects in one?"
        if module != "isolation":
            text = path.read_text().replace("torch.Generator().manual_seed(", "").replace("generator.manual_seed(", "")
            found = [word for word in words if word in text]
            assert not found, f"{module} uses {found}"


#: What a process does one after the other; after each name, the modules that it has loaded by then.
STAGES = """
import contextlib, io, json, os, pathlib, sys

def tell(stage):
    print(json.dumps([stage, [*sys.modules]]), flush=True)

import bnn_pyro
dir(bnn_pyro)
tell("package")
from bnn_pyro.run import main
answered = ["--help", "train --help", "diagnose --help", "--version", "list", "list --json"]
refused = ["train --epocs", "train meanfield", "train mlp --inference svii"]
for command in answered + refused:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try: code = main(command.split())
        except SystemExit as exit: code = exit.code
    assert code == (2 if command in refused else 0), (command, code)
    assert "examples" in out.getvalue() or not command.endswith("n --help")
tell("commands")
folder = pathlib.Path(sys.argv[1])

def forked(job):
    if not (child := os.fork()):
        with contextlib.redirect_stdout(io.StringIO()):
            job()
        tell(job.__name__)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, job.__name__

def inspect():
    (folder / "t.csv").write_text("a,y\\n1,2\\n2,3.5\\n")
    assert not main(["inspect", str(folder / "t.csv")])

forked(inspect)
from bnn_pyro import fit, predict, metrics, ZOO, METHODS
tell("fit")
import torch
torch.set_num_threads(1)

def train():
    options = "mean-field --data toy-curve --epochs 1 --num-draws 2 --no-baseline --quiet --out"
    assert main(["train", *options.split(), str(folder / "run")]) in (0, 4)  # 4: of little use after one epoch

def work():
    from bnn_pyro.runs.sweep import make_run
    from bnn_pyro.runs.sweep_config import read_sweep_config

    (folder / "s.toml").write_text("[data.toy-curve]\\n[recipes.mlp]\\ninference_settings = { epochs = 2 }\\n")
    (task,) = read_sweep_config(folder / "s.toml").tasks
    assert not make_run(task, sweep=folder)
    assert list(folder.glob("*/metrics.json"))

forked(work)
forked(train)
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """{stage: the modules that a process has loaded by then}; a sweep's worker and `train` are forks of it."""
    command = [sys.executable, "-c", STAGES, tmp_path_factory.mktemp("stages")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {stage: set(names) for stage, names in map(json.loads, done.stdout.splitlines())}


HEAVY = {"torch", "pyro", "numpy", "pandas", "matplotlib", "seaborn", "sklearn", "jinja2"}
PLOTS = {"matplotlib", "seaborn", "jinja2", "bnn_pyro.plots"}


@pytest.mark.parametrize(("stage", "there", "absent"), [
    ("package", "bnn_pyro", HEAVY | {"torchvision", "arviz", "scipy"}),
    ("commands", "bnn_pyro.run", HEAVY),
    ("inspect", "pandas", {"torch", "tqdm", "filelock"}),
    ("fit", "torch", PLOTS),
    ("work", "bnn_pyro.runs.evaluate", PLOTS - {"jinja2", "bnn_pyro.plots"}),
    ("train", "bnn_pyro.runs.train", {"bnn_pyro.checks", "bnn_pyro.runs.sweep"}),
])  # fmt: skip
def test_what_a_process_loads(loaded, stage, there, absent):
    assert there in loaded[stage] and not absent & loaded[stage]
    assert stage != "train" or sum(name.startswith("bnn_pyro") for name in loaded[stage]) <= 110


def test_list_reads_a_variant_as_the_docs_write_one():
    text = "class Linear:\n    summary, paper = 'Linear', ''\n    has = frozenset({'guide'})\n    width: int = 3\n"
    text += "    a, b = f()\n    c, d = 'xy'\n    table['x'] = 1\n    meanings = 'x'\n    (e, f), g = (1, 2), 3\n"
    read = _read(ast.parse(text).body[0], {})
    assert (read["summary"], read["paper"], read["has"]) == ("Linear", "", {"guide"})
    assert read["settings"] == {"width": 3}


def test_list_is_read_as_the_tables_are_and_every_public_name_is_there():
    read = tables()
    for name, kind in bp.ZOO.items():
        defaults = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(kind()).items()}
        assert read["variants"][name]["settings"] == defaults
        assert (read["variants"][name]["idea"], read["variants"][name]["paper"]) == (kind.summary, kind.paper)
        assert read["variants"][name]["methods"] == list(methods_for(kind))
    for name, kind in bp.METHODS.items():
        assert read["methods"][name]["settings"] == asdict(kind())
    assert read["checks"] == {name: kind.idea for name, kind in bp.checks.CHECKS.items()}
    assert list(read["data"]) == list(bp.DATASETS)
    assert dir(bp) == sorted(bp.__all__) and all(getattr(bp, name) is not None for name in bp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = bp.nonsense


@pytest.mark.parametrize(
    ("module", "most"),
    # In the order of the table: processes that share the tests out must collect the same.
    [("fitting", 67), *dict.fromkeys((kind.__module__.removeprefix("bnn_pyro."), 24) for kind in bp.ZOO.values())],
)
def test_few_files_have_to_be_read(module, most):
    found, todo = set(), [module]
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += [other for other in imported(FILES[name], ast.iter_child_nodes) if other in FILES]
    assert len(found - {"parts"}) <= most, sorted(found)


def test_methods_are_named_in_inference_and_zoo_alone():
    """Elsewhere what a method declares decides, and a new one needs no other file."""
    known = {
        ("runs.recipe", "map"),  # the deterministic baseline
        ("parts.likelihoods", "laplace"),  # the distribution
        ("plots.training", "ensemble"),  # a label: all draws together
    }  # fmt: skip
    names = set(bp.METHODS) | {kind.__name__ for kind in bp.METHODS.values()}
    used = set()
    for module, path in FILES.items():
        if unit(module) not in ("inference", "zoo", "__init__"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
            taken = {a.name for node in imports if node.module.startswith("bnn_pyro.inference") for a in node.names}
            used |= {(module, name) for name in (texts | taken) & names}
    assert used <= known, used - known


def faults_of_a_pass():
    keep_freed_memory()
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        parts = [torch.ones(1 << 22) for _ in range(6)]  # 16 MiB each
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_the_memory_of_a_pass_is_kept_for_the_next_unless_the_user_has_set_that(monkeypatch):
    with get_context("spawn").Pool(1) as alone:
        assert alone.apply(faults_of_a_pass) < 1000  # of 24,576 pages
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    monkeypatch.setattr("ctypes.CDLL", None)  # is not asked for
    keep_freed_memory.__wrapped__()
