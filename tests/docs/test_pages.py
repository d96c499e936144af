# SPDX-License-Identifier: Apache-2.0
"""Runs the Python code of every page, block after block."""

import os
import re
import shlex
import subprocess
import sys

import jax.numpy as jnp
import pytest
from flax import nnx
from jax import P

from tests.comparing import assert_same_bits
from tests.docs import howto
from tests.docs.pages import (
  LOGS,
  NAMES,
  NOT_RUN,
  PAGES,
  ROOT,
  python_blocks,
  run_page,
)

# The other pages take too long for the quick suite.
QUICK = {
  "README.md",
  "docs/howto/clusters.md",
  "docs/plan.md",
}
WITH_PYTHON = [
  name
  for name, page in zip(NAMES, PAGES, strict=True)
  if python_blocks(page.read_text())
]


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in WITH_PYTHON
    if name not in howto.VARIED
  ],
)
def test_page_runs(name, as_a_reader, capsys):
  names = run_page(name)
  if check := CHECKS.get(name):
    check(names, capsys.readouterr().out, (ROOT / name).read_text())


def check_tutorial(names, printed, text):
  """Checks that the model learns, and that the page shows what is printed."""
  losses = names["losses"]
  assert losses[0] > 5 and losses[-1] < 0.1
  assert names["model"].layer.mlp.active_recipe.nonlinear == "fp8"
  # The page does not train its first model, so check only its output's shape.
  plain = nnx.eval_shape(
    lambda: names["Model"](names["Layer"], rngs=nnx.Rngs(0))(names["tokens"])
  )
  assert plain.shape == (*names["tokens"].shape, 256)
  per_param = re.search(r"([\d.]+) bytes per parameter", printed)[1]
  assert f"prints {per_param} bytes per parameter" in text
  saved = re.findall(r"(\w+): (\d+) bytes per token", printed)
  assert [name for name, _ in saved] == ["bf16", "coat"]
  shown = f"{saved[0][1]} bytes per token for `bf16` and {saved[1][1]} for"
  assert shown in text


def check_checkpoints(names, printed, text):
  """Checks three restored states: on two devices, by name, and from npz."""
  saved, restored = names["state"], names["restored"]
  assert_same_bits(restored, saved)
  assert_same_bits(names["adam"], saved["optimizer"][0])
  assert_same_bits(names["loaded"], saved)
  codes = restored["optimizer"][0].mu.codes["kernel"]
  assert codes.dtype == jnp.float8_e4m3fn
  assert len(codes.sharding.device_set) == 2


def check_sharding(names, printed, text):
  """Checks the shardings of optimizer states and of layers' outputs."""
  moments = names["opt_state"][0]
  assert moments.nu.codes["up"].sharding.spec == P(None, "fsdp")
  assert moments.nu.amax["up"].sharding.spec == P(None, "fsdp")
  by_optax = names["by_optax"][0]
  assert by_optax.nu.codes["up"].sharding.spec == P(None, "fsdp")
  assert names["state_specs"][0].nu.amax["up"] == P(None, "fsdp")
  abstract = names["target"]["optimizer"][0].nu.amax["up"].sharding
  assert abstract == moments.nu.amax["up"].sharding
  model, adam = names["model"], names["adamw"].opt_state[0]
  for kernel, spec in (
    (model.head.kernel, P("fsdp")),
    (adam.mu.codes["head"]["kernel"], P("fsdp")),
    (adam.mu.amax["head"]["kernel"], P("fsdp")),
    (model.mlp.gate_up.kernel, P("fsdp")),
    (adam.nu.codes["mlp"]["gate_up"]["kernel"], P("fsdp")),
    (adam.nu.amax["mlp"]["gate_up"]["kernel"], P("fsdp")),
    (adam.mu.codes["head"]["bias"], P("fsdp")),
  ):
    array = kernel[...]
    assert tuple(spec) == tuple(array.sharding.spec)[:1]
    assert array.addressable_shards[0].data.nbytes * 4 == array.nbytes
  assert names["y"].sharding.spec == P(("data", "fsdp"))


def check_optimizer(names, printed, text):
  """Checks that parameters are BF16 and that the state is encoded."""
  assert names["params"]["kernel"].dtype == jnp.bfloat16
  state = names["opt_state"][1][0]
  assert state.mu.codes["kernel"].dtype == jnp.float8_e4m3fn


def check_finetune(names, printed, text):
  """Checks that the trained model gives the answer on the page."""
  section = text.split("## Try it on a CPU")[1].split("## Data")[0]
  lines = section.replace("\\\n", "").splitlines()
  commands = [line for line in lines if line.startswith("python -m train.")]
  assert len(commands) == 3
  # Compile with optimizations; otherwise programs would take five times as
  # long.
  environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
  for line in commands:
    _, *words = shlex.split(line, comments=True)
    done = subprocess.run(
      [sys.executable, *words],
      env=environment,
      check=True,
      stdout=subprocess.PIPE,
      text=True,
    )
    if "train.generate" in line:
      assert line.split("# ")[1] == done.stdout.strip() == "It is 7."


CHECKS = howto.CHECKS | {
  "docs/checkpoints.md": check_checkpoints,
  "docs/finetune.md": check_finetune,
  "docs/optimizer.md": check_optimizer,
  "docs/sharding.md": check_sharding,
  "docs/tutorial.md": check_tutorial,
}


def test_pages_with_python_are_found():
  others = "README.md", "docs/layers.md", "docs/plan.md"
  assert {*CHECKS, *howto.VARIED, *others} <= {*WITH_PYTHON}
  assert LOGS


def test_block_that_is_not_run_has_a_reason():
  text = f'```python {NOT_RUN}it needs a GPU"\n1 / 0\n```\n'
  assert python_blocks(text) == []
  for hidden in ("```python noqa\n1 / 0\n```\n", "  ```python\n  1 / 0\n  ```"):
    with pytest.raises(ValueError, match="docs: "):
      python_blocks(hidden)


def test_links_of_the_readme_lead_to_files():
  targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
  local = [target for target in targets if "://" not in target]
  assert len(local) > 10
  assert [target for target in local if not (ROOT / target).exists()] == []
