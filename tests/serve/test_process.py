"""`dgemma serve` as a process, driven by the real openai client, by hostile sockets and by a browser."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from PIL import Image

import dgemma
from fork_server import free_port
from view.browser import Browser, find_browser

pytestmark = pytest.mark.slow
openai: ModuleType
NAME = "toy"


@pytest.fixture(scope="module", autouse=True)
def _client_library():
    """Import the client, which takes seconds, only where these tests run: every lane collects this file."""
    global openai
    pytest.importorskip("fastapi")
    openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy")
    torch.manual_seed(0)
    dgemma.DiffusionGemma(dgemma.presets.tiny().replace(vocab_size=384, max_position_embeddings=512)).save_pretrained(
        path
    )
    dgemma.ByteTokenizer().save_pretrained(path)
    return path


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the server is too slow"
        time.sleep(0.02)


class Server:
    """A server process on a free port."""

    def __init__(self, folder, port, *options):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "dgemma", "serve", "-m", folder, "--name", NAME, "--port", str(port), *options]
        self.port, self.process = port, subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        wait_until(self.answers, 120)

    def answers(self):
        assert self.process.poll() is None, self.process.stderr.read()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port)).close()
            return True

    def send(self, data, seconds=30.0):
        """Send bytes and return everything that the server answers before it closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            connection.sendall(data)
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
            return b"".join(parts)

    def metric(self, name):
        text = self.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture(scope="module")
def server(folder):
    server = Server(folder, free_port(), "--batch-size", "4", "--max-queue", "16")
    yield server
    server.process.terminate()
    assert server.process.wait(30) in (0, 128 + signal.SIGTERM)


def ask(client, text, seed, *, steps=3, drafts=False, **options):
    messages, extra = [{"role": "user", "content": text}], {"steps": steps, "drafts": drafts}
    return client.chat.completions.create(
        model=NAME, messages=messages, seed=seed, max_tokens=40, extra_body=extra, **options
    )


def test_many_clients_get_their_own_answers_or_a_429(server):
    streams = [ask(server.client, f"number {at}", at, stream=True) for at in range(4)]
    alone = {at: "".join(chunk.choices[0].delta.content or "" for chunk in stream) for at, stream in enumerate(streams)}
    assert len(set(alone.values())) == 4

    def run(at):
        try:
            return at % 4, ask(server.client, f"number {at % 4}", at % 4).choices[0].message.content
        except openai.RateLimitError:
            return at % 4, None

    with ThreadPoolExecutor(40) as pool:
        results = list(pool.map(run, range(60)))
    answered = [(at, text) for at, text in results if text is not None]
    # The server has 4 rows and a queue of 16. If all clients ask before it takes a request from the queue, only 16
    # requests fit.
    assert len(answered) >= 16
    assert all(text == alone[at] for at, text in answered)


def test_a_client_that_leaves_is_cancelled(server):
    stream = ask(server.client, "hi", 1, stream=True, steps=500, drafts=True)
    next(iter(stream))
    stream.close()
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 400, "steps": 1000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: server.metric("dgemma_running"))
    wait_until(lambda: not server.metric("dgemma_running"))


def test_hostile_requests_get_a_4xx_and_the_server_goes_on(server):
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for data, status in (
        (b"nonsense\r\n\r\n", b" 400 "),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b" 421 "),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000, b" 400 "),
        (post + b"Content-Length: 99999999999\r\n\r\n", b" 413 "),
        (post + b"Content-Length: -5\r\n\r\n", b" 400 "),
        (post.replace(b"application/json", b"text/plain") + b"Content-Length: 2\r\n\r\n{}", b" 415 "),
        (post + b"Content-Length: 50\r\n\r\n{", b" 408 "),  # the rest never comes
        (b"GET /hea", b" 408 "),
    ):
        answer = server.send(data)
        assert status in answer.partition(b"\r\n")[0], answer[:200]
    assert server.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 200"
    )


