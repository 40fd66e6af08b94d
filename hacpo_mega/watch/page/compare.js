// Runs side by side: the differences of their configurations, and their last values.
import { get } from "./api.js";
import { SECTIONS, linesOf } from "./catalogue.js";
import { el, fill, show } from "./dom.js";

export class Compare {
  constructor(app, host) {
    this.app = app;
    this.body = el("div", {});
    fill(host, el("h1", {}, "Compare"), this.body);
  }

  async open() {
    this.runs = this.app.chosen();
    if (this.runs.length < 2) return void fill(this.body, el("p", {}, "Choose two runs or more."));
    const { differences, groups = [] } = await get("/api/compare", { runs: this.runs.map(({ id }) => id).join(",") });
    this.metrics = new Map();
    await Promise.all(this.runs.map(async ({ id }) => this.metrics.set(id, await this.app.metrics(id))));
    this.charts = [...SECTIONS[0].charts, ...SECTIONS[1].charts.filter(({ patterns }) => patterns)];
    await this.#load();
    fill(this.body, this.#seeds(groups), this.#table("Configurations", "setting", this.#differences(differences)), el("section", {}, (this.ends = el("div", {}))));
    this.#fillEnds();
  }

  async #load() {
    await Promise.all(
      this.runs.map(({ id, agents }) => {
        const metrics = this.metrics.get(id);
        const names = this.charts.flatMap((spec) => linesOf(spec, metrics.names, agents).map(({ name }) => name));
        return metrics.need(names).then(() => metrics.whole); // their last values are compared
      }),
    );
  }

  #seeds(groups) {
    const named = (ids) => ids.map((id) => this.runs.find((run) => run.id === id)?.name ?? id).join(", ");
    const found = groups.filter(({ runs }) => runs.length > 1);
    return found.map(({ name, runs }) => el("p", { class: "note" }, `${name}: ${named(runs)} differ in their seed alone; Curves can show their mean and band.`));
  }

  #differences(differences) {
    if (!differences.length) return null;
    return differences.map(({ key, values }) => ({ name: key, cells: this.runs.map(({ id }) => setting(values[id])) }));
  }

  #fillEnds() {
    const rows = this.charts.flatMap((spec) => {
      const names = [...new Set(this.runs.flatMap(({ id, agents }) => linesOf(spec, this.metrics.get(id).names, agents).map(({ name }) => name)))];
      return names.map((name) => ({ name: `${spec.title}: ${labelOf(spec, name, this.runs)}`, cells: this.#last(name) }));
    });
    fill(this.ends, this.#table("Last values", "measure", rows));
  }

  /** Each run's last value, with its interval, and its distance from the first run. */
  #last(name) {
    const ends = this.runs.map(({ id }) => lastOf(this.metrics.get(id).series(name)));
    return ends.map((end, n) => {
      if (!end) return "–";
      const apart = n && ends[0] ? ` (${end.value >= ends[0].value ? "+" : ""}${show(end.value - ends[0].value)})` : "";
      const bounds = end.low === null || end.low === undefined ? "" : ` [${show(end.low)}, ${show(end.high)}]`;
      return `${show(end.value)}${bounds}${apart}`;
    });
  }

  #table(title, first, rows) {
    if (!rows?.length) return el("section", {}, el("h2", {}, title), el("p", { class: "note" }, "No difference."));
    const head = el("tr", {}, el("th", { scope: "col" }, first), this.runs.map(({ name }) => el("th", { scope: "col" }, name)));
    const body = rows.map(({ name, cells }) => el("tr", {}, el("th", { scope: "row" }, name), cells.map((cell) => el("td", {}, cell))));
    return el("section", {}, el("h2", {}, title), el("div", { class: "wide" }, el("table", { class: "compare" }, el("thead", {}, head), el("tbody", {}, body))));
  }

  params() {}

  async update(changed) {
    const mine = (this.runs ?? []).filter(({ id }) => changed.includes(id));
    if (!mine.length || !this.ends) return;
    await Promise.all(mine.map(({ id }) => this.metrics.get(id).refresh()));
    this.#fillEnds();
  }

  close() {}
}

/** A setting's value as people read it. */
export function setting(value) {
  if (value === null || value === undefined) return "not set";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function labelOf(spec, name, runs) {
  for (const { agents } of runs) {
    const found = linesOf(spec, [name], agents);
    if (found.length) return found[0].label;
  }
  return name;
}

function lastOf(series) {
  const n = series ? series.values.findLastIndex((value) => value !== null) : -1;
  return n < 0 ? null : { value: series.values[n], low: series.low?.[n], high: series.high?.[n] };
}
