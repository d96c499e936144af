# SPDX-License-Identifier: Apache-2.0
"""Checks that numbers in pages match the measured rows, and redraws figures."""

import re

import pytest

from benchmarks import memory
from docs.figures import expansion, flow, long, losses, mesh, race, style
from studies import quantization_tables
from tests.docs.pages import DOCS, ROOT, measured

PERFORMANCE = (DOCS / "performance.md").read_text()


def table(text, after):
  """Returns the numbers in the first table after a text, with None for words.

  The first column, commas, and any text after a number are left out.
  """
  _, found, rest = text.partition(after)
  assert found, after
  lines = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)[0].splitlines()
  return [
    [_number(cell) for cell in line.split("|")[2:-1]] for line in lines[2:]
  ]


def _number(cell):
  found = re.match(r"\d[\d,]*(\.\d+)?", cell.strip(" *"))
  return found and float(found[0].replace(",", ""))


def training_row(variant, batch):
  """Returns the row of a variant on two GPUs."""
  (row,) = (
    row
    for row in measured("training")
    for case in (row["case"],)
    if (case["mesh"], case["batch_per_gpu"]) == ("fsdp=2", batch)
    and case["variant"] == variant
  )
  return row


def layer_rows(name="layer"):
  """Returns rows of layers by preset, length, variant and mode."""
  return {
    tuple(row["case"][key] for key in ("preset", "seq", "variant", "mode")): row
    for row in measured(name)
  }


def optimizer_ms():
  """Returns milliseconds of AdamW's steps by codec, rounding and dtype."""
  return {
    tuple(row["case"].get(key) for key in ("codec", "rounding", "dtype")): row[
      "median_ms"
    ]
    for row in measured("optimizer")
    if row["implementation"] == _BEST.get(row["case"]["codec"], "mosaic")
  }


_BEST = {"optax.adamw": "xla"}


def peer(bench, implementation, **case):
  """Returns the only row of peers.jsonl with these values in its case."""
  (row,) = (
    row
    for row in measured("peers")
    if (row["bench"], row["implementation"]) == (bench, implementation)
    and case.items() <= row["case"].items()
  )
  return row


def steps_on_one_gpu():
  """Maps (preset, variant) to the row of its training step on one GPU."""
  return {
    (row["case"]["preset"], row["case"]["variant"]): row
    for row in measured("training")
    if row["case"]["mesh"] == ""
  }


@pytest.mark.parametrize(
  ("page", "lines"), [("README.md", 3), ("docs/index.md", 6)]
)
def test_headline_shows_the_measured_figures(page, lines):
  before_table = (ROOT / page).read_text().partition("| one H200")[0]
  rows = layer_rows()
  layers = [
    rows["llama2_7b", 2048, variant, "full"]
    for variant in ("bf16", "minimal_no_cache")
  ]
  float8 = "torch.compile torchao float8 tensorwise"
  float8 = peer("peers.layer", float8, mode="full")
  ms = optimizer_ms()
  adamw = peer("peers.optimizer", "torchao AdamWFp8", dtype="float32")
  steps = steps_on_one_gpu()
  steps = [steps["olmo_1b", variant] for variant in ("bf16", "minimal")]
  unit = 4 * 2048 * 4096 * 2 / 1e6
  want = [
    [
      round(layers[0]["median_ms"], 1),
      round(float8["median_ms"], 1),
      round(layers[1]["median_ms"], 1),
    ],
    [
      round(layers[0]["remembered_units"] * unit),
      round(float8["saved_units"] * unit),
      round(layers[1]["remembered_units"] * unit),
    ],
    [
      round(ms["optax.adamw", None, "float32"], 2),
      round(adamw["median_ms"], 2),
      round(ms["coat", "stochastic", "float32"], 2),
    ],
    # tests/benchmarks/test_memory.py checks the bytes of f32 and COAT states.
    [8, round(adamw["state_bytes"], 2), 2.08],
    [round(steps[0]["median_ms"]), None, round(steps[1]["median_ms"])],
    [
      round(steps[0]["peak_bytes"] / 1e9, 1),
      None,
      round(steps[1]["peak_bytes"] / 1e9, 1),
    ],
  ]
  assert table((ROOT / page).read_text(), before_table) == want[:lines]


def test_speedup_and_peak_in_the_readme_match_the_rows():
  steps = steps_on_one_gpu()
  bf16, coat = (steps["olmo_1b", variant] for variant in ("bf16", "minimal"))
  speedup = bf16["median_ms"] / coat["median_ms"]
  peaks = [row["peak_bytes"] / 1e9 for row in (coat, bf16)]
  words = f"is {speedup:.2f} times as fast as in BF16, and its peak memory is "
  words += "{:.0f} GB, compared with {:.0f} GB".format(*peaks)
  assert words in " ".join((ROOT / "README.md").read_text().split())


