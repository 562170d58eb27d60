/* What the two plots share: scales, ticks and grid lines. */

function scale([from, to], [start, end]) {
  return (value) => start + ((value - from) / (to - from)) * (end - start);
}

function ends(list) {
  return [list[0], list.at(-1)];
}

function across(y, x1, x2, kind) {
  return shape("line", { class: kind, x1, x2, y1: y, y2: y });
}

function upright(x, y1, y2, kind) {
  return shape("line", { class: kind, x1: x, x2: x, y1, y2 });
}

function label(text, x, y, anchor, kind = "tick") {
  return shape("text", { class: kind, x, y, "text-anchor": anchor }, text);
}

/* Grid lines across the plot, each with its value to the left of it. */
function yAxis(values, toY, textOf, left, right) {
  return values.flatMap((value) => [
    across(toY(value), left, right, "grid"),
    label(textOf(value), left - 8, toY(value) + 4, "end"),
  ]);
}

/* As much room as the widest of the values needs. */
function leftMargin(texts) {
  return 12 + Math.ceil(highest(texts.map((text) => textWidth(text, 11))));
}

function linePath(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`).join("");
}

function areaPath(points, floor) {
  const [first, last] = ends(points);
  return `${linePath(points)}L${last[0].toFixed(2)} ${floor}L${first[0].toFixed(2)} ${floor}Z`;
}
