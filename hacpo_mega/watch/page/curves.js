// The curves of the chosen runs, section by section; a chart is made when it comes into sight.
import { get, runPath } from "./api.js";
import { AGENT_COLOURS, BAND, FATES, PHASES, SECTIONS, UNKNOWN_COLOUR, linesOf, others } from "./catalogue.js";
import { Chart } from "./chart.js";
import { button, el, field, fill } from "./dom.js";
import { setting } from "./compare.js";
import { meanOfSeeds, points, smooth } from "./series.js";

const AXES = { steps: "step", seconds: "seconds", trained_answers: "trained answers" };
const colour = (n) => AGENT_COLOURS[n % AGENT_COLOURS.length];

export class Curves {
  #cards = []; // {spec, chart, shown}
  #details = new Map(); // run -> the server's verdicts and fates
  #groups = [];
  #again = 0;

  constructor(app, host) {
    this.app = app;
    this.zoom = { from: null, to: null, set: (from, to) => this.#setZoom(from, to) };
    this.toolbar = el("form", { class: "toolbar", "aria-label": "Curves", onsubmit: (event) => event.preventDefault() });
    this.events = el("details", { class: "events", hidden: true });
    this.differences = el("details", { class: "events", hidden: true });
    this.sections = el("div", {});
    this.none = el("p", { role: "status", hidden: true }, "No metric of this name.");
    const keys = "Drag to zoom, double-click to see all. On a chart, arrow keys read values, + and - zoom, 0 shows all.";
    fill(host, el("h1", {}, "Curves"), this.toolbar, this.events, this.differences, this.none, this.sections, el("p", { class: "note" }, keys));
    this.seen = new IntersectionObserver((entries) => this.#see(entries), { rootMargin: "300px" });
  }

  async open() {
    this.runs = this.app.chosen();
    if (!this.runs.length) return void fill(this.sections, el("p", {}, "Choose a run."));
    this.metrics = new Map();
    await Promise.all(this.runs.map(async (run) => this.metrics.set(run.id, await this.app.metrics(run.id))));
    for (const metrics of this.metrics.values()) metrics.onWhole = () => this.#redraw();
    const groups = this.runs.length > 1 ? await get("/api/compare", { runs: this.runs.map(({ id }) => id).join(",") }) : {};
    this.#listDifferences(groups.differences ?? []);
    this.#groups = (groups.groups ?? []).filter(({ runs }) => runs.length > 1);
    this.params();
    this.#layOut();
    this.#fetchDetails();
  }

  /** Verdicts and fates come after the curves: they are counted over the whole run. */
  async #fetchDetails() {
    await Promise.all(
      this.runs.map(async ({ id }) => {
        const found = await get(runPath(id, "verdicts")).catch((error) => this.app.say(`${id}: ${error.message}`));
        if (found) this.#details.set(id, found);
      }),
    );
    this.#redraw();
  }

  /** Reads the address: axis, smoothing, log, zoom, seeds, filter. */
  params() {
    const number = (name) => (this.app.param(name) === null || Number.isNaN(Number(this.app.param(name))) ? null : Number(this.app.param(name)));
    const seeds = this.app.param("seeds") === "mean" && this.#groups.length > 0;
    const axis = !seeds && this.app.param("x") in AXES ? this.app.param("x") : "steps";
    this.how = { axis, smooth: number("smooth") ?? 0, log: this.app.param("log") === "1", seeds, find: this.app.param("find") ?? "" };
    Object.assign(this.zoom, { from: number("from"), to: number("to") });
    this.#fillToolbar();
    this.#filter();
    this.#redraw();
  }

  #fillToolbar() {
    if (this.toolbar.contains(document.activeElement) && this.toolbar.childElementCount) return this.#fillZoom();
    const set = (name) => (event) => this.app.set({ [name]: event.target.value || null });
    const check = (event) => this.app.set({ log: event.target.checked ? "1" : null });
    this.from = field("from", { type: "number", step: "any", onchange: set("from") });
    this.to = field("to", { type: "number", step: "any", onchange: set("to") });
    fill(
      this.toolbar,
      field("x axis", { value: this.how.axis, onchange: (e) => this.app.set({ x: e.target.value, from: null, to: null }) }, Object.entries(AXES)),
      field("smoothing", { type: "range", min: 0, max: 0.98, step: 0.02, value: this.how.smooth, oninput: set("smooth") }),
      field("log y", { type: "checkbox", checked: this.how.log, onchange: check }),
      this.#groups.length > 0 && field("seeds", { value: this.how.seeds ? "mean" : "each", onchange: set("seeds") }, [["each", "each run"], ["mean", "mean and band"]]),
      this.from,
      this.to,
      button("all", () => this.#setZoom(null, null), { title: "reset the zoom" }),
      field("find a metric", { type: "search", value: this.how.find, oninput: set("find") }),
    );
    this.#fillZoom();
  }

  #fillZoom() {
    for (const [label, value] of [[this.from, this.zoom.from], [this.to, this.zoom.to]]) {
      const input = label.querySelector("input");
      if (input !== document.activeElement) input.value = value === null ? "" : String(value);
    }
  }