def test_tables_of_peers_match_the_rows():
  layer, optimizer = "peers.layer", "peers.optimizer"
  want = []
  for name in ("bf16", "torchao float8 tensorwise", "torchao float8 rowwise"):
    forward, full = (
      peer(layer, f"torch.compile {name}", mode=mode)
      for mode in ("forward", "full")
    )
    ms = [round(row["median_ms"], 2) for row in (forward, full)]
    want.append([*ms, round(full["saved_units"], 1)])
  rows = layer_rows()
  for variant in ("bf16", "fp8_linear", "minimal_no_cache", "minimal_codes"):
    forward, full = (
      rows["llama2_7b", 2048, variant, mode] for mode in ("forward", "full")
    )
    ms = [round(row["median_ms"], 2) for row in (forward, full)]
    want.append([*ms, round(full["remembered_units"], 1)])
  assert table(PERFORMANCE, "A layer of Llama-2-7B, 4 sequences") == want

  want = []
  for name in (
    "torch fused",
    "torchao AdamWFp8",
    "torchao AdamW8bit",
    "bitsandbytes AdamW8bit",
    "FlashAdamW",
    "FlashAdamW, 24-bit weights",
  ):
    cells = []
    for dtype in ("float32", "bfloat16"):
      if "24-bit" in name and dtype == "float32":
        cells += [None, None]
        continue
      row = peer(optimizer, name, dtype=dtype)
      cells += [round(row["median_ms"], 2), round(row["state_bytes"], 2)]
    want.append(cells)
  ms = optimizer_ms()
  for key, wide, size in (
    (("optax.adamw", None), "bfloat16", [8, 4]),
    (("coat", "stochastic"), "bfloat16", [2.08, 2.08]),
    (("coat", "stochastic"), "bfloat16_low8", [None, 3.08]),
    (("log8", "stochastic"), "bfloat16", [2.03, 2.03]),
    (("coat", "nearest"), "bfloat16", [2.08, 2.08]),
  ):
    f32 = None if size[0] is None else round(ms[*key, "float32"], 2)
    want.append([f32, size[0], round(ms[*key, wide], 2), size[1]])
  assert table(PERFORMANCE, "A step of AdamW on one tensor") == want


def test_table_of_other_models_matches_the_rows():
  rows = layer_rows("layer_shapes")
  want = []
  for preset, seq in (
    ("olmo_1b", 2048),
    ("llama_130m", 1024),
    ("qwen3_30b_a3b", 2048),
    ("llama2_7b", 32768),
    ("siglip_so400m", 729),
    ("clip_l", 577),
  ):
    bf16, coat = (rows[preset, seq, v, "full"] for v in ("bf16", "minimal"))
    ms = [row["median_ms"] for row in (bf16, coat)]
    saved = round(bf16["remembered_units"], 1)
    cells = [round(x, 2) for x in (*ms, ms[0] / ms[1])]
    want.append([*cells, saved])
  assert table(PERFORMANCE, "Layers of other shapes") == want


def test_table_of_towers_matches_the_rows():
  rows = layer_rows("layer_shapes")
  want = []
  for preset, seq in (("siglip_so400m", 729), ("clip_l", 577)):
    bf16, coat = (rows[preset, seq, v, "full"] for v in ("bf16", "minimal"))
    ms = [coat["median_ms"], bf16["median_ms"]]
    saved = coat["remembered_units"] / bf16["remembered_units"]
    want.append([round(x, 2) for x in (*ms, ms[1] / ms[0], saved)])
  text = (DOCS / "vision.md").read_text()
  assert table(text, "## Time of a layer") == want


def test_table_of_steps_matches_the_rows():
  rows = steps_on_one_gpu()
  keys = [
    ("olmo_1b", v) for v in ("bf16", "fp8_linear", "block", "minimal", "lean")
  ]
  keys += [("llama2_7b", "minimal"), ("llama2_7b", "lean")]
  want = []
  for key in keys:
    rate = rows[key]["tokens_per_s_per_gpu"]
    base = rows.get((key[0], "bf16"))
    ratio = base and round(rate / base["tokens_per_s_per_gpu"], 2)
    peak = round(rows[key]["peak_bytes"] / 1e9, 1)
    want.append([round(rows[key]["median_ms"]), round(rate), ratio, peak])
  assert table(PERFORMANCE, "## Whole training steps on one GPU") == want


def test_training_table_matches_the_rows():
  cases = [("bf16", 2), ("fp8_linear", 2), ("coat", 2), ("minimal", 2)]
  cases += [("bf16", 4), ("minimal", 4)]
  cases += [("bf16", 1), ("fp8_linear", 1), ("minimal", 9)]
  want = []
  for variant, batch in cases:
    row = training_row(variant, batch)
    rate = row["tokens_per_s_per_gpu"]
    # In 80 GB, nine sequences fit with COAT, but only one in BF16.
    base = training_row("bf16", 1 if batch == 9 else batch)
    of_bf16 = round(rate / base["tokens_per_s_per_gpu"], 2)
    peak = round(row["peak_bytes"] / 1e9, 1)
    want.append([round(row["median_ms"]), round(rate), of_bf16, peak])
  assert table(PERFORMANCE, "## Training on several GPUs") == want


