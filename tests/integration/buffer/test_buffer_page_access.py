"""Who can use the live page, and how: token, keyboard, phone, odd addresses, cut answers; and without other hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2
import pytest

from tests.support.browser import Open, until
from tests.support.buffer import make_prompts
from tests.support.buffer_fixtures import BufferThread, ServeBuffer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TOKENS = {
    "operator": "operator-secret-1",
    "trainer": "trainer-secret-1",
    "searcher": "searcher-1",
    "viewer": "viewer-1",
}
PHONE = {"width": 360, "height": 740}


def test_a_token_is_asked_for_and_the_service_checks_the_role(serve_buffer: ServeBuffer, browser: Browser) -> None:
    served = serve_buffer(tokens=TOKENS)
    page = browser.new_page()
    page.goto(served.url)
    page.wait_for_selector("dialog #token")
    page.fill("#token", TOKENS["viewer"])
    page.click("dialog button")
    until(page, "document.getElementById('run-state').textContent === 'waiting'")
    page.click("#commands >> text=Pause")
    page.click("dialog button.primary")
    page.wait_for_selector("dialog >> text=Sign in with an operator's token")
    assert served.client(token=TOKENS["operator"]).run().state == "running"
    page.close()
    page = browser.new_page()
    page.goto(f"{served.url}/#token={TOKENS['operator']}")
    until(page, "document.getElementById('run-state').textContent === 'waiting'")
    assert TOKENS["operator"] not in page.url
    page.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "buffer.test"])
def test_a_reload_keeps_the_token_on_loopback_alone(host: str, serve_buffer: ServeBuffer, browser: Browser) -> None:
    served = serve_buffer(tokens=TOKENS)
    address = served.url.replace("127.0.0.1", host)
    page = browser.new_page()
    page.route(
        f"{address}/**",
        lambda route: route.fulfill(response=route.fetch(url=route.request.url.replace(host, "127.0.0.1"))),
    )
    page.goto(f"{address}/#token={TOKENS['viewer']}")
    until(page, "document.getElementById('run-state').textContent === 'waiting'")
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    is_loopback = host == "127.0.0.1"
    assert page.evaluate("sessionStorage.length") == is_loopback
    page.reload()
    if is_loopback:
        until(page, "document.getElementById('run-state').textContent === 'waiting'")
    else:
        page.wait_for_selector("dialog #token")
    page.close()


def test_the_page_survives_cut_answers_and_addresses_that_are_none(trained: BufferThread, open_page: Open) -> None:
    page, watched = open_page(trained, "#/prompt/%E0%A4%A")
    page.wait_for_selector("text=was never uploaded")
    page.route("**/v1/run?*", lambda route: route.fulfill(body='{"run": ', content_type="application/json"))
    page.wait_for_selector("#problem >> text=was cut")
    page.unroute("**/v1/run?*")
    until(page, "document.getElementById('problem').hidden")
    assert [error for error in watched.errors if "404" not in error] == []


def test_prompts_with_odd_ids_have_a_page(serve_buffer: ServeBuffer, open_page: Open) -> None:
    served = serve_buffer()
    client = served.client()
    ids = ["a/b?c#d", "100%", "%2F", "/", " x  y ", "é🦆&=+", "<b>"]
    client.upload_prompts(
        [one.model_copy(update={"prompt_id": each}) for one, each in zip(make_prompts(len(ids)), ids, strict=True)]
    )
    page, watched = open_page(served, "#/prompts")
    for number, each in enumerate(ids):
        page.goto(f"{served.url}/#/prompts")
        page.click(f"main tbody tr:nth-child({number + 1}) a")
        page.wait_for_selector("main h2 code")
        assert page.text_content("main h2 code") == each
    assert watched.errors == []


def test_without_a_known_token_the_page_asks_once_and_stops(serve_buffer: ServeBuffer, browser: Browser) -> None:
    served = serve_buffer(tokens=TOKENS)
    page = browser.new_page()
    refused: list[str] = []
    page.on("response", lambda response: refused.append(response.url) if response.status == 401 else None)
    page.goto(served.url)
    page.wait_for_selector("dialog #token")
    page.wait_for_timeout(5000)
    assert len(refused) == 2
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog #token")
    # the address of `tba view` in the tab that is open already
    page.goto(f"{served.url}/#token={TOKENS['viewer']}")
    until(page, "document.getElementById('run-state').textContent === 'waiting'")
    assert page.locator("dialog").count() == 0
    assert TOKENS["viewer"] not in page.url
    page.close()


IN_THE_COLOURS_OF_THE_SCHEME = """(() => {
    const wanted = document.createElement("i").style;
    wanted.color = getComputedStyle(document.documentElement).getPropertyValue("--series-1").trim();
    return wanted.color === document.querySelector(".u-series:nth-child(2) .u-marker").style.borderColor;
})()"""


@pytest.mark.nightly
def test_axe_finds_nothing_serious_and_a_phone_never_scrolls_sideways(trained: BufferThread, open_page: Open) -> None:
    from axe_playwright_python.sync_playwright import Axe

    newest = trained.client().list_rollouts(limit=1).rollouts[0].rollout_id
    tabs = ("#/", "#/rollouts", "#/prompts", "#/fleet", "#/settings", "#/ledger")
    page, _ = open_page(trained, viewport=PHONE)
    for view in (*tabs, f"#/rollout/{newest}", "#/prompt/train-0"):
        page.goto(f"{trained.url}/{view}")
        page.wait_for_selector("main h2")
        until(page, "!document.querySelector('main').innerText.includes('Asking for')")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = Axe().run(page).response["violations"]
            serious = [
                (item["id"], item["nodes"][0]["html"]) for item in found if item["impact"] in ("serious", "critical")
            ]
            assert serious == [], f"{view}, {scheme}"
        if view == "#/":  # the scheme is dark now: a chart reads its colours when it is made
            until(page, IN_THE_COLOURS_OF_THE_SCHEME)
        width = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert width[0] <= width[1], f"{view} is {width[0]} px wide on a phone of {width[1]} px"


@pytest.mark.nightly
def test_the_keyboard_reaches_content_tabs_and_buttons(trained: BufferThread, open_page: Open) -> None:
    page, _ = open_page(trained)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.focus("nav a[href='#/rollouts']")
    page.keyboard.press("Enter")
    page.wait_for_selector("form.filters")
    assert page.evaluate("document.activeElement.id") == "main"


def test_files_are_cached_by_content_and_allow_no_inline_script(trained: BufferThread) -> None:
    index = httpx2.get(f"{trained.url}/")
    policy = index.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    again = httpx2.get(f"{trained.url}/", headers={"if-none-match": index.headers["etag"]})
    assert again.status_code == 304
    assert httpx2.get(f"{trained.url}/page/nothing.js").json()["type"] == "urn:tba:problem:not-found"
    assert httpx2.get(f"{trained.url}/page/../files.py").status_code == 404
