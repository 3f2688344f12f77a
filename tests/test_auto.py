"""``auto``: the rule that applies is taken, within the minutes; a run says what was chosen, and is run again alike."""

import json
from dataclasses import replace

import pytest
from run_folders import same, small_table

import bnn_pyro as bp
from bnn_pyro import commands
from bnn_pyro.run import main, parse
from bnn_pyro.runs.recipe import EXAMPLE
from bnn_pyro.zoo import auto as rules
from bnn_pyro.zoo.auto import RULES, choose

TABLE = bp.Schema("regression", (10,), y_scale=2.0)
IMAGES = bp.Schema("classification", (1, 8, 8), tuple("0123456789"))
LABELS = replace(TABLE, task="classification", classes=("no", "yes"))
#: Settings by which a sampled posterior of a small table takes a moment.
SHORT = {"hidden": (3,), "epochs": 2, "warmup": 20, "thin": 1, "draws": 4, "chains": 2, "compiled": "no", "cores": 1}
FLAGS = [f"--set={k}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in SHORT.items()]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(rules, "usable_cores", lambda: 2)


@pytest.mark.parametrize("schema", [TABLE, LABELS, IMAGES], ids=["numbers", "labels", "images"])
def test_every_rule_is_reached_by_some_size_and_fits_into_the_minutes(schema):
    rules = [rule for rule in RULES if rule.inputs == ("image" if schema.is_image else "table")]
    methods, taken = [rule.method for rule in rules], []
    for rows in (100, 1000, 10_000, 100_000, 1_000_000):
        for minutes in (1, 5, 60):
            choice = choose(schema, rows, minutes=minutes)
            assert choice.auto["expected_seconds"] <= 60 * minutes or choice.inference == methods[-1]
            taken.append((choice.variant, choice.inference))
    assert set(taken) == {(rule.variant, rule.method) for rule in rules}
    order = [methods.index(method) for _, method in taken[1::3]]
    assert order == sorted(order)  # in the same minutes, more rows never bring an earlier rule


def test_small_tables_are_sampled_and_shortened_where_there_is_no_time():
    whole, short = choose(TABLE, 2000), choose(TABLE, 2000, minutes=1)
    assert whole.inference == short.inference and whole.method == bp.METHODS[whole.inference]()
    shares = [v / vars(whole.method)[k] for k, v in vars(short.method).items() if v != vars(whole.method)[k]]
    assert len(shares) > 1 and max(shares) < 0.9 and max(shares) - min(shares) < 0.02
    assert short.auto["expected_seconds"] <= 60 < whole.auto["expected_seconds"]
    assert whole.entry.noise == "heteroscedastic" and choose(LABELS, 2000).entry.noise == bp.MeanField().noise


def test_settings_go_over_the_rule_and_wide_tables_have_a_prior_by_their_width():
    rule = choose(TABLE, 300)
    setup = choose(TABLE, 300, settings={"hidden": "5", "lr": "0.1", "nonsense": 3})
    assert setup.entry == replace(rule.entry, hidden=(5,)) and setup.method == replace(rule.method, lr=0.1)
    priors = [choose(replace(TABLE, input_shape=(width,)), 300).entry.prior for width in (16, 17, 200)]
    assert priors == ["normal:1", "fan-in:4", "fan-in:4"]
    with pytest.raises(bp.UserError, match="auto takes mile, svi for a table, not laplace; name a variant"):
        choose(TABLE, 300, method="laplace")


@pytest.mark.usefixtures("no_figures")
def test_a_run_says_what_was_chosen_and_is_run_again_alike(tmp_path, capsys):
    table, out, again = small_table(tmp_path / "houses.csv"), tmp_path / "run", tmp_path / "again"
    common = ["--num-draws", "5", "--device", "cpu", "--no-baseline"]
    data = ["--data", str(table), "--target", "price"]
    assert main(["train", *data, "--minutes", "2", *FLAGS, *common, "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    choice = choose(bp.load(out).schema, 42, minutes=2.0, settings=SHORT)
    assert config["auto"] == choice.auto == bp.load(out).provenance["auto"]
    assert config["variant_settings"]["hidden"] == [3] and config["inference_settings"]["draws"] == 4
    said = capsys.readouterr().err
    assert f"auto: {choice.variant} by {choice.inference}, about" in said and choice.auto["reason"] in said
    assert choice.auto["reason"] in (out / "report.html").read_text()
    for argv in (["--config", str(out / "config.json"), "--out", str(again)], ["auto", "--resume", "--out", str(out)]):
        assert main(["train", *argv, "--quiet"]) == 0
    assert same(out, again) and json.loads((again / "config.json").read_text()) == config
    assert main(["train", *data, "--set", "widht=3", "--out", str(tmp_path / "x")]) == 2
    assert f"setting of {choice.variant} or {choice.inference}, which auto chose" in capsys.readouterr().err


def test_without_data_it_is_digits_with_most_rows_to_test(tmp_path):
    def data(*argv):
        return commands._train_target(parse(["train", "mlp", "--out", str(tmp_path / "none"), *argv]))[0].data

    (tmp_path / "old.toml").write_text("seed = 1")  # configs of before say no more
    assert data("--config", str(tmp_path / "old.toml")) == data("--data", "digits") == {"name": "digits"}
    shares = data("--data", "digits", "--fractions", "0.5,0.25,.25")
    assert data() == EXAMPLE and shares == {"name": "digits", "fractions": [0.5, 0.25, 0.25]}
    with pytest.raises(bp.UserError, match="--fractions: invalid numbers value: 'half'"):
        data("--fractions", "half")


def test_fit_chooses_and_takes_settings_of_a_method(tmp_path):
    data = bp.load_data("diabetes", limit=40)
    few = {k: v for k, v in SHORT.items() if k != "hidden"}
    posterior = bp.fit("auto", data, bp.MILE(**few), progress=False, device="cpu", out=tmp_path)
    about = posterior.provenance
    assert about["entry"] == choose(data.schema, 40).variant and about["method_settings"]["draws"] == 4
    assert "40 rows" in about["auto"]["reason"] and bp.load(tmp_path).provenance["auto"] == about["auto"]
