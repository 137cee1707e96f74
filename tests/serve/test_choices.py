"""What the openai client can ask for: log-probabilities, choices, lists of prompts, JSON objects and images."""

import asyncio
import base64
import copy
import http.server
import io
import json
import socket
import threading
import time
from contextlib import nullcontext, suppress
from itertools import pairwise
from unittest.mock import MagicMock, Mock

import pytest
import torch
from PIL import Image

import dgemma
from dgemma.checkpoint.images import processor_of
from dgemma.sampling import ReMDM
from dgemma.sampling.named import describe_noise, describe_sampler
from dgemma.train import add_lora, load_lora, save_lora, share_weights
from image_prompts import seeing_model
from serve.letters import CONFIG, TOKENIZER, expected, letters

MESSAGES = [{"role": "user", "content": "hi"}]
NAME = "toy"


@pytest.fixture(scope="module")
def openai():
    pytest.importorskip("fastapi")
    return pytest.importorskip("openai")  # here, because the import takes seconds


@pytest.fixture
def serve(openai):
    """Return a function from a model to a client of its server, which runs in this process."""
    from starlette.testclient import TestClient

    from dgemma.serve.app import create_app

    started = []

    def start(model, **options):
        app = create_app(model, TOKENIZER, name=NAME, batch_size=4, **options)
        started.append(TestClient(app, base_url="http://localhost"))
        started[-1].__enter__()
        return openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=started[-1])

    yield start
    for client in started:
        client.__exit__(None, None, None)


def chat(client, **options):
    return client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, **options})


def complete(client, **options):
    return client.completions.create(**{"model": NAME, "prompt": "Once", **options})


def test_the_field_model_chooses_adapters_over_one_copy_of_the_weights(serve, tmp_path):
    defaults = dgemma.GenerationDefaults(eos_token_id=(1,), max_new_tokens=16, max_denoising_steps=3)
    model = dgemma.DiffusionGemma(CONFIG)
    model.generation = defaults
    loaded = {NAME: model}
    for seed, name in enumerate(("pirate", "poet")):
        loaded[name] = copy.deepcopy(model)
        for weight in add_lora(loaded[name], seed=seed):
            torch.nn.init.normal_(weight, std=0.1)
        save_lora(loaded[name], tmp_path / name)
    shared = {name: share_weights(model) for name in ("pirate", "poet")}
    for name, adapted in shared.items():
        load_lora(adapted, tmp_path / name)
        weights = dict(adapted.named_parameters())
        assert all(weights[name].data_ptr() == weight.data_ptr() for name, weight in model.named_parameters())
    client = serve(model, adapters=shared)
    assert [listed.id for listed in client.models.list()] == [NAME, "pirate", "poet"]
    texts = {name: complete(client, model=name, seed=1).choices[0].text for name in loaded}
    assert texts == {name: expected(each, TOKENIZER.encode("Once"), seed=1) for name, each in loaded.items()}
    assert len(set(texts.values())) == 3
    with pytest.raises(Exception, match="'sailor' does not exist"):
        complete(client, model="sailor")


def recorded(model, prompt, seed):
    """Return the recorded run of a prompt and, for each step, the log-probabilities of its canvas."""
    log_probs = []

    def watch(record):
        log_probs.append(record.prediction.log_prob(record.state.canvas)[0])

    tokens = torch.tensor([prompt])
    return dgemma.generate(model, tokens, seed=[seed], record=True, on_step=watch).trajectory, log_probs


