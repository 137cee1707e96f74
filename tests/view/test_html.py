"""The page: complete, safe with anything a model writes, and usable in a real browser."""

import html
import json
import re

import pytest
import torch

import dgemma
from dgemma.view import Board, to_html
from dgemma.view.html import NOTEBOOK_BYTES, Page
from view.converging import Words, record, writer_of

HOSTILE = [
    "</script>",
    "<script>alert(1)</script>",
    "<!--",
    "\u2028",
    "\u2029",
    '"><img src=x onerror=alert(2)>',
    "]]>",
]


@pytest.fixture(scope="module")
def hostile():
    """A run whose text contains strings that could break a page, and one frozen token."""
    tokenizer = Words([*HOSTILE, " and", "&lt;", "&", "'", "\\", "\ud800", "\n", "\x1b[31m", "`", "${x}"])
    text = " and".join([*HOSTILE, "&lt;", "\\", "\ud800", "\x1b[31m", "${x}", "\n"])
    canvas = torch.full((1, 32), -1)
    canvas[0, 1] = tokenizer.token_id(" and")
    return record(text, tokenizer=tokenizer, canvas_len=32, canvas=canvas, frozen=canvas >= 0, steps=24)


def content_of(page):
    found = re.findall(r'<script type="application/json" id="content">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def test_a_models_text_is_never_parsed_as_markup(hostile):
    out, tokenizer = hostile
    page = to_html(out.trajectory, tokenizer=tokenizer)
    content = content_of(page)
    assert set(HOSTILE) - {"\u2028", "\u2029"} <= set(content["texts"])
    _, _, after = page.partition('id="content">')
    data = after[: after.index("</script>")]
    assert not set(data) & set("<>&\u2028\u2029")
    assert data.isascii()
    assert page.count("<script") == page.count("</script>") == 3  # the data, one row, the player
    assert "<img" not in page
    page.encode()


def test_the_page_loads_nothing_and_runs_only_its_own_script(hostile):
    page = to_html(hostile[0].trajectory)
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page).group(1)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"""(src|href)\s*=\s*["']""", page.split('id="content"')[0])


@pytest.fixture(scope="module")
def page(recorded, tmp_path_factory):
    """The page of the recorded run."""
    path = tmp_path_factory.mktemp("page") / "run.html"
    to_html(recorded[0].trajectory, path, tokenizer=recorded[1])
    return path


@pytest.mark.slow
def test_the_numbers_are_those_of_the_trajectory(recorded, browser, page):
    out, _ = recorded
    step = out.trajectory.at(block=0, step=6)
    position = int(step.entropy[0].argmax())  # the least certain position has the most candidates
    browser.open(page, "#step=7")
    assert browser.run("document.getElementById('place').textContent").startswith("Block 1 of 2, step 7 of")
    facts = browser.run("document.getElementById('facts').textContent")
    assert f"mean entropy {step.entropy[0].mean():.3f}" in facts
    assert f"{int(step.accepted[0].sum())} accepted" in facts
    browser.mouse("mouseMoved", *browser.centre(f'[data-i="{position}"]'))
    tip = browser.run("document.getElementById('tip').innerText")
    assert f"confidence {step.confidence[0, position]:.3f} · entropy {step.entropy[0, position]:.3f} nats" in tip
    shares = browser.run("[...document.querySelectorAll('#tip .chance')].map(e => e.textContent)")
    assert shares == [f"{100 * p:.1f} %" for p in step.top_probabilities[0, position].float().tolist()]
    marks = browser.run("[...document.querySelectorAll('#canvas .t')].map(e => e.classList.contains('accepted'))")
    assert marks[:64] == step.accepted[0].tolist()


@pytest.mark.slow
def test_the_page_plays_and_steps_with_mouse_and_keys(recorded, browser, page):
    out, tokenizer = recorded
    last = int(out.steps[0].sum()) + 2  # two blocks' noise before their steps, and the text after them

    def frame():
        return int(browser.run("document.getElementById('scrub').value"))

    browser.open(page)
    assert frame() == 0, "the page opens at the noise"
    browser.click("#start")
    browser.wait(f"document.getElementById('scrub').value === '{last}'", seconds=60)
    assert browser.run("getComputedStyle(document.getElementById('start')).visibility") == "hidden"
    assert browser.run("document.getElementById('place').textContent") == "Written"
    speed = f"{out.tokens_per_forward[0]:.1f} tokens per forward"
    assert browser.run("document.getElementById('total').textContent").endswith(speed)
    browser.press("Home")
    assert browser.run("document.getElementById('place').textContent") == "Block 1 of 2, noise"
    for key, expected in [("ArrowRight", 1), ("End", last), ("ArrowLeft", last - 1), ("Home", 0)]:
        browser.press(key)
        assert frame() == expected
    for button, expected in [("#forward", 1), ("#last", last), ("#back", last - 1), ("#first", 0)]:
        browser.click(button)
        assert frame() == expected
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, *browser.centre("#strip svg"))
    assert frame() == (last + 1) // 2
    browser.run("document.getElementById('speed').value = '4'")
    browser.run("document.activeElement.blur()")
    browser.press(" ")
    browser.wait(f"document.getElementById('scrub').value === '{last}'", seconds=60)
    assert browser.run("document.getElementById('play').textContent") == "Play"
    text = browser.run("[...document.querySelectorAll('#canvas .t:not(.dropped)')].map(e => e.innerText).join('')")
    assert text.replace("<eos>", "") == tokenizer.decode(out.new_tokens[0]).replace(" ", "")
    browser.wait(f"location.hash === '#step={last}&row=0'")


