/* The figures of the untouched step and of one plan, and the slider between the plans. */

function untouchedFigures(data) {
  const { kept, peak, seconds } = data.untouched;
  const facts = [["Untouched peak", bytesText(peak)], ["Untouched kept", bytesText(kept)]];
  if (seconds !== null) facts.push(["Untouched step", secondsText(seconds)]);
  const entries = facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  byId("untouched").replaceChildren(...entries);
  const count = `${plural(data.storages.length, "storage")} kept for backward`;
  byId("setup").textContent = [data.device, `torch ${data.torch}`, count].join(" · ");
}

function planFigures(data) {
  const { untouched, plans } = data;
  const cells = ["peak", "kept", "time", "error"].map((name) => figureCell(byId("figures"), name));
  const show = (index) => {
    const plan = plans[index];
    const texts = [
      ["Peak memory", bytesText(plan.peak), ratioText(untouched.peak, plan.peak)],
      ["Kept for backward", bytesText(plan.kept), ratioText(untouched.kept, plan.kept)],
      ["Step time", slowdownText(plan.slowdown), timeNote(untouched, plan)],
      ["Gradient error", errorText(plan.error), plan.error === 0 ? "gradients are exact" : "relative"],
    ];
    texts.forEach((text, i) => cells[i](text));
  };
  return { show };
}

/* A figure on the page, as a function that sets its texts. */
function figureCell(host, name) {
  const [value, note] = [element("dd", { id: `figure-${name}` }), element("dd", { id: `note-${name}`, class: "note" })];
  const parts = [element("dt"), value, note];
  host.append(element("div", {}, ...parts));
  return (texts) => parts.forEach((part, i) => (part.textContent = texts[i]));
}

function timeNote(untouched, plan) {
  if (plan.seconds === null) return "of the untouched step";
  if (untouched.seconds === null) return `${secondsText(plan.seconds)} a step`;
  return `${secondsText(plan.seconds)}, was ${secondsText(untouched.seconds)}`;
}

/* The slider runs from the smallest budget to the largest, so against the order of the plans. */
function budgetSlider(data, pick) {
  const { plans, untouched } = data;
  const [slider, last] = [byId("budget"), plans.length - 1];
  slider.max = String(last);
  slider.disabled = last === 0;
  slider.addEventListener("input", () => pick(last - Number(slider.value)));
  byId("largest").textContent = last > 0 ? plans[0].label : "";
  byId("smallest").textContent = last > 0 ? plans[last].label : "the only plan";
  const stops = last > 0 && last < 40 ? plans.map(() => element("i")) : [];
  byId("stops").replaceChildren(...stops);
  const show = (index) => {
    slider.value = String(last - index);
    slider.setAttribute("aria-valuetext", planSentence(plans[index], untouched));
    byId("budget-label").textContent = plans[index].label;
    stops.forEach((stop, i) => stop.classList.toggle("current", i === last - index));
  };
  return { show };
}

function planSentence(plan, untouched) {
  const less = ratioText(untouched.peak, plan.peak);
  const costs = `step time ${slowdownText(plan.slowdown)}, gradient error ${errorText(plan.error)}`;
  return `${plan.label}: peak ${bytesText(plan.peak)}, ${less}, kept ${bytesText(plan.kept)}, ${costs}`;
}
