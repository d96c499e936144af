# SPDX-License-Identifier: Apache-2.0
"""Figures show the right points; their bytes are not compared."""

import matplotlib.figure
import numpy as np
import pytest

from train import plot


@pytest.fixture
def drawn(monkeypatch):
  """Returns a function that draws runs and returns the axes by title."""
  figures = []
  monkeypatch.setattr(
    matplotlib.figure.Figure,
    "savefig",
    lambda figure, *args, **kwargs: figures.append(figure),
  )

  def draw(runs):
    plot.draw(runs, "unused.png")
    (figure,) = figures
    return {axes.get_title(): axes for axes in figure.axes}

  return draw


def points(line):
  return [
    tuple(map(float, point)) for point in zip(*line.get_data(), strict=True)
  ]


LOSSES = np.random.default_rng(0).normal(3, 1, 50)


def rows():
  return [
    *(dict(step=i + 1, loss=float(x)) for i, x in enumerate(LOSSES)),
    dict(step=25, held_out_loss=2.0),
    dict(step=50, held_out_loss=1.0),
  ]


def test_smoothed_loss_is_the_mean_of_the_last_20_steps(drawn):
  raw, smoothed, held_out = drawn({"a": rows()})["Loss"].lines
  assert points(raw) == [(i + 1, x) for i, x in enumerate(LOSSES)]
  want = [(i, np.mean(LOSSES[i - 20 : i])) for i in range(20, 51)]
  np.testing.assert_allclose(points(smoothed), want, rtol=1e-12)
  assert points(held_out) == [(25, 2.0), (50, 1.0)]


def test_differences_cover_only_steps_that_both_runs_logged(drawn):
  others = [dict(row, loss=row.get("loss", 0) + row["step"]) for row in rows()]
  others = [row for row in others if "held_out_loss" not in row][10:]
  others.append(dict(step=50, held_out_loss=0.25))
  axes = drawn({"a": rows(), "b": others, "c": [dict(step=99, loss=1.0)]})
  smoothed, held_out, zero = axes["Loss of a minus another run's"].lines
  assert smoothed.get_label() == "b, mean of 20"
  # In steps 11 to 50, the loss of b is higher by the number of the step.
  want = [(i, -np.mean(np.arange(i - 19, i + 1))) for i in range(30, 51)]
  np.testing.assert_allclose(points(smoothed), want, rtol=1e-12)
  assert points(held_out) == [(50, 0.75)]
  assert set(zero.get_ydata()) == {0}


def test_runs_without_common_steps_have_no_differences(drawn):
  assert list(drawn({"a": rows(), "c": [dict(step=99, loss=1.0)]})) == ["Loss"]


def test_losses_that_were_not_finite_are_left_out(drawn):
  lines = rows()
  lines[3]["loss"] = None
  raw, smoothed, _ = drawn({"a": lines})["Loss"].lines
  assert [step for step, _ in points(raw)] == [1, 2, 3, *range(5, 51)]
  kept = np.delete(LOSSES, 3)
  assert points(smoothed)[0] == (21, pytest.approx(np.mean(kept[:20])))


def leaf(parameters, error, encoded=True):
  moment = dict(relative_error=error)
  second = dict(relative_error=error / 2)
  return dict(encoded=encoded, parameters=parameters, mu=moment, nu=second)


def reports():
  """Returns rows of two reports, at steps 10 and 20."""
  first = dict(
    step=10,
    state={"w": leaf(10, 0.1)},
    powers=dict(mu={"16": 1}, nu={"16": 1}),
  )
  last = dict(
    step=20,
    state={
      "small": leaf(10, 0.1),
      "large": leaf(30, 0.5),
      "norm": leaf(1000, 9.0, encoded=False),
    },
    powers=dict(mu={"16": 3, "40": 1}, nu={"255": 2}),
  )
  return [first, last]


def test_expansion_shows_shares_of_powers_in_the_last_report(drawn):
  mu, nu = drawn({"a": reports()})["Expansion"].lines
  assert points(mu) == [(1.0, 0.75), (2.5, 0.25)]
  assert points(nu) == [(15.9375, 1.0)]
  assert [line.get_label() for line in (mu, nu)] == [
    "a, first moment, step 20",
    "a, second moment, step 20",
  ]


def test_errors_are_weighted_by_parameters_of_encoded_leaves(drawn):
  (axes,) = (
    axes
    for title, axes in drawn({"a": reports()}).items()
    if axes.get_ylabel() == "relative error"
  )
  mu, nu = axes.lines
  # At step 20, mu's error is (10 * 0.1 + 30 * 0.5) / 40, and nu's is half that.
  np.testing.assert_allclose(points(mu), [(10, 0.1), (20, 0.4)])
  np.testing.assert_allclose(points(nu), [(10, 0.05), (20, 0.2)])
