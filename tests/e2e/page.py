"""The chat page at /ui in headless Chromium, asked through chromedriver as a person would: typing, clicking, reading.

PAGE_SHOTS=FOLDER keeps pictures of it."""
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from _server import KEY, done, equal, eventually, ok
from _spind import get, mock

DRIVER = shutil.which("chromedriver")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # of the WebDriver protocol
ENTER = "\ue007"


class Browser:
    def __init__(self, folder):
        self.driver = subprocess.Popen([DRIVER, "--port=0", "--log-level=SEVERE"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = next(x for x in self.driver.stdout if "successfully on port" in x)
        self.at = f"http://127.0.0.1:{line.rsplit(' ', 1)[1].strip().rstrip('.')}/session"
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=900,900", f"--user-data-dir={folder}"]
        caps = {"browserName": "chrome", "goog:chromeOptions": {"args": words}, "goog:loggingPrefs": {"browser": "ALL"}}
        self.at += "/" + self.call("POST", "", capabilities={"alwaysMatch": caps})["sessionId"]

    def call(self, method, path, **body):
        r = urllib.request.Request(self.at + path, json.dumps(body).encode() if method == "POST" else None,
                                   {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(r, timeout=60) as f:
                return json.load(f)["value"]
        except urllib.error.HTTPError as e:
            raise RuntimeError(e.read().decode()[:500]) from None

    def open(self, url):
        self.call("POST", "/url", url=url)

    def run(self, script):
        return self.call("POST", "/execute/sync", script=script, args=[])

    def element(self, css):
        return "/element/" + self.call("POST", "/element", using="css selector", value=css)[ELEMENT]

    def type(self, css, words):
        self.call("POST", self.element(css) + "/value", text=words)

    def click(self, css):
        self.call("POST", self.element(css) + "/click")

    def texts(self, css):
        return self.run(f"return [...document.querySelectorAll({json.dumps(css)})].map(e => e.textContent)")

    def shows(self, css):
        return self.run(f"return !document.querySelector({json.dumps(css)}).hidden")

    def complaints(self):
        return [x["message"] for x in self.call("POST", "/se/log", type="browser")]

    def shot(self, name):
        folder = os.environ.get("PAGE_SHOTS")
        if folder:
            with open(os.path.join(folder, name + ".png"), "wb") as f:
                f.write(base64.b64decode(self.call("GET", "/screenshot")))

    def stop(self):
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait(10)


def answered(b, n):
    return eventually(lambda: len(b.texts(".assistant .numbers")) >= n and b.shows("#send"), 20)


def a_conversation(b, server):
    b.open(f"http://127.0.0.1:{server.port}/ui")
    ok(eventually(lambda: b.texts("#model") == ["mock"]) and "tokens of context" in b.texts("#state")[0], "the page tells which model it speaks to",
       b.texts("#state"))
    b.type("#settings summary", ENTER)
    b.type("#most", "12")
    b.type("#text", "How are <b>you</b>?" + ENTER)
    ok(answered(b, 1), "a question is answered", b.texts("main"))
    equal(b.texts(".user .words"), ["How are <b>you</b>?"], "what was typed is text, never markup")
    words, line = b.texts(".assistant .words")[0], b.texts(".assistant .numbers")[0]
    ok(len(words) == 12 and "12 out" in line and "first after" in line and "tokens/s" in line and "ended by its length" in line,
       "with its numbers", words, line)
    first = int(line.split()[0])
    b.type("#text", "And now?")
    b.click("#send")
    ok(answered(b, 2), "and so is the next", b.texts("main"))
    second = int(b.texts(".assistant .numbers")[1].split()[0])
    ok(second > first + 12, "which knows what was said", first, second)
    b.shot("conversation")


def what_goes_wrong(b, server):
    b.run("document.querySelector('#temperature').value = 3")
    b.type("#text", "Too warm" + ENTER)
    ok(eventually(lambda: b.texts(".error")), "what the server refuses is told", b.texts("main"))
    ok("temperature" in b.texts(".error")[0] and b.run("return document.querySelector('#text').value") == "Too warm" and len(b.texts(".user")) == 2,
       "in its words, and the question is there to be asked again", b.texts(".error"), b.texts(".user"))
    b.shot("error")
    b.run("document.querySelector('#temperature').value = ''; document.querySelector('#text').value = ''; document.querySelector('#most').value = '4000'")
    b.type("#text", "Tell me everything" + ENTER)
    ok(eventually(lambda: len(b.texts(".assistant .words")) == 3 and len(b.texts(".assistant .words")[2]) > 3) and b.shows("#stop"),
       "a long answer comes as it is written", b.texts("main"))
    b.click("#stop")
    ok(answered(b, 3) and "stopped" in b.texts(".assistant .numbers")[2], "and can be stopped", b.texts(".numbers"))
    ok(eventually(lambda: "vllm:num_requests_running{engine=\"0\",model_name=\"mock\"} 0" in get(server, "/metrics").body.decode()),
       "so the server stops, too")
    b.click("#fresh")
    ok(b.texts("main") == [""], "a new chat is empty", b.texts("main"))


def with_a_key(b, server):
    b.open(f"http://127.0.0.1:{server.port}/ui")
    ok(eventually(lambda: "API key" in b.texts("#state")[0]) and b.run("return document.querySelector('#settings').open"),
       "where a key is needed the page says so and shows where", b.texts("#state"))
    b.type("#key", KEY + ENTER)
    ok(eventually(lambda: b.texts("#model") == ["mock"]), "and goes on with it", b.texts("#state"))
    b.type("#most", "3")
    b.type("#text", "Hello" + ENTER)
    ok(answered(b, 1), "through the API that everybody uses", b.texts("main"))


def main():
    if DRIVER is None:
        print("1..0 # skip no chromedriver: apt-get install chromium chromium-driver")
        return
    server = mock("--mock-step-us", "10000", "--mock-first-token", "97", "--mock-n-tokens", "26")
    locked = mock("--mock-first-token", "97", "--mock-n-tokens", "26", key=KEY)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        b = Browser(folder)
        try:
            a_conversation(b, server)
            what_goes_wrong(b, server)
            with_a_key(b, locked)
            bad = [x for x in b.complaints() if "400 (Bad Request)" not in x and "401 (Unauthorized)" not in x]
            equal(bad, [], "the browser has nothing to complain about: no script of others, nothing that did not load")
        finally:
            b.stop()
    head = get(server, "/ui").head
    ok("script-src 'self'" in head and "frame-ancestors 'none'" in head and "nosniff" in head, "and is told to run and frame nothing else", head)
    equal([get(server, p).status for p in ("/ui/", "/ui/chat.jsx", "/uix")], [404] * 3, "there is nothing else below it")
    server.stop()
    locked.stop()
    done()


main()
