/* The plan behind the picture: what is done to which kind of storage, how often, and what it saves. */

const COLUMNS = [
  { name: "Module", of: (row) => row.module },
  { name: "Slot", of: (row) => row.slot, long: true },
  { name: "Need", of: (row) => row.need, tone: "need" },
  { name: "Action", of: (row) => row.action, tone: "action" },
  { name: "Storages", of: (row) => row.count, text: String },
  { name: "Before", of: (row) => row.bytes, text: bytesText },
  { name: "Held", of: (row) => row.held, text: bytesText },
  { name: "Change", of: (row) => row.held / row.bytes, text: (_, row) => ratioText(row.bytes, row.held) },
];
const LARGEST_FIRST = { column: COLUMNS.findIndex(({ name }) => name === "Before"), falling: true };

function planTable(data) {
  const view = { data, plan: data.plans[0], ways: colourings(data), terms: [], ...LARGEST_FIRST };
  const [head, body, foot] = ["thead", "tbody", "tfoot"].map((tag) => element(tag));
  const fill = () => fillTable(view, head, body, foot);
  byId("table").replaceChildren(element("caption", {}, "Storages by module, slot and action"), head, body, foot);
  head.append(element("tr", {}, ...COLUMNS.map((column, i) => headCell(column, () => {
    Object.assign(view, sortedBy(view, i));
    fill();
  }))));
  byId("filter").addEventListener("input", ({ target }) => {
    view.terms = target.value.toLowerCase().split(/\s+/).filter(Boolean);
    fill();
  });
  return {
    show(index) {
      view.plan = data.plans[index];
      fill();
    },
  };
}

function headCell({ name, text }, act) {
  const button = element("button", { type: "button" }, name);
  button.addEventListener("click", act);
  return element("th", { scope: "col", class: text ? "number" : "" }, button);
}

/* Numbers begin with the largest, names with the first; a second click turns the order round. */
function sortedBy({ column, falling }, i) {
  return { column: i, falling: column === i ? !falling : Boolean(COLUMNS[i].text) };
}

function fillTable(view, head, body, foot) {
  const rows = ordered(tableRows(view), view);
  [...head.rows[0].cells].forEach((cell, i) => {
    const direction = view.falling ? "descending" : "ascending";
    setAll(cell, { "aria-sort": i === view.column ? direction : "none" });
  });
  body.replaceChildren(...rows.map((row) => bodyRow(row, view.ways)));
  foot.replaceChildren(...(rows.length > 0 ? [sumRow(rows)] : []));
  const count = total(rows.map((row) => row.count));
  const all = total(view.data.storages.map((storage) => storage.count));
  byId("table-count").textContent = `${plural(rows.length, "group")}, ${count} of ${plural(all, "storage")}`;
}

/* The filter chooses among storages, not among groups: a path such as 'h.3' leaves one of each group's layers. */
function tableRows({ data, plan, terms }) {
  const members = data.storages.map((_, i) => i).filter((i) => matches(data.storages[i], plan.actions[i], terms));
  const groups = grouped(members, (i) => {
    const storage = data.storages[i];
    return JSON.stringify([storage.module, slotOf(storage), storage.need, plan.actions[i]]);
  });
  return groups.map(([key, some]) => {
    const [module, slot, need, action] = JSON.parse(key);
    const count = total(some.map((i) => data.storages[i].count));
    return { module, slot, need, action, count, ...bytesOf(some, data, plan) };
  });
}

function matches(storage, action, terms) {
  if (terms.length === 0) return true;
  const text = [storage.path, storage.module, storage.need, action, ...storage.savers].join(" ").toLowerCase();
  return terms.every((term) => text.includes(term));
}

function ordered(rows, { column, falling }) {
  const { of } = COLUMNS[column];
  const compared = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b));
  return rows.sort((one, other) => (falling ? -1 : 1) * compared(of(one), of(other)) || other.bytes - one.bytes);
}

function bodyRow(row, ways) {
  return element("tr", {}, ...COLUMNS.map((column) => bodyCell(column, row, ways)));
}

function bodyCell({ of, text, tone, long }, row, ways) {
  if (text) return element("td", { class: "number" }, text(of(row), row));
  if (long) return element("td", { class: "long" }, ...breakable(of(row)));
  if (!tone) return element("td", {}, of(row));
  const sign = element("span", { class: `sign block ${ways[tone].tone(of(row))}`, "aria-hidden": "true" });
  return element("td", { class: tone }, sign, of(row));
}

/* A name that may go on in another line before each of its words: 'ScaledDotProductAttention.query'. */
function breakable(name) {
  return name.split(/(?<=\.)|(?<=[a-z])(?=[A-Z])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));
}

function sumRow(rows) {
  const [bytes, held, count] = ["bytes", "held", "count"].map((name) => total(rows.map((row) => row[name])));
  const numbers = COLUMNS.filter(({ text }) => text).map((column) => bodyCell(column, { bytes, held, count }));
  const name = element("th", { scope: "row", colspan: COLUMNS.length - numbers.length }, "Together");
  return element("tr", {}, name, ...numbers);
}
