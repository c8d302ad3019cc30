"""The page as a browser shows it, on a desk and on a phone, in Chromium where it is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

import stories
from longspan.report import write_report

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"]
WIDTHS = {"desk": 1280, "phone": 390}

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium")

MEASURE = """
addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    const plot = page.querySelector(".plot"), box = plot.getBoundingClientRect();
    plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, bubbles: true }));
    const lines = [...page.querySelectorAll("svg .line, svg .area")].map((line) => line.getBoundingClientRect());
    found[frame.id] = {
      width: root.clientWidth,
      needed: root.scrollWidth,
      charts: page.querySelectorAll("figure svg").length,
      drawn: lines.filter((line) => line.width > 100).length,
      outside: [...page.querySelectorAll(".plot span:not(.tip)")].filter((text) => {
        const edges = text.getBoundingClientRect();
        return edges.left < 0 || edges.right > root.clientWidth;
      }).map((text) => text.textContent),
      verdict: page.querySelector("[role=status]").innerText,
      tip: page.querySelector(".tip").textContent,
      columns: getComputedStyle(page.querySelector(".charts")).gridTemplateColumns.split(" ").length,
    };
  }
  document.body.textContent = JSON.stringify(found);
});
"""


def chromium(folder: Path, *arguments: str) -> tuple[str, list[str]]:
    """Run Chromium with a new profile; return what it prints, and what pages said on their consoles."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def seen(folder: Path, page: Path) -> tuple[dict[str, dict], list[str]]:
    """Show a page at several widths at once; return what is measured of it, and the consoles' lines."""
    source = html.escape(page.read_text())
    frames = (
        f'<iframe id="{name}" width="{width}" height="900" srcdoc="{source}"></iframe>'
        for name, width in WIDTHS.items()
    )
    frame = folder / "frame.html"
    frame.write_text(f"<!doctype html><meta charset=utf-8><body>{''.join(frames)}<script>{MEASURE}</script></body>")
    dom, consoles = chromium(folder, "--dump-dom", frame.as_uri())
    body = re.search(r"<body>(.*?)</body>", dom, re.DOTALL)
    assert body is not None
    return json.loads(html.unescape(body[1])), consoles


def check(found: dict[str, dict], consoles: list[str], charts: int) -> None:
    """Check what holds for every page."""
    assert consoles == []
    for name, page in found.items():
        assert page["width"] == WIDTHS[name] and page["needed"] <= page["width"], name
        assert page["charts"] == charts and page["drawn"] >= charts, name
        assert page["outside"] == [], name
    assert found["desk"]["columns"] == 2 and found["phone"]["columns"] == 1


def test_a_complete_run_in_a_browser(tmp_path: Path) -> None:
    path, _ = write_report(stories.leave(tmp_path / "run", stories.facts(end=stories.ended()), stories.rows(200)))
    found, consoles = seen(tmp_path, path)
    check(found, consoles, charts=8)
    for page in found.values():
        assert page["verdict"] == "The run ended after step 200 of 200."
        assert re.fullmatch(r"step 10[01]\nloss  [\d.]+\nmean of 7 steps  [\d.]+", page["tip"])
    chromium(tmp_path, "--window-size=1280,1000", f"--screenshot={tmp_path / 'page.png'}", path.as_uri())
    with Image.open(tmp_path / "page.png") as image:
        assert image.size == (1280, 1000)
        colors = image.convert("RGB").getcolors(1 << 24) or []
    assert len(colors) > 50
    most = max(count for count, _ in colors)
    assert most < 0.8 * 1280 * 1000  # more than a background
    blue = (37, 99, 201)
    assert {color: count for count, color in colors}[blue] > 500  # lines of charts


def test_a_run_that_was_killed_halfway_in_a_browser(tmp_path: Path) -> None:
    facts = stories.facts(plan=None)
    path, _ = write_report(stories.leave(tmp_path / "run", facts, stories.rows(100)[:37], '{"step": 38, "loss": 2.'))
    found, consoles = seen(tmp_path, path)
    check(found, consoles, charts=8)
    for page in found.values():
        headline, detail = page["verdict"].split("\n")
        assert headline == "The run did not end: the last that was seen of it is step 37 of 200."
        assert detail == "It was killed, or still runs. The last line of its metrics is torn."
        assert re.fullmatch(r"step (18|19|20)\n[\d.]+", page["tip"])