def test_log_probabilities_are_those_of_the_recorded_last_step_of_each_canvas(serve):
    """The published sampler decides every position anew at every step, and writes the argmax of the last one."""
    model = letters()
    client = serve(model)
    run, _ = recorded(model, TOKENIZER.chat("hi"), seed=3)
    last = [before for before, after in pairwise([*run, None]) if after is None or after.block != before.block]
    certain = torch.cat([step.confidence[0] for step in last]).log().tolist()
    top_tokens, top = (
        torch.cat([getattr(step, name)[0] for step in last]) for name in ("top_tokens", "top_probabilities")
    )

    content = chat(client, seed=3, logprobs=True, top_logprobs=4).choices[0].logprobs.content
    assert [part.logprob for part in content] == pytest.approx(certain, abs=1e-5)  # logits of about 10 in float32
    assert [part.bytes[0] + TOKENIZER.first_byte for part in content] == run.new_tokens[0].tolist()
    assert "".join(part.token for part in content) == expected(model, TOKENIZER.chat("hi"), seed=3)
    for part, tokens, probabilities in zip(content, top_tokens.tolist(), top.double(), strict=True):
        assert [other.bytes[0] + TOKENIZER.first_byte for other in part.top_logprobs] == tokens[:4]
        got = torch.tensor([other.logprob for other in part.top_logprobs]).exp()
        torch.testing.assert_close(got.double(), probabilities[:4], rtol=1e-3, atol=1e-7)  # recorded in float16
    chunks = [chunk.choices[0] for chunk in chat(client, seed=3, logprobs=True, top_logprobs=4, stream=True)]
    assert [part for chunk in chunks if chunk.logprobs for part in chunk.logprobs.content] == content
    assert chat(client, seed=3).choices[0].logprobs is None
    plain = chat(client, seed=3, logprobs=True).choices[0].logprobs.content
    assert [(part.logprob, part.top_logprobs) for part in plain] == [(part.logprob, []) for part in content]


