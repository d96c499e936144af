# SPDX-License-Identifier: Apache-2.0
"""`python -m train.plan PRESET --gpus N`: candidates, ranking and output."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import tyro

from train import plan
from train.command_line import one_of
from train.memory import search
from train.memory.step import fullest
from train.memory.step import plan as plan_run
from train.presets import PRESETS

DOCS = Path(__file__).parents[3] / "docs"


def trained(line):
  """Returns the configuration that a printed command line trains."""
  words = shlex.split(line)
  assert words[:3] == ["python", "-m", "train.pretrain"]
  return tyro.cli(one_of(PRESETS), args=words[3:])


def found_by(capsys, *options):
  """Returns the configuration that a search finds, and all that it printed."""
  assert plan.main(list(options)) == 0
  out = capsys.readouterr().out
  (line,) = (x for x in out.splitlines() if x.startswith("python -m"))
  return trained(line), out


def test_documented_search_fits_13b_on_one_gpu_of_80_gb(capsys):
  text = (DOCS / "plan.md").read_text()
  (line,) = re.findall(r"python -m train.plan (llama2_13b.*)", text)
  assert line == "llama2_13b --gpus 1 --hbm 80GB --seq 2048"
  run, out = found_by(capsys, *line.split())
  assert f"```\n{out}```" in text
  assert (run.params, run.optimizer_in_backward) == ("bfloat16", True)
  assert (run.optim.clip, run.seq, run.mesh) == ("share", 2048, "")
  peak = fullest(plan_run(run))[1].total
  assert peak <= 80e9 and f"a peak of {peak / 1e9:.1f} GB" in out
  # Plans with f32 weights, or with all layers' gradients at once, do not fit.
  assert " after " not in out and "float32" not in out


@pytest.mark.parametrize(
  "options",
  [
    ["demo", "--gpus", "1"],
    pytest.param(
      ["llama_60m", "--gpus", "4", "--hbm", "20", "--remat", "none"],
      marks=pytest.mark.slow,
    ),
    pytest.param(
      # The preset sets eps, which Lion does not have.
      ["olmo_1b", "--gpus", "1", "--optimizer", "coat_lion", "--remat", "full"],
      marks=pytest.mark.slow,
    ),
    pytest.param(
      ["llama2_7b", "--gpus", "8", "--batch", "1024"], marks=pytest.mark.slow
    ),
    pytest.param(
      ["llama_30b", "--gpus", "2", "--codec", "log8"], marks=pytest.mark.slow
    ),
  ],
)
def test_printed_command_trains_what_was_planned(capsys, options):
  run, out = found_by(capsys, *options)
  shown = float(out.splitlines()[-1].split()[-1])
  assert 0 < shown <= 1
  peak = fullest(plan_run(run))[1].total
  assert f"a peak of {peak / 1e9:.1f} GB" in out
  if "--batch" in options:
    assert run.batch == 1024 and run.accumulate > 1
  if "--remat" in options:
    assert run.remat == options[-1]
  if "--optimizer" in options:
    assert run.optim.optimizer == "coat_lion"
  if "--codec" in options:
    assert run.optim.codec == "log8"


def test_search_tries_only_requested_weights_and_remat():
  config = dataclasses.replace(PRESETS["llama_60m"]())
  runs = list(search.candidates(config, "bfloat16_low8", "fp8"))
  assert {(x.params, x.remat, x.recipe) for x in runs} == {
    ("bfloat16_low8", "fp8", "coat")
  }
  assert [x.optimizer_in_backward for x in runs] == [False, True]
  # Microbatches need the gradients of all layers at once.
  several = dataclasses.replace(config, accumulate=2)
  assert not any(
    x.optimizer_in_backward for x in search.candidates(several, None, None)
  )
  every = list(search.candidates(config, None, None))
  assert len(every) == 3 + 2 + 3 * 2 * 4


def test_too_large_batch_is_split_into_microbatches():
  config = dataclasses.replace(PRESETS["llama_60m"](), batch=256)
  run = dataclasses.replace(config, params="bfloat16")
  (found,), _ = search.search([run], 10 * 10**9, is_batch_fixed=True)
  assert found.run.batch == 256 and found.run.accumulate > 1
  assert found.peak_bytes <= 10e9 / 1.02
  fewer = dataclasses.replace(run, accumulate=found.run.accumulate // 2)
  assert fullest(plan_run(fewer))[1].total > 10e9 / 1.02


def test_cost_depends_on_the_microbatch_of_one_gpu():
  config = dataclasses.replace(PRESETS["llama_60m"](), batch=24, seq=1000)
  run = dataclasses.replace(config, remat="full", accumulate=3)
  assert search.cost(run) == pytest.approx(0.83 + 1500 / 8000)
  lean = dataclasses.replace(run, mesh="fsdp=2", params="bfloat16")
  assert search.cost(lean) == pytest.approx(0.83 + 1150 / 4000)


def test_fp8_layer_ranks_first_only_if_two_percent_faster():
  config = dataclasses.replace(PRESETS["llama_60m"](), seq=2048)

  def fastest(batch):
    runs = [
      dataclasses.replace(config, remat="fp8_layer", batch=batch),
      dataclasses.replace(config, remat="full", batch=8),
    ]
    found, _ = search.search(runs, 80 * 10**9, is_batch_fixed=True)
    costs = {each.run.remat: each.cost for each in found}
    return found[0].run.remat, costs["full"] / costs["fp8_layer"]

  for batch, first, ratio in (
    (8, "full", 1.0),
    (9, "full", 1.011),
    (12, "fp8_layer", 1.034),
  ):
    assert fastest(batch) == (first, pytest.approx(ratio, abs=1e-3))


def test_error_for_too_little_memory_says_how_much_is_needed(capsys):
  small = ["llama_60m", "--gpus", "1", "--hbm", "0.2GB"]
  assert plan.main(small) == 2
  said = capsys.readouterr().err
  assert "0.2 GB on each of 1 GPUs: it needs 0.5 GB or more" in said
  assert "use more GPUs, a smaller --seq or --batch, or a smaller state" in said


def test_gpus_and_mesh_exclude_each_other(capsys):
  both = ["demo", "--gpus", "2", "--mesh", "fsdp=2"]
  assert plan.main(both) == 2
  assert "leave one of them out" in capsys.readouterr().err


# Tokens per second per GPU of Llama-2-7B, with sequences of 2048. Both numbers
# of a ratio were measured together: docs/performance.md has the first four
# ratios, docs/memory.md the last two.
@pytest.mark.parametrize(
  "fast, slow, ratio",
  [
    (("coat", 9), ("coat", 4), 18_927 / 16_998),
    (("coat", 4), ("coat", 2), 16_998 / 14_274),
    (("coat", 4), ("bf16", 4), 16_998 / 11_154),
    (("coat", 9), ("bf16", 1), 18_927 / 7_791),
    (("bfloat16", 4), ("coat", 4), 17_395 / 16_675),
    (("lean", 4), ("coat", 4), 17_927 / 16_675),
  ],
)
def test_estimated_speeds_are_near_the_measured_ones(fast, slow, ratio):
  def cost(name, batch):
    config = dataclasses.replace(PRESETS["llama2_7b"](), batch=batch, seq=2048)
    if name == "bf16":
      return search.cost(config.with_f32_moments("bf16"))
    params = "float32" if name == "coat" else "bfloat16"
    run = dataclasses.replace(config, params=params)
    if name == "lean":
      clip = dataclasses.replace(run.optim, clip="share")
      run = dataclasses.replace(run, optimizer_in_backward=True, optim=clip)
    return search.cost(run)

  assert cost(*slow) / cost(*fast) == pytest.approx(ratio, rel=0.1)
