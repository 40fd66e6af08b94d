"""`hacpo-mega watch` as its reader meets it: the real server, a real browser, a run that is being written."""

import re
import shutil
import threading
from pathlib import Path

import pytest
from watched_run import WatchedRun

from hacpo_mega.watch import watch

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def address(run: WatchedRun) -> str:
    """Where the page of `run` is served; the server ends with the process."""
    said, told = [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        told.set()

    threading.Thread(target=watch, args=([run.folder], 0, say), daemon=True).start()
    assert told.wait(30.0)
    return said[0]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedRun:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = WatchedRun(tmp_path / "run", num_steps=20)
    for step in range(1, 11):
        made.add_metrics(step)
    made.add_answers(1, ["<img src=x onerror=window.alive=1> is 4", "4"])
    return made


@pytest.mark.nightly
def test_a_run_is_followed_until_it_is_deleted(run, address):
    drive = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: browser)")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with drive.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page, problems = browser.new_page(), []
        page.on("console", lambda told: told.type == "error" and problems.append(told.text))
        page.goto(address)
        chart = page.locator(".chart").filter(has=page.get_by_role("heading", name="Reward while training")).first
        chart.get_by_text("last: step 10").wait_for()
        assert "token" not in page.url
        run.add_metrics(11)
        chart.get_by_text("last: step 11").wait_for(timeout=20_000)
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write(run.metrics_line(12)[:100])
        page.wait_for_timeout(1500)
        assert "last: step 11" in chart.inner_text()
        run.start(8)
        run.add_metrics(9, reward_mean=0.125)
        chart.get_by_text("last: step 9").wait_for(timeout=20_000)
        assert "0.125" in chart.inner_text()
        page.get_by_role("link", name="Answers").click()
        page.locator("tbody tr").first.wait_for()
        page.get_by_role("link", name=re.compile("onerror")).click()
        page.locator(".answer.chosen").wait_for()
        assert page.evaluate("window.alive === undefined") and page.locator("main img").count() == 0
        assert page.context.request.get(page.url.split("#")[0]).status == 200  # with the cookie
        assert browser.new_context().request.get(page.url.split("#")[0]).status == 401  # another user
        aside = run.folder.rename(run.folder.with_name("aside"))
        page.locator("#runs").get_by_text("was moved or deleted").wait_for(timeout=20_000)
        aside.rename(run.folder)
        page.locator("#runs").get_by_text("stopped").wait_for(timeout=20_000)
        shutil.rmtree(run.folder)
        page.locator("#runs").get_by_text("gone").first.wait_for(timeout=20_000)
        assert not problems
        browser.close()
