"""Reports as they are seen: seven small runs of six kinds, and screenshots of every page that they write.

Each page in light, dark, at the width of a phone, printed (as PDF; as PNG too where pypdfium2 is installed) and as seen
with deuteranopia. It needs chromium. Runs that are there already are taken.

python -m benchmarks.figures.pages [--out runs/pages] [--only NAME]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image, ImageChops
from sklearn.datasets import load_digits

#: On linear RGB; severity 1.0 of Machado, Oliveira & Fernandes 2009, "A physiologically-based model for simulation of
#: color vision deficiency".
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
#: Pixels of a screenshot, which is cut where the page ends.
HEIGHT = 14000
SWEEP = """seeds = [0, 1]
splits = [0, 1]

[data.diabetes]

[recipes.mlp]
variant = "mlp"
inference_settings = { epochs = 60 }

[recipes.hidden-layer]
variant = "hidden-layer"
inference_settings = { epochs = 60 }
"""
#: The commands that make each kind of run.
RUNS = {
    "houses": [
        "train hidden-layer --data houses.csv --target price --exclude id --missing indicator --dates parts --epochs 60"
    ],
    "fraud": ["train mean-field --data fraud.csv --target fraud --epochs 60"],
    "digits": ["train mean-field --data digits.npz --epochs 40", "evaluate digits --ood noise"],
    "visits": ["train hidden-layer --data visits.csv --target visits --task counts --epochs 60"],
    "several": ["train hidden-layer --data several.csv --target price,rent --epochs 60"],
    "sampler": ["train mean-field --data toy-curve --inference nuts", "diagnose sampler"],
    "sweep": ["sweep sweep.toml"],
}


def write_data(folder: Path) -> None:
    """Tables with dates, categories, gaps and outliers; rare classes; counts; pictures of five digits."""
    rng, num = np.random.default_rng(0), 600
    area, city = rng.normal(80, 20, num), rng.choice(["Oslo", "Rome", "Port-au-Prince"], num)
    price = np.exp(11 + area / 100 + 0.3 * (city == "Oslo") + rng.normal(0, 0.25, num)).round(-2)
    houses = pd.DataFrame({"id": range(num), "area_m2": area.round(1), "city": city, "price": price})
    houses["built"] = rng.integers(1900, 2020, num)
    houses["garden"] = rng.choice(["yes", "no"], num)
    houses["sold"] = pd.date_range("2021-01-01", periods=num, freq="2D").strftime("%d.%m.%Y")
    several = houses.drop(columns=["id", "sold"]).assign(rent=4 * price**0.5 + rng.normal(0, 100, num))
    visits = houses.drop(columns=["id", "sold", "price"]).assign(visits=rng.negative_binomial(3, 3 / (3 + area / 10)))
    amount = rng.lognormal(3, 1, num)
    risk = 1 / (1 + np.exp(5.5 - 0.5 * amount**0.5))
    fraud = pd.DataFrame({"amount": amount.round(2), "country": city, "hour": rng.integers(0, 24, num)})
    fraud["fraud"] = np.where(rng.random(num) < risk, "yes", "no")
    houses.loc[3, "area_m2"], houses.loc[7, "price"] = 9999, price[7] * 100
    houses.loc[rng.random(num) < 0.05, "area_m2"] = np.nan
    for name, frame in {"houses": houses, "several": several, "visits": visits, "fraud": fraud}.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    digits = load_digits()
    some = digits.target < 5
    np.savez(folder / "digits.npz", x=(digits.images[some] * 15).astype(np.uint8), y=digits.target[some])
    (folder / "sweep.toml").write_text(SWEEP)


def make_runs(folder: Path, only: str | None) -> None:
    """The runs that are not there yet."""
    for name, commands in RUNS.items():
        if only not in (None, name) or (folder / name).exists():
            continue
        for number, command in enumerate(commands):
            out = [] if number else ["--out", name]
            subprocess.run([sys.executable, "-m", "bnn_pyro.run", *command.split(), *out, "--quiet"], cwd=folder)


def pages(folder: Path, only: str | None) -> Iterator[Path]:
    """The pages of the runs; of a sweep's fits one."""
    for name in RUNS:
        if only in (None, name):
            yield from sorted((folder / name).glob("*.html"))
            yield from sorted((folder / name).glob("*/report.html"))[:1]


def browse(page: Path, *options: str) -> None:
    """One call of chromium."""
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", *QUIET, f"--user-data-dir={profile}", *options, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def shoot(page: Path, out: Path, width: int, *options: str) -> None:
    """A screenshot of the whole page.   width: pixels; a narrow page is shown in a frame, as windows are wider."""
    browse(page, f"--screenshot={out}", f"--window-size={width},{HEIGHT}", *options)
    picture = Image.open(out).convert("RGB")
    blank = Image.new("RGB", picture.size, picture.getpixel((width - 1, HEIGHT - 1)))
    picture.crop((0, 0, width, ImageChops.difference(picture, blank).getbbox()[3] + 20)).save(out)


def deuteranopia(source: Path, out: Path) -> None:
    """The picture as it is seen without the middle cones."""
    colours = np.asarray(Image.open(source), dtype=np.float32) / 255
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.transpose(DEUTERANOPIA), 0, 1)
    shown = np.where(seen <= 0.0031308, seen * 12.92, 1.055 * seen ** (1 / 2.4) - 0.055)
    Image.fromarray((shown * 255).round().astype(np.uint8)).save(out)


def look_at(page: Path, out: Path) -> None:
    """All pictures of one page, in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    shoot(page, out / "light.png", 1280)
    shoot(page, out / "dark.png", 1280, "--blink-settings=preferredColorScheme=0")
    frame = out / "phone.html"
    style = f'style="border:0;width:390px;height:{HEIGHT}px"'
    frame.write_text(f'<body style="margin:0"><iframe src="{page.as_uri()}" {style}></iframe>')
    shoot(frame, out / "phone.png", 600, "--allow-file-access-from-files")
    deuteranopia(out / "light.png", out / "deuteranopia.png")
    browse(page, f"--print-to-pdf={out / 'print.pdf'}", "--no-pdf-header-footer")
    try:
        from pypdfium2 import PdfDocument
    except ImportError:
        return
    for number, sheet in enumerate(PdfDocument(out / "print.pdf"), 1):
        sheet.render(scale=1).to_pil().save(out / f"print-{number}.png")


def main() -> None:
    """Make what is missing, then look at every page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/pages"))
    parser.add_argument("--only", choices=RUNS)
    args = parser.parse_args()
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    make_runs(folder, args.only)
    for page in pages(folder, args.only):
        name = "-".join(page.relative_to(folder).with_suffix("").parts)
        look_at(page, folder / "seen" / name)
        print(folder / "seen" / name)


if __name__ == "__main__":
    main()
