/* Rectangles whose areas are exactly proportional to bytes: nothing is set aside for headings or gaps, which are drawn
   over them. Squarified as in Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000). */

const ROOM = { width: 64, height: 56 };
const DEEPEST = 6;

/* The node's modules, down to what is too small to be looked into: groups and tiles in one list, groups first. */
function placedBelow(root, box) {
  const groups = [];
  const tiles = [];
  const place = (node, area, depth) => {
    if (node !== root && !opens(node, area, depth)) return tiles.push({ node, depth, ...area });
    if (node !== root) groups.push({ node, depth, ...area });
    const boxes = squarified(node.children.map((child) => child.bytes), area);
    return node.children.forEach((child, i) => place(child, boxes[i], depth + 1));
  };
  if (root.children.length === 0) tiles.push({ node: root, depth: 0, ...box });
  else place(root, box, 0);
  return { groups, tiles };
}

function opens(node, area, depth) {
  const large = area.width >= ROOM.width && area.height >= ROOM.height;
  return node.children.length > 0 && !node.fine && large && depth < DEEPEST;
}

/* One rectangle for each size, in the order given, which must be falling. */
function squarified(sizes, box) {
  const scale = (box.width * box.height) / total(sizes);
  const areas = sizes.map((size) => size * scale);
  const boxes = [];
  let rest = box;
  while (boxes.length < areas.length) {
    const row = bestRow(areas, boxes.length, Math.min(rest.width, rest.height));
    boxes.push(...rowBoxes(row, rest));
    rest = withoutRow(total(row), rest);
  }
  return boxes;
}

/* As many areas as can stand side by side along `side` before the worst of them becomes more oblong. */
function bestRow(areas, start, side) {
  let sum = areas[start];
  let end = start + 1;
  let worst = oblong(areas[start], areas[start], sum, side);
  while (end < areas.length) {
    const next = oblong(areas[start], areas[end], sum + areas[end], side);
    if (next > worst) break;
    worst = next;
    sum += areas[end++];
  }
  return areas.slice(start, end);
}

function oblong(largest, smallest, sum, side) {
  return Math.max((side * side * largest) / (sum * sum), (sum * sum) / (side * side * smallest));
}

function rowBoxes(row, { x, y, width, height }) {
  const sum = total(row);
  const upright = width >= height;
  const thick = sum / (upright ? height : width);
  let at = upright ? y : x;
  return row.map((area) => {
    const long = area / thick;
    const box = upright ? { x, y: at, width: thick, height: long } : { x: at, y, width: long, height: thick };
    at += long;
    return box;
  });
}

function withoutRow(sum, { x, y, width, height }) {
  if (width >= height) return { x: x + sum / height, y, width: Math.max(width - sum / height, 0), height };
  return { x, y: y + sum / width, width, height: Math.max(height - sum / width, 0) };
}
