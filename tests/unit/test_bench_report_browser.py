"""The report in headless Chromium, as wide as a desktop's window and as a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PROBE = """<script>addEventListener("load", () => {
  const far = [...document.querySelectorAll("h1,h2,h3,p,svg,.card,.scroll")].filter(
    e => e.getBoundingClientRect().right > innerWidth + 1).length;
  const tiny = [...document.querySelectorAll("svg text")].filter(
    e => e.getBoundingClientRect().height < 9).length;
  const cut = [...document.querySelectorAll("svg text")].filter(e => {
    const box = e.getBoundingClientRect(), svg = e.ownerSVGElement.getBoundingClientRect();
    return box.left < svg.left - 2 || box.right > svg.right + 2 }).length;
  document.body.dataset.found = JSON.stringify(
    {wide: document.documentElement.scrollWidth, inner: innerWidth, far, tiny, cut,
     plots: document.querySelectorAll("svg").length}) })</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt install chromium"),
]


@pytest.mark.parametrize("width", [1200, 500])
def test_nothing_is_cut_off(width: int, tmp_path: Path) -> None:
    """500 is the least that a headless window may be; a frame makes the phone's 390 of it."""
    from vllm_specx.cli import main

    out = tmp_path / "report.html"
    results = [str(RESULTS / f"{name}.json") for name in ("methods", "heads_twin", "never_slower")]
    assert main(["bench", "report", *results, "--out", str(out)]) == 0
    text = out.read_text().replace("</body>", PROBE + "</body>")
    if width == 500:
        text = text.replace("<body>", '<body style="width:390px;margin:0">')
        text = text.replace("innerWidth", "390").replace(
            "document.documentElement.scrollWidth", "document.body.scrollWidth"
        )
    out.write_text(text)
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
            f"--window-size={width},1200", "--virtual-time-budget=3000", "--dump-dom", f"file://{out}",
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    assert match, done.stderr[-2000:]
    found = json.loads(match[1].replace("&quot;", '"'))
    assert found["plots"] >= 8
    assert found["wide"] <= found["inner"], found
    assert found["far"] == found["tiny"] == found["cut"] == 0, found
