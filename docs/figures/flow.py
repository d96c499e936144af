# SPDX-License-Identifier: Apache-2.0
"""Draws the FP8 flow of a block, and what it saves for the backward pass.

  python -m docs.figures.flow

Bytes are for Llama-2-7B with recipes.coat(), from `python -m benchmarks.memory
residuals --preset llama2_7b`.
"""

from matplotlib.figure import Figure

from docs.figures.style import Drawing, Palette, canvas, main

# Positions of the operations from left to right, and of rows from the top.
NORM, FIRST, MIDDLE, SECOND, ADD = 2.15, 4.3, 6.55, 8.75, 10.55
FORWARD, SAVED, BACKWARD, WEIGHTS = 5.7, 3.75, 1.8, 0.45


def draw(palette: Palette) -> Figure:
  """Draws a gated MLP, from the top: forward, saved arrays, backward."""
  figure = Figure(figsize=(12, 7))
  d = Drawing(canvas(figure), palette)
  d.zone((1.12, 0.1), (5.4, 6.9), "front")
  d.zone((5.5, 0.1), (7.6, 6.9), "middle")
  d.zone((7.7, 0.1), (11.2, 6.9), "back")
  d.text(0.55, 6.68, "forward", color=palette.faint)
  d.text(0.56, SAVED, "saved for\nbackward", color=palette.saved)
  d.text(11.58, 2.35, "backward", size=11, color=palette.faint)
  _forward(d, palette)
  _saved(d, palette)
  _backward(d, palette)
  return figure


def _forward(d: Drawing, p: Palette) -> None:
  y = FORWARD
  for x, text in (
    (NORM, "norm"),
    (FIRST, "matmul\ngate, up"),
    (MIDDLE, "SwiGLU"),
    (SECOND, "matmul\ndown"),
  ):
    d.box(x, y, text, color=p.text)
  d.box(ADD, y, "+", width=0.5, height=0.5, color=p.text, size=14)
  d.text(0.3, y, "x", size=13)
  d.text(11.75, y, "y", size=13)
  d.arrow(
    (0.45, y), (NORM - 0.65, y), color=p.plain, label="BF16", shift=(0.18, 0.18)
  )
  d.arrow((NORM + 0.65, y), (FIRST - 0.65, y), color=p.value, label="E4M3")
  d.arrow((FIRST + 0.65, y), (MIDDLE - 0.65, y), color=p.plain, label="BF16")
  d.arrow((MIDDLE + 0.65, y), (SECOND - 0.65, y), color=p.value, label="E4M3")
  d.arrow((SECOND + 0.65, y), (ADD - 0.25, y), color=p.plain, label="BF16")
  d.arrow((ADD + 0.25, y), (11.6, y), color=p.plain)
  d.line((0.85, y), (0.85, 6.4), (ADD, 6.4), (ADD, y + 0.25), color=p.plain)


def _saved(d: Drawing, p: Palette) -> None:
  y = SAVED
  for x, text, width in (
    (NORM, "x in E4M3,\n1 x 16 groups\n0.56 U", 1.5),
    (FIRST, "two scales", 1.15),
    (MIDDLE, "gate, up, E4M3,\n1 x 16 groups\n3.02 U", 1.5),
    (SECOND, "two scales", 1.15),
  ):
    kind = dict(color=p.saved, filled=True, height=1.0, size=11)
    d.box(x, y, text, width=width, **kind)
    d.arrow((x, FORWARD - 0.31), (x, y + 0.5), color=p.saved)
    d.arrow((x, y - 0.5), (x, BACKWARD + 0.31), color=p.saved)


def _backward(d: Drawing, p: Palette) -> None:
  y = BACKWARD
  for x, text in (
    (NORM, "norm,\nbackward"),
    (FIRST, "matmuls"),
    (MIDDLE, "SwiGLU,\nbackward"),
    (SECOND, "matmuls"),
  ):
    d.box(x, y, text, color=p.text)
  d.box(ADD, y, "quantize", width=1.0, color=p.text)
  d.text(11.75, y, "dy", size=13)
  d.text(0.3, y, "dx", size=13)
  # Gradients flow to the left, above operands that are computed again.
  up, down = y + 0.14, y - 0.16
  d.arrow((11.55, y), (ADD + 0.5, y), color=p.plain)
  d.arrow((ADD - 0.5, up), (SECOND + 0.65, up), color=p.gradient, label="E5M2")
  d.arrow((SECOND - 0.65, up), (MIDDLE + 0.65, up), color=p.plain, label="BF16")
  d.arrow(
    (MIDDLE - 0.65, up), (FIRST + 0.65, up), color=p.gradient, label="E5M2"
  )
  d.arrow((FIRST - 0.65, up), (NORM + 0.65, up), color=p.plain, label="BF16")
  d.arrow((NORM - 0.65, y), (0.5, y), color=p.plain, label="BF16")
  for start, end in ((NORM, FIRST), (MIDDLE, SECOND)):
    d.arrow(
      (start + 0.65, down),
      (end - 0.65, down),
      color=p.value,
      dashed=True,
      label="E4M3,\nagain",
      shift=(0, -0.29),
    )
  for x, name in ((FIRST, "dW gate, up"), (SECOND, "dW down")):
    d.arrow((x, y - 0.31), (x, 0.97), color=p.plain)
    d.text(x, 0.82, name)
  d.line(
    (11.38, y), (11.38, 0.38), (NORM, 0.38), (NORM, y - 0.31), color=p.plain
  )


if __name__ == "__main__":
  main("flow", draw)
