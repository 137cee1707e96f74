"""A recorded run in a notebook, next to its model: a click removes a word, and the model fills the hole."""

import socket
import threading
from typing import Self

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.model.denoiser import Denoiser
from dgemma.run.recorded.trajectory import Trajectory
from dgemma.serve.app import create_app
from dgemma.serve.gate import QuickServer
from dgemma.view.html import to_html


class ReplayPage:
    """A page at `url` that plays a recorded run, until `close`. A notebook shows it in a frame.

    The browser must run on this machine, or forward the port. The model fills holes in another thread.

    Example: `ReplayPage(model, generate(model, prompt, record=True).trajectory, tokenizer)`.
    """

    def __init__(self, model: Denoiser, trajectory: Trajectory, tokenizer: Tokenizer) -> None:
        page = to_html(trajectory, tokenizer=tokenizer)
        frames = "http: https: vscode-webview:"  # a notebook, wherever it is shown
        app = create_app(model, tokenizer, name="replay", hosts=("127.0.0.1",), replay=page, frames=frames)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/replay"
        self._server = QuickServer(app)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server; the page can no longer reach the model."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        look = 'title="Denoising, step by step" style="width:100%;height:620px;border:0"'
        return f'<iframe src="{self.url}" {look}></iframe>'
