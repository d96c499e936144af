# SPDX-License-Identifier: Apache-2.0
"""Data and checks that the runs in other trainers share."""

import jax
import numpy as np

# Bytes per parameter: two codes, and ten bytes per group of 128.
STATE = 2.08


def tokens(steps, *, batch, length):
  """Yields batches of 16 different tokens, which a model learns at once."""
  random = np.random.default_rng(0)
  for _ in range(steps):
    yield random.integers(1, 17, (batch, length)).astype(np.int32)


def check_bytes(name, state, params, devices, capsys):
  """Prints the state's bytes per parameter on each device; checks them."""
  count = sum(x.size for x in jax.tree.leaves(params))
  stored = dict.fromkeys(devices, 0)
  for x in jax.tree.leaves(state):
    for shard in x.addressable_shards:
      stored[shard.device] += shard.data.nbytes
  each = [size / count for size in stored.values()]
  bar = 1.02 * STATE / len(each)
  with capsys.disabled():
    printed = " ".join(f"{size:.4f}" for size in each)
    print(f"\n{name}: {printed} bytes per parameter, at most {bar:.4f}")
  assert max(each) <= bar


def check_losses(runs, capsys):
  """Compares the losses of restored runs with those of the undisturbed one."""
  undisturbed = runs.pop("undisturbed")
  for name, losses in runs.items():
    apart = max(abs(losses[step] - undisturbed[step]) for step in losses)
    with capsys.disabled():
      print(f"losses restored on {name}: at most {apart:.1e} from undisturbed")
    # Another mesh sums in another order. Then a moment between two codes may
    # get the other code, as in tests/train/test_mesh.py.
    assert apart <= (0 if name == "the same mesh" else 5e-4)
  # The model learns, so the losses tell something.
  first, *_, last = undisturbed.values()
  assert last < first - 0.5
