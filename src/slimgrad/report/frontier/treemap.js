/* What is kept, by module: areas are bytes of the untouched step, the solid part of each is what the plan holds. */

const MAP = { height: 440, narrow: 520 };
const CHIP = { height: 18, gap: 4, pad: 6 };
const WORDS = { left: 7, first: 17, line: 15, below: 6 };
const ITEM = "[data-item]";

function treemap(data) {
  const host = byId("treemap");
  const ways = colourings(data);
  const trees = { together: moduleTree(data.storages, true), apart: moduleTree(data.storages, false) };
  const view = { data, plan: data.plans[0], colouring: ways.need, root: trees.together, items: [] };
  const zoom = (node) => zoomed(host, Object.assign(view, { root: node }), zoom);
  listenToMap(host, view, zoom);
  whenChosen("colouring", (way) => paintMap(Object.assign(view, { colouring: ways[way] })));
  whenChosen("layers", (layers) => zoom(trees[layers]));
  byId("layers").hidden = nodeCount(trees.together) === nodeCount(trees.apart);
  whenResized(host, () => zoom(view.root));
  return { show: (index) => paintMap(Object.assign(view, { plan: data.plans[index] })) };
}

function whenChosen(id, act) {
  byId(id).addEventListener("change", ({ target }) => act(target.value));
}

function nodeCount(node) {
  return 1 + total(node.children.map(nodeCount));
}

function listenToMap(host, view, zoom) {
  const itemOf = (box) => view.items[box.dataset.item];
  whenPressed(host, ITEM, (box) => zoom(openable(itemOf(box).node)));
  roving(host, ITEM);
  hinted(host, ITEM, (box) => {
    moveHalo(view.halo, itemOf(box));
    return nodeHint(view, itemOf(box).node);
  });
  for (const left of ["pointerleave", "focusout"]) host.addEventListener(left, () => moveHalo(view.halo, null));
  document.addEventListener("keydown", ({ key, target }) => {
    if (key !== "Escape" || target === byId("filter")) return;
    hideHint();
    if (view.root.parent) zoom(view.root.parent);
  });
}

/* A single storage has nothing inside: its module is shown instead. */
function openable(node) {
  return node.children.length > 0 || !node.parent ? node : node.parent;
}

/* Draw the map of the view's root; the keyboard stays in it if it was there. */
function zoomed(host, view, zoom) {
  const focused = host.contains(document.activeElement);
  hideHint();
  drawMap(host, view);
  drawCrumbs(view, zoom);
  if (focused) host.querySelector(ITEM).focus();
}

function drawCrumbs({ root, data }, zoom) {
  const line = lineage(root);
  const size = `${bytesText(root.bytes)} in ${plural(root.count, "storage")}`;
  const crumbs = line.map((node, i) => crumb(nodeName(node), i < line.length - 1 ? () => zoom(node) : null));
  byId("crumbs").replaceChildren(...crumbs, element("li", { class: "size" }, size));
}

function crumb(name, act) {
  if (!act) return element("li", {}, element("span", { "aria-current": "true" }, name));
  const button = element("button", { type: "button" }, name);
  button.addEventListener("click", act);
  return element("li", {}, button);
}

function nodeName(node) {
  return node.parent ? node.name || "(model)" : "All modules";
}

/* The path, and behind it what does not belong to it: the slot of a storage. */
function fullName({ path, name, parent }) {
  if (!parent) return "All modules";
  const place = path || "(model)";
  return path === name || path.endsWith(`.${name}`) ? place : `${place} ${name}`;
}

