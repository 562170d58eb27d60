"""The planner's page, in a real browser where there is one: what it shows, what it lets be done, what it never does.

The browser is driven through chromedriver's own protocol (https://www.w3.org/TR/webdriver2/), which is plain HTTP.
"""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from slimgrad.errors import SpecError
from slimgrad.report.frontier_page import FrontierData, StorageRow, frontier_page, joined_scripts, resource
from slimgrad.report.human import NEEDS, human_bytes, human_ratio
from slimgrad.report.plans import WHY
from slimgrad.report.plots import COLOURS

MIB = 1 << 20
EVENTS = 360
BACKWARD = 0.36
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--window-size=1280,800",
)

# ---- Plans of a GPT-2 with 12 layers on 8 x 1024 tokens: sizes are true, times and errors are made up but plausible.

BLOCK = (
    ("ln_1", "LayerNorm", "NativeLayerNormBackward0.input", "VALUES", 24),
    ("attn.c_attn", "Conv1D", "AddmmBackward0.mat1", "OPERAND", 24),
    ("attn", "GPT2Attention", "ScaledDotProductFlashAttentionForCpuBackward0.query", "VALUES", 72),
    ("attn", "GPT2Attention", "ScaledDotProductFlashAttentionForCpuBackward0.logsumexp", "EXACT", 0.375),
    ("attn.c_proj", "Conv1D", "AddmmBackward0.mat1", "OPERAND", 24),
    ("attn.resid_dropout", "Dropout", "NativeDropoutBackward0.result1", "MASK", 6),
    ("ln_2", "LayerNorm", "NativeLayerNormBackward0.input", "VALUES", 24),
    ("mlp.c_fc", "Conv1D", "AddmmBackward0.mat1", "OPERAND", 24),
    ("mlp.act", "GELU", "GeluBackward0.self", "DERIVATIVE", 96),
    ("mlp.c_proj", "Conv1D", "AddmmBackward0.mat1", "OPERAND", 96),
    ("mlp.dropout", "Dropout", "NativeDropoutBackward0.result1", "MASK", 6),
)
BEFORE = (
    ("transformer.wte", "Embedding", "EmbeddingBackward0.indices", "INDEX", 0.0625),
    ("transformer.drop", "Dropout", "NativeDropoutBackward0.result1", "MASK", 6),
)
AFTER = (
    ("transformer.ln_f", "LayerNorm", "NativeLayerNormBackward0.input", "VALUES", 24),
    ("lm_head", "Linear", "MmBackward0.self", "OPERAND", 24),
    ("", "GPT2LMHeadModel", "LogSoftmaxBackward0.result", "EXACT", 1570.5),
)
STEPS = (  # what a planner would do next: need, action, part still held, slowdown, squared error, each per GiB
    ("MASK", "lossless()", 1 / 8, 0.01, 0.0),
    ("DERIVATIVE", "derive(); lossless()", 1 / 4, 0.02, 0.0001),
    ("OPERAND", "quant(bits=8)", 0.26, 0.04, 0.00004),
    ("VALUES", "recompute", 0.0, 0.09, 0.0),
    ("OPERAND", "quant(bits=4)", 0.14, 0.05, 0.0012),
    ("DERIVATIVE", "derive(); quant(bits=2)", 0.07, 0.04, 0.002),
)


def gpt2_storages() -> list[StorageRow]:
    blocks = [(f"transformer.h.{i}.{path}", *rest) for i in range(12) for path, *rest in BLOCK]
    rows = [*BEFORE, *blocks, *AFTER]
    return [
        {
            "path": path,
            "module": module,
            "need": need,
            "bytes": int(size * MIB),
            "count": 1,
            "savers": [f"{path}:{slot}"],
        }
        for path, module, slot, need, size in rows
    ]


