/* The modules as a tree, with repeated layers together or apart. */

const NUMBER = /^[0-9]+$/;

/* Every node has its name, its whole path, the storages beneath it and their bytes. A `fine` node is one module whose
   children are single storages: they are told apart only when one looks inside it. */
function moduleTree(storages, together) {
  const root = branch("");
  storages.forEach((storage, i) => storage.bytes > 0 && plant(root, storage.path, i));
  return weighed(finished(together ? merged(root) : root, storages, null), storages);
}

function branch(name) {
  return { name, own: [], branches: new Map() };
}

function plant(root, path, i) {
  let node = root;
  for (const step of path === "" ? [] : path.split(".")) {
    if (!node.branches.has(step)) node.branches.set(step, branch(step));
    node = node.branches.get(step);
  }
  node.own.push(i);
}

/* Numbered siblings that look alike inside become one node, such as '0–11'. Numbered siblings with nothing inside,
   such as the steps of a Sequential, are different things and stay. */
function merged(node) {
  const families = [];
  const branches = new Map();
  for (const child of node.branches.values()) {
    const numbered = NUMBER.test(child.name);
    const family = numbered && families.find(([first]) => alike(first, child));
    if (family) family.push(child);
    else if (numbered) families.push([child]);
    else branches.set(child.name, merged(child));
  }
  for (const family of families) {
    const one = merged(union(familyName(family), family));
    branches.set(one.name, one);
  }
  return { ...node, branches };
}

/* Whether most of the modules inside the two have the same names; where nothing is inside, nothing is the same. */
function alike(one, other) {
  const shared = [...one.branches.keys()].filter((name) => other.branches.has(name)).length;
  return 2 * shared > one.branches.size + other.branches.size - shared;
}

function familyName(family) {
  const numbers = family.map((member) => Number(member.name)).sort((a, b) => a - b);
  const [first, last] = [numbers[0], numbers.at(-1)];
  if (first === last) return String(first);
  const unbroken = last - first === numbers.length - 1;
  return unbroken ? `${first}–${last}` : `${first}…${last} (${numbers.length})`;
}

function union(name, family) {
  const one = branch(name);
  for (const member of family) {
    one.own.push(...member.own);
    for (const child of member.branches.values()) {
      const known = one.branches.get(child.name);
      one.branches.set(child.name, known ? union(child.name, [known, child]) : child);
    }
  }
  return one;
}

/* The node as it is drawn: a chain of only children is one node, and its own storages stand beside its modules. */
function finished(node, storages, parent) {
  let [name, inner] = [node.name, node];
  while (parent && inner.own.length === 0 && inner.branches.size === 1) {
    inner = inner.branches.values().next().value;
    name = `${name}.${inner.name}`;
  }
  const path = parent?.path ? `${parent.path}.${name}` : name;
  const done = treeNode(/^[0-9]/.test(name) ? lastSteps(path) : name, path, parent);
  const slots = bySlot(inner.own, storages);
  if (inner.branches.size === 0 && slots.length === 1) return withSingles(done, slots[0][1], storages);
  const modules = [...inner.branches.values()].map((child) => finished(child, storages, done));
  const own = slots.map(([slot, members]) => withSingles(treeNode(slot, done.path, done), members, storages));
  return Object.assign(done, { children: [...modules, ...own] });
}

/* A number says little without what it counts: 'h.3'. */
function lastSteps(path) {
  return path.split(".").slice(-2).join(".");
}

function treeNode(name, path, parent) {
  return { name, path, parent, fine: false, children: [], members: [] };
}

/* A child for each storage, unless there is only one: that one is the node itself. */
function withSingles(node, members, storages) {
  node.fine = true;
  node.members = members;
  if (members.length === 1) return node;
  const paths = members.map((i) => storages[i].path);
  const names = distinctions(paths.map((path) => path.split(".")));
  node.children = members.map((i, k) => ({ ...treeNode(names[k], paths[k], node), members: [i] }));
  return node;
}

/* The steps in which the paths differ, with the one before them: 'h.3'. Paths that do not differ are counted. */
function distinctions(paths) {
  const differs = (k) => paths.some((path) => path[k] !== paths[0][k]);
  const steps = [...paths[0].keys()].filter(differs);
  if (steps.length === 0) return paths.map((_, i) => `${i + 1}`);
  return paths.map((path) => path.slice(Math.max(steps[0] - 1, 0), steps.at(-1) + 1).join("."));
}

function weighed(node, storages) {
  for (const child of node.children) weighed(child, storages);
  if (node.children.length > 0) node.members = node.children.flatMap((child) => child.members);
  for (const sum of ["bytes", "count"]) node[sum] = total(node.members.map((i) => storages[i][sum]));
  node.children.sort((a, b) => b.bytes - a.bytes);
  return node;
}

function bySlot(members, storages) {
  return grouped(members, (i) => slotOf(storages[i]));
}

/* 'Gelu.self' of 'transformer.h.0.mlp.act:GeluBackward0.self'. */
function slotOf(storage) {
  const lead = storage.savers[0] ?? "";
  return lead.slice(lead.lastIndexOf(":") + 1).replace(/Backward0(?=\.|$)/, "") || "-";
}

/* Pairs of a key and the items that have it, in the order in which the keys come first. */
function grouped(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (groups.has(key)) groups.get(key).push(item);
    else groups.set(key, [item]);
  }
  return [...groups];
}

/* The nodes from the root to this one. */
function lineage(node) {
  return node ? [...lineage(node.parent), node] : [];
}
