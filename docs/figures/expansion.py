# SPDX-License-Identifier: Apache-2.0
"""Draws what dynamic range expansion does to a group of second moments.

  python -m docs.figures.expansion

moments.npz contains two groups of 128 second moments, in f32, from the run
`python -m train.pretrain demo --report-state` after its 200 steps: the group of
the output layer with the widest range, and a group of a down projection with a
median range.
"""

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coat_jax import codecs
from docs.figures.style import FOLDER, Palette, main

GROUPS = {
  "wide": "output layer, the widest group",
  "narrow": "down projection, a median group",
}
CODECS = {
  "E4M3 of x, one scale": codecs.fp8(rounding="nearest"),
  "E4M3 of $x^k$": codecs.coat(rounding="nearest"),
}
# Codes of positive values: 0 is zero, 126 is 448, the largest.
NUM_CODES = 127


def draw(palette: Palette) -> Figure:
  """Draws histograms of codes for each group, without and with expansion."""
  figure = Figure(figsize=(12, 6.4), layout="constrained")
  axes = figure.subplots(2, 2, sharex=True, sharey=True)
  with np.load(FOLDER / "moments.npz") as moments:
    for row, (name, title) in zip(axes, GROUPS.items(), strict=True):
      for ax, (kind, codec) in zip(row, CODECS.items(), strict=True):
        _panel(ax, moments[name], codec.nu, palette)
        if name == "wide":
          ax.set_title(kind, color=palette.text, size=14)
      octaves = np.log2(moments[name].max() / moments[name].min())
      row[0].set_ylabel(
        f"{title},\nlargest / smallest = $2^{{{octaves:.0f}}}$",
        color=palette.text,
        size=12,
      )
  for ax in axes[1]:
    ax.set_xlabel(
      "E4M3 code: 0 is zero, 126 the largest", color=palette.text, size=12
    )
  return figure


def _panel(ax: Axes, x: np.ndarray, group, p: Palette) -> None:
  encoded = group.encode(jnp.asarray(x)[None], None)
  decoded = np.asarray(group.decode(encoded))[0]
  codes = np.asarray(encoded.codes).view(np.uint8).ravel()
  counts = np.bincount(codes, minlength=NUM_CODES)
  used, zeros = np.flatnonzero(counts), counts[0]
  colors = [p.value if code else p.fault for code in used]
  ax.bar(used, counts[used], width=1, color=colors)
  error = 100 * np.abs(decoded - x) / x
  lines = [
    f"{len(used)} codes used",
    f"error: median {np.median(error):.1f} %, largest {np.max(error):.0f} %",
  ]
  # The power is stored in sixteenths.
  if encoded.range.ndim:
    lines.insert(0, f"k = {encoded.range.item() / 16:g}")
  words = dict(transform=ax.transAxes, ha="right", va="top", size=13)
  ax.text(0.97, 0.93, "\n".join(lines), color=p.text, **words)
  if zeros:
    ax.annotate(
      f"{zeros} of {len(x)} become 0",
      (0.6, zeros - 1.5),
      xytext=(12, zeros - 1.5),
      arrowprops=dict(arrowstyle="->", color=p.fault),
      color=p.fault,
      size=13,
      va="center",
    )
  ax.set_facecolor("none")
  ax.tick_params(colors=p.faint, labelsize=11)
  for side, spine in ax.spines.items():
    spine.set_visible(side in ("left", "bottom"))
    spine.set_color(p.faint)


if __name__ == "__main__":
  main("expansion", draw)
