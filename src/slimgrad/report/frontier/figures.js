/* The figures of the untouched step and of one plan, and the slider between the plans. */

function untouchedFigures(data) {
  const { kept, peak, seconds } = data.untouched;
  const facts = [["Untouched kept", bytesText(kept)]];
  if (peak !== null) facts.unshift(["Untouched peak", bytesText(peak)]);
  if (seconds !== null) facts.push(["Untouched step", secondsText(seconds)]);
  const entries = facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  byId("untouched").replaceChildren(...entries);
  const count = `${plural(total(data.storages.map((storage) => storage.count)), "storage")} kept for backward`;
  byId("setup").textContent = [data.device, `torch ${data.torch}`, count].join(" · ");
}

function planFigures(data) {
  const { untouched, plans } = data;
  const names = ["peak", "kept", "time", "error"].filter((name) => name !== "peak" || untouched.peak !== null);
  const cells = names.map((name) => [name, figureCell(byId("figures"), name)]);
  const show = (index) => {
    const texts = figureTexts(untouched, plans[index]);
    for (const [name, cell] of cells) cell(texts[name]);
  };
  return { show };
}

function figureTexts(untouched, plan) {
  return {
    peak: plan.peak === null ? [] : ["Peak memory", bytesText(plan.peak), ratioText(untouched.peak, plan.peak)],
    kept: ["Kept for backward", bytesText(plan.kept), ratioText(untouched.kept, plan.kept)],
    time: ["Step time", timeText(plan), timeNote(untouched, plan)],
    error: ["Gradient error", errorText(plan.error), plan.error === 0 ? "gradients are exact" : "relative"],
  };
}

/* A figure on the page, as a function that sets its texts. */
function figureCell(host, name) {
  const [value, note] = [element("dd", { id: `figure-${name}` }), element("dd", { id: `note-${name}`, class: "note" })];
  const parts = [element("dt"), value, note];
  host.append(element("div", {}, ...parts));
  return (texts) => parts.forEach((part, i) => (part.textContent = texts[i]));
}

function timeNote(untouched, plan) {
  if (plan.slowdown === null) return "added to a step";
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
  byId("unmet").textContent = data.unmet?.length ? `No plan meets ${data.unmet.join(", ")}.` : "";
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
  const facts = planFacts(untouched, plan).map(([name, value]) => `${name} ${value}`);
  return `${plan.label}: ${facts.join(", ")}`;
}

/* What there is to say about a plan: names and values. */
function planFacts(untouched, plan) {
  const facts = [
    ["kept", `${bytesText(plan.kept)}, ${ratioText(untouched.kept, plan.kept)}`],
    ["step time", timeText(plan)],
    ["gradient error", errorText(plan.error)],
  ];
  if (plan.peak === null) return facts;
  return [["peak", `${bytesText(plan.peak)}, ${ratioText(untouched.peak, plan.peak)}`], ...facts];
}
