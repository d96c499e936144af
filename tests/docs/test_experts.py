# SPDX-License-Identifier: Apache-2.0
"""Checks that numbers about mixtures of experts match the measured rows."""

import numpy as np

from studies import stability_figure
from tests.docs.pages import DOCS, measured
from tests.docs.test_figures import PERFORMANCE, layer_rows, table
from tests.docs.test_losses import signed


def test_table_of_expert_matmuls_matches_the_rows():
  # The kernels use the larger tile; later rows replace earlier ones.
  rows = {
    tuple(row["case"][key] for key in ("model", "product"))
    + (row["implementation"],): row["tflops"]
    for row in measured("grouped_products")
    if (row["case"]["matrix"], row["case"]["routing"]) == ("gate_up", "uniform")
    and row.get("tile", "three") == "three"
    and row.get("dtype", "bfloat16") == "bfloat16"
  }
  want = [
    [
      tflops and round(tflops)
      for how in ("bf16", "mosaic_bf16", "mosaic")
      for tflops in (rows.get((model, product, how)),)
    ]
    for model in ("qwen3_30b_a3b", "mixtral_8x7b")
    for product in ("fwd", "dgrad", "wgrad")
  ]
  assert table(PERFORMANCE, "shows the TFLOP/s of expert matmuls") == want


def test_layers_page_shows_the_measured_losses_of_experts():
  rows: dict[str, list[dict]] = {}
  for row in measured("experts"):
    if row["steps"] == row["step"] == 1900:
      rows.setdefault(row["variant"], []).append(row)
  shown = (DOCS / "layers.md").read_text()
  plain = np.array([row["held_out_loss"] for row in rows["bf16"]])
  for label, variant in (
    ("bf16()", "bf16"),
    ("coat()", "coat"),
    ('coat(experts="fp8")', "coat, experts fp8"),
  ):
    found = rows[variant]
    assert [row["seed"] for row in found] == [0, 1, 2]
    rate = np.mean([row["tokens_per_s"] for row in found])
    cells = f"| `{label}` | {rate:,.0f} | {found[0]['step_bytes'] / 1e9:.1f} |"
    ends = np.array([row["held_out_loss"] for row in found])
    if variant == "bf16":
      losses = ", ".join(f"{x:.4f}" for x in ends)
      cells += f" {losses} | {ends.mean():.4f} |"
    else:
      mean, half = stability_figure.interval(ends - plain)
      cells += f" {signed(ends - plain)} | {mean:+.4f} ± {half:.4f} |"
    least = min(row["smallest_load"] for row in found)
    most = max(row["largest_load"] for row in found)
    assert f"{cells} {least:.2f} to {most:.2f} |" in shown


def test_layers_page_shows_the_measured_times_of_a_layer_of_experts():
  rows = layer_rows("layer_mosaic")
  want = [
    [round(rows["qwen3_30b_a3b", 2048, variant, "full"]["median_ms"], 2)]
    for variant in (
      "bf16",
      "minimal",
      "minimal_experts",
      "minimal_experts_codes",
    )
  ]
  text = (DOCS / "layers.md").read_text()
  assert table(text, "Forward and backward pass of a layer of Qwen3") == want
