"""The live page in a real Chromium: what it shows, what its buttons do, and that text of a model is never markup."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyarrow.parquet import read_metadata
from redis import Redis
from tba_buffer.storage.keys import Keys
from tokenizers import Tokenizer, models

from tba.api import AckRequest, EvalRequest, EvalResult, EvalResults, LineageRequest, VersionRequest
from tba.clients import BufferClient
from tba.weights import checkpoint_prefix
from tba.wire import Message, encode_rollout
from tests.integration.buffer.test_buffer_conversations import talk
from tests.support.browser import Open, until
from tests.support.buffer import make_heartbeat, make_prompts, make_rollout
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.leases import draw, lease
from tests.support.page_run import NUM_STEPS
from tests.support.redis_process import RedisProcess

if TYPE_CHECKING:
    from playwright.sync_api import Page


def texts(page: Page) -> str:
    return page.inner_text("body")


def test_overview_shows_how_the_run_learns(trained: BufferThread, open_page: Open) -> None:
    page, watched = open_page(trained)
    page.wait_for_selector(".uplot canvas")
    shown = texts(page)
    assert f"step {NUM_STEPS}" in shown
    assert "The mean reward of a batch" in page.inner_text("#summary")
    chart = page.locator("section", has=page.get_by_role("heading", name="Reward", exact=True)).locator(".plot")
    assert "12 values from step 1 to 12" in (chart.get_attribute("aria-label") or "")
    assert "0.9167" in page.inner_text(".u-legend >> nth=0")
    # rollouts of 3 tokens: 12 per step, and one more that was never trained on
    tokens = page.inner_text("section[aria-labelledby=panel-tokens-and-time]")
    for fact in ("435 tokens", "432 tokens"):
        assert fact in tokens
    # every panel says how to read it
    assert page.locator(".panel").count() == page.locator(".panel > .how").count() > 10
    assert (watched.errors, watched.hosts) == ([], {trained.url.split("//")[1]})


def test_zoom_and_hover_of_a_chart_stay_while_the_page_updates(trained: BufferThread, open_page: Open) -> None:
    page, watched = open_page(trained)
    over = page.locator(".u-over").first
    over.wait_for()

    def point_at(share: float) -> None:
        box = over.bounding_box()  # panels above it may have grown
        assert box is not None
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 40)

    def step_at(share: float) -> int:
        point_at(share)
        page.wait_for_timeout(100)
        return page.evaluate("Number(/step:?\\s*(\\d+)/.exec(document.querySelector('.u-legend').innerText)[1])")

    assert (step_at(0.01), step_at(0.99)) == (1, NUM_STEPS)
    assert "0.9167" in page.inner_text(".u-legend >> nth=0")
    step_at(0.5)
    assert "0.9167" not in page.inner_text(".u-legend >> nth=0")  # of the step under the cursor, not the last one
    point_at(0.3)
    page.mouse.down()
    point_at(0.5)
    point_at(0.7)
    page.mouse.up()
    zoomed = (step_at(0.01), step_at(0.99))
    assert 1 < zoomed[0] < zoomed[1] < NUM_STEPS
    for _ in range(2):
        with page.expect_response("**/v1/run?*"):
            pass
    assert (step_at(0.01), step_at(0.99)) == zoomed
    assert watched.errors == []


def test_a_link_shows_what_cannot_be_seen(trained: BufferThread, open_page: Open) -> None:
    page, _ = open_page(trained)
    made = "({ h }) => h('a', { href: '#/' }, ['ab\\u200bc\\u202ed', h('b', {}, '\\u3164 é 👍')], 7).textContent"
    assert page.evaluate(f"import('./page/js/dom.js').then({made})") == "ab\\u{200b}c\\u{202e}d\u3164 é 👍7"


def test_rollouts_are_filtered_and_exported(trained: BufferThread, open_page: Open) -> None:
    page, watched = open_page(trained, "#/rollouts?order=best")
    page.wait_for_selector("main table tbody tr")
    rewards = page.locator("main tbody tr td:first-child").all_inner_texts()
    assert rewards == sorted(rewards, reverse=True)
    page.select_option("#filter-order", "newest")
    page.select_option("#filter-status", "failed")
    page.click("form.filters button.primary")
    until(page, "document.querySelectorAll('main tbody tr').length === 1")
    assert "failed" in page.inner_text("main tbody tr td:first-child")  # named, and no number
    page.fill("#filter-contains", "of step 5")
    page.select_option("#filter-status", "")
    page.click("form.filters button.primary")
    until(page, "document.querySelectorAll('main tbody tr').length === 12")
    with page.expect_download() as download:
        page.click("text=Export all that match")
    assert download.value.suggested_filename == "test-rollouts.parquet"
    assert read_metadata(download.value.path()).num_rows == 12
    assert watched.errors == []


def test_one_rollout_says_what_made_it_and_what_it_made(trained: BufferThread, open_page: Open) -> None:
    client = trained.client()
    best = next(one for one in client.list_rollouts(order="best", limit=50).rollouts if one.num_batches)
    page, watched = open_page(trained, f"#/rollout/{best.rollout_id}")
    page.wait_for_selector("text=Trained by")
    shown = texts(page)
    assert best.prompt_text is not None
    assert best.prompt_text in shown
    assert best.response_text in shown
    steps = page.locator("section", has=page.get_by_role("heading", name="Trained by")).locator("tbody tr")
    assert steps.count() == best.num_batches
    assert "0.25" in steps.first.inner_text()
    page.wait_for_selector("section:has-text('Its group') tbody tr")
    page.check("input[value=advantage]")
    assert watched.errors == []


def test_a_conversation_is_shown_turn_by_turn_and_its_tokens_by_origin(
    serve_buffer: ServeBuffer, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(40)}, unk_token="w0"))
    monkeypatch.setattr("tba_buffer.rollouts.token_texts.load_tokenizer", lambda *given: words)
    served = serve_buffer()
    calls = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": "<b>3</b>"}}</tool_call>'
    said = (
        Message("user", "2 * 3?"),
        Message("assistant", calls),
        Message("tool", "6"),
        Message("assistant", "six", 1),
    )
    cut = talk(messages=said)
    failed = talk(reward=None, stop_condition="tool_failed", is_truncated=False).with_failure("tool step: it is away")
    client = served.with_prompts(1)
    client.push([encode_rollout(each) for each in (cut, failed)])
    client.heartbeat(make_heartbeat(gauges={"episodes/shop": 4.0, "episodes_failed_tool/shop": 1.0}))
    page, watched = open_page(served, f"#/rollout/{cut.rollout_id.hex()}")
    page.wait_for_selector("section:has-text('Its group')")
    turns = page.locator("section[aria-labelledby=panel-conversation] .talk > li")
    heads = [each.inner_text().split("\n")[0] for each in turns.all()]
    assert heads == ["User", "Assistant", "Tool", "Assistant", "cut off by max_turns"]
    assert turns.nth(1).locator("code").inner_text() == 'add(a: 2, b: "<b>3</b>")'
    assert "tool call: ok" in turns.nth(1).inner_text()
    assert "reward" not in turns.nth(1).inner_text()  # not known, which is not 0
    assert "reward 0.5" in turns.nth(3).inner_text()
    tokens = page.locator("section[aria-labelledby=panel-tokens]")
    assert tokens.locator("details[open]").count() == 0
    second = tokens.locator("details").nth(1)
    second.locator("summary").click()
    assert "Sequence 2 of 2: 15 (policy 6, environment 9, template 0)" in second.inner_text()
    repeated, new = second.locator("li.policy").all()
    assert "not trained again" in repeated.inner_text()
    assert repeated.locator("span[title*=log-prob]").count() == 0
    assert (new.locator("pre").inner_text().split(), new.locator("span.lp-0").count()) == (["w30", "w31"], 2)
    page.check("input[value=version]")
    assert (tokens.locator("details[open]").count(), new.locator("span.span-0").count()) == (1, 2)
    page.goto(f"{served.url}/#/rollout/{failed.rollout_id.hex()}")
    page.wait_for_selector("li.end:has-text('failed in: tool') >> text=tool step: it is away")
    page.goto(f"{served.url}/#/rollouts?failure_boundary=tool")
    until(page, "document.querySelectorAll('main tbody tr').length === 1")
    assert page.input_value("#filter-failure_boundary") == "tool"
    page.click("nav >> text=Overview")
    page.wait_for_selector("#panel-environments")
    cells = page.locator("section[aria-labelledby=panel-environments] tbody td")
    assert cells.all_inner_texts()[:4] == ["shop", "4", "0.0 %", "tool 1"]
    assert watched.errors == []


def test_the_next_rollout_is_that_of_the_list_or_else_of_the_group(trained: BufferThread, open_page: Open) -> None:
    page, watched = open_page(trained, "#/rollouts?order=best")
    page.wait_for_selector("main tbody tr")
    listed = [
        link.split("/")[-1]
        for link in page.eval_on_selector_all("main tbody td:nth-child(2) a", "all => all.map(one => one.hash)")
    ]
    page.click("main tbody td:nth-child(2) a >> nth=1")
    page.wait_for_selector("text=2 of 50 in the list")
    page.click("text=Next")
    page.wait_for_selector("text=3 of 50 in the list")
    assert page.url.endswith(listed[2])
    page.click("text=Previous")
    page.click("text=Previous")
    page.wait_for_selector("text=1 of 50 in the list")
    assert page.locator("a:has-text('Previous')").count() == 0
    page.click("main >> text=Rollouts >> nth=0")
    assert page.url.endswith("#/rollouts?order=best")
    slot = [one for one in trained.client().ledger().entries if one.kind == "batch"][-1].rollout_ids[4:8]
    page.goto(f"{trained.url}/#/rollout/{slot[1]}")
    page.reload()  # a link from elsewhere knows no list
    page.wait_for_selector("text=in its group")
    group = page.locator("section:has-text('Its group') tbody")
    links = [link.get_attribute("href") for link in group.locator("a").all()]
    assert links == [f"#/rollout/{one}" for one in dict.fromkeys(slot) if one != slot[1]]
    assert group.locator("tr:has-text('this one')").inner_text().split("\t")[1] in ("0.25", "-0.75")
    assert watched.errors == []


CHAT = (
    "<|im_start|>system\nYou are terse.<|im_end|>\n"
    "<|im_start|>user\nWhat is {0}+{0}?<|im_end|>\n<|im_start|>assistant\n"
)


LAST_TURNS = {
    CHAT.format(1) + "Let me think.\n<think>": "What is 1+1?",
    CHAT.format(1) + "2<|im_end|>\n" + CHAT.format(2): "What is 2+2?",
    "<|start_header_id|>user<|end_header_id|>\n\nQ?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n": "Q?",
    "<bos><start_of_turn>user\nQ?<end_of_turn>\n<start_of_turn>model\n": "Q?",
    "<s>[INST] Q? [/INST]": "Q?",
    "<｜begin▁of▁sentence｜>Sys<｜User｜>Q?<｜Assistant｜>": "Q?",
    "<|system|>\nSys<|end|>\n<|user|>\nQ?<|end|>\n<|assistant|>\n": "Q?",
    "An assistant counts <|here|>: 1 ": "An assistant counts <|here|>: 1 ",
}


def test_rows_of_a_chat_show_its_last_turn_and_the_gold_answer(serve_buffer: ServeBuffer, open_page: Open) -> None:
    served = serve_buffer()
    client, metadata = served.client(), {"source": "a generator " * 50}
    prompts = [
        one.model_copy(update={"text": CHAT.format(i), "data": {"answer": 2 * i, **metadata}})
        for i, one in enumerate(make_prompts(3))
    ]
    client.upload_prompts(prompts)
    client.push([encode_rollout(make_rollout(f"train-{i}", response_text=f"It is {2 * i}. " * 20)) for i in range(3)])
    page, watched = open_page(served, "#/rollouts?order=oldest", viewport={"width": 1440, "height": 900})
    page.wait_for_selector("main tbody tr")
    assert page.locator("main tbody tr >> nth=2 >> td").all_inner_texts()[2:4] == ["What is 2+2?", "4"]
    assert page.evaluate("(one => one.scrollWidth <= one.clientWidth)(document.querySelector('.scroll'))")
    page.click("text=Columns")
    page.uncheck("input[name=column-age]")
    page.check("input[name=column-searcher]")
    page.reload()
    page.wait_for_selector("main tbody tr")
    heads = page.locator("main thead th").all_inner_texts()
    assert ("age" in heads, "searcher" in heads, heads[:4]) == (False, True, ["reward", "completion", "prompt", "gold"])
    turns = "texts => import('./page/js/format.js').then((it) => texts.map((text) => it.lastTurn(text)))"
    assert page.evaluate(turns, list(LAST_TURNS)) == list(LAST_TURNS.values())
    page.goto(f"{served.url}/#/prompts")
    page.click("text=What is 1+1?")
    page.wait_for_selector("main pre >> text=What is 1+1?")
    page.click("text=The whole prompt, as the model reads it")
    page.wait_for_selector("text=You are terse.")
    assert watched.errors == []


PAINTED = """(name => {
    const colour = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const [r, g, b] = colour.match(/\\w\\w/g).map((two) => parseInt(two, 16));
    const canvas = document.querySelector(".uplot canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return data.some((_, at) => at % 4 === 0 && data[at] === r && data[at + 1] === g && data[at + 2] === b);
})('--series-1')"""


def test_a_curve_of_one_point_is_drawn(serve_buffer: ServeBuffer, open_page: Open) -> None:
    served = serve_buffer()
    client, lineage = served.begin(4, per_prompt=4)
    batch = draw(client, lineage, 1)
    client.ack(batch.batch_id, AckRequest(lineage=1, step=1, token=lineage.token, metrics={"reward_mean": 0.5}))
    page, watched = open_page(served)
    page.wait_for_selector(".uplot canvas")
    until(page, PAINTED)
    assert page.evaluate("document.querySelector('.uplot').clientHeight >= innerHeight / 3")
    assert watched.errors == []


def test_text_of_a_model_is_never_markup(trained: BufferThread, open_page: Open) -> None:
    for view in ("#/rollouts?contains=onerror", "#/prompt/train-0", "rollout"):
        if view == "rollout":
            found = trained.client().list_rollouts(contains="onerror").rollouts[0]
            view = f"#/rollout/{found.rollout_id}"
        page, watched = open_page(trained, view)
        until(page, "document.querySelector('main').innerText.includes('onerror')")
        assert page.title().startswith("test: learning")
        assert page.locator("main img, main script, main pre b").count() == 0
        assert watched.errors == []


def test_the_same_prompt_is_shown_under_two_versions(trained: BufferThread, open_page: Open) -> None:
    page, watched = open_page(trained, "#/prompts")
    page.click("main tbody a >> nth=0")
    page.wait_for_selector(".answer")
    versions = [page.input_value("#version-older"), page.input_value("#version-newer")]
    assert versions[0] != versions[1]
    page.select_option("#version-older", versions[1])
    newest = f"of step {versions[1].split('-')[1]}"
    until(page, f"document.querySelector('.grid.two').innerText.split({newest!r}).length > 4")
    assert watched.errors == []


def evaluated(client: BufferClient, version: str) -> None:
    client.request_eval(EvalRequest(version=version, num_prompts=1))
    for item in lease(client, 2).leases:
        assert item.eval_id is not None
        num = item.num_rollouts
        result = EvalResult(lease_id=item.lease_id, rewards=[1.0] * num, num_response_tokens=[3] * num)
        client.eval_results(item.eval_id, EvalResults(searcher_id="s1", version=version, results=[result]))


def test_searchers_settings_and_ledger_are_there(trained: BufferThread, open_page: Open, redis: RedisProcess) -> None:
    page, watched = open_page(trained, "#/fleet")
    page.wait_for_selector("text=searcher-7")
    assert "1,234" in texts(page)
    page.click("nav >> text=Settings")
    page.wait_for_selector("text=Audit of the run")
    assert "learning_rate" in texts(page)
    page.click("nav >> text=Ledger")
    page.wait_for_selector(f"text=1-{NUM_STEPS}")
    assert page.locator("main tbody tr").count() == NUM_STEPS + 1
    client = trained.client()
    assert client.ledger(limit=1).num_lines == NUM_STEPS + 1
    with Redis.from_url(redis.url, decode_responses=True) as raw:
        token = raw.hget(Keys("test").run, "token")
    client.announce_version(VersionRequest(version="1-8", token=str(token)))
    for version in ("0-0", "1-8"):
        evaluated(client, version)
    page.click("nav >> text=Overview")
    chart = "document.querySelector('[aria-labelledby=chart-reward] .plot')?.getAttribute('aria-label')"
    until(page, f"{chart}?.includes('held out, sampled: 2 values')")
    client.new_lineage(LineageRequest(trainer_id="t", parent="1-4"))  # what came after it is abandoned
    until(page, f"{chart}?.includes('held out, sampled: 1 values')")
    page.click("nav >> text=Searchers")
    page.wait_for_selector("tr:has-text('1-8') >> text=done, abandoned: the run went back")
    page.click("nav >> text=Ledger")
    page.wait_for_selector(f"tr:has-text('1-{NUM_STEPS}') >> text=abandoned: the run went back")
    assert watched.errors == []


def test_buttons_act_and_leave_reasons_in_the_audit(trained: BufferThread, open_page: Open, tmp_path: Path) -> None:
    checkpoints = tmp_path / checkpoint_prefix("test")
    page, watched = open_page(trained)
    page.click("#commands >> text=Evaluate")
    page.fill("dialog #ask-prompts", "1")
    page.click("dialog button.primary")
    until(page, "!document.querySelector('dialog')")
    assert [(item.version, item.num_prompts) for item in trained.client().run().evals] == [("0-0", 1)]
    page.click("#commands >> text=Evaluate")
    page.fill("dialog #ask-prompts", "1")
    page.click("dialog button.primary")
    page.wait_for_selector("dialog >> text=The evaluation of 0-0 on 1 held-out prompts is under way: 0 are done.")
    assert page.locator("dialog input, dialog button.primary").count() == 0, "Enter must not ask again"
    assert page.evaluate("document.activeElement.textContent") == "Close"
    page.keyboard.press("Enter")
    until(page, "!document.querySelector('dialog')")
    page.click("#commands >> text=Pause")
    page.fill("dialog #ask-reason", "lunch")
    page.click("dialog button.primary")
    until(page, "document.getElementById('advice').innerText === 'The run is paused (lunch). Resume it (tba resume).'")
    assert page.inner_text("#run-state") == "waiting"
    assert page.inner_text("#advice code") == "tba resume"
    assert trained.client().run_changes().changes[-1].reason == "lunch"
    for version in ("1-4", "1-8"):
        (checkpoints / version).mkdir(parents=True)
        (checkpoints / version / "manifest.json").write_text("{}")
    page.click("#commands >> text=Roll back")
    page.wait_for_selector("dialog #ask-version")
    assert page.locator("#ask-version option").all_inner_texts() == ["1-8, 4 steps back", "1-4, 8 steps back"]
    assert "The run stays paused" in page.inner_text("dialog")
    page.select_option("dialog #ask-version", "1-4")
    page.fill("dialog #ask-reason", "it fell")
    assert trained.client().run().rollback is None
    page.click("dialog button.primary")
    until(page, "document.getElementById('doing').innerText.startsWith('A rollback to 1-4 waits for the trainer.')")
    waiting = trained.client().run().rollback
    assert waiting is not None
    assert (waiting.version, waiting.reason) == ("1-4", "it fell")
    until(page, "!document.getElementById('commands').innerText.includes('Roll back')")
    page.click("nav >> text=Settings")
    page.wait_for_selector("tr:has-text('rollback') >> text=to 1-4")
    page.click("tr:has-text('learning_rate') button")
    page.fill("dialog #ask-value", "0.0007")
    page.click("dialog button.primary")
    until(page, "!document.querySelector('dialog')")
    assert trained.client().settings().now["learning_rate"] == pytest.approx(0.0007)
    page.click("tr:has-text('learning_rate') button")
    page.fill("dialog #ask-value", "-1")
    page.click("dialog button.primary")
    until(page, "document.querySelector('dialog [role=alert]').textContent.includes('learning_rate')")
    # a decimal comma is no number; as null it would set the recipe's value
    page.fill("dialog #ask-value", "0,0005")
    page.click("dialog button.primary")
    until(page, "document.querySelector('dialog [role=alert]').textContent.includes('no number')")
    page.click("dialog >> text=Cancel")
    assert trained.client().settings().now["learning_rate"] == pytest.approx(0.0007)
    # shown at once, though the run is paused and makes no step
    until(page, "document.querySelector('main').innerText.includes('7.00e-4')")
    # the browser itself reports the refused request, and nothing else
    assert all("422" in error or "400" in error for error in watched.errors)


def test_empty_states_say_what_is_awaited(serve_buffer: ServeBuffer, open_page: Open) -> None:
    served = serve_buffer()
    page, watched = open_page(served)
    page.wait_for_selector("text=The first optimizer step is awaited")
    for view, text in (
        ("#/rollouts", "The first rollout is awaited"),
        ("#/prompts", "none has been uploaded yet"),
        ("#/fleet", "The first searcher is awaited"),
        ("#/ledger", "The first optimizer step is awaited"),
    ):
        page.goto(f"{served.url}/{view}")
        page.wait_for_selector(f"text={text}")
    assert [error for error in watched.errors if "503" not in error] == []


def test_a_view_awaits_nothing(serve_buffer: ServeBuffer, open_page: Open) -> None:
    serve_buffer().stop()
    over = serve_buffer(buffer={"read_only": "it is over"})
    page, watched = open_page(over)
    page.goto(f"{over.url}/#/ledger")
    page.wait_for_selector("text=The files that this view shows hold none.")
    assert page.inner_text("#run-state") == "interrupted"
    assert watched.errors == []
