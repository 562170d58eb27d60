/* Every plan as a dot: the memory that budgets bound, its peak or what it keeps, against its step time and, where
   gradients are not exact, their error. */

const PANELS = { height: 290, top: 28, error: 62, gap: 42, bottom: 42, right: 14 };

function frontierPlot(data, pick) {
  const host = byId("frontier");
  const choose = (dot) => pick(Number(dot.dataset.plan));
  let [current, mark] = [0, () => {}];
  whenPressed(host, ".dot", choose);
  roving(host, '[role="radio"]', choose);
  hinted(host, ".dot", (dot) => planHint(data, data.plans[dot.dataset.plan]));
  byId("frontier-key").replaceChildren(keyEntry("disc", "plan"), keyEntry("disc hollow", "untouched"));
  whenResized(host, () => {
    mark = drawnFrontier(host, data);
    mark(current);
  });
  return {
    show(index) {
      current = index;
      mark(index);
    },
  };
}

/* Draw the panels; the result moves the marks to another plan. */
function drawnFrontier(host, data) {
  const { svg, width, height } = canvasIn(host, PANELS.height, { role: "radiogroup", "aria-label": "Plans" });
  const panels = panelsOf(data, height - PANELS.bottom);
  const left = leftMargin(panels.flatMap(({ values, textOf }) => values.map(textOf)));
  const right = width - PANELS.right;
  const axis = memoryAxis(data, width < 420 ? 4 : 6);
  const toX = scale(ends(axis.values), [left, right]);
  svg.append(...xAxis(axis, toX, panels.at(-1).floor));
  const marks = panels.map((panel) => drawnPanel(svg, data, panel, { left, right, toX }));
  return (index) => marks.forEach((mark) => mark(index));
}

/* Plans that hardly differ are not drawn as if they did: an axis has some width, whatever is on it. */
function memoryAxis({ of, untouched, plans }, count) {
  const sizes = [untouched, ...plans].map((each) => each[of]);
  const most = Math.max(...sizes);
  const name = of === "peak" ? "peak memory" : "kept for backward";
  return { name, ...byteTicks(Math.min(...sizes, 0.9 * most), most, count) };
}

/* Step time, and error beneath it unless all gradients are exact. */
function panelsOf(data, floor) {
  const timePanel = data.plans.some(({ slowdown }) => slowdown === null) ? addedPanel : slowdownPanel;
  if (data.plans.every(({ error }) => error === 0)) return [timePanel(data, PANELS.top, floor)];
  const middle = floor - PANELS.error;
  return [timePanel(data, PANELS.top, middle - PANELS.gap), errorPanel(data, middle, floor)];
}

function slowdownPanel(data, top, floor) {
  const all = [1, ...data.plans.map(({ slowdown }) => slowdown)];
  const least = Math.min(...all);
  const values = ticks(least, Math.max(...all, least + 0.04), 4);
  const digits = values[1] - values[0] < 0.0999 ? 2 : 1;
  const textOf = (value) => `${value.toFixed(digits)}x`;
  return { name: "step time", top, floor, values, textOf, of: ({ slowdown }) => slowdown, untouched: 1, main: true };
}

/* Where nobody knows what an untouched step takes. */
function addedPanel(data, top, floor) {
  const all = [0, ...data.plans.map(({ added }) => added)];
  const values = ticks(Math.min(...all), Math.max(...all, 1e-6), 4);
  const panel = { name: "added to a step", top, floor, values, textOf: secondsText };
  return { ...panel, of: ({ added }) => added, untouched: 0, main: true };
}

function errorPanel(data, top, floor) {
  const values = ticks(0, Math.max(...data.plans.map(({ error }) => error)), 2);
  const textOf = (value) => (value === 0 ? "0%" : errorText(value).replace(".0%", "%"));
  return { name: "gradient error", top, floor, values, textOf, of: ({ error }) => error, untouched: 0, main: false };
}

function xAxis({ name, values, textOf }, toX, floor) {
  const [first, last] = ends(values).map(toX);
  const widest = highest(values.map((value) => textWidth(textOf(value), 11)));
  const stride = Math.ceil((1.5 * widest) / (toX(values[1]) - first)); // the last is moved aside by up to half of it
  const texts = values.map((value, i) => {
    const anchor = i === values.length - 1 ? "end" : "middle";
    const text = (values.length - 1 - i) % stride === 0 ? textOf(value) : "";
    return label(text, toX(value) + (anchor === "end" ? 12 : 0), floor + 19, anchor);
  });
  return [...texts, label(name, (first + last) / 2, floor + 38, "middle", "axis-name")];
}

function drawnPanel(svg, data, panel, { left, right, toX }) {
  const toY = scale(ends(panel.values), [panel.floor, panel.top]);
  const points = data.plans.map((plan) => [toX(plan[data.of]), toY(panel.of(plan))]);
  const drop = [upright(0, 0, panel.floor, "drop"), across(0, left, 0, "drop")];
  const ring = shape("circle", { class: "ring", r: 10 });
  const hollow = { class: "hollow", r: 7.5, cx: toX(data.untouched[data.of]), cy: toY(panel.untouched) };
  const dots = points.map((point, i) => planDot(data, i, point, panel.main));
  svg.append(...yAxis(panel.values, toY, panel.textOf, left, right));
  svg.append(label(panel.name, 0, panel.top - 16, "start", "axis-name"), ...drop);
  svg.append(shape("path", { class: "thread", d: linePath(points) }), shape("circle", hollow));
  svg.append(...dots.toReversed(), ring);
  return (index) => markPlan(dots, points, drop, ring, index);
}

/* Dots of the main panel are radio buttons; those beneath it only repeat them, for the pointer. */
function planDot(data, i, [cx, cy], main) {
  const spoken = { role: "radio", "aria-label": planSentence(data.plans[i], data.untouched) };
  const role = main ? spoken : { "aria-hidden": "true" };
  return shape("circle", { class: "dot", "data-plan": i, cx, cy, r: 5.5, ...role });
}

function markPlan(dots, points, [down, aside], ring, index) {
  const [x, y] = points[index];
  setAll(ring, { cx: x, cy: y });
  setAll(down, { x1: x, x2: x, y1: y });
  setAll(aside, { x2: x, y1: y, y2: y });
  dots.forEach((dot, i) => {
    const chosen = i === index;
    dot.classList.toggle("current", chosen);
    if (dot.hasAttribute("role")) setAll(dot, { "aria-checked": chosen, tabindex: chosen ? 0 : -1 });
  });
}

function planHint({ untouched }, plan) {
  return [plan.label, planFacts(untouched, plan)];
}
