# SPDX-License-Identifier: Apache-2.0
"""If one of two processes cannot write, both end."""

import resource

import pytest

from tests.train import runs
from tests.train.test_distributed import finish, processes


@pytest.mark.slow
def test_both_processes_end_if_one_cannot_write_its_log(tmp_path):
  out = tmp_path / "run"
  with processes(out, environment={}) as started:
    runs.wait_for_step(started[0], out, 2)
    # Keep the log from growing. Only the first process writes it.
    resource.prlimit(started[0].pid, resource.RLIMIT_FSIZE, (0, 0))
    statuses, outputs = finish(started)
  assert statuses[0] == 1 and statuses[1] != 0, outputs
  words = f"error: save: could not write {out}: OSError ([Errno 27] File"
  assert words in outputs[0]
  assert "Traceback" not in outputs[0]
