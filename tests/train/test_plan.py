# SPDX-License-Identifier: Apache-2.0
"""`python -m train.plan`: what it counts, prints and rejects."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tyro

from coat_jax import recipes
from coat_jax.models.hf.config import write_config
from studies import families, vision_memory
from tests.matrices import quick
from train import plan
from train.memory import search
from train.memory.count import residual_bytes, saved_bytes
from train.memory.step import Memory, fullest, largest
from train.memory.step import plan as plan_run
from train.presets import PRESETS

ROWS = Path(__file__).parents[2] / "docs" / "rows"


@pytest.mark.parametrize(
  "preset", quick(3, ["llama3_8b", "olmo_1b", "gpt2", "qwen3_30b_a3b"])
)
@pytest.mark.parametrize(
  "recipe",
  [
    recipes.coat(residuals="coat"),
    recipes.coat(),
    recipes.coat(attention="fp8", group_size=32),
    recipes.bf16(),
    recipes.fp8_linear(),
  ],
)
def test_planned_residuals_match_those_of_a_traced_layer(preset, recipe):
  config = PRESETS[preset]().model
  planned = saved_bytes(config, recipe)
  counted = residual_bytes(config, recipe, tokens=256)["total"]
  if recipe.name == "bf16":
    # The plan also counts a copy of the attention's output for the next matmul.
    counted += 2 * config.num_heads * config.head_width
  if recipe.nonlinear == "bf16" and config.choices.norm == "layer":
    # A LayerNorm saves two equal arrays. XLA keeps only one, as planned.
    counted -= 2 * 4 * config.d_model
  # The plan leaves out positions and scales of whole tensors.
  assert planned == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize(
  "family", quick(1, ["gemma3_text", "gemma2", "olmo2", "qwen3"])
)
def test_norms_of_all_families_are_planned(family):
  config = families.config_of(family)
  for recipe in (
    recipes.coat(),
    recipes.coat(residuals="coat"),
    recipes.coat(attention="fp8"),
    recipes.fp8_linear(),
  ):
    planned = saved_bytes(config, recipe)
    counted = residual_bytes(config, recipe, tokens=256)["total"]
    # The plan leaves out positions and scales of whole tensors.
    assert 0 <= counted - planned < 5, recipe


def test_plan_counts_the_state_of_the_run():
  config = PRESETS["llama2_7b"]()
  config = dataclasses.replace(config, mesh="fsdp=4", batch=8, seq=2048)
  count = 6_738_415_616
  for found in plan_run(config).values():
    # Weights have 4 bytes per parameter, and 4 GPUs share them.
    assert found.weights == pytest.approx(count, rel=1e-3)
    # Moments have 2.08 bytes per parameter. Each GPU also has whole norms.
    assert found.optimizer == pytest.approx(2.08 * count / 4, rel=2e-3)
  exact = dataclasses.replace(config, report_state=True)
  more = plan_run(exact)["loss"].optimizer - found.optimizer
  assert more == pytest.approx(8 * count / 4, rel=1e-3)


def test_llama2_7b_fits_one_gpu_of_80_gb():
  config = PRESETS["llama2_7b"]()
  config = dataclasses.replace(config, batch=1, seq=2048)
  assert fullest(plan_run(config))[1].total <= 76e9
  assert largest(config, 80 * 10**9) >= 1


@pytest.mark.slow
def test_largest_batch_fits_and_a_larger_one_does_not():
  config = PRESETS["llama_60m"]()
  config = dataclasses.replace(
    config, mesh="data=2,fsdp=2", batch=8, accumulate=2
  )
  most = largest(config, 10**10)

  def peak(batch):
    run = dataclasses.replace(config, batch=batch)
    return fullest(plan_run(run))[1].total

  assert most % 8 == 0 and peak(most) <= 10**10 < peak(most + 8)
  assert largest(config, 10**8) == 0


def rows(text):
  """Maps the first cell of each row of a printed table to the others."""
  lines = [line.split("  ") for line in text.splitlines()]
  cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
  return {first: others for first, *others in cells}


@pytest.mark.slow
def test_printed_terms_add_up_to_the_peak(capsys):
  options = ["--mesh", "fsdp=4", "--batch", "8", "--seq", "2048"]
  assert plan.main(["llama2_7b", *options]) == 0
  out = capsys.readouterr().out
  assert out.startswith(
    "llama2_7b, 4 GPUs, a step of 8 sequences of 2048 tokens\n"
  )
  found = rows(out)
  assert found["GB on each GPU"] == list(plan.COLUMNS)
  parts = Memory._fields
  for i in range(6):
    column = [float(found[part][i]) for part in parts]
    assert sum(column) == pytest.approx(float(found["peak"][i]), abs=0.03)
  peaks = [float(cell) for cell in found["peak"]]
  assert peaks == sorted(peaks, reverse=True)
  assert found["fits 80 GB"] == ["yes"] * 6
  assert found["peak is in the"] == ["backward"] * 4 + ["loss"] * 2


@pytest.mark.slow
def test_each_option_changes_the_plan():
  def backward(*options):
    large = ["llama_60m", "--seq", "1024", "--batch", "16"]
    line = [*large, *options]
    config = tyro.cli(plan.PlanConfig, args=line).run()
    assert (config.seq, config.batch) == (1024, 16)
    return plan_run(config)["backward"]

  plain = backward()
  assert backward("--codec", "float32").optimizer > plain.optimizer
  assert backward("--optimizer", "coat_lion").optimizer < plain.optimizer
  assert backward("--remat", "full").activations < plain.activations
  assert backward("--remat", "fp8").activations < plain.activations
  in_bf16 = backward("--params", "bfloat16")
  assert in_bf16.weights < plain.weights
  assert backward("--params", "bfloat16_low8").optimizer > plain.optimizer
  assert backward("--attention", "fp8").activations < plain.activations
  assert backward("--accumulate", "2").gradients > plain.gradients
  assert backward("--weight-cache", "codes").temporary > plain.temporary
  halved = backward("--mesh", "fsdp=2")
  assert halved.weights < plain.weights
  in_bf16 = backward("--mesh", "fsdp=2", "--grad-reduce", "bfloat16")
  assert in_bf16.temporary < halved.temporary


@pytest.mark.parametrize(
  "preset, mesh, is_said",
  [
    ("demo_moe", "", True),
    ("qwen3_30b_a3b", "", False),
    ("qwen3_30b_a3b", "tensor=4", True),  # 768 / 4 = 192
  ],
)
def test_plan_of_fp8_experts_without_a_kernel_says_it_is_too_low(
  preset, mesh, is_said
):
  line = [preset, "--experts", "fp8", "--mesh", mesh]
  options = tyro.cli(plan.PlanConfig, args=line)
  said = "\n".join(plan._remarks(options, options.run()))
  assert ("too low: the temporary memory" in said) == is_said


@pytest.mark.slow
def test_plan_counts_codes_of_experts():
  def temporary(*options):
    line = ["demo_moe", "--weight-cache", "codes", *options]
    config = tyro.cli(plan.PlanConfig, args=line).run()
    return plan_run(config)["backward"].temporary

  assert temporary("--experts", "fp8") > temporary()


@pytest.mark.parametrize("hbm, fits", [("0.2GB", "yes"), ("0.005GiB", "no")])
def test_table_says_what_fits(capsys, hbm, fits):
  assert plan.main(["demo", "--hbm", hbm]) == 0
  found = rows(capsys.readouterr().out)
  (key,) = (key for key in found if key.startswith("fits"))
  # Only the last column, 5.05 MB, fits into 0.005 GiB.
  assert found[key] == [fits] * 5 + ["yes"]
  is_none = [batch == "none" for batch in found["largest batch"]]
  assert is_none == [fits == "no"] * 5 + [False]


@pytest.mark.parametrize(
  "options, said",
  [
    (["llama9"], "invalid choice 'llama9'"),
    (["demo", "--hbm", "80MB"], "expected memory such as 80GB"),
    (["demo", "--codec", "caot"], "did you mean 'coat'?"),
    (["demo", "--mesh", "fsdp=3"], "fsdp must divide d_model"),
    (["demo", "--mesh", "fsdp=4", "--batch", "3"], "4 would fit"),
    (["demo", "--batch", "0"], "batch must be a whole number at least 1"),
    (
      ["demo", "--accumulate", "0"],
      "accumulate must be a whole number at least 1",
    ),
    (["demo", "--mesh", "tensor=2"], "each device must hold whole groups"),
    (["demo", "--trained", "all"], "trained applies to vision-language models"),
    (
      ["demo", "--images-each", "2"],
      "images_each applies to vision-language models",
    ),
    (["demo", "--init-from", "/no/such"], "got nothing of that name"),
  ],
)
def test_bad_options_are_refused(capsys, options, said):
  try:
    status = plan.main(options)
  except SystemExit as stop:
    status = stop.code
  assert status == 2
  assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def llava_7b(tmp_path_factory):
  folder = tmp_path_factory.mktemp("llava")
  keys = write_config(vision_memory.LLAVA_7B, np.dtype("float16"))
  (folder / "config.json").write_text(json.dumps(keys))
  return str(folder)


@pytest.mark.parametrize("trained", ["projector", "decoder", "all"])
def test_step_of_a_vision_language_model_is_planned(trained, llava_7b, capsys):
  rows_of = (ROWS / "vision_plan.jsonl").read_text().splitlines()
  (row,) = (
    row for row in map(json.loads, rows_of) if row["case"]["trained"] == trained
  )
  case = {name: str(row["case"][name]) for name in ("batch", "seq", "images")}
  line = ["finetune", "--init-from", llava_7b, "--params", "bfloat16"]
  line += ["--trained", trained, "--images-each", case["images"]]
  line += ["--batch", case["batch"], "--seq", case["seq"]]
  assert plan.main(line) == 0
  first, *_ = (out := capsys.readouterr().out).splitlines()
  assert first.endswith(f"of 2048 tokens, 2 images each, trained: {trained}")
  found = rows(out)
  assert found["GB on each GPU"] == ["COAT", "COAT minimal"]
  assert found["peak is in the"] == [row["moment"]] * 2
  peak = float(found["peak"][1]) * 1e9
  assert peak == pytest.approx(row["peak_bytes"], rel=0.02)


def test_tower_with_f32_weights_needs_more_temporary_memory(llava_7b):
  line = ["finetune", "--init-from", llava_7b, "--trained", "all"]
  temporary = [
    plan_run(
      tyro.cli(plan.PlanConfig, args=[*line, "--params", params]).run(),
      images_each=1,
    )["tower"].temporary
    for params in ("float32", "bfloat16")
  ]
  assert temporary[0] > temporary[1]


@pytest.mark.parametrize(
  "options, said",
  [
    (["--gpus", "2"], "do not support gpus"),
    (["--mesh", "fsdp=2"], "do not support mesh"),
    (["--batch", "2", "--accumulate", "2"], "do not support accumulate"),
    (["--remat", "fp8"], "do not support remat"),
  ],
)
def test_options_that_are_not_planned_with_images_are_refused(
  options, said, llava_7b, capsys
):
  assert plan.main(["finetune", "--init-from", llava_7b, *options]) == 2
  assert said in capsys.readouterr().err


def test_search_without_candidates_is_refused(capsys):
  line = ["demo", "--gpus", "1", "--remat", "dots", "--params", "bfloat16"]
  assert plan.main(line) == 2
  assert "leave --params or --remat out" in capsys.readouterr().err


def test_plan_uses_the_shape_of_a_text_checkpoint(tmp_path):
  shape = dataclasses.replace(PRESETS["demo"]().model, num_layers=3)
  keys = write_config(shape, np.dtype("float32"))
  (tmp_path / "config.json").write_text(json.dumps(keys))
  line = ["demo", "--init-from", str(tmp_path)]
  run = tyro.cli(plan.PlanConfig, args=line).run()
  assert run.model == shape
  assert f"--init-from {tmp_path}" in search.command(
    run, "demo", PRESETS["demo"]()
  )


def test_table_with_microbatches_omits_updates_in_backward(capsys):
  assert plan.main(["demo", "--accumulate", "2"]) == 0
  found = rows(capsys.readouterr().out)
  assert found["MB on each GPU"] == list(plan.COLUMNS)[:4]
  # Small numbers are not rounded to 0.
  assert all(float(cell) > 1 for cell in found["weights"])


@pytest.mark.parametrize(
  "preset, is_said", [("demo_moe", True), ("demo", False)]
)
def test_remark_says_that_plans_with_experts_were_not_checked(
  preset, is_said, monkeypatch, capsys
):
  monkeypatch.setattr(plan, "table", lambda *_: "GB")
  assert plan.main([preset]) == 0
  *_, last = capsys.readouterr().out.splitlines()
  assert last.startswith("not checked: mixtures of experts") == is_said


@pytest.mark.parametrize(
  "line, words",
  [
    (["gemma2_2b"], []),
    (["finetune"], ["the shape of llama2_7b, sequences of 4096", "--seq 2048"]),
  ],
)
def test_remarks_are_below_the_table(line, words, monkeypatch, capsys):
  monkeypatch.setattr(plan, "table", lambda *_: "GB")
  assert plan.main(line) == 0
  title, _, *remarks = capsys.readouterr().out.splitlines()
  assert "1 GPU, a step of 1 sequence of" in title
  assert len(remarks) == bool(words)
  assert all(word in remarks[0] for word in words)


def test_images_must_fit(llava_7b, monkeypatch, capsys):
  monkeypatch.setattr(plan, "table", lambda *_: "GB")
  line = ["finetune", "--init-from", llava_7b]
  assert plan.main(line) == 0
  title, *_ = capsys.readouterr().out.splitlines()
  assert title.endswith(
    "1 sequence of 2048 tokens, 1 image each, trained: decoder"
  )
  assert plan.main([*line, "--images-each", "4"]) == 2
  assert "got 4 * 576 = 2304 tokens" in capsys.readouterr().err
  assert plan.main([*line, "--images-each", "4", "--seq", "2304"]) == 0


@pytest.mark.slow
def test_smaller_groups_of_moments_fit_the_mesh(capsys):
  smaller = ["demo", "--mesh", "tensor=2", "--group-size", "16"]
  assert plan.main(smaller) == 0
  assert "demo, 2 GPUs" in capsys.readouterr().out


DOCS = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()


def test_docs_show_the_printed_table(capsys):
  (command,) = re.findall(r"python -m train.plan (llama2_7b.*)", DOCS)
  assert plan.main(command.split()) == 0
  assert f"```\n{capsys.readouterr().out}```" in DOCS


def test_code_in_the_docs_runs(capsys):
  (block,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
  exec(compile(block, "docs/plan.md", "exec"), {})
  printed = capsys.readouterr().out
  assert re.fullmatch(r"[\d.]+ GB in the \w+\n", printed)
  assert f"```text\n{printed}```" in DOCS