/* Tiles, the borders of their groups above them, and the names of the groups above these. */
function drawMap(host, view) {
  const narrow = host.clientWidth < 600;
  const name = { role: "group", "aria-label": "Kept storages by module" };
  const { svg, width, height } = canvasIn(host, narrow ? MAP.narrow : MAP.height, name);
  const { groups, tiles } = placedBelow(view.root, { x: 0, y: 0, width, height });
  const chips = placedChips(groups);
  view.items = [...tiles, ...chips.map(({ group }) => group)];
  view.tiles = tiles.map((tile, i) => drawnTile(tile, i, chips));
  view.halo = shape("rect", { class: "halo", hidden: "" });
  svg.append(...view.tiles.map(({ box }) => box), ...groups.toReversed().map(border));
  svg.append(...chips.map((chip, i) => drawnChip(chip, tiles.length + i)), view.halo);
  onlyStop(svg, ITEM, svg.querySelector(ITEM));
  paintMap(view);
}

function drawnTile(tile, i, chips) {
  const { node, x, y, width, height } = tile;
  const parts = shape("g");
  const words = shape("g", { class: "words" });
  const edge = shape("rect", { class: `edge ${depthClass(tile)}`, x, y, width, height });
  const role = { class: "tile", role: "button", tabindex: -1, "data-item": i, "data-path": node.path };
  const box = shape("g", role, parts, edge, words);
  return { ...tile, box, parts, words, from: chips.some((chip) => covers(chip, tile)) ? CHIP.height + CHIP.gap : 0 };
}

/* Whether a group's name lies where another's, or a tile's own, would begin. */
function covers(chip, { x, y, width }) {
  const beside = chip.x >= x + width || chip.x + chip.width <= x;
  return !beside && chip.y < y + CHIP.height && chip.y + CHIP.height > y;
}

function border({ x, y, width, height, depth }) {
  return shape("rect", { class: `border ${depthClass({ depth })}`, x, y, width, height });
}

/* The nearer to the root, the wider the gap. */
function depthClass({ depth }) {
  return `depth-${Math.min(depth, 4)}`;
}

/* The names of groups, outer ones first: those that begin in the same corner stand there in a row, and one for which
   there is no room is left out. */
function placedChips(groups) {
  const chips = [];
  for (const group of groups) {
    const y = group.y + CHIP.gap;
    const before = chips.filter((chip) => Math.abs(chip.y - y) < 1 && Math.abs(chip.group.x - group.x) < 1).at(-1);
    const x = before ? before.x + before.width + CHIP.gap / 2 : group.x + CHIP.gap;
    const text = fittedName(group.node, group.x + group.width - x - CHIP.gap - 2 * CHIP.pad, 11);
    const chip = { group, text, x, y, width: textWidth(text, 11, 600) + 2 * CHIP.pad };
    if (text && !chips.some((other) => covers(other, chip))) chips.push(chip);
  }
  return chips;
}

function drawnChip({ group, text, x, y, width }, i) {
  const back = shape("rect", { x, y, width, height: CHIP.height, rx: 4 });
  const name = shape("text", { x: x + CHIP.pad, y: y + 13 }, text);
  const role = { role: "button", tabindex: -1, "aria-label": `Look inside ${group.node.path}` };
  return shape("g", { class: "chip", "data-item": i, ...role }, back, name);
}

/* Set whatever depends on the plan and on the colouring. */
function paintMap(view) {
  for (const tile of view.tiles) paintTile(tile, view);
  const entries = portions(view.root.members, view).map(({ tone, name, bytes, held }) =>
    keyEntry(`block ${tone}`, name, heldText(bytes, held)));
  byId("treemap-key").replaceChildren(...entries);
}

function paintTile({ box, parts, words, node, from, ...area }, view) {
  const all = portions(node.members, view);
  const sizes = bytesOf(node.members, view.data, view.plan);
  const names = all.map(({ name }) => name).join(", ");
  setAll(box, { "data-bytes": sizes.bytes, "data-held": sizes.held });
  setAll(box, { "aria-label": `${fullName(node)}: ${heldText(sizes.bytes, sizes.held)}, ${names}` });
  parts.replaceChildren(...paintedParts(all, area, sizes.bytes));
  words.replaceChildren(...wordsOn(area, from, node, [sizeText(node, sizes, area), names]));
}

