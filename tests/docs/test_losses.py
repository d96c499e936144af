# SPDX-License-Identifier: Apache-2.0
"""Checks that losses in pages match the measured rows."""

from docs.figures import long, losses
from studies import stability, stability_figure
from tests.docs.pages import DOCS, measured


def test_difference_on_the_accuracy_page_equals_the_rows():
  differences = losses.held_out_differences(
    losses.read_runs(), losses.BEST_RATE
  )
  mean, half = stability_figure.interval(differences)
  shown = f"| {mean:+.4f} ± {half:.4f} |"
  assert shown in (DOCS / "accuracy.md").read_text()


def test_differences_of_long_runs_on_the_accuracy_page_equal_the_rows():
  runs = long.read_runs()
  shown = (DOCS / "accuracy.md").read_text()
  for label, variant in (
    ("`coat`", "coat"),
    (
      'BF16 weights, optimizer step in the backward pass, `attention="fp8"`',
      "lean, attention fp8",
    ),
    ("BF16 layers with `coat`'s moments, stopped early", "bf16, coat moments"),
    ("BF16 with seed 1, stopped early", "bf16, seed 1"),
  ):
    _, difference = long.held_out_difference(runs, variant)
    tokens = runs[variant]["trained_steps"] * long.TOKENS_PER_STEP / 1e6
    assert f"| {label} | {tokens:.0f} | {difference:+.4f} |" in shown


def test_page_shows_how_much_of_the_grid_was_run():
  said = stability.progress(measured("stability"))
  assert said in " ".join((DOCS / "stability.md").read_text().split())