@pytest.mark.slow
def test_rows_colours_and_best_guesses_can_be_selected(recorded, browser, page):
    out, _ = recorded
    browser.open(page, "#step=2&row=1")
    texts = "[...document.querySelectorAll('#canvas .t')].slice(0, 64).map(e => e.innerText)"
    levels = (
        "[...document.querySelectorAll('#canvas .t')].slice(0, 64).map(e => Number(e.className.match(/h(\\d+)/)[1]))"
    )
    step = out.trajectory.at(block=0, step=1)
    assert browser.run("document.getElementById('row').value") == "1"
    options = browser.run("[...document.getElementById('row').options].map(e => e.textContent)")
    assert options == ["0: Noi", "1: Noi"]  # the first words of their prompts
    assert f"{int(step.accepted[1].sum())} accepted" in browser.run("document.getElementById('facts').textContent")
    canvas, by_confidence = browser.run(texts), browser.run(levels)
    surest_first = step.confidence[1].argsort(descending=True).tolist()
    assert [by_confidence[i] for i in surest_first] == sorted(by_confidence)
    assert min(by_confidence) < 4 < 12 < max(by_confidence)
    browser.press("d")
    draft = browser.run(texts)
    changed = [i for i, (a, b) in enumerate(zip(canvas, draft, strict=True)) if a != b]
    assert len(changed) > 20
    assert all(step.next_canvas[1, i] != step.draft[1, i] for i in changed)
    browser.press("c")
    by_entropy = browser.run(levels)
    assert by_entropy != by_confidence
    assert [by_entropy[i] for i in step.entropy[1].argsort().tolist()] == sorted(by_entropy)
    browser.press("ArrowDown")
    browser.wait("document.getElementById('row').value === '0'")