def test_connections_are_limited_in_number_and_time(server):
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with contextlib.ExitStack() as stack:
        idle = []
        for _ in range(700):  # more than the server keeps
            idle.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30)))
        assert server.send(get + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert idle[0].recv(1) == b""  # the oldest was closed
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        slow.sendall(get + b"\r\n")
        first = b""
        while not first.endswith(b"}"):  # headers and body may come apart
            first += slow.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 200")
        slow.settimeout(1)
        answer = b""
        for byte in get:  # a byte every second of the second request
            slow.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                answer = slow.recv(1 << 16)
                break
        assert answer.startswith(b"HTTP/1.1 408")


def test_sigterm_ends_the_server_at_once_whatever_it_does(folder):
    server = Server(folder, free_port(), "--batch-size", "4")
    post = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}"
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "^.*a.{30}$"}}}
    bodies = [
        ("/v1/infill", {"tokens": [200] * 400, "holes": [[1, 399]]}),
        ("/v1/completions", {"model": NAME, "prompt": "a", "max_tokens": 400, "steps": 1000, "stream": True}),
        ("/v1/completions", {"model": NAME, "prompt": "a", "response_format": schema}),
    ]
    with contextlib.ExitStack() as stack:
        for path, body in bodies * 4:
            text = json.dumps(body)
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            connection.sendall(post.format(path, len(text), text).encode())
        for _ in range(50):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
        wait_until(lambda: server.metric("dgemma_running") == 4)
        server.process.terminate()
        assert server.process.wait(60) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)  # the answers take longer
    assert b"Traceback" not in server.process.stderr.read()


def test_a_killed_server_starts_again_on_the_same_port_and_one_that_is_interrupted_stops_at_once(folder):
    port = free_port()
    server = Server(folder, port)
    text = ask(server.client, "hi", 2).choices[0].message.content
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(30)
    with pytest.raises(openai.APIConnectionError):
        ask(server.client, "hi", 2)
    server = Server(folder, port)
    assert ask(server.client, "hi", 2).choices[0].message.content == text
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, server.client, "hi", 2, steps=1000, temperature=2)
        wait_until(lambda: server.metric("dgemma_running"))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            long.result()


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")
def test_the_page_asks_for_the_fields_that_were_written(server):
    with Browser(find_browser()) as browser:
        browser("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        browser.wait("document.readyState === 'complete' && document.getElementById('form')")
        settings = {"tokens": 192, "steps": 3, "schema": "name, age", "input": "ho"}
        browser.run(f"for (const [id, value] of Object.entries({settings})) byId(id).value = value")
        browser.run("byId('form').requestSubmit()")
        browser.wait("document.querySelector('.counts') !== null")
        answer = json.loads(browser.run("document.querySelector('.assistant').textContent"))
        assert list(answer) == ["name", "age"]
        assert all(url.startswith(f"http://127.0.0.1:{server.port}/") for url in browser.requests)
        assert browser.complaints == []


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")
def test_the_page_shows_an_attached_picture_next_to_the_canvas(tmp_path):
    model, tokenizer = dgemma.DiffusionGemma(dgemma.presets.tiny(vision=True)), dgemma.ByteTokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    Image.new("RGB", (30, 20), "red").save(tmp_path / "red.png")
    server = Server(tmp_path, free_port(), "--image-tokens", "70")
    with contextlib.ExitStack() as stack:
        stack.callback(server.process.terminate)
        browser = stack.enter_context(Browser(find_browser()))
        browser("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        browser.wait("document.readyState === 'complete' && document.getElementById('form')")
        browser.run("""window.shown = 0; new MutationObserver(() => {
          shown += document.querySelector(".seen > img[src^='data:image/png'] + span .canvas span") ? 1 : 0;
        }).observe(document.body, {childList: true, subtree: true}); 0""")
        place = browser("DOM.querySelector", nodeId=browser("DOM.getDocument")["root"]["nodeId"], selector="#image")
        browser("DOM.setFileInputFiles", nodeId=place["nodeId"], files=[str(tmp_path / "red.png")])
        browser.wait("document.querySelector('#attached img') !== null")
        settings = {"tokens": 32, "seed": 3, "steps": 3, "input": "hi"}
        browser.run(f"for (const [id, value] of Object.entries({settings})) byId(id).value = value")
        browser.run("byId('form').requestSubmit()")
        browser.wait("document.querySelector('.counts') !== null")
        text = browser.run("document.querySelector('.seen').textContent")
        assert browser.run("[shown > 0, document.querySelector('.seen img').naturalWidth]") == [True, 30]
        assert browser.complaints == []
    images = dgemma.ImageProcessor.from_pretrained(tmp_path, max_soft_tokens=70)([tmp_path / "red.png"])
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    prompt = torch.tensor([tokenizer.chat(turn, images=images)])
    new = dgemma.generate(model, prompt, images=images, seed=[3], max_new_tokens=32, steps=3).new_tokens
    assert text == tokenizer.reply(new[0]).answer.lstrip()
