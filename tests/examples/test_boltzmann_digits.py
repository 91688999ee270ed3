"""The example of a Boltzmann machine on digits: both ways to learn beat independent pixels on held-out digits."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def test_both_gradients_raise_the_held_out_likelihood_over_independent_pixels(tmp_path, capsys):
    script = runpy.run_path(str(EXAMPLES / "boltzmann_digits.py"), run_name="example")
    picture = tmp_path / "samples.png"
    results = script["main"](["--quick", "--picture", str(picture)])
    held = {row["model"]: row["held"] for row in results["runs"]}
    assert set(held) == set(script["MODELS"])
    # Nats per image: five are reached.
    assert min(held["exact gradient"], held["CD-1"]) > held["independent pixels"] + 3
    assert picture.stat().st_size > 1000
    assert script["table"](results) in capsys.readouterr().out
