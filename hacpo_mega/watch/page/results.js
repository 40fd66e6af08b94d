// What experiment, bench and eval have written: their tables, charts and bars, as the server tells them.
import { get } from "./api.js";
import { AGENT_COLOURS } from "./catalogue.js";
import { verdictClass } from "./answer.js";
import { Chart } from "./chart.js";
import { button, el, field, fill, show } from "./dom.js";

const AXES = { steps: "step", seconds: "seconds", generated_answers: "generated answers", trained_answers: "trained answers" };
const MOST_BANDS = 6; // lines with a band in one chart
const WAIT_MS = 250; // after a key, before a search
const LONG = 36; // letters of a cell that may be broken
const TITLES = { experiment: "Experiment", bench: "Benchmark", scaling: "Benchmark by size", eval: "Evaluation", evaluations: "Evaluations" };

export class Results {
  #charts = [];
  #closed = false;

  constructor(app, host) {
    this.app = app;
    this.zoom = { from: null, to: null, set: (from, to) => this.#setZoom(from, to) };
    this.toolbar = el("form", { class: "toolbar", "aria-label": "Results", onsubmit: (event) => event.preventDefault() });
    this.body = el("div", {});
    fill(host, el("h1", {}, "Results"), this.toolbar, this.body);
  }

  async open() {
    await this.#ask();
  }

  /** The study of the address, else the first. */
  get #chosen() {
    return this.app.studies.find(({ id }) => id === this.app.param("study")) ?? this.app.studies[0] ?? null;
  }

