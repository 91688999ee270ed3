"""A headless browser for tests: Chrome's own protocol over two pipes, so that no driver and no port is needed."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
#: The reason of a skipped test.
MISSING = "no browser: install Debian's package chromium"
SECONDS = 60
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    # No name is looked up, so that nothing is loaded even where a network is.
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe"),
)
#: The protocol wants the numbers 3 and 4 of the pipes. Shells take no number of two digits for them.
START = """
import os, sys
from fcntl import F_DUPFD, fcntl
ends = [fcntl(int(end), F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in enumerate(ends, 3):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}
SHIFT = 8


class Tab:
    """One page of a browser: its events, its JavaScript, its pointer and its keys."""

    def __init__(self, process, to, back):
        self.process, self.to, self.back = process, to, back
        self.rest, self.events, self.count, self.session = b"", [], 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Return the answer to one command; events that come before it are kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.count:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self):
        until = time.monotonic() + SECONDS
        while b"\0" not in self.rest:
            assert select.select([self.back], [], [], max(0, until - time.monotonic()))[0], "the browser is silent"
            read = os.read(self.back, 2**20)
            assert read, "the browser has ended"
            self.rest += read
        first, self.rest = self.rest.split(b"\0", 1)
        return json.loads(first)

    def of(self, method):
        """Return the parameters of the events of one kind up to now."""
        self.run("0")
        return [event["params"] for event in self.events if event.get("method") == method]

    def open(self, address, width, height, *, scheme="light", scripts=True, phone=False):
        """Load a page in a window of this size, and wait until everything is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, expression):
        """Return the value of an expression, of a promise what it brings."""
        wanted = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=expression, **wanted)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression, seconds=10):
        """Wait until an expression is true."""
        ends = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < ends, expression
            time.sleep(0.02)

    def drag(self, start, end, steps=5):
        """Press the mouse at one place, and leave it at another."""
        button = {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], buttons=1, **button)
        for x, y in _between(start, end, steps):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, buttons=1, button="left")
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], **button)

    def swipe(self, start, end, steps=5):
        """Put a finger at one place, and lift it at another."""
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": start[0], "y": start[1]}])
        for x, y in _between(start, end, steps):
            self.call("Input.dispatchTouchEvent", type="touchMove", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key, modifiers=0):
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def faults(self):
        """Return what the console has to say, and addresses outside of the page's own file."""
        said = [entry["entry"]["text"] for entry in self.of("Log.entryAdded")]
        said += [str(entry["args"]) for entry in self.of("Runtime.consoleAPICalled")]
        said += [entry["exceptionDetails"]["text"] for entry in self.of("Runtime.exceptionThrown")]
        asked = [request["request"]["url"] for request in self.of("Network.requestWillBeSent")]
        return said + [address[:80] for address in asked if not address.startswith(("file:", "data:"))]


def _between(start, end, steps):
    for step in range(1, steps + 1):
        yield tuple(a + (b - a) * step / steps for a, b in zip(start, end, strict=True))


@contextlib.contextmanager
def browser():
    """Start the browser, yield a `Tab`, and end it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        (its_in, to), (back, its_out) = os.pipe(), os.pipe()
        start = [sys.executable, "-ISc", START, str(its_in), str(its_out)]
        command = [*start, BROWSER, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, pass_fds=(its_in, its_out), **quiet)
        for end in (its_in, its_out):
            os.close(end)
        try:
            tab = Tab(process, to, back)
            yield tab
            tab.session = None
            tab.call("Browser.close")
            process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()
            for end in (to, back):
                os.close(end)
