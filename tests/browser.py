"""A real browser for tests: Debian's chromium (or another that is installed), driven by playwright, which brings none."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def needed(missing: str) -> None:
    """Skips what needs it, with the reason; where a browser was promised ($HEADRACE_NEEDS_BROWSER) it fails."""
    if os.environ.get("HEADRACE_NEEDS_BROWSER"):
        pytest.fail(f"{missing}, and HEADRACE_NEEDS_BROWSER is set")
    pytest.skip(f"{missing}: `bash tools/browser.sh` installs it on Debian")


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        needed("there is no playwright")
    path = os.environ.get("HEADRACE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        needed("there is no chromium to open the page in")
    # Its own sandbox needs what containers and root do not have; the page is ours.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield chromium
        finally:
            await chromium.close()
