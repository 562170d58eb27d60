/* Making elements. Text goes in as text nodes and attributes, never as markup: a module path may contain anything. */

const SVG = "http://www.w3.org/2000/svg";

function byId(id) {
  return document.getElementById(id);
}

function element(tag, attributes, ...children) {
  return dressed(document.createElement(tag), attributes, children);
}

function shape(tag, attributes, ...children) {
  return dressed(document.createElementNS(SVG, tag), attributes, children);
}

function dressed(node, attributes, children) {
  setAll(node, attributes);
  node.append(...children);
  return node;
}

function setAll(node, attributes = {}) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
}

/* An SVG as large as the element that holds it, in pixels, so that text keeps its size. */
function canvasIn(host, height, attributes) {
  const width = Math.max(host.clientWidth, 200);
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, ...attributes });
  host.replaceChildren(svg);
  return { svg, width, height };
}

/* Draw now, and again whenever the width of the element changes. */
function whenResized(host, draw) {
  let width = host.clientWidth;
  new ResizeObserver(() => {
    if (host.clientWidth === width) return;
    width = host.clientWidth;
    draw();
  }).observe(host);
  draw();
}

/* One tab stop for many elements: arrow keys go from one to the next, and `arrive` is told where. */
function roving(host, selector, arrive = () => {}) {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  host.addEventListener("keydown", (event) => {
    if (!(event.key in steps)) return;
    const all = [...host.querySelectorAll(selector)];
    const next = all[all.indexOf(document.activeElement) + steps[event.key]];
    event.preventDefault();
    if (!next) return;
    next.focus();
    arrive(next);
  });
  host.addEventListener("focusin", (event) => {
    if (event.target.matches(selector)) onlyStop(host, selector, event.target);
  });
}

function onlyStop(host, selector, stop) {
  for (const other of host.querySelectorAll(selector)) other.setAttribute("tabindex", other === stop ? "0" : "-1");
}

/* Click, or Enter or the space bar, as on a button. */
function whenPressed(host, selector, act) {
  const pressed = (event) => event.target.closest(selector);
  host.addEventListener("click", (event) => pressed(event) && act(pressed(event)));
  host.addEventListener("keydown", (event) => {
    if ((event.key !== "Enter" && event.key !== " ") || !pressed(event)) return;
    event.preventDefault();
    act(pressed(event));
  });
}

const rulers = new Map();

/* The width of a text in pixels, in the page's own font. What was measured is remembered: there may be thousands. */
function textWidth(text, size, weight = 400) {
  const font = `${weight} ${size}px`;
  if (!rulers.has(font)) rulers.set(font, newRuler(`${font} ${getComputedStyle(document.body).fontFamily}`));
  return rulers.get(font)(text);
}

function newRuler(font) {
  const context = document.createElement("canvas").getContext("2d");
  const known = new Map();
  context.font = font;
  return (text) => {
    if (!known.has(text)) known.set(text, context.measureText(text).width);
    return known.get(text);
  };
}

/* The text cut in its middle until it fits: both ends of a module path tell more than its middle. Nothing, if less
   than the part `least` of it would be left. */
function fitted(text, width, size, weight, least) {
  let room = text.length;
  let cut = text;
  while (textWidth(cut, size, weight) > width && --room > 4 && room >= least * text.length) cut = shortened(text, room);
  return textWidth(cut, size, weight) > width ? "" : cut;
}

function shortened(text, room) {
  const tail = Math.floor(((room - 1) * 2) / 3);
  const [start, end] = [text.slice(0, room - 1 - tail), text.slice(text.length - tail)];
  return `${start.replace(/\.+$/, "")}…${end.replace(/^\.+/, "")}`;
}

/* An entry of a legend: a small sign, what it stands for, and perhaps how much of it there is. */
function keyEntry(sign, name, amount = "") {
  const parts = [element("span", { class: `sign ${sign}`, "aria-hidden": "true" }), name];
  return element("li", {}, ...parts, element("span", { class: "amount" }, amount));
}

/* A box beside the pointer: a title, then lines of a name and its value. */
function showHint(title, lines, x, y) {
  const hint = byId("hint");
  const rows = lines.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  hint.replaceChildren(element("strong", {}, title), element("dl", {}, ...rows));
  hint.hidden = false;
  const { width, height } = hint.getBoundingClientRect();
  const below = y + 16 + height <= innerHeight;
  hint.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  hint.style.top = `${Math.max(4, below ? y + 16 : y - height - 12)}px`;
}

function hideHint() {
  byId("hint").hidden = true;
}

/* Show a hint on whatever the pointer or the keyboard rests on; `describe` gives its title and lines. */
function hinted(host, selector, describe) {
  const show = (target, x, y) => showHint(...describe(target), x, y);
  host.addEventListener("pointermove", (event) => {
    const target = event.target.closest(selector);
    if (target) show(target, event.clientX, event.clientY);
    else hideHint();
  });
  host.addEventListener("focusin", (event) => {
    if (!event.target.matches(selector) || !event.target.matches(":focus-visible")) return;
    const { left, bottom } = event.target.getBoundingClientRect();
    event.target.setAttribute("aria-describedby", "hint");
    show(event.target, left, bottom - 16);
  });
  host.addEventListener("pointerleave", hideHint);
  host.addEventListener("focusout", (event) => {
    event.target.removeAttribute("aria-describedby");
    hideHint();
  });
}
