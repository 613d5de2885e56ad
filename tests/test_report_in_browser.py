"""The report in a real Chromium: no complaint on its console, light, dark, narrow and on paper.

Set TCCL_REPORT_SHOTS to a directory to keep the pictures and look at them.
"""

import os
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from tccl_py.report.page import read_contents, report_html
from tests.planned import ASUS, WRX
from tests.report_pages import Page, all_singles_and_pairs, plan_directory

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
DARK = "--blink-settings=preferredColorScheme=0"
LIGHT = "--blink-settings=preferredColorScheme=1"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not here")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A report of sixteen GPUs; what the browser makes lies beside it."""
    place = tmp_path_factory.mktemp("browser")
    sets = all_singles_and_pairs(range(16), [0], pairs=50)
    plan = plan_directory(place / "plan", WRX, sets=sets)
    (place / "report.html").write_text(report_html(read_contents(plan)))
    return place


def browse(place, *arguments, page="report.html"):
    """Open a page; what the browser prints, and its console's lines."""
    result = subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={place / 'profile'}",
            *arguments,
            f"file://{place / page}",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return result.stdout, console


def shot(place, name, width, height, *arguments):
    """A picture of the page: its size and the colour of its upper left corner."""
    target = Path(os.environ.get("TCCL_REPORT_SHOTS", place)).resolve() / f"{name}.png"
    _, console = browse(
        place, f"--screenshot={target}", f"--window-size={width},{height}", *arguments
    )
    assert console == []
    data = target.read_bytes()
    size = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    return size, corner(data)


def corner(png):
    """Red, green and blue of the first pixel, which no PNG filter changes."""
    at, packed = 8, b""
    while at < len(png):
        length, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        packed += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    return tuple(zlib.decompress(packed)[1:4])


def test_light_and_dark_and_narrow_pages_draw_without_a_complaint(place):
    assert shot(place, "light", 1280, 2000, LIGHT) == ((1280, 2000), (255, 255, 255))
    size, dark = shot(place, "dark", 1280, 2000, DARK)
    assert size == (1280, 2000)
    assert max(dark) < 40
    assert shot(place, "narrow", 400, 2000, LIGHT)[0] == (400, 2000)


def test_what_the_browser_made_of_the_page_has_words_for_every_picture(place):
    dom, console = browse(place, "--dump-dom")
    assert console == []
    page = Page(dom)
    page.assert_accessible()
    assert len(page.all("svg")) >= 3
    assert page.words.startswith("simulated wrx90-16gpu-4switch")


def test_the_page_prints(place):
    target = Path(os.environ.get("TCCL_REPORT_SHOTS", place)).resolve() / "report.pdf"
    _, console = browse(place, f"--print-to-pdf={target}", "--no-pdf-header-footer")
    assert console == []
    assert target.read_bytes().startswith(b"%PDF")


def test_eight_gpus_print_on_ten_pages_with_every_table(tmp_path):
    sets = all_singles_and_pairs(range(8), [0, 1], pairs=50)
    plan = plan_directory(tmp_path / "plan", ASUS, sets=sets)
    page = report_html(read_contents(plan))
    assert page.count("<details") > 4
    (tmp_path / "report.html").write_text(page)
    browse(tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}", "--no-pdf-header-footer")
    assert 3 < len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "report.pdf").read_bytes())) <= 10


def test_a_script_that_got_into_the_page_would_not_run(place):
    text = (place / "report.html").read_text()
    bad = text.replace("</main>", "<script>document.title = 'ran'</script></main>")
    (place / "bad.html").write_text(bad)
    dom, console = browse(place, "--dump-dom", page="bad.html")
    assert "<title>ran</title>" not in dom
    assert any("Content Security Policy" in line for line in console)
