# SPDX-License-Identifier: Apache-2.0
"""Replaces values in a checkpoint's files with values of another type.

The values are those of config.json, of one tensor's header entry, and of the
index. Each refusal must be one sentence.
"""

import copy
import json

import jaxtyping
import pytest

from coat_jax.models.hf.config import read_config
from coat_jax.models.hf.files import INDEX, MODEL, open_tensors
from tests.models.hf.folders import copied, split

# 10**400 is too large for a float.
VALUES = (["F32"], {"F32": 1}, 10**400, float("nan"), "x", True, -1, None)


def replaced(found, at=()):
  """Yields (path, value, changed copy) for each path and each of VALUES."""
  here = found
  for key in at:
    here = here[key]
  if at:
    for value in VALUES:
      changed = copy.deepcopy(found)
      inner = changed
      for key in at[:-1]:
        inner = inner[key]
      inner[at[-1]] = value
      yield at, value, changed
  if isinstance(here, dict | list):
    for key in here if isinstance(here, dict) else range(len(here)):
      yield from replaced(found, (*at, key))


def count_refused(read, folder, cases, write):
  """Counts the refused cases; raises errors other than ValueError."""
  count = 0
  for at, value, changed in cases:
    write(changed)
    try:
      read(folder)
    except ValueError as error:
      count += 1
      words = str(error)
      assert words.startswith("load_hf: "), (at, value)
      assert "\n" not in words and len(words) < 1500, (at, value)
  return count


@pytest.mark.parametrize(
  "name", ["llama3_rope", "gemma3", "gpt2", "phi3", "qwen3_moe", "vit", "llava"]
)
def test_wrong_values_in_config_are_refused_in_one_sentence(
  name, tmp_path, monkeypatch
):
  # Turn off the tests' type checks, so that `ModelConfig` raises the errors.
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
  folder = copied(tmp_path / "m", name)
  file = folder / "config.json"
  cases = [*replaced(json.loads(file.read_text()))]
  count = count_refused(
    read_config,
    folder,
    cases,
    lambda found: file.write_text(json.dumps(found)),
  )
  # Keys without an effect may have any value.
  assert 60 < count < len(cases)


def test_wrong_values_in_a_header_are_refused_in_one_sentence(tmp_path):
  folder = copied(tmp_path / "m")
  data = (folder / MODEL).read_bytes()
  end = 8 + int.from_bytes(data[:8], "little")
  header = json.loads(data[8:end])
  name = "model.norm.weight"

  def write(entry):
    text = json.dumps(header | {name: entry["of"]}).encode()
    (folder / MODEL).write_bytes(
      len(text).to_bytes(8, "little") + text + data[end:]
    )

  cases = [*replaced({"of": header[name]})]
  assert count_refused(open_tensors, folder, cases, write) == len(cases)


def test_wrong_values_in_an_index_are_refused_in_one_sentence(tmp_path):
  folder = split(copied(tmp_path / "m"))
  file = folder / INDEX
  names = json.loads(file.read_text())["weight_map"]
  some = dict([*names.items()][:2])

  def write(found):
    found = found["weight_map"]
    if isinstance(found, dict) and found.keys() >= some.keys():
      found = names | found
    file.write_text(json.dumps({"weight_map": found}))

  cases = [*replaced({"weight_map": some})]
  assert count_refused(open_tensors, folder, cases, write) == len(cases)
  write({"weight_map": some})
  assert open_tensors(folder).keys() == names.keys()
