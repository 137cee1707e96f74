"""Headless Chromium through its debugging pipe: nothing to install but the browser itself."""

import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """Return the path of Chromium or Chrome, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser; `events` holds what it reported (requests, errors, console)."""

    def __init__(self, executable: str, *, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "--hide-scrollbars", "about:blank"]
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4. High numbers avoid collisions with those two.
        high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out))
        wiring = [(os.POSIX_SPAWN_DUP2, high_in, 3), (os.POSIX_SPAWN_DUP2, high_out, 4)]
        wiring += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
        self._process = os.posix_spawn(executable, [executable, *flags], os.environ, file_actions=wiring)
        for descriptor in (theirs_in, theirs_out, high_in, high_out):
            os.close(descriptor)
        self.events: list[dict[str, Any]] = []
        self._rest, self._number, self._session = b"", 0, None
        deadline = time.monotonic() + 60
        while not (pages := [t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page"]):
            assert time.monotonic() < deadline, "the browser opened no page"
            time.sleep(0.05)
        self._session = self("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol, and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 16)
            if not more:
                raise RuntimeError("the browser has exited")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def resize(self, width: int, height: int) -> None:
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, page: Path | str, fragment: str = "") -> None:
        """Load a file or an address, and wait until its script says that it is ready."""
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=(page if isinstance(page, str) else page.resolve().as_uri()) + fragment)
        self.wait("document.body && document.body.dataset.ready === 'yes'")

    def wait(self, condition: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never true: {condition}; the browser said {self.complaints}"
            time.sleep(0.03)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; wait for promises."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "an exception"))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self("Input.dispatchKeyEvent", type="keyUp", key=key)

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def centre(self, selector: str) -> tuple[float, float]:
        """Return the centre of an element on the page."""
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def click(self, selector: str) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, *self.centre(selector))

    @property
    def requests(self) -> list[str]:
        """Return the addresses that the page requested."""
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if url != "about:blank"]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Return exceptions, errors and warnings, including violations of the content policy."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        try:
            self("Browser.close")
        except (OSError, RuntimeError):
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()
