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


def test_differences_of_long_runs_equal_the_rows():
  runs = long.read_runs()
  shown = (DOCS / "long_runs.md").read_text()
  lean = (
    "`lean`: BF16 weights, optimizer step in the backward pass; stopped early"
  )
  with_attention = '`lean` with `attention="fp8"`'
  moments = "BF16 layers with `coat`'s moments, stopped early"
  other = "`coat` on another machine, stopped early"
  for label, variant, corpus in (
    ("`coat`", "coat", long.LATER),
    ("`coat`", "coat", long.EARLIER),
    ("`coat`, seed 1, stopped early", "coat, seed 1", long.LATER),
    (lean, "lean", long.LATER),
    (with_attention, "lean, attention fp8", long.EARLIER),
    (other, "coat, earlier machine", long.EARLIER),
    (moments, "bf16, coat moments", long.EARLIER),
  ):
    step, difference = last(long.held_out_differences(runs[corpus], variant))
    seeds = long.held_out_differences(runs[corpus], long.SECOND_SEED)
    spread = f"{seeds[step]:+.4f}" if step in seeds else "unknown"
    tokens = step * long.TOKENS_PER_STEP / 1e6
    date = runs[corpus]["coat"]["date"]
    cells = (
      f"| {label} | {date} | {tokens:.0f} | {difference:+.4f} | {spread} |"
    )
    assert cells in shown


def last(differences):
  return max(differences.items())


def test_words_about_long_runs_equal_the_rows():
  runs = long.read_runs()
  shown = " ".join((DOCS / "long_runs.md").read_text().split())
  pairs = [
    long.held_out_differences(runs[corpus], "coat")
    for corpus in (long.LATER, long.EARLIER)
  ]
  seeds = long.held_out_differences(runs[long.LATER], long.SECOND_SEED)
  above = sum(abs(x) > abs(seeds[step]) for step, x in pairs[0].items())
  assert f"at {above} of {len(seeds)} evaluations" in shown
  for pair in pairs:
    late = [x for step, x in pair.items() if step * long.TOKENS_PER_STEP > 15e7]
    assert 0.007 < min(late) <= max(late) < 0.012
  for corpus in (long.LATER, long.EARLIER):
    ends = [runs[corpus][x]["held_out"][-1][1] for x in ("bf16", "coat")]
    cells = "| {:.4f} | {:.4f} | {:+.4f} |".format(*ends, ends[1] - ends[0])
    assert cells in shown
    assert cells in (DOCS / "accuracy.md").read_text()


def test_page_shows_how_much_of_the_grid_was_run():
  said = stability.progress(measured("stability"))
  assert said in " ".join((DOCS / "stability.md").read_text().split())
