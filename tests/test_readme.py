"""The README does not lie: its code runs, its table is the zoo, its test command is what CI calls."""

import re
from pathlib import Path

import bnn_pyro as bp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert names["prediction"].epistemic.max() > 0
    assert bp.predict(names["again"], names["data"].x_test, num_draws=200).mean.equal(names["prediction"].mean)
    assert sum(names["losses"][-20:]) < 0.7 * sum(names["losses"][:20])
    assert names["mcmc"].get_samples()["layers.0.weight"].shape == (20, 5, 2)


def test_zoo_table_is_the_zoo():
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.*?) \| (.*?) \|$", README, re.MULTILINE)
    assert {name: tuple(rest) for name, *rest in rows} == {
        name: (kind.summary, ", ".join(kind.methods), kind.paper) for name, kind in bp.ZOO.items()
    }


def test_ci_calls_the_readme_test_command():
    command = re.search(r"Run the tests:\n\n```bash\n(.*?)\n```", README).group(1)
    install, test = (ROOT / ".ci" / "run").read_text(), command.split(" && ")
    assert all(part.replace("pip install -e", "") in install.replace("pip install -q -e", "") for part in test)


def test_files_that_the_readme_names_exist():
    for target in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / target).exists(), target
    rooms = re.findall(r"`([a-z_]+(?:\.py|/))`", README.split("## Architecture")[1].split("**Add")[0])
    assert rooms and all((ROOT / "bnn_pyro" / room).exists() for room in rooms)
