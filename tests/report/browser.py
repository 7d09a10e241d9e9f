"""A headless Chromium for tests, driven over a pipe by the Chrome DevTools Protocol (no further package)."""

from __future__ import annotations

import base64
import contextlib
import importlib.resources
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--force-prefers-reduced-motion", "--remote-debugging-pipe",
)  # fmt: skip


def executable() -> str | None:
    """Path of Chromium, or None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One browser with one tab.

    `messages` are the errors and warnings of the tab's console, refused loads and uncaught exceptions, since the last
    `open`.
    """

    def __init__(self, profile: Path):
        reads, child_writes = os.pipe()
        child_reads, self._writes = os.pipe()
        self._reads, self._buffer, self._number, self.messages = reads, b"", 0, []

        def place() -> None:  # the protocol's pipe is descriptors 3 (its input) and 4 (its output)
            low, high = os.dup(child_reads), os.dup(child_writes)
            os.dup2(low, 3)
            os.dup2(high, 4)

        flags = [*FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [executable(), *flags],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_reads)
        os.close(child_writes)
        self._session = None
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Ends the browser."""
        with contextlib.suppress(OSError, EOFError):
            self._session = None
            self.call("Browser.close")
        self.process.wait(10)
        os.close(self._reads)
        os.close(self._writes)

    def call(self, method: str, **params):
        """The result of one command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _receive(self, seconds: float = 30):
        while b"\0" not in self._buffer:
            if not select.select([self._reads], [], [], seconds)[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._reads, 2**20)
            if not chunk:
                raise EOFError("the browser has ended")
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer = json.loads(text)
        self._note(answer.get("method"), answer.get("params", {}))
        return answer

    def _note(self, method, params) -> None:
        if method == "Page.loadEventFired":
            self._is_loaded = True
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.messages.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(params["entry"]["text"])

    def open(self, url: str, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Opens a page at a size, and returns when it has loaded."""
        self.messages.clear()
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self._is_loaded = False
        self.call("Page.navigate", url=url)
        while not self._is_loaded:
            self._receive()

    def run(self, expression: str):
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "failed"))
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Waits until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}; console: {self.messages}")
            time.sleep(0.05)

    def press(self, key: str, shift: bool = False) -> None:
        """Presses and releases one key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 * shift, **text)

    def mouse(self, x: float, y: float, kind: str = "mouseMoved", **more) -> None:
        """A mouse event at a place of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def serious_findings(self) -> dict[str, list[str]]:
        """Rules of axe-core that the page breaks seriously, with the elements; skips without the package."""
        axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
        self.run(importlib.resources.files(axe).joinpath("axe.min.js").read_text(encoding="utf-8") + ";0")
        found = self.run("axe.run(document, {resultTypes: ['violations']}).then(found => found.violations)")
        return {
            each["id"]: [node["html"][:200] for node in each["nodes"][:3]]
            for each in found
            if each["impact"] in ("serious", "critical")
        }

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Writes a PNG of the page, or of the window."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
