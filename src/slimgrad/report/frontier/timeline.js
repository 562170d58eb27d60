/* The bytes alive over one step: untouched in grey, the plan in colour, its budget as a line. */

const STEP = { height: 290, top: 28, bottom: 42, right: 10, strides: 50 };

function timelinePlot(data) {
  const host = byId("timeline");
  if (data.timeline.length === 0) return withoutTimeline(host);
  let [plan, plot] = [data.plans[0], null];
  const visit = (event, x, y) => {
    const lines = momentLines(data, plan, event);
    plot.cursor(event, plan);
    setAll(plot.svg, { "aria-valuenow": event, "aria-valuetext": momentSentence(data, event, lines) });
    showHint(momentName(data, event), lines, x, y);
  };
  const leave = () => {
    plot.cursor(null);
    hideHint();
  };
  host.addEventListener("pointermove", ({ clientX, clientY }) => visit(plot.eventAt(clientX), clientX, clientY));
  host.addEventListener("pointerleave", leave);
  host.addEventListener("focusout", leave);
  host.addEventListener("keydown", (key) => whenStepped(key, plot, data.timeline.length, visit));
  byId("timeline-key").replaceChildren(keyEntry("block before", "untouched"), keyEntry("block after", "this plan"));
  whenResized(host, () => {
    plot = drawnTimeline(host, data);
    plot.show(plan);
  });
  return {
    show(index) {
      plan = data.plans[index];
      plot.cursor(null);
      plot.show(plan);
    },
  };
}

/* A step that could not be followed operator by operator is not drawn; the plans have its room. */
function withoutTimeline(host) {
  host.closest(".card").hidden = true;
  byId("frontier").closest(".card").classList.add("wide");
  return { show: () => {} };
}

/* Arrow keys move along the step, Home and End to where it begins and ends. */
function whenStepped(key, plot, count, visit) {
  const from = Number(plot.svg.getAttribute("aria-valuenow"));
  const stride = Math.max(1, Math.round(count / STEP.strides));
  const goals = { ArrowRight: from + stride, ArrowLeft: from - stride, Home: 0, End: count - 1 };
  if (!(key.key in goals)) return;
  key.preventDefault();
  const event = Math.min(Math.max(goals[key.key], 0), count - 1);
  const { left, top } = plot.svg.getBoundingClientRect();
  visit(event, left + plot.toX(event), top + STEP.top);
}

function momentShare(data, event) {
  return data.timeline.length > 1 ? event / (data.timeline.length - 1) : 0;
}

function momentName(data, event) {
  const share = momentShare(data, event);
  return `${share < data.backward ? "Forward" : "Backward"}, ${Math.round(100 * share)}% of the step's events`;
}

function momentLines(data, plan, event) {
  const [before, after] = [data.timeline[event], plan.timeline[event]];
  return [["untouched", bytesText(before)], ["this plan", `${bytesText(after)}, ${ratioText(before, after)}`]];
}

function momentSentence(data, event, lines) {
  return [momentName(data, event), ...lines.map((line) => line.join(" "))].join("; ");
}

/* Draw everything that is the same for all plans; the result draws what is not. */
function drawnTimeline(host, data) {
  const count = data.timeline.length;
  const range = { "aria-valuemin": 0, "aria-valuemax": Math.max(count - 1, 0), "aria-valuenow": 0 };
  const role = { role: "slider", tabindex: 0, "aria-label": "Live memory along the step", ...range };
  const { svg, width, height } = canvasIn(host, STEP.height, role);
  const most = mostAlive(data);
  const { values, textOf } = byteTicks(0, most, 5);
  const [left, right] = [leftMargin(values.map(textOf)), width - STEP.right];
  const toX = scale([0, Math.max(count - 1, 1)], [left, right]);
  const toY = scale(ends(values), [height - STEP.bottom, STEP.top]);
  const frame = { svg, left, right, toX, toY, most };
  svg.append(...yAxis(values, toY, textOf, left, right), ...untouchedCurve(data, frame));
  const show = planCurve(frame);
  svg.append(...turn(data, frame));
  return { svg, toX, show, cursor: cursorOn(data, frame), eventAt: eventFinder(count, frame) };
}

/* The axis is the same for all plans, so that the slider moves the plan and nothing else. A budget far above whatever
   is alive is not worth the room. */
function mostAlive(data) {
  const most = highest([data, ...data.plans].map(({ timeline }) => highest(timeline)));
  const budgets = data.plans.map(({ budget }) => budget).filter((budget) => drawable(budget, 1.2 * most));
  return Math.max(highest(budgets), most, 1);
}

function drawable(budget, most) {
  return typeof budget === "number" && budget <= most;
}

function curve(timeline, { toX, toY }) {
  return timeline.map((bytes, event) => [toX(event), toY(bytes)]);
}

function untouchedCurve({ timeline }, frame) {
  const points = curve(timeline, frame);
  const area = shape("path", { class: "area before", d: areaPath(points, frame.toY(0)) });
  return [area, shape("path", { class: "line before", d: linePath(points) })];
}

/* Where backward begins, and what runs from left to right. */
function turn(data, { left, right, toY }) {
  const x = left + data.backward * (right - left);
  return [
    upright(x, STEP.top - 20, toY(0), "turn"),
    label("forward", x - 8, STEP.top - 11, "end", "axis-name"),
    label("backward", x + 8, STEP.top - 11, "start", "axis-name"),
    label("operators of one step, in order", (left + right) / 2, toY(0) + 24, "middle", "axis-name"),
  ];
}

/* The plan's curve and its budget, as a function that draws them for a plan. */
function planCurve(frame) {
  const { svg, left, right, toY, most } = frame;
  const [area, line] = [shape("path", { class: "area after" }), shape("path", { class: "line after" })];
  const name = label("", right, -6, "end", "limit-name");
  const limit = shape("g", { class: "limit" }, across(0, left, right, "limit-line"), name);
  svg.append(area, line, limit);
  return (plan) => {
    const points = curve(plan.timeline, frame);
    area.setAttribute("d", areaPath(points, toY(0)));
    line.setAttribute("d", linePath(points));
    limit.toggleAttribute("hidden", !drawable(plan.budget, most));
    if (drawable(plan.budget, most)) setAll(limit, { transform: `translate(0 ${toY(plan.budget)})` });
    name.textContent = `budget ${plan.label}`;
  };
}

/* The moment under the pointer: a line, and a dot on each curve. */
function cursorOn(data, { svg, toX, toY }) {
  const [before, after] = ["before", "after"].map((kind) => shape("circle", { class: `spot ${kind}`, r: 4 }));
  const group = shape("g", { class: "cursor", hidden: "" }, upright(0, STEP.top, toY(0), "moment"), before, after);
  svg.append(group);
  return (event, plan) => {
    group.toggleAttribute("hidden", event === null);
    if (event === null) return;
    setAll(group, { transform: `translate(${toX(event)} 0)` });
    setAll(before, { cy: toY(data.timeline[event]) });
    setAll(after, { cy: toY(plan.timeline[event]) });
  };
}

function eventFinder(count, { svg, left, right }) {
  return (clientX) => {
    const share = (clientX - svg.getBoundingClientRect().left - left) / (right - left);
    return Math.round(Math.min(Math.max(share, 0), 1) * (count - 1));
  };
}
