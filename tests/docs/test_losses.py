# SPDX-License-Identifier: Apache-2.0
"""Checks that losses in pages match the measured rows."""

import numpy as np

from docs.figures import long, losses
from studies import codec_race_table, stability, stability_figure
from tests.docs.pages import DOCS, measured

ACCURACY = (DOCS / "accuracy.md").read_text()


def signed(values):
  return ", ".join(f"{x:+.4f}" for x in values)


def test_accuracy_page_shows_the_measured_differences_of_the_small_model():
  differences = losses.held_out_differences(
    losses.read_runs(), losses.BEST_RATE
  )
  mean, half = stability_figure.interval(differences)
  assert f"| {signed(differences)} | {mean:+.4f} ± {half:.4f} |" in ACCURACY


def test_runs_page_shows_the_measured_differences_of_long_runs():
  runs = long.read_runs()
  shown = (DOCS / "runs.md").read_text()
  with_attention = '`lean` with `attention="fp8"`'
  moments = "BF16 layers with `coat`'s moments, stopped early"
  other = "`coat` on another machine, stopped early"
  for label, variant, corpus in (
    ("`coat`", "coat", long.LATER),
    ("`coat`", "coat", long.EARLIER),
    ("`coat`, seed 1", "coat, seed 1", long.LATER),
    ("`coat`, seed 2", "coat, seed 2", long.LATER),
    ("`lean`", "lean", long.LATER),
    ("`lean`, seed 1", "lean, seed 1", long.LATER),
    ("`lean`, seed 2", "lean, seed 2", long.LATER),
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


def test_text_about_long_runs_agrees_with_measurements():
  runs = long.read_runs()
  shown = " ".join((DOCS / "runs.md").read_text().split())
  seeds = long.held_out_differences(runs[long.LATER], long.SECOND_SEED)
  above = []
  for variant, corpus, least, most in (
    ("coat", long.LATER, 0.007, 0.012),
    ("coat, seed 1", long.LATER, 0.002, 0.005),
    ("coat, seed 2", long.LATER, 0.004, 0.007),
    ("coat", long.EARLIER, 0.007, 0.012),
  ):
    pair = long.held_out_differences(runs[corpus], variant)
    late = [x for step, x in pair.items() if step * long.TOKENS_PER_STEP > 15e7]
    assert least < min(late) <= max(late) < most
    if corpus == long.LATER:
      above.append(sum(x > abs(seeds[step]) for step, x in pair.items()))
    plain = long.bf16_run(runs[corpus], variant)
    ends = [x["held_out"][-1][1] for x in (plain, runs[corpus][variant])]
    cells = "| {:.4f} | {:.4f} | {:+.4f} |".format(*ends, ends[1] - ends[0])
    assert cells in shown
  counts = "at {} of them with seed 0, at {} with seed 1, and at {} with seed 2"
  assert counts.format(*above) in shown


def test_accuracy_page_shows_the_measured_differences_of_long_runs():
  runs = long.read_runs()
  plain, ends, halfway = [], [], []
  for corpus, name in (
    (long.LATER, "coat"),
    (long.LATER, "coat, seed 1"),
    (long.LATER, "coat, seed 2"),
    (long.EARLIER, "coat"),
  ):
    plain.append(long.bf16_run(runs[corpus], name)["held_out"][-1][1])
    pair = long.held_out_differences(runs[corpus], name)
    ends.append(last(pair)[1])
    halfway.append(pair[4600])
  losses_shown = ", ".join(f"{x:.4f}" for x in plain)
  mean, half = stability_figure.interval(ends)
  cells = f"| {losses_shown} | {signed(ends)} | {mean:+.4f} ± {half:.4f} |"
  assert cells in ACCURACY
  words = " ".join(ACCURACY.split())
  said = "ended {:.3f} to {:.3f} nats per token above BF16"
  assert said.format(min(ends), max(ends)) in words
  said = "the differences were already {:.3f} to {:.3f}"
  assert said.format(min(halfway), max(halfway)) in words
  lean = [
    last(long.held_out_differences(runs[long.LATER], f"lean{seed}"))[1]
    for seed in ("", ", seed 1", ", seed 2")
  ]
  said = "was {:.4f} (seed 0), {:.4f} (seed 1) and {:.4f} (seed 2) above BF16"
  assert said.format(*lean) in words
  page = " ".join((DOCS / "runs.md").read_text().split())
  mean, half = stability_figure.interval(lean)
  assert f"`lean` minus BF16 is {mean:.4f} ± {half:.4f} nats** over" in page
  mean, half = stability_figure.interval(ends[:3])
  assert f"the same three seeds give {mean:.4f} ± {half:.4f}" in page
  goes = []
  for seed in ("", ", seed 1", ", seed 2"):
    run = runs[long.LATER][f"lean{seed}"]["held_out"]
    pair = long.held_out_differences(runs[long.LATER], f"lean{seed}")
    goes += [pair[5060], pair[9200]]
    assert f"| {run[-1][1]:.4f} | {pair[9200]:+.4f} |" in page
  said = (
    "rises from {:.3f} to {:.3f} with seed 0, from {:.3f} to {:.3f} with seed "
    "1, and from {:.3f} to {:.3f} with seed 2"
  )
  assert said.format(*goes) in page
  tuned = [row["held_out"][-1][1] for row in measured("finetuning")]
  # Rows come in pairs: BF16, then `coat`.
  first, second = (f"{tuned[i + 1] - tuned[i]:+.4f}" for i in (0, 2))
  assert f"`coat` - BF16 was {first} and {second}" in words


def test_pages_show_the_measured_scores_on_sums():
  found: dict[str, list[float]] = {}
  for row in measured("sums"):
    if row["case"]["steps"] == 600:
      share = 100 * row["exact_match"]
      found.setdefault(row["case"]["variant"], []).append(share)
  shown = (DOCS / "runs.md").read_text()
  for name, cells in (
    ("bf16", "| BF16 | f32 |"),
    ("moments", "| BF16 | FP8 |"),
    ("layers", "| FP8 | f32 |"),
    ("coat", "| FP8 | FP8 |"),
  ):
    *seeds, mean = *found[name], np.mean(found[name])
    assert (
      f"{cells} {' | '.join(f'{x:.1f}' for x in (*seeds, mean))} |" in shown
    )
  plain, moments, layers, coat = map(np.array, found.values())
  words = " ".join(shown.split())
  mean, half = stability_figure.interval((layers + coat - plain - moments) / 2)
  assert f"{-mean:.1f} ± {half:.1f} percentage points" in words
  fp8, bf16 = (
    (a + b).mean() / 2 for a, b in ((layers, coat), (plain, moments))
  )
  accuracy = " ".join(ACCURACY.split())
  assert f"{fp8:.0f} % of held-out questions" in accuracy
  assert f"{bf16:.0f} % with BF16 layers" in accuracy
  mean, half = stability_figure.interval((moments + coat - plain - layers) / 2)
  assert f"{mean:+.1f} ± {half:.1f} points" in words


def test_stability_page_shows_how_much_of_the_grid_was_run():
  said = stability.progress(measured("stability"))
  assert said in " ".join((DOCS / "stability.md").read_text().split())


def test_pages_show_the_measured_grid_of_the_larger_model():
  found: dict[tuple[str, float], dict[int, float]] = {}
  for row in measured("stability"):
    case = row["case"]
    if case["preset"] == "llama_60m":
      key = case["variant"], case["rate"]
      found.setdefault(key, {})[case["seed"]] = row["held_out_loss"]
  shown = (DOCS / "stability.md").read_text()
  for rate in (0.0003, 0.001):
    plain = found["bf16", rate]
    losses = ", ".join(f"{plain[seed]:.4f}" for seed in range(3))
    mean = np.mean(list(plain.values()))
    assert f"| BF16 | {rate:g} | {losses} | {mean:.4f} |" in shown
    for variant, name in (
      ("fp8_linear", "`fp8_linear`"),
      ("coat", "`coat`"),
      ("coat, nearest", "`coat`, rounded to nearest"),
      ("coat, E4M3 gradients", "`coat`, E4M3 gradients"),
      ("coat, BF16 weights", "`coat`, BF16 weights"),
      ("fp8_block", "`fp8_block`"),
      ("int8", "`int8`"),
    ):
      differences = [
        found[variant, rate][seed] - plain[seed] for seed in range(3)
      ]
      mean, half = stability_figure.interval(differences)
      cells = ", ".join(f"{x:+.4f}" for x in differences)
      assert f"| {name} | {rate:g} | {cells} | {mean:+.4f} ± {half:.4f} |" in (
        shown
      )
      if variant == "coat":
        cells = f"| {losses} | {cells} | {mean:+.4f} ± {half:.4f} |"
        assert cells in ACCURACY
  broken = [
    loss
    for rate in (0.0003, 0.001)
    for loss in found["coat, INT8 moments", rate].values()
  ]
  assert len(broken) == 6
  words = " ".join(shown.split())
  assert f"end between {min(broken):.0f} and {max(broken):.0f} nats" in words


def test_codec_race_page_shows_the_measured_losses_of_longer_races():
  rows = measured("codec_race_1000")
  shown = (DOCS / "codec_race.md").read_text()
  assert codec_race_table.table(rows, "demo") in shown


def test_vision_page_shows_the_measured_losses_on_clothes():
  shown = (DOCS / "vision.md").read_text()
  rows = {tuple(x["case"].values()): x for x in measured("fashion")}
  for label, model, key, scale, digits in (
    ("held-out loss after `projector`, nats", "llava", "projector_loss", 1, 4),
    ("held-out loss after `decoder`, nats", "llava", "decoder_loss", 1, 4),
    ("loss on 5,000 test conversations, nats", "llava", "nats_per_token", 1, 4),
    ("test conversations answered exactly, %", "llava", "exact_match", 100, 2),
    ("loss, nats", "vit", "held_out_loss", 1, 4),
    ("accuracy, %", "vit", "held_out_accuracy", 100, 2),
  ):
    plain, coat = (
      [scale * rows[model, recipe, seed][key] for seed in (0, 1)]
      for recipe in ("bf16", "coat")
    )
    cells = [
      ", ".join(f"{x:{sign}.{digits}f}" for x in values)
      for sign, values in (
        ("", plain),
        ("", coat),
        ("+", np.subtract(coat, plain)),
      )
    ]
    assert f"| {label} | {' | '.join(cells)} |" in shown
