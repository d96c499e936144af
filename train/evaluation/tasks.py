# SPDX-License-Identifier: Apache-2.0
"""Runs lm-evaluation-harness on its own tasks, or on tasks in a folder.

Nothing is downloaded: a task fails if its data are not on this machine. The
module requires the `eval` extra.
"""

import contextlib
import difflib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.options import first_line

if TYPE_CHECKING:
  from lm_eval.api.model import LM

# Without DISABLE_MULTIPROC, the harness forks a pool of processes. Forking is
# unsafe with JAX's threads.
_ENVIRONMENT = {
  "HF_DATASETS_OFFLINE": "1",
  "HF_HUB_OFFLINE": "1",
  "HF_EVALUATE_OFFLINE": "1",
  "HF_HUB_DISABLE_TELEMETRY": "1",
  "DISABLE_MULTIPROC": "1",
}
# Number of bootstrap samples for standard errors that have no formula.
_BOOTSTRAPS = 1000


class Tasks:
  """Tasks, loaded with their data."""

  def __init__(self, names: Sequence[str], folder: Path | None = None):
    if folder is not None and not folder.is_dir():
      raise ValueError(
        f"evaluate: --task-dir must be a folder, got {folder}; pass the folder "
        "that contains the tasks' YAML files"
      )
    self.names = list(dict.fromkeys(names))
    self._folder = None if folder is None else folder.absolute()
    for name, value in _ENVIRONMENT.items():
      os.environ.setdefault(name, value)
    try:
      from lm_eval import tasks  # noqa: F401
    except ModuleNotFoundError as error:
      raise ValueError(
        f"evaluate: --task needs the 'eval' extra, but the module {error.name} "
        "is not installed; run pip install '.[eval]', or measure perplexity "
        "with --data"
      ) from error
    self._manager = self._find()
    try:
      with self._inside():
        self._manager.load(self.names)
    except Exception as error:  # Tasks can run any code.
      raise ValueError(
        f"evaluate: a task could not be loaded offline: {first_line(error)}; "
        "pass --task-dir with a copy of the task that reads local files"
      ) from error

  def _find(self) -> Any:
    """Returns a task manager that knows all `names`."""
    from lm_eval.tasks import TaskManager

    # Try the user's folder alone first, because listing lm_eval's own tasks is
    # slow.
    unknown, manager = self.names, None
    for with_own in (False, True):
      if not with_own and self._folder is None:
        continue
      manager = TaskManager(
        include_path=self._folder, include_defaults=with_own
      )
      unknown = [x for x in self.names if not manager.match_tasks([x])]
      if not unknown:
        return manager
    known = manager.all_tasks if manager is not None else []
    near = difflib.get_close_matches(unknown[0], known, n=3)
    raise ValueError(
      f"evaluate: --task must name a task in lm_eval or in --task-dir, got "
      f"{unknown[0]}; "
      + (f"did you mean {' or '.join(near)}?" if near else "check its name")
    )

  @contextlib.contextmanager
  def _inside(self) -> Iterator[None]:
    """Enters the tasks' folder; redirects standard output to standard error."""
    folder = contextlib.nullcontext()
    if self._folder is not None:
      folder = contextlib.chdir(self._folder)
    with contextlib.redirect_stdout(sys.stderr), folder:
      yield

  def run(
    self, lm: "LM", *, shots: int | None = None, limit: int | None = None
  ) -> dict[str, Any]:
    """Runs the tasks; returns what `lm_eval.simple_evaluate` returns."""
    import lm_eval

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    evaluate: Any = lm_eval.simple_evaluate
    with self._inside():
      return evaluate(
        lm,
        tasks=self.names,
        num_fewshot=shots,
        limit=limit,
        bootstrap_iters=_BOOTSTRAPS,
        log_samples=False,
        task_manager=self._manager,
      )
