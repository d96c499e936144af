# SPDX-License-Identifier: Apache-2.0
"""A run of a few seconds, for tests of the training scripts."""

from train import pretrain

MODEL = dict(num_layers=2, d_model=64, d_ff=128, num_heads=2, num_kv_heads=1)
# Leaves of 4096 values and more, so that the codec encodes some.
OPTIONS = {
  **{f"model.{name.replace('_', '-')}": value for name, value in MODEL.items()},
  "batch": 2,
  "seq": 32,
  "eval-batches": 2,
  "optim.warmup": 2,
  "steps": 8,
  "eval-every": 4,
  "save-every": 4,
}


def arguments(out, *flags, **options):
  """Command line of a tiny run; `optim__lr=1` is `--optim.lr 1`."""
  options = {
    name.replace("__", ".").replace("_", "-"): value
    for name, value in options.items()
  }
  line = ["demo", "--out", str(out), *flags]
  for name, value in {**OPTIONS, **options}.items():
    line += [f"--{name}", str(value)]
  return line


def run(out, *flags, **options):
  """Runs it in this process; its exit status."""
  try:
    return pretrain.main(arguments(out, *flags, **options))
  except SystemExit as exit:  # tyro's own errors
    return exit.code
