"""Which ratios are asked for, and the tables that a reader sees."""

from __future__ import annotations

from collections.abc import Iterable

from speed.timing import Times, ratio, spread

__all__ = ["comparisons", "over_deterministic", "print_memory", "print_prediction", "print_steps"]


def comparisons(times: Times, ours: str, peers: Iterable[str]) -> dict[str, dict]:
    """The ratios that the table of goals names, {what: median and quartiles}, as far as they were measured."""
    asked = {
        "ours / deterministic": (ours, "deterministic"),
        "variational-dropout / deterministic": ("variational-dropout", "deterministic"),
        "stock HiddenLayer / ours": ("stock HiddenLayer", ours),
        "naive HiddenLayer / ours": ("naive HiddenLayer", ours),
        "Pyro AutoNormal / ours": ("Pyro AutoNormal", ours),
        "ours / plain torch": (ours, "plain torch"),
        "training loop / plain torch": (f"{ours}, training loop", "plain torch"),
        **{f"{name}: predict / naive loop": (f"{name}, predict", f"{name}, naive loop") for name in _variants(times)},
    }
    found = {what: ratio(times, *pair) for what, pair in asked.items()}
    timed = [name for name in peers if times.get(name)]
    if timed and times.get(ours):
        fastest = min(timed, key=lambda name: spread(times[name])["median"])
        found[f"ours / fastest peer ({fastest})"] = ratio(times, ours, fastest)
    return {what: value for what, value in found.items() if value is not None}


def _variants(times: Times) -> list[str]:
    return [name.removesuffix(", predict") for name in times if name.endswith(", predict")]


def _show(ratios: dict[str, dict]) -> None:
    for what, value in ratios.items():
        low, high = value["quartiles"]
        print(f"  {what:48} {value['median']:8.2f}   ({low:.2f} to {high:.2f})")


def print_steps(sizes: str, found: dict, ours: str) -> None:
    """Milliseconds a step, and as multiples of the deterministic network's and of ours."""
    times = {name: value["median"] for name, value in found["ms"].items()}
    floor, own = times.get("deterministic"), times.get(ours)
    print(f"\n\n{sizes}: a training step, median of {found['rounds']} rounds (quartiles)")
    print(f"  {'':32} {'ms':>9} {'':21} {'/ deterministic':>16} {'/ ours':>8}")
    for name, value in found["ms"].items():
        low, high = value["quartiles"]
        against = [f"{value['median'] / other:.2f}" if other else "" for other in (floor, own)]
        print(f"  {name:32} {value['median']:9.3f} {f'({low:.3f} to {high:.3f})':>21} {against[0]:>16} {against[1]:>8}")
    for name, error in found["failed"].items():
        print(f"  {name:32} failed: {error}")
    _show(found["ratios"])


def print_memory(sizes: str, found: dict, ours: str) -> None:
    """Megabytes held and at the peak, and in weights and activations."""
    print(f"\n{sizes}: memory of a training step")
    columns = ("held MB", "peak MB", "held/weights", "peak/weights", "during/weights", "during/activations")
    print(f"  {'':32}" + "".join(f"{c:>20}" for c in columns))
    keys = ("held_in_weights", "peak_in_weights", "during_in_weights", "during_in_activations")
    for name, value in found.items():
        numbers = [value["held"] / 2**20, value["peak"] / 2**20, *(value[key] for key in keys)]
        print(f"  {name:32}" + "".join(f"{number:20.2f}" for number in numbers))
    over = over_deterministic(found, ours)
    if over:
        more, state = over["bytes"] / 2**20, over["state"] / 2**20
        print(
            f"  ours over deterministic, at the peak: {more:.1f} MB, {state:.1f} of it held between steps; "
            f"the rest is {over['rest_in_activations']:.2f} activations of every layer"
        )


def over_deterministic(found: dict, ours: str) -> dict[str, float] | None:
    """What our step takes beyond the deterministic one: bytes at the peak, those held between steps, and the rest."""
    if ours not in found or "deterministic" not in found:
        return None
    own, floor = found[ours], found["deterministic"]
    return {
        "bytes": own["peak"] - floor["peak"],
        "state": own["held"] - floor["held"],
        "rest_in_activations": round(own["during_in_activations"] - floor["during_in_activations"], 2),
    }


def print_prediction(found: dict) -> None:
    """Seconds and peak memory of a whole prediction."""
    print(f"\n\n{found['network']}: {found['images']:,} images × {found['draws']} draws")
    for name, value in found["seconds"].items():
        print(f"  {name:32} {value['median']:9.2f} s {found['peak_bytes'].get(name, 0) / 2**20:9.1f} MB at the peak")
    _show(found["ratios"])