/* A column for each portion, as wide as its share; in it, what is held stands solid at the bottom. */
function paintedParts(all, { x, y, width, height }, bytes) {
  let at = x;
  return all.flatMap((portion) => {
    const column = { x: at, width: (width * portion.bytes) / bytes };
    const solid = height * Math.min(portion.held / portion.bytes, 1);
    at += column.width;
    return [
      shape("rect", { class: `pale ${portion.tone}`, ...column, y, height }),
      shape("rect", { class: `solid ${portion.tone}`, ...column, y: y + height - solid, height: solid }),
    ];
  });
}

/* A name, or its last step, such as the slot without its node, or as much of it as there is room for. */
function fittedName(node, room, size) {
  const name = nodeName(node);
  const names = [name, name.slice(name.lastIndexOf(".") + 1)];
  return names.find((text) => textWidth(text, size, 600) <= room) ?? fitted(names[1], room, size, 600, 0.4);
}

/* As many lines as there is room for; a name may be cut more than what is beneath it. */
function wordsOn({ x, y, width, height }, from, node, details) {
  const room = width - 2 * WORDS.left;
  if (!fittedName(node, room, 12)) return []; // what is said of nothing helps nobody
  const lines = [fittedName(node, room, 12), ...details.map((detail) => fitted(detail, room, 11, 400, 0.9))];
  const rows = Math.floor((height - from - WORDS.first - WORDS.below) / WORDS.line) + 1;
  return lines.filter(Boolean).slice(0, Math.max(rows, 0)).map((line, i) => {
    const at = { x: x + WORDS.left, y: y + from + WORDS.first + i * WORDS.line };
    return shape("text", { class: line === lines[0] ? "name" : "detail", ...at }, line);
  });
}

function sizeText(node, { bytes, held }, { width }) {
  const times = node.count > 1 ? ` ×${node.count}` : "";
  const texts = [`${heldText(bytes, held)}${times}`, heldText(bytes, held), bytesText(bytes)];
  return texts.find((text) => textWidth(text, 11) <= width - 2 * WORDS.left) ?? "";
}

function heldText(bytes, held) {
  return bytes === held ? bytesText(bytes) : `${bytesText(bytes)} → ${bytesText(held)}`;
}

function moveHalo(halo, item) {
  halo.toggleAttribute("hidden", item === null);
  if (item) setAll(halo, { x: item.x, y: item.y, width: item.width, height: item.height });
}

/* All there is to say about a module or a storage. */
function nodeHint({ data, plan }, node) {
  const storages = node.members.map((i) => data.storages[i]);
  const { bytes, held } = bytesOf(node.members, data, plan);
  const rows = [
    ["module", tally(storages.map(({ module }) => module))],
    ["need", tally(storages.map(({ need }) => need))],
    ["untouched", bytesText(bytes)],
    ["action", tally(node.members.map((i) => plan.actions[i]))],
    ["held", `${bytesText(held)}, ${ratioText(bytes, held)}`],
    ["kept by", storages.length === 1 ? listed(storages[0].savers) : tally(storages.flatMap(saverSlots))],
  ];
  return [fullName(node), rows];
}

function saverSlots({ savers }) {
  return savers.map((saver) => saver.slice(saver.lastIndexOf(":") + 1));
}

/* How often there is each of them: 'quant(bits=4) ×8', 'keep ×4', a line each. */
function tally(names) {
  const counts = grouped(names, (name) => name).sort(([, one], [, other]) => other.length - one.length);
  return listed(counts.map(([name, all]) => (names.length > 1 ? `${name} ×${all.length}` : name)));
}

function listed(lines, most = 6) {
  const rest = lines.length - most;
  return (rest > 0 ? [...lines.slice(0, most), `and ${rest} more`] : lines).join("\n") || "-";
}
