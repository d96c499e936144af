# SPDX-License-Identifier: Apache-2.0
"""Training data and checks for the tests with Levanter, MaxText and Tunix."""

import jax
import numpy as np

# Bytes of optimizer state per parameter: two one-byte codes, and ten bytes of
# scales for every group of 128 parameters.
STATE = 2.08


def tokens(steps, *, batch, length):
  """Yields batches of only 16 different tokens, which a model soon learns."""
  random = np.random.default_rng(0)
  for _ in range(steps):
    yield random.integers(1, 17, (batch, length)).astype(np.int32)


def check_bytes(name, state, params, devices, capsys):
  """Checks, and prints, the state's bytes per parameter on each device."""
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
  """Compares the losses of restored runs with the uninterrupted run's."""
  uninterrupted = runs.pop("uninterrupted")
  for name, losses in runs.items():
    apart = max(abs(losses[step] - uninterrupted[step]) for step in losses)
    with capsys.disabled():
      print(f"losses restored on {name}: off by at most {apart:.1e}")
    # Another mesh sums in a different order, so a moment halfway between two
    # codes may get the other code, as in tests/train/test_mesh.py.
    assert apart <= (0 if name == "the same mesh" else 5e-4)
  # The comparison means little unless the model learns.
  first, *_, last = uninterrupted.values()
  assert last < first - 0.5