def test_layer_table_matches_the_rows():
  times = {key[2:]: row for key, row in layer_rows().items()}
  units = {
    row["case"]["variant"]: row["units_per_layer"]
    for row in measured("layer_scan")
  }
  variants = ["bf16", "bf16_dots", "bf16_nothing", "bf16_names", "fp8_linear"]
  variants += ["coat", "minimal", "minimal_codes"]
  variants += ["minimal_nothing"]
  want = []
  for variant in variants:
    # The table shows the codes of weights separately.
    unit = units["minimal" if variant == "minimal_codes" else variant]
    if variant == "bf16_names":  # This variant was only compiled.
      want.append([None] * 4 + [round(unit, 1)])
      continue
    forward, full = (times[variant, mode] for mode in ("forward", "full"))
    ms = [round(row["median_ms"], 2) for row in (forward, full)]
    rest = round(full["tflops"]), round(full["temporary_bytes"] / 1e6)
    want.append([*ms, *rest, round(unit, 1)])
  assert table(PERFORMANCE, "## One decoder layer") == want


def test_optimizer_table_matches_the_rows():
  ms = optimizer_ms()
  keys = [("optax.adamw", None), ("coat", "nearest")]
  names = ("coat", "coat_e5m2", "coat_factored", "log8", "fp8")
  keys += [(name, "stochastic") for name in names]
  want = []
  for key in keys:
    cells = []
    for dtype in ("float32", "bfloat16"):
      relative = ms[*key, dtype] / ms[*keys[0], dtype]
      cells += [round(ms[*key, dtype], 2), round(relative, 2)]
    want.append(cells)
  plain = {
    row["case"]["dtype"]: row["median_ms"]
    for row in measured("optimizer")
    if row["case"].get("rounding") == "stochastic"
    and row["implementation"] == "xla"
  }
  cells = []
  for dtype in ("float32", "bfloat16"):
    relative = plain[dtype] / ms[*keys[0], dtype]
    cells += [round(plain[dtype], 2), round(relative, 2)]
  want.append(cells)
  assert table(PERFORMANCE, "## The optimizer's step") == want


def test_table_of_fused_steps_matches_the_rows():
  lion = {
    tuple(row["case"].get(key) for key in ("codec", "rounding", "dtype")): row
    for row in measured("optimizer_lion")
  }
  lion = {key: row["median_ms"] for key, row in lion.items()}
  want = [
    [round(ms[*key, dtype], 2) for dtype in ("float32", "bfloat16")]
    for ms, key in (
      (optimizer_ms(), ("optax.adamw", None)),
      (optimizer_ms(), ("coat", "stochastic")),
      (optimizer_ms(), ("coat_factored", "stochastic")),
      (optimizer_ms(), ("log8", "stochastic")),
      (optimizer_ms(), ("coat", "nearest")),
      (lion, ("optax.lion", None)),
      (lion, ("coat", "stochastic")),
      (lion, ("coat", "nearest")),
    )
  ]
  text = (DOCS / "optimizer.md").read_text()
  assert table(text, "one step over 2^28 parameters on one H200") == want


def test_table_of_saved_residuals_matches_the_counts():
  text = (DOCS / "layers.md").read_text()
  shown = table(text, "## What is saved for the backward pass")
  for column, row in enumerate(memory.residuals("llama2_7b", 256)):
    want = [*row["units_by_kind"].values(), row["units"]]
    # The table has two decimals. Scalars and RoPE's 4 bytes per token are below
    # 0.001 U.
    assert [cells[column] for cells in shown] == pytest.approx(want, abs=6e-3)


def test_tables_of_quantization_match_the_rows():
  text = (DOCS / "stability.md").read_text()
  rows = [
    row for row in measured("quantization") if row["case"]["preset"] == "demo"
  ]
  found = quantization_tables.tables(rows)
  assert len(found) == 5
  for title, lines in found.items():
    assert lines in text, title


@pytest.mark.parametrize("figure", [expansion, flow, long, losses, mesh, race])
@pytest.mark.slow
def test_figure_is_drawn_for_light_and_dark_pages(figure, tmp_path):
  name = figure.__name__.rpartition(".")[2]
  files = style.write(name, figure.draw, tmp_path)
  names = [f"{name}.{palette}.svg" for palette in ("light", "dark")]
  assert [file.name for file in files] == names
  for file in files:
    assert (DOCS / "figures" / file.name).exists()
    assert 10_000 < file.stat().st_size < 200_000
  assert files[0].read_bytes() != files[1].read_bytes()


def test_expansion_figure_agrees_with_the_method_page():
  figure = expansion.draw(style.PALETTES[0])
  shown = [text.get_text() for ax in figure.axes for text in ax.texts]
  for words in ("32 of 128 become 0", "k = 0.75", "22 codes", "77 codes"):
    assert any(words in text for text in shown), words
  text = (DOCS / "method.md").read_text()
  for words in ("a quarter of the values", "k = 0.75", "22 codes", "uses 77"):
    assert words in text