  async #ask() {
    const study = this.#chosen;
    if (!study) return void fill(this.body, el("p", {}, "No folder of experiment, bench or eval is watched."));
    const reference = this.app.param("reference");
    this.asked = `${study.id} ${reference ?? ""}`;
    try {
      const found = await get(`/api/studies/${encodeURIComponent(study.id)}`, { reference });
      if (this.#closed) return;
      this.found = found;
      this.#layOut(study);
    } catch (error) {
      this.found = null;
      this.#fillToolbar(study);
      fill(this.body, el("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  #fillToolbar(study) {
    const set = (name) => (event) => this.app.set({ [name]: event.target.value || null });
    const studies = this.app.studies.map(({ id, kind, path }) => [id, `${TITLES[kind]}: ${path.split("/").slice(-2).join("/")}`]);
    const { methods, reference, charts = [] } = this.found ?? {};
    const axes = Object.keys(AXES).filter((axis) => charts.some(({ lines }) => lines.some(({ x }) => x[axis])));
    fill(
      this.toolbar,
      field("folder", { value: study.id, onchange: (event) => this.app.set({ study: event.target.value, reference: null, from: null, to: null }) }, studies),
      methods && field("compare with", { value: reference, onchange: set("reference") }, methods.map((name) => [name, name])),
      methods && field("methods with", { type: "search", value: this.app.param("methods") ?? "", placeholder: "name, name", onchange: set("methods") }),
      axes.length > 0 && field("x axis", { value: this.#axis(), onchange: (event) => this.app.set({ x: event.target.value, from: null, to: null }) }, axes.map((axis) => [axis, AXES[axis]])),
      axes.length > 0 && button("all", () => this.#setZoom(null, null), { title: "reset the zoom" }),
    );
  }

  #axis() {
    return this.app.param("x") in AXES ? this.app.param("x") : "steps";
  }

  #layOut(study) {
    const { facts, notes = [], charts = [], bars = [], tables = [] } = this.found;
    this.#fillToolbar(study);
    for (const { chart } of this.#charts) chart.close();
    this.#charts = charts.map((spec) => ({ spec, chart: new Chart(spec.title, this.zoom) }));
    const list = el("dl", {}, Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    fill(
      this.body,
      el("h2", {}, `${TITLES[study.kind]}: ${study.name}`),
      el("div", { class: "facts-block" }, list),
      notes.map((text) => el("p", { class: "note" }, text)),
      study.note && el("p", { class: "problem" }, study.note),
      bars.map(barTable),
      this.#charts.length > 0 && el("div", { class: "grid" }, this.#charts.map(({ chart }) => el("div", { class: "card" }, chart.node))),
      tables.map(table),
      this.found.benchmarks && this.#answersOf(study.id, this.found.benchmarks).node,
    );
    this.#draw();
  }

  /** The list of answers, asked again; it keeps the reader's page and choices while the study has the same benchmarks. */
  #answersOf(study, benchmarks) {
    const about = JSON.stringify([study, benchmarks]);
    if (this.answers?.about === about) this.answers.ask();
    else this.answers = new EvalAnswers(about, study, benchmarks);
    return this.answers;
  }

  #draw() {
    const number = (name) => (this.app.param(name) === null || Number.isNaN(Number(this.app.param(name))) ? null : Number(this.app.param(name)));
    Object.assign(this.zoom, { from: number("from"), to: number("to") });
    const axis = this.#axis();
    const wanted = (this.app.param("methods") ?? "").toLowerCase().split(",").map((part) => part.trim()).filter(Boolean);
    for (const { spec, chart } of this.#charts) {
      const shown = spec.lines.flatMap(({ label, x, y, low, high }, n) =>
        x[axis] && (!wanted.length || wanted.some((part) => label.toLowerCase().includes(part)))
          ? [{ label, x: x[axis], y, low, high, colour: AGENT_COLOURS[n % AGENT_COLOURS.length], dash: Math.floor(n / AGENT_COLOURS.length) }]
          : [],
      );
      const isFew = shown.length <= MOST_BANDS;
      const band = isFew ? "Shade: from the lowest seed to the highest." : `Fewer than ${MOST_BANDS + 1} methods show their bands: name some above.`;
      chart.draw({ lines: isFew ? shown : shown.map((line) => ({ ...line, low: null, high: null })), note: `${spec.note} ${band}`, xUnit: AXES[axis] });
    }
  }

  #setZoom(from, to) {
    const near = (value) => (value === null ? null : Number(value.toPrecision(6)));
    this.app.set({ from: near(from), to: near(to) });
  }

  params() {
    const study = this.#chosen;
    if (study && this.asked !== `${study.id} ${this.app.param("reference") ?? ""}`) return this.#ask();
    if (!this.found) return undefined;
    this.#fillToolbar(study);
    this.#draw();
    return undefined;
  }

  async update(changed) {
    const study = this.#chosen;
    if (study && changed.includes(study.id)) await this.#ask();
  }

  close() {
    this.#closed = true;
    for (const { chart } of this.#charts) chart.close();
  }
}

/** Every answer of an evaluation, by benchmark, verdict and text. */
class EvalAnswers {
  #how = { verdict: "", text: "", page: 0 };
  #timer = 0;
  #asked = 0;

  constructor(about, study, benchmarks) {
    this.about = about;
    this.study = study;
    this.benchmarks = benchmarks;
    this.#how.benchmark = benchmarks[0];
    this.form = el("form", { class: "toolbar", "aria-label": "Answers", onsubmit: (event) => event.preventDefault() });
    this.list = el("div", {});
    this.node = el("section", {}, el("h2", {}, "Answers"), this.form, this.list);
    this.ask();
  }

  #set(changes, wait = 0) {
    Object.assign(this.#how, { page: 0, ...changes });
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.ask(), wait);
  }

  async ask() {
    const asked = ++this.#asked;
    try {
      const found = await get(`/api/studies/${encodeURIComponent(this.study)}/answers`, this.#how);
      if (asked !== this.#asked) return; // a later question is on its way
      if (!this.form.childElementCount) this.#fillForm(found.verdicts);
      const last = Math.max(0, Math.ceil(found.total / found.per_page) - 1);
      const pager = [["previous", -1], ["next", 1]].map(([name, by]) => {
        const page = found.page + by;
        return button(name, () => this.#set({ page }), { disabled: page < 0 || page > last });
      });
      fill(this.list, el("p", { class: "note", role: "status" }, `${show(found.total)} answers, page ${found.page + 1} of ${last + 1}`), found.rows.map(evalAnswer), el("div", { class: "toolbar pager" }, pager));
    } catch (error) {
      if (asked === this.#asked) fill(this.list, el("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  #fillForm(verdicts) {
    const choice = (name) => (event) => this.#set({ [name]: event.target.value });
    fill(
      this.form,
      field("benchmark", { value: this.#how.benchmark, onchange: choice("benchmark") }, this.benchmarks.map((name) => [name, name])),
      field("verdict", { value: "", onchange: choice("verdict") }, [["", "all"], ...verdicts.map((name) => [name, name])]),
      field("text", { type: "search", oninput: (event) => this.#set({ text: event.target.value }, WAIT_MS) }),
    );
  }
}

function evalAnswer({ id, rollout, prompt_seen: prompt, gold, text, vote, verdict, reward, stop, num_tokens: length }) {
  const facts = [`reward ${show(reward)}`, verdict, `gold ${gold}`, vote !== null && `read ${vote}`, stop, `${show(length)} tokens`].filter(Boolean);
  return el(
    "div",
    { class: `answer ${verdictClass({ reward, verdict })}` },
    el("small", {}, `${id} · answer ${show(rollout)}`),
    el("pre", {}, text),
    el("p", { class: "facts" }, facts.join(" · ")),
    el("details", {}, el("summary", {}, "prompt as the model read it"), el("pre", {}, prompt)),
  );
}

function table({ title, head, rows, notes }) {
  const top = el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map(([first, ...cells]) => el("tr", {}, el("th", { scope: "row" }, first), cells.map((cell) => el("td", { class: cell.length > LONG ? "long" : null }, cell))));
  const grid = el("table", { class: "results" }, el("thead", {}, top), el("tbody", {}, body));
  return el("section", {}, el("h2", {}, title), el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": title }, grid), notes.map((note) => el("p", { class: "note" }, note)));
}

/** Rows of one length scale, each cut into its parts; what no part fills stays pale. */
function barTable({ title, note, unit, rows }) {
  const longest = Math.max(...rows.map(({ whole }) => whole), 0) || 1;
  const colours = new Map(rows.flatMap(({ parts }) => parts.map(([name, , colour]) => [name, colour])));
  const lines = rows.map(({ label, whole, parts }) => {
    const told = parts.map(([name, value]) => `${name.replaceAll("_", " ")} ${show(value)}`).join(", ");
    const bar = el("div", { class: "bar", role: "img", "aria-label": `${label}: ${show(whole)} ${unit}; ${told}` }, parts.map(([name, value, colour]) => sized(el("i", { title: `${name.replaceAll("_", " ")} ${show(value)} ${unit}` }), value / (whole || 1), colour)));
    return el("tr", {}, el("th", { scope: "row" }, label), el("td", {}, show(whole)), el("td", { class: "bars" }, sized(bar, whole / longest, null)));
  });
  const key = [...colours].map(([name, colour]) => {
    const swatch = el("i", { class: "swatch" });
    swatch.style.setProperty("--colour", colour);
    return el("span", {}, swatch, name.replaceAll("_", " "));
  });
  return el("section", {}, el("h2", {}, title), el("table", { class: "results" }, el("tbody", {}, lines)), el("p", { class: "legend", "aria-hidden": "true" }, key), el("p", { class: "note" }, note));
}

function sized(node, share, colour) {
  node.style.setProperty("--share", `${100 * Math.min(1, Math.max(0, share))}%`);
  if (colour) node.style.setProperty("--colour", colour);
  return node;
}