@pytest.mark.slow
def test_positions_can_be_read_with_the_keyboard_alone(browser, page):
    browser.resize(390, 800)
    browser.open(page, "#step=3")
    browser.run("document.getElementById('canvas').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        browser.press(key)
    tip = "document.getElementById('tip').innerText"
    assert "position 2 ·" in browser.run(tip)
    browser.press("ArrowDown")
    assert int(re.search(r"position (\d+)", browser.run(tip)).group(1)) > 20, "a line further down"
    browser.press("Escape")
    assert browser.run("document.getElementById('tip').hidden")
    browser.resize(1200, 800)


@pytest.mark.slow
def test_hostile_text_is_shown_as_text_in_a_browser(hostile, browser, tmp_path):
    out, tokenizer = hostile
    to_html(out.trajectory, tmp_path / "run.html", tokenizer=tokenizer)
    asked = len(browser.requests)
    complaints = len(browser.complaints)
    browser.open(tmp_path / "run.html", "#step=99")
    shown = browser.run("[...document.querySelectorAll('#canvas .t')].map(e => e.innerText)")
    assert {"</script>", "<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "&lt;", "⟨2028⟩"} <= set(shown)
    assert browser.run("document.querySelectorAll('#canvas img, #canvas script, body > img').length") == 0
    assert browser.run("document.querySelector('#canvas .frozen').innerText") == "and"
    assert browser.requests[asked:] == [(tmp_path / "run.html").as_uri() + "#step=99"] or browser.requests[asked:] == [
        (tmp_path / "run.html").as_uri()
    ]
    assert browser.complaints[complaints:] == []


def test_a_notebook_shows_the_page_in_a_sandboxed_frame(recorded):
    out, tokenizer = recorded
    shown = to_html(out.trajectory, tokenizer=tokenizer)._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert 'sandbox="allow-scripts"' in shown
    assert "allow-same-origin" not in shown
    inner = html.unescape(re.search(r'srcdoc="([^"]*)"', shown).group(1))
    assert inner == str(to_html(out.trajectory, tokenizer=tokenizer))
    assert "to_html(trajectory, path)" in Page("x" * (NOTEBOOK_BYTES + 1))._repr_html_()


@pytest.mark.slow
def test_a_sudoku_is_a_board_of_its_digits(board, browser, tmp_path):
    out, solution = board
    to_html(out.trajectory, tmp_path / "run.html", tokenizer=Board())
    browser.open(tmp_path / "run.html", "#step=99")
    assert browser.run("document.querySelector('h1').textContent") == "Sudoku"
    assert browser.run("document.getElementById('prompt').textContent").startswith("1234..... 4")
    cells = browser.run(
        "[...document.querySelectorAll('#canvas .t')].map(e => [e.innerText, ...['left', 'top'].map("
        "side => Math.round(e.getBoundingClientRect()[side]))])"
    )
    assert "".join(text for text, _, _ in cells) == solution
    assert len({left for _, left, _ in cells}) == len({top for _, _, top in cells}) == 9
    assert [len({top for _, _, top in cells[i : i + 9]}) for i in range(0, 81, 9)] == [1] * 9
    assert browser.run("document.querySelectorAll('#canvas .frozen').length") == 4
    browser.press("Home")
    shown = browser.run("[...document.querySelectorAll('#canvas .t')].map(e => e.innerText).join('')")
    assert shown == "1234" + "░" * 77


WORDS = "document.querySelectorAll('#canvas .t.{}').length"


@pytest.fixture(scope="module")
def sentence():
    """A recorded run that writes a sentence, and the places of its second word."""
    text = "A quiet word is found here."
    out, tokenizer = record(text, canvas_len=32)
    return out, tokenizer, range(text.index("quiet"), text.index("quiet") + len("quiet"))


@pytest.mark.slow
def test_a_click_removes_a_word_and_without_a_model_the_page_says_how_to_reach_one(sentence, browser, tmp_path):
    out, tokenizer, word = sentence
    to_html(out.trajectory, tmp_path / "run.html", tokenizer=tokenizer)
    asked, complaints = len(browser.requests), len(browser.complaints)
    browser.open(tmp_path / "run.html")
    assert "a click removes a word" in browser.run("document.getElementById('facts').innerText")
    browser.open(tmp_path / "run.html", "#step=99")
    holes = "[...document.querySelectorAll('#canvas .hole')].map(e => Number(e.dataset.i))"
    browser.click(f'[data-i="{word[2]}"]')
    browser.wait("!document.getElementById('note').hidden")
    assert browser.run(holes) == list(word)
    assert browser.run(f"document.querySelector('[data-i=\"{word[0]}\"]').innerText") == ""
    assert "dgemma serve --replay FILE" in browser.run("document.getElementById('note').textContent")
    browser.click(f'[data-i="{word[0]}"]')
    assert browser.run(holes) == []
    assert browser.run("document.getElementById('note').hidden")
    shown = browser.run("[...document.querySelectorAll('#canvas .t')].map(e => e.innerText).join('')")
    assert shown.startswith("Aquietword")
    browser.run("document.getElementById('canvas').focus()")
    browser.press("ArrowRight")
    browser.press("Delete")
    assert browser.run(holes) == [0]
    browser.press("Home")
    assert browser.run(holes) == [], "the noise has no words"
    assert len(browser.requests) == asked + 2, "a page of a file asks for nothing"
    assert browser.complaints[complaints:] == []


@pytest.mark.slow
def test_a_click_on_a_word_lets_the_model_of_the_server_write_it_again(sentence, browser):
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    from dgemma.serve import replay

    out, tokenizer, word = sentence
    model = writer_of("another text", tokenizer, 32)[0]
    prompt = out.tokens.shape[1] - 32
    num_kept = out.new_tokens[0].tolist().index(tokenizer.eos_token_id) + 1
    tokens = out.tokens[:, : prompt + num_kept]
    want = dgemma.infill(model, tokens, [(prompt + word[0], prompt + word[-1] + 1)], seed=0).tokens[0]
    complaints = len(browser.complaints)
    with replay.ReplayPage(model, out.trajectory, tokenizer) as page:
        assert page.url in page._repr_html_()
        browser.open(page.url, "#step=99")
        browser.click(f'[data-i="{word[1]}"]')
        browser.wait(f"{WORDS.format('healed')} === {len(word)}")
        shown = browser.run("[...document.querySelectorAll('#canvas .t:not(.special)')].map(e => e.dataset.w).join('')")
    written = tokenizer.decode(want[prompt:].tolist())
    assert written != tokenizer.decode(out.new_tokens[0].tolist())
    assert shown == written
    assert browser.complaints[complaints:] == []
