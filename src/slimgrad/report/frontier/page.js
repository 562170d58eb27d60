/* The page: everything shows one plan, and whoever picks another tells everything. */

function start() {
  const data = JSON.parse(byId("data").textContent);
  const pick = (index) => views.forEach((view) => view.show(index));
  const views = [
    budgetSlider(data, pick),
    planFigures(data),
    timelinePlot(data),
    frontierPlot(data, pick),
    treemap(data),
    planTable(data),
  ];
  untouchedFigures(data);
  pick(data.chosen ?? Math.floor(data.plans.length / 2));
}

start();
