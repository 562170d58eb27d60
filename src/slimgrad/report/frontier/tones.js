/* Colours, as names of classes: one for each need, and one for each action as far as there are any. */

const NEEDS = ["NOTHING", "WEIGHT", "INDEX", "MASK", "DERIVATIVE", "OPERAND", "VALUES", "EXACT"];
const ACTION_TONES = 8;

/* The two ways of colouring: what a storage is told apart by, its tone, and the order of all there are. */
function colourings(data) {
  const actions = actionOrder(data);
  const actionTone = (action) => `tone action-${Math.min(actions.indexOf(action), ACTION_TONES)}`;
  const needTone = (need) => `tone need-${NEEDS.includes(need) ? need.toLowerCase() : "other"}`;
  return {
    need: { of: (i) => data.storages[i].need, tone: needTone, order: NEEDS },
    action: { of: (i, plan) => plan.actions[i], tone: actionTone, order: actions },
  };
}

/* All actions of all plans, so that a colour means the same in each: keep first, then by the bytes they are done to. */
function actionOrder({ plans, storages }) {
  const weight = new Map([["keep", Infinity]]);
  for (const { actions } of plans) {
    actions.forEach((action, i) => weight.set(action, (weight.get(action) ?? 0) + storages[i].bytes));
  }
  return [...weight.keys()].sort((a, b) => weight.get(b) - weight.get(a));
}

/* The storages by what colours them: their bytes, and what the plan holds of these. */
function portions(members, { data, plan, colouring }) {
  const { of, tone, order } = colouring;
  return grouped(members, (i) => of(i, plan))
    .sort(([one], [other]) => order.indexOf(one) - order.indexOf(other))
    .map(([name, some]) => ({ name, tone: tone(name), ...bytesOf(some, data, plan) }));
}

function bytesOf(members, { storages }, { held }) {
  return { bytes: total(members.map((i) => storages[i].bytes)), held: total(members.map((i) => held[i])) };
}
