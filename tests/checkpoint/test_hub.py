"""Publishing a model: huggingface_hub's own client talks to a local server, which keeps what it gets."""

import base64
import functools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi, ModelCard

import dgemma
from dgemma.train import LoRA, add_lora


class Hub(BaseHTTPRequestHandler):
    """The hub's requests for a commit of small files."""

    def do_HEAD(self):
        self.answer({}, 200 if "README.md" in self.server.files else 404)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.requests.append((self.path, self.headers.get("Authorization")))
        address = f"http://127.0.0.1:{self.server.server_port}/me/small"
        if self.path.endswith("/create"):
            self.server.created.append(json.loads(body))
            self.answer({"url": address, "name": "me/small"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif self.path.endswith("/validate-yaml"):
            self.answer({"errors": [], "warnings": []})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{address}/commit/1", "commitOid": "1", "pullRequestUrl": None})

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header(*(("ETag", "1") if status == 200 else ("X-Error-Code", "EntryNotFound")))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.created, server.requests = {}, [], []
    local = functools.partial(HfApi, endpoint=f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub, "HfApi", local)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_pushed_model_has_a_card_and_opens_again(hub, tmp_path):
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    model.save_pretrained(tmp_path / "first")
    dgemma.ByteTokenizer().save_pretrained(tmp_path / "first")
    model = dgemma.DiffusionGemma.from_pretrained(tmp_path / "first")
    assert model.push_to_hub("me/small", private=True, token="hf_secret").endswith("/me/small")
    assert hub.created[0].get("visibility", hub.created[0].get("private")) in ("private", True)  # by version
    assert {key for _, key in hub.requests} == {"Bearer hf_secret"}
    for name, content in hub.files.items():
        (tmp_path / name).write_bytes(content)
    again = dgemma.DiffusionGemma.from_pretrained(tmp_path)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())
    assert dgemma.Tokenizer.from_pretrained(tmp_path).encode("hi") == dgemma.ByteTokenizer().encode("hi")
    card = ModelCard(hub.files["README.md"].decode())
    assert (card.data.library_name, card.data.pipeline_tag) == ("dgemma", "text-generation")
    assert f"{model.num_parameters():,} weights" in card.text
    assert 'from_pretrained("me/small")' in card.text


def test_a_name_without_an_owner_is_that_of_the_user(hub):
    dgemma.DiffusionGemma(dgemma.presets.tiny()).push_to_hub("small", token="hf_secret")
    paths = [path for path, _ in hub.requests if path.startswith("/api/models/")]
    assert paths
    assert all(path.startswith("/api/models/me/small/") for path in paths)
    assert b'from_pretrained("me/small")' in hub.files["README.md"]


def test_a_card_that_is_there_stays(hub):
    hub.files["README.md"] = b"my own words"
    dgemma.DiffusionGemma(dgemma.presets.tiny()).push_to_hub("me/small", token="hf_secret")
    assert hub.files["README.md"] == b"my own words"
    assert "model.safetensors" in hub.files


def test_a_model_that_cannot_be_saved_makes_no_repository(hub):
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    add_lora(model, LoRA(rank=2, alpha=4.0), seed=0)
    with pytest.raises(ValueError, match="Merge adapters first"):
        model.push_to_hub("me/small", token="hf_secret")
    assert hub.requests == []