def step_timeline(held: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Live bytes of a step that saves its storages one by one and lets go of them in reverse."""
    turn, last, count = BACKWARD * EVENTS, EVENTS - 1, len(held)
    live = []
    for event in range(EVENTS):
        ahead = event < turn
        progress = event / turn if ahead else (last - event) / (last - turn)
        front = min(int(progress * count), count - 1)
        work = (60 + 30 * (event * 7 % 5)) * MIB + max(whole[front] - held[front], 0)
        logits = 1571 * MIB if abs(event - turn) < 7 else 0
        gradients = 0 if ahead else int((1 - progress) * 475 * MIB)
        live.append(sum(held[: front + 1]) + work + logits + gradients)
    return live


def gpt2_data(plans: int = 12) -> FrontierData:
    storages = gpt2_storages()
    whole = [row["bytes"] for row in storages]
    actions, held, slowdown, error = ["keep"] * len(storages), list(whole), 1.0, 0.0
    timeline = step_timeline(held, whole)
    peak, rows = max(timeline), []
    todo = [(step, i) for step in STEPS for i, row in enumerate(storages) if row["need"] == step[0]]
    for k in range(plans):
        budget = int(peak * (0.97 - 0.5 * k / max(plans - 1, 1)))
        while todo and max(step_timeline(held, whole)) > budget:
            (_, action, part, cost, noise), i = todo.pop(0)
            actions[i], held[i] = action, int(whole[i] * part)
            slowdown += cost * whole[i] / (1024 * MIB)
            error += noise * whole[i] / (1024 * MIB)
        live = step_timeline(held, whole)
        rows.append(
            {
                "budget": budget,
                "label": human_bytes(budget),
                "kept": sum(held),
                "peak": max(live),
                "seconds": 2.31 * slowdown,
                "slowdown": slowdown,
                "added": 2.31 * (slowdown - 1),
                "error": error**0.5,
                "timeline": live,
                "actions": list(actions),
                "held": list(held),
            }
        )
    return {
        "title": "GPT2LMHeadModel, 8 x 1024",
        "of": "peak",
        "device": "cpu",
        "torch": "2.13.0",
        "untouched": {"kept": sum(whole), "peak": peak, "seconds": 2.31},
        "storages": storages,
        "backward": BACKWARD,
        "timeline": timeline,
        "plans": rows,  # type: ignore[typeddict-item]
    }


# ---- The browser.


class Browser:
    """One session of a chromedriver that is already listening."""

    ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # how the protocol names a reference to an element

    def __init__(self, port: int, binary: str, profile: Path) -> None:
        self.url = f"http://127.0.0.1:{port}/session"
        options = {"binary": binary, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        made = self.call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.url += f"/{made['sessionId']}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def js(self, code: str, *args: Any) -> Any:
        return self.call("POST", "/execute/sync", {"script": code, "args": args})

    def find(self, css: str) -> str:
        found = self.call("POST", "/element", {"using": "css selector", "value": css})
        return str(found[self.ELEMENT])

    def click(self, css: str) -> None:
        self.js("document.querySelector(arguments[0]).scrollIntoView({ block: 'center' })", css)
        self.call("POST", f"/element/{self.find(css)}/click", {})

    def type(self, css: str, keys: str) -> None:
        self.call("POST", f"/element/{self.find(css)}/value", {"text": keys})

    def press(self, key: str) -> None:
        """Press a key on whatever has the focus."""
        strokes = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def hover(self, css: str, x: float = 0.5, y: float = 0.5) -> None:
        """Point at a place of an element, given as parts of its width and height."""
        self.js("document.querySelector(arguments[0]).scrollIntoView({ block: 'center' })", css)
        box = self.js("return document.querySelector(arguments[0]).getBoundingClientRect()", css)
        x, y = box["x"] + x * box["width"], box["y"] + y * box["height"]
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
        self.call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def cdp(self, command: str, **params: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What has been logged since the last time."""
        return list(self.call("POST", "/se/log", {"type": kind}))

    def text(self, css: str) -> str:
        return str(self.js("return document.querySelector(arguments[0]).textContent", css))

    def texts(self, css: str) -> list[str]:
        return list(self.js("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", css))


HOME, END, LEFT, RIGHT, ENTER, ESCAPE = "\ue011", "\ue010", "\ue012", "\ue014", "\ue007", "\ue00c"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if driver is None or binary is None:
        pytest.skip("needs a browser and its driver; on Debian: apt-get install chromium chromium-driver")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            with session(listening_port(server), binary, tmp_path_factory.mktemp("browser")) as opened:
                yield opened
        finally:
            server.terminate()


def listening_port(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    said = []
    for line in server.stdout:
        if match := re.search(r"started successfully on port (\d+)", line):
            return int(match[1])
        said.append(line)
    raise RuntimeError(f"chromedriver did not start: {''.join(said)}")


@contextlib.contextmanager
def session(port: int, binary: str, profile: Path) -> Iterator[Browser]:
    opened = Browser(port, binary, profile)
    try:
        yield opened
    finally:
        opened.call("DELETE", "")


class Page:
    """A page as it is shown, and what the tests ask of it."""

    def __init__(self, browser: Browser, path: Path, data: FrontierData) -> None:
        self.browser, self.data = browser, data
        path.write_text(frontier_page(data), encoding="utf-8")
        self.url = path.as_uri()
        for kind in ("browser", "performance"):
            browser.log(kind)  # what other pages did
        browser.open(self.url)

    def pick(self, index: int) -> None:
        """Move the slider by keyboard: from the smallest budget up."""
        self.browser.js("document.getElementById('budget').focus()")
        self.browser.press(HOME)
        for _ in range(len(self.data["plans"]) - 1 - index):
            self.browser.press(RIGHT)

    def picked(self) -> int:
        """The plan whose budget is shown, which all labels of a test must make certain."""
        labels = [plan["label"] for plan in self.data["plans"]]
        return labels.index(self.browser.text("#budget-label"))

    def tiles(self) -> list[dict[str, Any]]:
        """What the treemap shows: of each tile its place, its bytes, and the area that is solid."""
        return list(
            self.browser.js("""
                const number = (e, name) => Number(e.getAttribute(name));
                const area = (e) => number(e, "width") * number(e, "height");
                return [...document.querySelectorAll(".tile")].map((tile) => ({
                    path: tile.dataset.path,
                    bytes: Number(tile.dataset.bytes),
                    held: Number(tile.dataset.held),
                    area: area(tile.querySelector(".edge")),
                    solid: [...tile.querySelectorAll(".solid")].map(area).reduce((a, b) => a + b, 0),
                    tones: [...tile.querySelectorAll(".solid")].map((e) => e.classList[2]),
                    text: [...tile.querySelectorAll("text")].map((e) => e.textContent),
                }))""")
        )

    def rows(self) -> list[list[str]]:
        """The cells of the table's body."""
        code = "return [...document.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
        return list(self.browser.js(code))

    def hint(self) -> str:
        return "" if self.browser.js("return document.getElementById('hint').hidden") else self.browser.text("#hint")

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.browser.log("browser")]

    def requests(self) -> list[str]:
        """Every address that was asked for, but the page's own."""
        events = [json.loads(entry["message"])["message"] for entry in self.browser.log("performance")]
        asked = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        urls = [request["request"]["url"] for request in asked if request["documentURL"] == self.url]
        return [url for url in urls if url != self.url]


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Iterator[Any]:
    """`shown(data)` opens the page of these data; when it is done with, nothing may have gone wrong in it."""
    pages: list[Page] = []

    def leave() -> None:
        if pages:
            assert pages[-1].errors() == []
            assert pages[-1].requests() == []

    def show(data: FrontierData) -> Page:
        leave()
        pages.append(Page(browser, tmp_path / f"page{len(pages)}.html", data))
        return pages[-1]

    yield show
    leave()


@pytest.fixture(scope="module")
def data() -> FrontierData:
    return gpt2_data()


@pytest.fixture
def page(shown: Any, data: FrontierData) -> Page:
    return shown(data)


# ---- Without a browser.


class Parts(HTMLParser):
    """The scripts of a page, as a parser of HTML delimits them, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.title = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and data.strip():
            self.scripts[-1] += data
        if self.lasttag == "title" and not self.title:
            self.title = data


def hostile(data: FrontierData) -> FrontierData:
    """The same data with markup in every name."""
    twisted = copy.deepcopy(data)
    evil = (
        "</script><script>window.harmed = 1</script ><img src=x onerror='window.harmed = 1'>&lt;<!-- <script </script "
    )
    twisted["title"] = twisted["device"] = twisted["torch"] = evil
    for i, row in enumerate(twisted["storages"]):
        row["path"] = f"{row['path']}.{evil}{i}"
        row["module"] = row["need"] = f"{evil}{i % 3}"
        row["savers"] = [f"{row['path']}:{evil}.self"]
    for k, plan in enumerate(twisted["plans"]):
        plan["label"] = f"{evil}{k}"
        plan["actions"] = [f"{evil}{action}" for action in plan["actions"]]
    return twisted


def test_the_page_carries_its_data_unchanged(data: FrontierData) -> None:
    assert json.loads(Parts(frontier_page(data)).scripts[0]) == data


def test_no_name_in_the_data_can_leave_its_script_element(data: FrontierData) -> None:
    twisted = hostile(data)
    plain, parts = Parts(frontier_page(data)), Parts(frontier_page(twisted))
    assert [tag for tag, _ in parts.tags] == [tag for tag, _ in plain.tags]
    assert json.loads(parts.scripts[0]) == twisted
    assert parts.scripts[1] == plain.scripts[1]
    assert not set("<>&") & set(parts.scripts[0])
    assert parts.title.startswith("</script><script>")


def test_the_page_lets_its_own_style_and_script_act_and_asks_for_nothing(data: FrontierData) -> None:
    parts = Parts(frontier_page(data))
    policies = [attrs["content"] for _, attrs in parts.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    hashed = r"'sha256-[A-Za-z0-9+/]{43}='"
    expected = rf"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {hashed}; script-src {hashed}"
    assert len(policies) == 1
    assert re.fullmatch(expected, policies[0] or "")
    assert not [attrs for _, attrs in parts.tags if {"src", "href", "style"} & set(attrs)]


def test_no_address_is_named_but_the_name_of_svg() -> None:
    text = "".join([resource("page.html"), resource("page.css"), joined_scripts()])
    assert re.findall(r"\w+://[^\s\"']+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"url\(|@import|\bimport\b|fetch\(|XMLHttpRequest|innerHTML|insertAdjacentHTML|eval\(", text)


def test_needs_have_the_colours_of_the_plots() -> None:
    colours = dict(re.findall(r"^\.need-(\w+) \{ --tone: (#\w+); \}", resource("page.css"), flags=re.MULTILINE))
    assert {need: colours[need.lower()].upper() for need in NEEDS} == COLOURS


def test_every_need_and_every_action_is_explained() -> None:
    words = re.findall(r"<dt>(\w+)</dt>", resource("page.html"))
    assert [word for word in words if word.isupper()] == list(NEEDS)
    assert {word for word in words if word.islower()} == set(WHY)


def test_plans_that_do_not_fit_the_storages_are_refused(data: FrontierData) -> None:
    for name, expected in (("actions", 137), ("held", 137), ("timeline", EVENTS)):
        broken = copy.deepcopy(data)
        broken["plans"][3][name].pop()  # type: ignore[literal-required]
        with pytest.raises(SpecError, match=rf"has {expected - 1} {name}, expected {expected}"):
            frontier_page(broken)


def test_data_with_nothing_to_show_are_refused(data: FrontierData) -> None:
    with pytest.raises(SpecError, match="at least one plan"):
        frontier_page({**data, "plans": []})
    with pytest.raises(SpecError, match="one event"):
        frontier_page({**data, "timeline": []})
    with pytest.raises(SpecError, match="by 'peak'"):
        frontier_page(without_timeline(data) | {"of": "peak"})
    with pytest.raises(SpecError, match="by 'time'"):
        frontier_page({**data, "of": "time"})
    with pytest.raises(SpecError, match="misses 'backward', 'plans'"):
        frontier_page({name: value for name, value in data.items() if name not in ("plans", "backward")})
    with pytest.raises(SpecError, match="cannot begin with plan 12: there are 12"):
        frontier_page({**data, "chosen": 12})


def test_data_that_are_no_json_are_refused(data: FrontierData) -> None:
    for bad in (float("nan"), object()):
        with pytest.raises(SpecError, match="plain JSON data with finite numbers"):
            frontier_page({**data, "backward": bad})


def without_timeline(data: FrontierData) -> dict[str, Any]:
    """The same plans for a model whose step cannot be followed, so that nobody knows its peak or its time."""
    plans = [
        {**plan, "budget": plan["kept"], "peak": None, "seconds": None, "slowdown": None, "timeline": []}
        for plan in data["plans"]
    ]
    untouched = {**data["untouched"], "peak": None, "seconds": None}
    return {**data, "of": "kept", "untouched": untouched, "timeline": [], "plans": plans}


# ---- In the browser.


def four_figures(page: Page) -> list[str]:
    return [page.browser.text(f"#figure-{name}") for name in ("peak", "kept", "time", "error")]


def shown_bytes(text: str) -> set[str]:
    return set(re.findall(r"[0-9.]+ [KMG]?i?B", text))


def test_the_page_asks_the_network_for_nothing_and_could_not(page: Page) -> None:
    assert page.browser.js("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
    assert page.requests() == []
    refused = """
        const [address, done] = arguments;
        const seen = [];
        document.addEventListener("securitypolicyviolation", (event) => seen.push(event.effectiveDirective));
        const image = new Image();
        image.onerror = () => fetch(address).catch(() => setTimeout(() => done(seen.sort()), 50));
        image.src = address;"""
    tried = page.browser.call("POST", "/execute/async", {"script": refused, "args": ["http://127.0.0.1:9/x"]})
    assert tried == ["connect-src", "img-src"]
    assert len(page.errors()) >= 2  # the browser says so, too
    assert page.requests() == ["http://127.0.0.1:9/x"]  # announced, and then not made


def test_a_page_that_is_served_asks_for_no_icon_either(browser: Browser, data: FrontierData) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(frontier_page(data).encode())

        def log_message(self, *_: Any) -> None:
            pass

    asked: list[str] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/page.html")
        assert browser.text("h1") == data["title"]
        time.sleep(0.5)  # an icon is asked for a little later
        browser.open("about:blank")
        server.shutdown()
    assert asked == ["/page.html"]


def test_the_first_plan_shown_is_the_one_chosen_or_the_middle_one(shown: Any, data: FrontierData) -> None:
    assert shown(data).picked() == 6
    assert shown({**data, "chosen": 2}).picked() == 2


def test_the_slider_moves_every_figure_to_its_plan(page: Page) -> None:
    untouched = page.data["untouched"]
    for index, plan in enumerate(page.data["plans"]):
        page.pick(index)
        assert page.picked() == index
        peak, kept, time, error = four_figures(page)
        assert (peak, kept, time) == (human_bytes(plan["peak"]), human_bytes(plan["kept"]), f"{plan['slowdown']:.2f}x")
        assert float(error.removesuffix("%")) == pytest.approx(100 * plan["error"], abs=0.05)  # one decimal is shown
        assert page.browser.text("#note-peak") == human_ratio(untouched["peak"], plan["peak"])
        assert page.browser.text("#note-kept") == human_ratio(untouched["kept"], plan["kept"])
        assert page.browser.js("return document.querySelector('.dot.current').dataset.plan") == str(index)


def test_the_slider_says_its_plan_to_those_who_hear_it(page: Page) -> None:
    page.pick(11)
    said = page.browser.js("return document.getElementById('budget').getAttribute('aria-valuetext')")
    plan = page.data["plans"][11]
    assert said.startswith(f"{plan['label']}: peak {human_bytes(plan['peak'])}, ")
    assert f"kept {human_bytes(plan['kept'])}" in said


def test_bytes_read_as_in_the_terminal(shown: Any, data: FrontierData) -> None:
    """Ties in particular: Python rounds them to the even digit, JavaScript away from zero."""
    ties = [0, 1, 1023, 1024, 1280, 1792, 2 * MIB + MIB // 4, 3 * MIB + 3 * MIB // 4, 1048523, 1048524, 1 << 40]
    plans = [{**data["plans"][0], "kept": kept, "label": str(kept)} for kept in ties]
    page = shown({**data, "plans": plans})
    for index, kept in enumerate(ties):
        page.pick(index)
        assert page.browser.text("#figure-kept") == human_bytes(kept)
        assert page.browser.text("#note-kept") == human_ratio(data["untouched"]["kept"], kept)


def test_clicking_a_dot_picks_its_plan_in_both_panels(page: Page) -> None:
    for panel in ("[role=radio]", "[aria-hidden]"):
        for index in (0, 9, 4):
            page.browser.click(f".dot{panel}[data-plan='{index}']")
            assert page.picked() == index
            assert page.browser.js("return document.getElementById('budget').value") == str(11 - index)
            assert page.browser.js("return document.querySelector('[aria-checked=true]').dataset.plan") == str(index)


def test_arrow_keys_go_from_dot_to_dot(page: Page) -> None:
    page.browser.js("document.querySelector('[aria-checked=true]').focus()")
    page.browser.press(RIGHT)
    page.browser.press(RIGHT)
    assert page.picked() == 4
    page.browser.press(LEFT)
    assert page.picked() == 5
    assert page.browser.js("return document.activeElement.dataset.plan") == "5"


def test_there_is_a_dot_for_each_plan_where_its_peak_and_time_put_it(page: Page) -> None:
    dots = page.browser.js("""
        const number = (e, name) => Number(e.getAttribute(name));
        return [...document.querySelectorAll('[role=radio]')].map((e) => [number(e, 'cx'), number(e, 'cy')])""")
    plans = page.data["plans"][::-1]  # in the order of the keyboard: the smallest first
    assert len(dots) == len(plans)
    for k, name in enumerate(("peak", "slowdown")):
        assert_linear([plan[name] for plan in plans], [dot[k] for dot in dots])  # type: ignore[literal-required]


def assert_linear(values: Sequence[float], places: Sequence[float], within: float = 0.02) -> None:
    """Every place follows from its value by one and the same scale, up to the rounding of what is drawn, in pixels."""
    low, high = min(values), max(values)
    first, last = places[values.index(low)], places[values.index(high)]
    for value, place in zip(values, places, strict=True):
        assert place == pytest.approx(first + (value - low) / (high - low) * (last - first), abs=within)


def heights(page: Page, css: str) -> list[float]:
    path = page.browser.js("return document.querySelector(arguments[0]).getAttribute('d')", css)
    return [float(y) for y in re.findall(r"[ML][0-9.]+ ([0-9.]+)", path)]


def test_the_timeline_draws_the_plan_and_the_untouched_step_to_one_scale(page: Page) -> None:
    for index in (0, 7, 11):
        page.pick(index)
        both = [*page.data["timeline"], *page.data["plans"][index]["timeline"]]
        drawn = [*heights(page, ".line.before"), *heights(page, ".line.after")]
        assert_linear(both, drawn)
        assert page.browser.text(".limit-name") == f"budget {page.data['plans'][index]['label']}"


def test_the_budget_line_lies_at_its_bytes(page: Page) -> None:
    page.pick(8)
    limit = page.browser.js("return document.querySelector('.limit').getAttribute('transform')")
    y = float(re.fullmatch(r"translate\(0 ([0-9.]+)\)", limit)[1])  # type: ignore[index]
    assert_linear([*page.data["timeline"], page.data["plans"][8]["budget"]], [*heights(page, ".line.before"), y])


def test_pointing_at_the_timeline_says_the_bytes_there(page: Page) -> None:
    page.pick(3)
    page.browser.hover("#timeline svg", 0.7)
    event = int(page.browser.js("return document.querySelector('#timeline svg').getAttribute('aria-valuenow')"))
    assert 0.6 < event / EVENTS < 0.75
    before, after = page.data["timeline"][event], page.data["plans"][3]["timeline"][event]
    assert page.hint().startswith(f"Backward, {100 * event / (EVENTS - 1):.0f}% of the step")
    assert {human_bytes(before), human_bytes(after)} == shown_bytes(page.hint())


def test_the_timeline_can_be_read_by_keyboard(page: Page) -> None:
    page.browser.js("document.querySelector('#timeline svg').focus()")
    page.browser.press(END)
    page.browser.press(LEFT)
    event = EVENTS - 1 - round(EVENTS / 50)
    said = page.browser.js("return document.activeElement.getAttribute('aria-valuetext')")
    assert human_bytes(page.data["timeline"][event]) in shown_bytes(said)


@pytest.mark.parametrize("layers", ["together", "apart"])
def test_areas_are_proportional_to_bytes_and_what_is_held_is_solid(page: Page, layers: str) -> None:
    page.browser.click(f"#layers input[value={layers}] + span")
    whole = page.data["untouched"]["kept"]
    for index in (1, 10):
        page.pick(index)
        tiles = page.tiles()
        surface = sum(tile["area"] for tile in tiles)
        assert sum(tile["bytes"] for tile in tiles) == whole
        assert sum(tile["held"] for tile in tiles) == page.data["plans"][index]["kept"]
        for tile in tiles:
            assert tile["area"] / surface == pytest.approx(tile["bytes"] / whole, rel=1e-6)
            assert tile["solid"] / surface == pytest.approx(tile["held"] / whole, rel=1e-6)


def test_tiles_fill_the_map_without_overlap(page: Page) -> None:
    boxes = page.browser.js("""
        const svg = document.querySelector('#treemap svg');
        const of = (e) => ['x', 'y', 'width', 'height'].map((name) => Number(e.getAttribute(name)));
        return [[0, 0, ...of(svg).slice(2)], ...[...svg.querySelectorAll('.edge')].map(of)]""")
    (_, _, width, height), *tiles = boxes
    assert sum(w * h for _, _, w, h in tiles) == pytest.approx(width * height, rel=1e-9)
    for i, (x, y, w, h) in enumerate(tiles):
        for ox, oy, ow, oh in tiles[:i]:
            assert min(x + w, ox + ow) - max(x, ox) < 1e-6 or min(y + h, oy + oh) - max(y, oy) < 1e-6


def crumbs(page: Page) -> list[str]:
    return page.browser.texts("#crumbs li:not(.size)")


def test_repeated_layers_are_one_group_until_they_are_asked_for_one_by_one(page: Page) -> None:
    assert "transformer.h.0–11.mlp.act" in {tile["path"] for tile in page.tiles()}
    assert page.browser.texts(".chip")[:3] == ["transformer", "h.0–11", "mlp"]
    page.browser.click("#layers input[value=apart] + span")
    paths = {tile["path"] for tile in page.tiles()}
    assert {f"transformer.h.{i}.mlp.act" for i in range(12)} <= paths


def test_clicking_goes_into_a_module_and_the_path_above_leads_back(page: Page) -> None:
    start = page.tiles()
    page.browser.click(".chip[aria-label$='.mlp']")
    assert crumbs(page) == ["All modules", "transformer", "h.0–11", "mlp"]
    inside = page.tiles()
    assert sum(tile["bytes"] for tile in inside) == 12 * (96 + 96 + 24 + 6) * MIB
    page.browser.click(".tile[data-path$='.act']")
    assert [tile["path"] for tile in page.tiles()] == [f"transformer.h.{i}.mlp.act" for i in range(12)]
    page.browser.click(".tile")  # one storage: there is nothing further in
    assert crumbs(page)[-1] == "act"
    page.browser.click("#crumbs li:nth-child(4) button")
    assert page.tiles() == inside
    page.browser.click("#crumbs button")
    assert page.tiles() == start


def test_the_map_can_be_used_by_keyboard_alone(page: Page) -> None:
    start = page.tiles()
    page.browser.js("document.querySelector('#treemap [tabindex=\"0\"]').focus()")
    page.browser.press(RIGHT)
    assert "transformer.h.0–11.mlp.c_proj" in page.hint()
    page.browser.press(ENTER)
    assert crumbs(page)[-1] == "c_proj"
    assert page.browser.js("return document.activeElement.matches('.tile')")
    for _ in range(6):
        page.browser.press(ESCAPE)
    assert page.tiles() == start


def test_what_is_zoomed_into_follows_the_slider(page: Page) -> None:
    page.browser.click(".tile[data-path='transformer.h.0–11.mlp.c_proj']")
    indices = [i for i, row in enumerate(page.data["storages"]) if row["path"].endswith("mlp.c_proj")]
    for index in (0, 5, 11):
        page.pick(index)
        held = page.data["plans"][index]["held"]
        assert [tile["held"] for tile in page.tiles()] == [held[i] for i in indices]


def test_pointing_at_a_storage_says_all_about_it(page: Page) -> None:
    page.pick(9)
    page.browser.hover(".tile[data-path='']")
    for word in (
        "(model) LogSoftmax.result",
        "GPT2LMHeadModel",
        "EXACT",
        "1.5 GiB",
        "keep",
        ":LogSoftmaxBackward0.result",
    ):
        assert word in page.hint()
    page.browser.hover(".tile[data-path='transformer.h.0–11.mlp.act']")
    for word in ("GELU ×12", "DERIVATIVE ×12", "1.1 GiB", "derive(); lossless() ×12", "288.0 MiB, 4.0x less"):
        assert word in page.hint()
    page.browser.hover("h1")
    assert page.hint() == ""


def test_every_tile_is_named_apart_to_those_who_hear_it(page: Page) -> None:
    page.browser.click("#layers label:last-of-type span")
    names = page.browser.js(
        "return [...document.querySelectorAll('.tile')].map((tile) => tile.ariaLabel.split(': ')[0])"
    )
    assert len(set(names)) == len(names) == 137
    assert {"(model) LogSoftmax.result", "transformer.h.3.mlp.act", "lm_head"} <= set(names)


def test_small_storages_that_share_a_row_are_all_counted(shown: Any, data: FrontierData) -> None:
    storages = [*data["storages"][:-1], {**data["storages"][-1], "count": 40}]
    page = shown({**data, "storages": storages})
    assert "176 storages kept for backward" in page.browser.text("#setup")
    assert page.browser.text("#crumbs .size").endswith("in 176 storages")
    assert page.browser.text("#table-count").endswith("176 of 176 storages")
    assert page.browser.texts("tfoot td")[0] == "176"


def test_colours_follow_the_need_or_the_action(page: Page) -> None:
    page.pick(8)
    assert {tone for tile in page.tiles() for tone in tile["tones"]} <= {f"need-{need.lower()}" for need in NEEDS}
    assert page.browser.text("#treemap-key").startswith("INDEX")
    page.browser.click("#colouring input[value=action] + span")
    tiles = page.tiles()
    assert all(tone.startswith("action-") for tile in tiles for tone in tile["tones"])
    key = page.browser.texts("#treemap-key li")
    assert {re.split(r"(?<=\))(?=[0-9])|(?<=[a-z])(?=[0-9])", text)[0] for text in key} == set(
        page.data["plans"][8]["actions"]
    )
    assert any("quant(bits=8)" in line for tile in tiles for line in tile["text"])  # said in words, too
    page.browser.click("#colouring input[value=need] + span")
    assert page.browser.text("#treemap-key").startswith("INDEX")


def test_a_tile_of_storages_treated_differently_shows_each_share(page: Page) -> None:
    index, mixed = next(
        (k, set(names))
        for k, plan in enumerate(page.data["plans"])
        if len(set(names := [plan["actions"][i] for i in range(len(plan["actions"])) if gelu(page.data, i)])) == 2
    )
    page.pick(index)
    page.browser.click("#colouring input[value=action] + span")
    tile = next(tile for tile in page.tiles() if tile["path"].endswith("0–11.mlp.act"))
    assert len(set(tile["tones"])) == len(mixed) == 2
    page.browser.hover(".tile[data-path='transformer.h.0–11.mlp.act']")
    assert all(f"{name} ×" in page.hint() for name in mixed)


def gelu(data: FrontierData, i: int) -> bool:
    return data["storages"][i]["module"] == "GELU"


def test_the_table_adds_up_to_the_plan(page: Page) -> None:
    for index in (0, 6, 11):
        page.pick(index)
        plan, storages = page.data["plans"][index], page.data["storages"]
        expected: dict[tuple[str, str, str], list[int]] = {}
        for row, action, held in zip(storages, plan["actions"], plan["held"], strict=True):
            slot = row["savers"][0].rpartition(":")[2].replace("Backward0", "")
            sums = expected.setdefault((row["module"], slot, action), [0, 0, 0])
            for k, n in enumerate((1, row["bytes"], held)):
                sums[k] += n
        cells = {(module, slot, action): rest for module, slot, _, action, *rest in page.rows()}
        assert cells == {
            key: [str(count), human_bytes(size), human_bytes(held), human_ratio(size, held)]
            for key, (count, size, held) in expected.items()
        }
        whole = page.data["untouched"]["kept"]
        together = ["137", human_bytes(whole), human_bytes(plan["kept"]), human_ratio(whole, plan["kept"])]
        assert page.browser.texts("tfoot td") == together


def test_the_table_is_sorted_by_any_column_both_ways(page: Page) -> None:
    def column(k: int) -> list[str]:
        return [row[k] for row in page.rows()]

    modules = column(0)
    assert modules[0] == "Conv1D"  # the most bytes first
    page.browser.click("thead th:nth-child(1) button")
    assert column(0) == sorted(modules, key=str.lower)
    page.browser.click("thead th:nth-child(1) button")
    assert column(0) == sorted(modules, key=str.lower, reverse=True)
    page.browser.click("thead th:nth-child(5) button")
    counts = [int(text) for text in column(4)]
    assert counts == sorted(counts, reverse=True)
    sorting = page.browser.js("return [...document.querySelectorAll('th[aria-sort]')].map((e) => e.ariaSort)")
    assert sorting == ["none"] * 4 + ["descending"] + ["none"] * 3


def test_the_filter_chooses_storages_by_every_word(page: Page) -> None:
    page.browser.click("#filter")
    page.browser.type("#filter", "h.3.")
    assert page.browser.text("#table-count") == "6 groups, 11 of 137 storages"
    page.browser.type("#filter", " OPERAND")
    assert [row[:3] + row[4:5] for row in page.rows()] == [["Conv1D", "Addmm.mat1", "OPERAND", "4"]]
    page.pick(11)
    assert [row[3] for row in page.rows()] == ["quant(bits=4)"]
    page.browser.type("#filter", " nothing of that kind")
    assert page.rows() == []
    assert page.browser.text("#table-count") == "0 groups, 0 of 137 storages"


def test_markup_in_names_is_shown_and_does_nothing(shown: Any, data: FrontierData) -> None:
    page = shown(hostile(data))
    for index in (0, 11):
        page.pick(index)
    page.browser.click("#colouring input[value=action] + span")
    page.browser.hover(".tile")
    assert "</script><script>window.harmed = 1</script >" in page.hint()
    page.browser.click(".tile")
    page.browser.type("#filter", "<script>")
    assert len(page.rows()) > 3
    assert page.browser.text("h1") == page.data["title"]
    assert page.browser.js("return [window.harmed ?? null, document.images.length, document.scripts.length]") == [
        None,
        0,
        2,
    ]


def test_two_thousand_storages_are_drawn_within_two_seconds(shown: Any) -> None:
    page = shown(many_storages(2000))
    load, move = page.browser.js("""
        const slider = document.getElementById('budget');
        const began = performance.now();
        slider.value = '3';
        slider.dispatchEvent(new Event('input'));
        document.body.getBoundingClientRect();
        return [performance.getEntriesByType('navigation')[0].loadEventEnd, performance.now() - began]""")
    print(f"2000 storages: {load:.0f} ms to load, {move:.0f} ms for another plan")
    assert len(page.tiles()) == 2000  # all of them side by side: nothing can be put together
    assert 0 < load < 2000
    assert move < 1000


def many_storages(count: int, plans: int = 20) -> FrontierData:
    sizes = [MIB * (1 + i * 7919 % 97) for i in range(count)]
    rows: list[Any] = []
    for k in range(plans):
        held = [size // (1 + (i + k) % 4) for i, size in enumerate(sizes)]
        actions = [
            "keep" if part == size else f"quant(bits={k % 8 + 1})" for part, size in zip(held, sizes, strict=True)
        ]
        figures = {"kept": sum(held), "peak": sum(held), "seconds": 1.0, "slowdown": 1.0, "added": 0.0, "error": 0.0}
        live = [sum(held)] * 600
        rows.append({"budget": "half", "label": f"{k}", **figures, "timeline": live, "actions": actions, "held": held})
    savers = [[f"part{i}.proj:AddmmBackward0.mat1", f"part{i}:MulBackward0.self"] for i in range(count)]
    return {
        "title": "Many",
        "of": "peak",
        "device": "cpu",
        "torch": "2.13.0",
        "untouched": {"kept": sum(sizes), "peak": sum(sizes), "seconds": 1.0},
        "storages": [
            {
                "path": f"part{i}",
                "module": f"M{i % 50}",
                "need": NEEDS[i % 8],
                "bytes": sizes[i],
                "savers": savers[i],
                "count": 1,
            }
            for i in range(count)
        ],
        "backward": 0.4,
        "timeline": [sum(sizes)] * 600,
        "plans": rows,
    }


def test_budgets_in_words_and_steps_nobody_timed_are_shown_as_far_as_they_go(shown: Any, data: FrontierData) -> None:
    plans = [{**plan, "budget": "half", "seconds": None, "error": 0.0} for plan in data["plans"]]
    page = shown({**data, "plans": plans, "untouched": {**data["untouched"], "seconds": None}})
    assert page.browser.js("return document.querySelector('.limit').hasAttribute('hidden')")
    assert page.browser.text("#note-time") == "of the untouched step"
    assert page.browser.text("#figure-error") == "none"
    assert page.browser.js("return document.querySelectorAll('.dot').length") == 12  # no panel for the error
    assert page.browser.texts("#untouched dt") == ["Untouched peak", "Untouched kept"]


def test_a_single_plan_and_a_model_that_keeps_nothing_can_be_shown(shown: Any, data: FrontierData) -> None:
    alone = shown({**data, "plans": data["plans"][:1]})
    assert alone.picked() == 0
    assert alone.browser.js("return document.getElementById('budget').disabled")
    nothing = {**data["plans"][0], "actions": [], "held": [], "kept": 0, "timeline": [0], "peak": 0, "slowdown": 1.0}
    none = {"kept": 0, "peak": 0, "seconds": 1.0}
    empty = shown({**data, "untouched": none, "storages": [], "timeline": [0], "plans": [nothing]})
    assert empty.rows() == []
    assert empty.browser.text("#figure-kept") == "0 B"


def test_plans_without_a_timeline_are_shown_by_what_they_keep(shown: Any, data: FrontierData) -> None:
    page = shown(without_timeline(data))
    assert page.browser.js("return document.getElementById('timeline').closest('.card').hidden")
    assert page.browser.texts("#untouched dt") == ["Untouched kept"]
    assert page.browser.texts("#figures dt") == ["Kept for backward", "Step time", "Gradient error"]
    page.pick(11)
    added = 1000 * data["plans"][11]["added"]
    assert page.browser.text("#figure-time") == f"+{float(f'{added:.3g}'):g} ms"
    assert page.browser.text("#note-time") == "added to a step"
    spoken = page.browser.js("return document.getElementById('budget').getAttribute('aria-valuetext')")
    assert "peak" not in spoken and f"step time +{added:.3g} ms" in spoken
    assert "added to a step" in page.browser.texts("#frontier .axis-name")


def test_plans_for_budgets_of_what_is_kept_are_drawn_by_that(shown: Any, data: FrontierData) -> None:
    page = shown({**data, "of": "kept"})
    assert "kept for backward" in page.browser.texts("#frontier .axis-name")
    xs = page.browser.js("return [...document.querySelectorAll('.dot[role]')].map((dot) => Number(dot.dataset.plan))")
    places = page.browser.js("return [...document.querySelectorAll('.dot[role]')].map((dot) => dot.cx.baseVal.value)")
    kept = [data["plans"][number]["kept"] for number in xs]
    slope = (places[0] - places[-1]) / (kept[0] - kept[-1])
    assert places == pytest.approx([places[0] + slope * (size - kept[0]) for size in kept], abs=0.1)


def test_budgets_that_no_plan_meets_are_named(shown: Any, data: FrontierData) -> None:
    assert shown(data).browser.text("#unmet") == ""
    assert shown({**data, "unmet": ["2 GiB", "1 GiB"]}).browser.text("#unmet") == "No plan meets 2 GiB, 1 GiB."


def test_the_untouched_step_is_seen_around_a_plan_that_does_nothing(page: Page) -> None:
    radius = "return document.querySelector(arguments[0]).r.baseVal.value"
    dot, hollow, ring = (page.browser.js(radius, css) for css in (".dot", "circle.hollow", "circle.ring"))
    assert dot < hollow < ring


def test_a_tile_without_room_for_its_name_says_nothing(page: Page) -> None:
    page.browser.click("#layers label:last-of-type span")
    first = "return [...document.querySelectorAll('.tile .words')].map((words) => words.firstChild?.classList[0])"
    assert set(page.browser.js(first)) <= {"name", None}


def test_nothing_is_cut_off_on_paper(page: Page) -> None:
    sheet = {"width": 740, "height": 1050, "deviceScaleFactor": 1, "mobile": False}
    page.browser.cdp("Emulation.setEmulatedMedia", media="print")
    try:
        assert page.browser.js("return document.querySelector('.filter').checkVisibility()") is False
        page.browser.cdp("Emulation.setDeviceMetricsOverride", **sheet)
        wide = """
            const inside = (e) => e.getBoundingClientRect().right <= document.documentElement.clientWidth;
            return [...document.querySelectorAll("svg, table")].filter((e) => !inside(e)).map((e) => e.id)"""
        assert page.browser.js(wide) == []
    finally:
        page.browser.cdp("Emulation.clearDeviceMetricsOverride")
        page.browser.cdp("Emulation.setEmulatedMedia", media="")


def test_steps_of_a_sequential_stay_apart_where_blocks_are_put_together(shown: Any, data: FrontierData) -> None:
    paths = ["net.0", "net.1", "net.2", *(f"blocks.{i}.{name}" for i in (0, 1, 2, 5) for name in ("conv", "bn"))]
    paths += ["blocks.5.shortcut"]
    row = data["storages"][0]
    storages = [{**row, "path": path, "bytes": MIB, "savers": [f"{path}:XBackward0.self"]} for path in paths]
    plan = {**data["plans"][0], "actions": ["keep"] * len(paths), "held": [MIB] * len(paths)}
    page = shown({**data, "storages": storages, "plans": [plan]})
    assert {tile["path"] for tile in page.tiles()} == {
        "net.0",
        "net.1",
        "net.2",
        "blocks.0…5 (4).conv",
        "blocks.0…5 (4).bn",
        "blocks.0…5 (4).shortcut",
    }


def test_nothing_of_the_page_becomes_a_global_name(page: Page) -> None:
    names = re.findall(r"^(?:function|const|let) (\w+)", joined_scripts(), flags=re.MULTILINE)
    assert len(names) > 80
    ours = "return arguments[0].filter((name) => Object.hasOwn(window, name))"
    assert page.browser.js(ours, sorted(set(names))) == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (420, "light")])
def test_texts_neither_overlap_nor_leave_their_places(page: Page, width: int, scheme: str) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.browser.cdp("Emulation.setDeviceMetricsOverride", **size)
    try:
        page.browser.open(page.url)
        assert page.browser.js(LOOK) == {"outside": [], "overlapping": [], "sideways": False, "dark": scheme == "dark"}
    finally:
        page.browser.cdp("Emulation.clearDeviceMetricsOverride")
        page.browser.cdp("Emulation.setEmulatedMedia", features=[])


def test_marks_of_a_narrow_axis_do_not_overlap(shown: Any, data: FrontierData) -> None:
    """Peaks between 174 and 183 MiB have six round values beside them."""
    near = [{**plan, "peak": int((174 + number) * MIB)} for number, plan in enumerate(reversed(data["plans"][:10]))]
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page = shown({**data, "plans": near[::-1], "untouched": {**data["untouched"], "peak": int(183.2 * MIB)}})
    page.browser.cdp("Emulation.setDeviceMetricsOverride", **size)
    try:
        page.browser.open(page.url)
        assert page.browser.js(LOOK)["overlapping"] == []
        assert "185 MiB" in page.browser.texts("#frontier .tick")
    finally:
        page.browser.cdp("Emulation.clearDeviceMetricsOverride")


LOOK = """
const boxOf = (e) => e.getBoundingClientRect();
const inside = (a, b) =>
  a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
const texts = (css) => [...document.querySelectorAll(css)].filter((e) => e.textContent && e.getClientRects().length);
const outside = [
  ...texts(".tile text").filter((e) => !inside(boxOf(e), boxOf(e.closest(".tile")))),
  ...texts(".chip text").filter((e) => !inside(boxOf(e), boxOf(e.previousSibling))),
  ...texts(".card svg text").filter((e) => !inside(boxOf(e), boxOf(e.closest(".card")))),
  ...texts(".figures dd, .untouched dd, h1").filter((e) => !inside(boxOf(e), boxOf(e.parentNode))),
];
const overlapping = [];
for (const plot of ["#frontier", "#timeline", "#treemap"]) {
  const all = texts(`${plot} text`);
  all.forEach((one, i) => all.slice(i + 1).forEach((other) => {
    if (!apart(boxOf(one), boxOf(other))) overlapping.push(`${one.textContent} / ${other.textContent}`);
  }));
}
return {
  outside: outside.map((e) => e.textContent),
  overlapping,
  sideways: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  dark: getComputedStyle(document.body).backgroundColor === "rgb(15, 19, 23)",
};"""