  #setZoom(from, to) {
    const near = (value) => (value === null ? null : Number(value.toPrecision(6)));
    this.app.set({ from: near(from), to: near(to) });
  }

  /** One card per chart that the runs have numbers for. */
  #layOut() {
    for (const { chart } of this.#cards) chart?.close();
    this.#cards = [];
    this.names = [...new Set([...this.metrics.values()].flatMap((one) => one.names))];
    this.agents = [...new Set(this.runs.flatMap(({ agents }) => agents))];
    const sections = [...SECTIONS, { title: "Everything else", folded: true, charts: others(this.names, this.agents) }];
    fill(this.sections, sections.map((section) => this.#section(section)));
    for (const card of this.#cards) this.seen.observe(card.place);
    this.#filter();
  }

  #section({ title, charts, folded }) {
    const cards = charts.flatMap((spec) => this.#variants(spec)).map((spec) => this.#card(spec));
    if (!cards.length) return null;
    const grid = el("div", { class: "grid" }, cards.map(({ place }) => place));
    const heading = el("h2", {}, title);
    return folded
      ? el("details", { class: "section" }, el("summary", {}, heading, el("small", {}, `${cards.length} charts`)), grid)
      : el("section", { class: "section" }, heading, grid);
  }

  #card(spec) {
    const card = { spec, chart: null, place: el("div", { class: "card" }), found: `${spec.title} ${spec.note ?? ""} ${(spec.patterns ?? []).join(" ")}`.toLowerCase() };
    this.#cards.push(card);
    return card;
  }

  /** A chart of curves is one for all runs; a stacked one is one per run and agent, or pair. */
  #variants(spec) {
    if (spec.patterns) {
      const has = this.runs.some(({ id, agents }) => linesOf(spec, this.metrics.get(id).names, agents).length);
      return has ? [spec] : [];
    }
    return this.runs.flatMap((run) => {
      const whose = this.runs.length > 1 ? `, ${run.name}` : "";
      if (spec.parts) return this.#pairs(spec, run, whose);
      return run.agents
        .map((agent) => ({ ...spec, run, learner: agent, names: this.#phases(run, agent, spec.phases), title: `${spec.title}: ${agent}${whose}` }))
        .filter(({ names }) => names.length);
    });
  }

  /** One chart per learner and source for which the run has all metrics of the chart. */
  #pairs(spec, run, whose) {
    const known = new Set(this.metrics.get(run.id).names);
    const pairs = run.agents.flatMap((learner) => run.agents.filter((source) => source !== learner).map((source) => ({ learner, source })));
    return pairs
      .map(({ learner, source }) => ({ ...spec, run, learner, source, names: spec.parts.map((part) => `agent/${learner}/from/${source}/${part}`) }))
      .filter(({ names }) => names.every((name) => known.has(name)))
      .map((one) => ({ ...one, title: `${spec.title}: ${one.learner} from ${one.source}${whose}` }));
  }

  #phases(run, agent, kind) {
    const prefix = `agent/${agent}/${kind}/`;
    const names = this.metrics.get(run.id).names.filter((name) => name.startsWith(prefix) && name.endsWith("_s"));
    const order = Object.keys(PHASES);
    const place = (name) => (order.indexOf(phaseOf(name)) + 1 || order.length + 1);
    return names.filter((name) => phaseOf(name) !== "load").sort((a, b) => place(a) - place(b));
  }

  #see(entries) {
    for (const { target, isIntersecting } of entries) {
      const card = this.#cards.find(({ place }) => place === target);
      if (card) card.shown = isIntersecting;
      if (card && isIntersecting) this.#draw(card);
    }
  }

  async #draw(card) {
    if (card.drawing) return void (card.old = true); // drawn again when it is done
    card.drawing = true;
    card.old = false;
    try {
      card.chart ??= new Chart(titled(card.spec), this.zoom);
      if (!card.chart.node.isConnected) card.place.append(card.chart.node);
      await this.#load(card.spec);
      card.chart.draw(this.#content(card.spec));
      this.#listEvents();
    } catch (error) {
      this.app.say(error.message);
    } finally {
      card.drawing = false;
    }
    if (card.old && card.shown) await this.#draw(card);
  }

  async #load(spec) {
    if (spec.names) return void (await this.metrics.get(spec.run.id).need(spec.names));
    await Promise.all(
      this.runs.map(({ id, agents }) => {
        const metrics = this.metrics.get(id);
        return metrics.need(linesOf(spec, metrics.names, agents).map(({ name }) => name));
      }),
    );
  }

  /** The data that a chart draws, from the numbers loaded so far. */
  #content(spec) {
    const common = { note: spec.note, verdicts: this.#verdicts(spec), xUnit: AXES[this.how.axis], unit: spec.unit, share: spec.share, level: spec.level };
    common.span = this.#span(spec.run ? [spec.run] : this.runs);
    common.events = this.#marks(spec.run ? [spec.run] : this.runs);
    if (spec.id === "fates") return { ...common, ...this.#fates(spec) };
    if (spec.names) return { ...common, ...this.#stack(spec) };
    if (this.how.seeds) common.note = "Mean of the seeds; shade: from the lowest to the highest.";
    if (this.how.smooth > 0) common.smoothed = true;
    return { ...common, log: spec.log || this.how.log, lines: this.how.seeds ? this.#seedLines(spec) : this.#lines(spec, this.runs) };
  }

  #lines(spec, runs) {
    const several = this.runs.length > 1;
    return runs.flatMap((run) => {
      const metrics = this.metrics.get(run.id);
      return linesOf(spec, metrics.names, run.agents).flatMap(({ name, label, a, b, part }, n) => {
        const series = metrics.series(name);
        if (!series) return [];
        const curve = points(series, this.how.axis);
        const place = several ? this.runs.indexOf(run) : Math.max(run.agents.indexOf(a), 0);
        const dash = several ? n : Math.max(part, b && run.agents.length > 2 ? run.agents.indexOf(b) : 0);
        const weight = this.how.smooth;
        const bounds = curve.low?.some((value) => value !== null) ? {} : { low: null, high: null };
        const smoothed = weight > 0 && bounds.low === null ? { y: smooth(curve.y, weight), raw: curve.y } : {}; // else its interval is another's
        return [{ ...curve, ...bounds, ...smoothed, label: several ? `${run.name} · ${label}` : label, short: label, colour: colour(place), dash }];
      });
    });
  }

  /** Runs that differ only in the seed, as one mean with a band from the lowest to the highest. */
  #seedLines(spec) {
    const grouped = new Set(this.#groups.flatMap(({ runs }) => runs));
    const alone = this.#lines(spec, this.runs.filter(({ id }) => !grouped.has(id)));
    const means = this.#groups.flatMap(({ name, runs }, n) => {
      const lines = this.#lines(spec, this.runs.filter(({ id }) => runs.includes(id)));
      const labels = [...new Set(lines.map(({ short }) => short))];
      return labels.map((label, m) => {
        const mean = meanOfSeeds(lines.filter(({ short }) => short === label).map(({ x, raw, y }) => ({ x, y: raw ?? y })));
        const sides = Object.fromEntries(["y", "low", "high"].map((side) => [side, smooth(mean[side], this.how.smooth)]));
        return { ...mean, ...sides, label: `${name} · ${label}, mean of ${runs.length} seeds`, colour: colour(n), dash: m };
      });
    });
    return [...means, ...alone];
  }

  #stack({ names, run, id }) {
    const metrics = this.metrics.get(run.id);
    const found = names.map((name) => [name, metrics.series(name)]).filter(([, series]) => series);
    if (!found.length) return { x: [], layers: [] };
    const [, first] = found[0];
    const rows = first.steps.map((_, n) => n).filter((n) => found.some(([, { values }]) => values[n] !== null && first.steps[n] > 0));
    const look = (name) => (id === "bands" ? BAND[name.split("/").at(-1)] : [phaseOf(name).replaceAll("_", " "), PHASES[phaseOf(name)] ?? UNKNOWN_COLOUR]);
    const layers = found.map(([name, { values }]) => ({ label: look(name)[0], colour: look(name)[1], values: rows.map((n) => values[n]) }));
    return { x: rows.map((n) => first[this.how.axis][n]), layers };
  }

  #fates({ run, learner, source }) {
    const fates = this.#details.get(run.id)?.fates.find((one) => one.learner === learner && one.source === source);
    if (!fates) return { x: [], layers: [] };
    const metrics = this.metrics.get(run.id);
    const kinds = [...new Set([...Object.keys(FATES), ...Object.keys(fates.series)])].filter((kind) => fates.series[kind]?.some((n) => n > 0));
    const layers = kinds.map((kind) => {
      const [label, shade] = FATES[kind] ?? [kind.replaceAll("_", " "), UNKNOWN_COLOUR];
      return { label, colour: shade, values: fates.series[kind] };
    });
    return { x: fates.steps.map((step) => metrics.place(step, this.how.axis)), layers };
  }

  #verdicts(spec) {
    return (spec.run ? [spec.run] : this.runs).flatMap((run) => {
      const found = (this.#details.get(run.id)?.verdicts ?? []).filter(
        (one) => one.chart === spec.id && (!spec.learner || !one.learner || (one.learner === spec.learner && (!spec.source || one.source === spec.source))),
      );
      return found.map(({ text, level }) => ({ level, text: this.runs.length > 1 ? `${run.name}: ${text}` : text }));
    });
  }

  #span(runs) {
    const ends = runs.map(({ id, last_step: last }) => [this.metrics.get(id).place(0, this.how.axis) ?? 0, this.metrics.get(id).place(last ?? 1, this.how.axis)]);
    return [Math.min(...ends.map(([low]) => low)), Math.max(...ends.map(([, high]) => high ?? 1))];
  }

  #marks(runs) {
    return runs.flatMap(({ id, name }) =>
      this.metrics.get(id).events.map(({ step, kind, text }) => ({
        x: this.metrics.get(id).place(step, this.how.axis),
        step,
        kind,
        text: this.runs.length > 1 ? `${name}: ${text}` : text,
      })),
    );
  }

  #listEvents() {
    const marks = this.#marks(this.runs);
    const alarms = marks.filter(({ kind }) => kind === "alarm").length;
    const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
    this.events.hidden = !marks.length;
    if (this.events.childElementCount && this.listed === marks.length) return;
    this.listed = marks.length;
    fill(
      this.events,
      el("summary", {}, `${count(alarms, "alarm")}, ${count(marks.length - alarms, "start")}`),
      el("ul", {}, marks.map(({ step, kind, text }) => el("li", { class: kind }, el("b", {}, `step ${step} `), text))),
    );
  }

  /** Settings in which the chosen runs differ, beside their curves. */
  #listDifferences(found) {
    this.differences.hidden = !found.length;
    const head = el("tr", {}, el("th", { scope: "col" }, "setting"), this.runs.map(({ name }, n) => el("th", { scope: "col" }, swatchOf(n), name)));
    const rows = found.map(({ key, values }) => el("tr", {}, el("th", { scope: "row" }, key), this.runs.map(({ id }) => el("td", {}, setting(values[id])))));
    const table = el("table", { class: "compare" }, el("thead", {}, head), el("tbody", {}, rows));
    fill(this.differences, el("summary", {}, `${found.length} setting${found.length === 1 ? "" : "s"} differ${found.length === 1 ? "s" : ""}`), el("div", { class: "wide" }, table));
  }

  #filter() {
    const find = this.how.find.trim().toLowerCase();
    for (const { place, found } of this.#cards) place.hidden = find !== "" && !found.includes(find);
    for (const section of this.sections.querySelectorAll(".section")) {
      section.hidden = [...section.querySelectorAll(".card")].every(({ hidden }) => hidden);
      if (find && section.tagName === "DETAILS") section.open = true;
    }
    this.none.hidden = !find || this.#cards.some(({ place }) => !place.hidden);
  }

  #redraw() {
    cancelAnimationFrame(this.#again);
    this.#again = requestAnimationFrame(() => {
      for (const card of this.#cards) if (card.shown && !card.place.hidden) this.#draw(card);
    });
  }

  /** New rows came for some runs. */
  async update(changed) {
    const mine = this.runs.filter(({ id }) => changed.includes(id));
    if (!mine.length) return;
    this.runs = this.app.chosen();
    const before = this.names.length;
    await Promise.all(mine.map(({ id }) => this.metrics.get(id).refresh()));
    this.#fetchDetails();
    const names = new Set([...this.metrics.values()].flatMap((one) => one.names));
    if (names.size !== before) this.#layOut();
    else this.#redraw();
  }

  close() {
    this.seen.disconnect();
    cancelAnimationFrame(this.#again);
    for (const { chart } of this.#cards) chart?.close();
  }
}

function swatchOf(n) {
  const swatch = el("i", { class: "swatch", "aria-hidden": "true" });
  swatch.style.setProperty("--colour", colour(n));
  return swatch;
}

/** A title with the unit of its numbers. */
const titled = ({ title, unit }) => (unit ? `${title} (${unit})` : title);
const phaseOf = (name) => name.split("/").at(-1).replace(/_s$/, "");