@pytest.mark.parametrize(
    "sampler", [dgemma.Threshold(tau=0.9), ReMDM(eta=0.2)], ids=["writes-once", "returns-to-noise"]
)
def test_log_probabilities_are_those_of_the_step_that_wrote_the_token(serve, sampler):
    noise = dgemma.MaskNoise(384, mask_token_id=4)
    stored = {"noise": describe_noise(noise), "sampler": describe_sampler(sampler), "max_denoising_steps": 20}
    model = letters(max_new_tokens=16, **stored)
    run, log_probs = recorded(model, TOKENIZER.encode("Once"), seed=1)
    accepted = run.array("accepted")[:, 0]
    want = torch.full((16,), torch.nan)
    for wrote, values in zip(accepted, log_probs, strict=True):
        want = torch.where(wrote, values, want)
    assert len(set(accepted.int().argmax(0).tolist())) > 1  # tokens of several steps

    answer = complete(serve(model), seed=1, logprobs=2).choices[0]
    assert answer.logprobs.token_logprobs == pytest.approx(want.tolist(), abs=1e-6)
    assert "".join(answer.logprobs.tokens) == answer.text
    assert answer.logprobs.text_offset == list(range(16))
    for token, value, top in zip(
        *(getattr(answer.logprobs, name) for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert top[token] == value
        assert 2 <= len(top) <= 3
    assert complete(serve(model), seed=1, logprobs=0).choices[0].logprobs.top_logprobs is None


def test_texts_and_their_log_probabilities_end_with_stop_strings_and_max_tokens(serve):
    """A canvas has 16 tokens, so one of the stop strings is in two canvases."""
    model = letters()
    client, whole = serve(model), expected(model, TOKENIZER.encode("Once"), seed=5)
    for stop in (whole[9:11], whole[14:18]):
        cut = complete(client, seed=5, stop=[stop, "never"], logprobs=0)
        (choice,) = cut.choices
        assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
        assert "".join(choice.logprobs.tokens) == choice.text + stop
        assert cut.usage.completion_tokens == len(choice.logprobs.tokens)
        chunks = [chunk.choices[0] for chunk in complete(client, seed=5, stop=stop, stream=True)]
        assert ("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason) == (choice.text, "stop")
    short = complete(client, seed=5, max_tokens=5, logprobs=0)
    (choice,) = short.choices
    assert "".join(choice.logprobs.tokens) == choice.text == whole[:5]
    assert (short.usage.completion_tokens, choice.finish_reason) == (5, "length")


def test_choices_have_the_seeds_of_a_batch(serve):
    """Choice i is row i of `generate`, whose seed is the request's seed + i."""
    model = letters()
    client = serve(model)
    want = [expected(model, TOKENIZER.chat("hi"), seed=seed).strip() for seed in (7, 8, 9)]
    assert len(set(want)) == 3
    answer = chat(client, seed=7, n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == list(enumerate(want))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (18, 96)
    texts, reasons = ["", "", ""], {}
    for chunk in chat(client, seed=7, n=3, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert (texts, reasons) == (want, {0: "length", 1: "length", 2: "length"})
    assert chunk.usage == answer.usage
    assert len({choice.message.content for choice in chat(client, n=2).choices}) == 2


def test_a_list_of_prompts_has_a_choice_for_each_in_order(serve):
    model = letters()
    client, tokens = serve(model), [TOKENIZER.encode(text) for text in ("Once", "Twice upon")]
    want = [expected(model, tokens[at // 2], seed=4 + at) for at in range(4)]
    for prompt in (["Once", "Twice upon"], tokens):
        answer = complete(client, prompt=prompt, seed=4, n=2)
        assert [choice.text for choice in answer.choices] == want
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
    assert complete(client, prompt=["Once"], seed=4).choices[0].text == want[0]


def test_every_choice_is_a_row_of_the_queue(openai, serve):
    from dgemma.serve.gate import Limits

    client = serve(letters(), limits=Limits(queue=8))
    with pytest.raises(openai.BadRequestError, match="at most 8 choices of all prompts, got 9") as refused:
        complete(client, prompt=["a", "b", "c"], n=3)
    assert refused.value.param == "n"
    assert len(complete(client, prompt=["a", "b"], n=4).choices) == 8


def test_a_json_object_is_any_object(serve):
    pytest.importorskip("outlines_core")
    client = serve(letters())
    for answer in chat(client, n=4, seed=1, response_format={"type": "json_object"}).choices:
        assert isinstance(json.loads(answer.message.content), dict)


def test_a_constrained_answer_that_fills_its_canvas_is_whole(serve):
    """No stop token fits behind it. Clients take "length" for half an object."""
    pytest.importorskip("outlines_core")
    client = serve(letters())
    for max_tokens, shortest, reason in ((16, 14, "stop"), (15, 14, "length"), (15, 13, "stop")):
        schema = {"type": "string", "pattern": f"^[a-z]{{{shortest},14}}$"}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        for choice in chat(client, response_format=form, max_tokens=max_tokens, n=2).choices:
            assert choice.finish_reason == reason
            assert len(choice.message.content) == max_tokens


def test_errors_name_the_fields_of_the_request(openai, serve):
    pytest.importorskip("outlines_core")
    client = serve(letters())
    long = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "minLength": 40}}}
    for options, param, sentence in (
        ({"max_completion_tokens": 5000}, "max_completion_tokens", "max_completion_tokens must be at most 4096"),
        ({"max_tokens": 5000}, "max_tokens", "max_tokens must be at most 4096"),
        ({"max_completion_tokens": 400}, "max_completion_tokens", "max_completion_tokens must be an integer"),
        ({"max_completion_tokens": 320}, "messages", "messages and max_completion_tokens must stay within"),
        ({"response_format": long, "max_tokens": 16}, "response_format", "response_format must fit into max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "top_logprobs must be"),
        ({"top_p": 1e-40}, "top_p", "top_p must be"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages", "messages role must be"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, **options)
        assert sentence in refused.value.body["message"]
        assert "max_new_tokens" not in refused.value.body["message"]
        assert refused.value.body["param"] == param


@pytest.fixture(scope="module")
def seeing():
    return seeing_model()


def picture(color, size=(12, 12), form="PNG"):
    """Return a picture, and its data URL."""
    image, file = Image.new("RGB", size, color), io.BytesIO()
    image.save(file, form)
    return image, f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def with_images(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "What is <|image|> "}, *parts]}]


def test_a_chat_reads_the_images_of_data_urls(serve, seeing):
    client, options = serve(seeing), {"max_new_tokens": 32, "steps": 3}
    images, urls = zip(*(picture(color) for color in ("red", "blue")), strict=True)
    texts = []
    for shown, data in ((images, urls), (images[:1], urls[:1]), (images[1:], [urls[1].replace("data:", "DATA:")])):
        read = processor_of(seeing)(shown)
        parts = [{"type": "text", "text": "What is <|image|> "}, *[{"type": "image"}] * len(shown)]
        tokens = torch.tensor([TOKENIZER.chat([{"role": "user", "content": parts}], images=read)])
        out = dgemma.generate(seeing, tokens, images=read, seed=[2], **options)
        answer = chat(client, messages=with_images(*data), seed=2, max_tokens=32, extra_body={"steps": 3})
        assert answer.usage.prompt_tokens == tokens.shape[1]
        texts.append(answer.choices[0].message.content)
        assert texts[-1] == TOKENIZER.reply(out.new_tokens[0]).answer
    assert len(set(texts)) == 3


def test_other_urls_and_bad_pictures_are_refused_in_one_sentence(openai, serve, seeing, tmp_path):
    image, good = picture("red")
    image.save(tmp_path / "secret.png")
    client = serve(seeing)
    place = "messages.0.content.1.image_url.url"
    for url, sentence in (
        ("https://example.com/a.png", "must be a data URL"),
        (f"file://{tmp_path}/secret.png", "must be a data URL"),
        ("data:text/html;base64,aaaa", "begin with data:image/"),
        ("data:image/png;base64,%%%", "base64"),
        ("data:image/png;base64,aaaa", "Pillow can read"),
        (good[: len("data:image/png;base64,") + len(good) // 8 * 4], "must be a picture"),
        (picture("red", (5000, 5000))[1], "16,777,216 pixels"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, messages=with_images(url), max_tokens=32)
        assert refused.value.body["message"].startswith(place)
        assert sentence in refused.value.body["message"]
        assert refused.value.body["message"].count("must") == 1
        assert len(refused.value.body["message"]) < 400
        assert refused.value.body["param"] == place
    with pytest.raises(openai.BadRequestError, match="at most 16 images, got 17"):
        chat(client, messages=with_images(*[good] * 17))
    with pytest.raises(openai.BadRequestError, match="part of type text or image_url"):
        chat(client, messages=[{"role": "user", "content": [{"type": "input_audio"}]}])
    with pytest.raises(openai.BadRequestError, match=f"{place} must be absent: this model has no vision tower."):
        chat(serve(letters()), messages=with_images(good))


def test_decisions_read_images(openai, serve, seeing):
    """The probabilities of the server are those of `decide_many` with the same images."""
    images, urls = zip(*(picture(color) for color in ("red", "blue")), strict=True)
    question = {"type": "choice", "instructions": "Colour?", "criteria": {"red": None, "blue": None}}
    text = "two\n\nColour?\nred\nblue\nAnswer with one of: red, blue.\n"
    client, laws = serve(seeing), []
    for shown, data in ((images, urls), (images[::-1], urls[::-1])):
        read = processor_of(seeing)(shown)
        parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": text}]
        marked = TOKENIZER.chat([{"role": "user", "content": parts}])
        first = marked.index(TOKENIZER.token_id("<|image|>"))
        template = [marked[:first], read, marked[first + 2 :], dgemma.Slot(["red", "blue"])]
        (expected,) = dgemma.decide_many(seeing, [template], tokenizer=TOKENIZER, progress=False)
        body = {"model": NAME, "state": "two", "questions": {"q": question}, "images": data}
        found = client.post("/systemone", body=body, cast_to=object)
        laws.append(list(found["answers"]["q"]["probabilities"].values()))
        assert laws[-1] == pytest.approx(expected.answers[0].probabilities.tolist(), abs=1e-6)
        assert found["usage"]["input_tokens"] == len(TOKENIZER.place_images(marked, read))
    assert laws[0] != pytest.approx(laws[1], abs=1e-6)
    with pytest.raises(openai.BadRequestError, match=r"images\.0 must be a data URL"):
        client.post("/systemone", body={**body, "images": ["http://localhost/a.png"]}, cast_to=object)


@pytest.fixture
def website(monkeypatch):
    """A website on this machine that the server takes for a public one: its name, and no other, resolves to it."""
    content = {"/red.png": (200, base64.b64decode(picture("red")[1].partition(",")[2]))}
    content |= {"/large": (200, bytes((16 << 20) + 1)), "/moved": (302, b""), "/page": (200, b"<html>")}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with suppress(OSError):  # the other side may leave
                while self.path == "/slow":
                    self.wfile.write(b"H")
                    time.sleep(0.05)
                status, data = content.get(self.path, (404, b""))
                self.send_response(status)
                self.send_header("Location", "/red.png")
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *words):
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    look_up, connect = socket.getaddrinfo, socket.create_connection
    public = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: public if host == "site.test" else look_up(host, *a, **k)
    )
    monkeypatch.setattr(
        socket,
        "create_connection",
        lambda place, **k: connect(site.server_address if place[0] == "93.184.216.34" else place, **k),
    )
    yield "http://site.test"
    site.shutdown()


def test_a_server_that_may_fetch_reads_pictures_of_public_addresses_only(openai, serve, seeing, website, monkeypatch):
    from dgemma.serve import fetch
    from dgemma.serve.gate import Limits

    client = serve(seeing, limits=Limits(fetch_images=True))
    options = {"seed": 2, "max_tokens": 32, "extra_body": {"steps": 3}}
    texts = [
        chat(client, messages=with_images(url), **options).choices[0].message.content
        for url in (f"{website}/red.png", picture("red")[1])
    ]
    assert texts[0] == texts[1]
    for url, sentence in (
        (f"{website}/large", "more than 16 MiB"),
        (f"{website}/moved", "its server answered 302"),
        (f"{website}/page", "its format is unknown"),
        ("http://127.0.0.1/a.png", "its address is not public"),
        ("http://localhost/a.png", "its address is not public"),
        ("http://[::1]/a.png", "its address is not public"),
        ("http://[::ffff:10.0.0.1]/a.png", "its address is not public"),
        ("http://169.254.169.254/latest", "its address is not public"),
        ("http://2130706433/a.png", "its address is not public"),
        ("http://[64:ff9b::7f00:1]/a.png", "its address is not public"),  # 127.0.0.1 behind a gateway
        ("http://[2002:7f00:1::]/a.png", "its address is not public"),
        ("ftp://site.test/a.png", "neither http nor https"),
        ("/etc/passwd", "neither http nor https"),
        ("http://site.test:99999/a.png", "Port out of range"),
        (f"{website}/slow", "could not be fetched"),
    ):
        if url.endswith("/slow"):
            monkeypatch.setattr(fetch, "_SECONDS", 0.5)
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, messages=with_images(url), **options)
        assert sentence in refused.value.body["message"]


def test_a_picture_is_not_text_if_its_slashes_are_escaped(serve, seeing):
    """As PHP writes JSON."""
    from dgemma.serve.gate import Limits

    _, url = picture("red", (40, 40), "BMP")
    body = json.dumps({"model": NAME, "messages": with_images(url), "max_tokens": 32, "steps": 1})
    assert len(url) > 6000
    for written in (body, body.replace("/", r"\/"), body.replace("data:", "DATA:")):
        client = serve(seeing, limits=Limits(body=1000))._client
        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/chat/completions", content=written, headers=headers).status_code == 200


@pytest.mark.slow
def test_photos_are_larger_than_other_bodies(openai, serve, seeing):
    """A photo of a phone fits. Text and many short pictures keep their limit."""
    from dgemma.serve.gate import Limits

    file = io.BytesIO()
    Image.frombytes("RGB", (1500, 1000), bytes(range(250)) * 18_000).save(file, "BMP")  # 4.5 MB
    photo = "data:image/bmp;base64," + base64.b64encode(file.getvalue()).decode()
    client = serve(seeing, limits=Limits(per_client=1))
    assert chat(client, messages=with_images(photo), max_tokens=32, extra_body={"steps": 1}).choices
    text = [{"role": "user", "content": "a" * (1 << 20)}]
    for messages in (text, with_images(*["data:image/png;base64,"] * 30_000), with_images(*[photo] * 3)):
        with pytest.raises(
            openai.APIStatusError, match="1,048,576 bytes without its pictures, and 16,777,216"
        ) as refused:
            chat(client, messages=messages)
        assert refused.value.status_code == 413
    with pytest.raises(openai.APIStatusError, match="at most 1,048,576 bytes"):
        chat(serve(letters()), messages=with_images(photo))


def test_the_bodies_of_a_client_together_are_bounded(openai):
    """Two requests of 100 bytes may be at work, of one client, or of another one too."""
    from dgemma.serve.gate import Gate, Limits

    async def run():
        release, statuses = asyncio.Event(), []

        async def work(scope, receive, send):
            await release.wait()

        door, limits = Mock(enter=lambda client: nullcontext()), Limits(body=100, pictures=150, per_client=2)
        options = {"limits": limits, "api_key": None, "hosts": None, "metrics": MagicMock(), "door": door}
        gate = Gate(work, **options, takes_images=True)

        async def post(host, num_bytes):
            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "client": (host, 1)}

            async def receive():
                return {"type": "http.request", "body": b" " * num_bytes}

            async def send(message):
                statuses.append(message.get("status"))

            await gate(scope, receive, send)

        waiting = [asyncio.create_task(post(host, 100)) for host in "aab"]
        await asyncio.sleep(0)
        await post("a", 1)
        assert statuses[:1] == [429]
        release.set()
        await asyncio.gather(*waiting)
        await post("a", 100)
        assert 429 not in statuses[1:]

    asyncio.run(run())
