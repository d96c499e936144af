# SPDX-License-Identifier: Apache-2.0
"""Opens the documentation and the page of answers in Chromium.

The tests need Playwright (`pip install playwright`) and Chromium, either
Debian's or the one that `playwright install chromium` downloads. Without them,
the tests are skipped.
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading

import pytest
from PIL import Image

from tests.docs.pages import ROOT
from train.evaluation.answers import Answer, Answers
from train.evaluation.page import render

sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.slow

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 375, "height": 812}
# Returns the luminance of the page's background, and lists the visible texts
# whose contrast with their background is below what WCAG 2.2 asks for (success
# criterion 1.4.3, AA): 4.5, or 3 for large text.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {
    willReadFrequently: true,
  });
  function rgba(color) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  }
  function over(top, below) {
    const a = top[3];
    return [0, 1, 2].map(i => top[i] * a + below[i] * (1 - a)).concat(1);
  }
  // The color under all elements follows the page's color scheme.
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.backgroundColor = "Canvas";
  const lowest = rgba(getComputedStyle(probe).backgroundColor);
  probe.remove();
  function background(element) {
    if (!element) return lowest;
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, background(element.parentElement));
  }
  function opacity(element) {
    if (!element) return 1;
    const own = Number(getComputedStyle(element).opacity);
    return own * opacity(element.parentElement);
  }
  function luminance(color) {
    const [r, g, b] = color.slice(0, 3).map(x => x / 255).map(
      x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    const visible = element.checkVisibility({
      opacityProperty: true, visibilityProperty: true,
    });
    if (!text || !visible || element.closest("svg, script, style")) continue;
    const style = getComputedStyle(element);
    const below = background(element);
    const color = rgba(style.color);
    color[3] *= opacity(element);
    const [dark, light] = [luminance(over(color, below)), luminance(below)]
      .sort((x, y) => x - y);
    const ratio = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) {
      found.add(`${ratio.toFixed(2)}: ${text.slice(0, 40)}`);
    }
  }
  return {background: luminance(background(document.body)), low: [...found]};
}"""


@pytest.fixture(scope="module")
def browser():
  with sync_api.sync_playwright() as playwright:
    path = shutil.which("chromium") or playwright.chromium.executable_path
    if not os.path.exists(path):
      pytest.skip("needs Chromium")
    chromium = playwright.chromium.launch(
      executable_path=path, args=["--no-sandbox"]
    )
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """Builds the site and serves it; returns its address."""
  pytest.importorskip("mkdocs")
  folder = tmp_path_factory.mktemp("site")
  subprocess.run(
    [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder],
    cwd=ROOT,
    env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    check=True,
  )
  handler = functools.partial(QuietHandler, directory=folder)
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
  """Serves files without logging requests."""

  def log_message(self, format: str, *args) -> None:
    pass


@pytest.fixture(scope="module")
def answers_page(tmp_path_factory):
  """Writes a page of two models' answers; returns its address."""
  folder = tmp_path_factory.mktemp("answers")
  images = (folder / "wide.png", folder / "tall.png")
  for image, size in zip(images, ((900, 300), (20, 500)), strict=True):
    Image.new("RGB", size, "teal").save(image)
  models = []
  for name, text in (("BF16", "red"), ("FP8", "Donaudampf" * 12)):
    rows = [
      Answer(0, "What color is it?", "Red.", text, images, True, text == "red"),
      Answer(
        1, "Say something long.", "word " * 200, "w" * 500, (), False, False
      ),
    ]
    models.append((name, Answers(2, 8, 4.0, 1, rows)))
  page = folder / "answers.html"
  page.write_text(render(models))
  return page.as_uri()


@pytest.fixture(params=["front page", "layers/", "answers"])
def address(request):
  """Returns the address of the front page, a page with code, or the answers."""
  if request.param == "answers":
    return request.getfixturevalue("answers_page")
  path = "" if request.param == "front page" else request.param
  return request.getfixturevalue("site") + path


@pytest.fixture
def open_page(browser):
  """Returns a function that opens a page; logged errors fail the test."""
  errors, contexts = [], []

  def opened(address, scheme, viewport):
    context = browser.new_context(color_scheme=scheme, viewport=viewport)
    contexts.append(context)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
      "console",
      lambda message: (
        errors.append(message.text)
        if message.type in ("error", "warning")
        else None
      ),
    )
    page.goto(address, wait_until="networkidle")
    return page

  yield opened
  for context in contexts:
    context.close()
  assert errors == []


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_legible(address, scheme, viewport, open_page):
  page = open_page(address, scheme, viewport)
  contrast = page.evaluate(CONTRAST)
  assert contrast["low"] == []
  assert (contrast["background"] < 0.1) == (scheme == "dark")
  missing = page.eval_on_selector_all(
    "img", "images => images.filter(x => !x.naturalWidth).map(x => x.src)"
  )
  assert missing == []
  # The page does not scroll sideways.
  width = page.evaluate("() => document.documentElement.scrollWidth")
  assert width <= viewport["width"]


def test_low_contrast_is_found(open_page, tmp_path):
  bad = tmp_path / "bad.html"
  bad.write_text("<!doctype html><p style='color: #999'>Pale<p>Plain")
  page = open_page(bad.as_uri(), "light", DESKTOP)
  (found,) = page.evaluate(CONTRAST)["low"]
  assert "Pale" in found
