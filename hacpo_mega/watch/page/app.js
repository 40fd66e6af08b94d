// The page: the chosen runs, the open view, and the address that holds both. Passes changes of runs on to the view.
import { Metrics, follow, get } from "./api.js";
import { Answers } from "./answers.js";
import { Compare } from "./compare.js";
import { Curves } from "./curves.js";
import { button, el, fill } from "./dom.js";
import { Job } from "./job.js";
import { Results } from "./results.js";

const VIEWS = { curves: ["Curves", Curves], answers: ["Answers", Answers], compare: ["Compare", Compare], job: ["Job", Job], results: ["Results", Results] };
const KEPT = ["runs"]; // of the address, from view to view
const THEMES = ["auto", "light", "dark"];
const STATES = { running: "●", finished: "✓", stopped: "■", gone: "✕" };

class App {
  runs = [];
  studies = []; // folders of experiment, bench and eval
  view = null;
  #name = "";
  #params = new URLSearchParams();
  #metrics = new Map();
  #opening = Promise.resolve();

  async start() {
    this.main = document.getElementById("main");
    this.live = document.getElementById("live");
    this.#hideToken();
    this.#theme(localStorage.getItem("theme") ?? "auto");
    document.getElementById("skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.main.focus();
    });
    await this.#askRuns();
    addEventListener("hashchange", () => this.#route());
    await this.#route();
    follow((changed) => this.#changed(changed), (text) => this.say(text));
  }

  /** Removes the token from the address, which can then be shown to others: the cookie has it from now on. */
  #hideToken() {
    const url = new URL(location.href);
    if (!url.searchParams.has("token")) return;
    url.searchParams.delete("token");
    history.replaceState(null, "", url);
  }

  async #askRuns() {
    const [runs, studies] = await Promise.all([get("/api/runs"), get("/api/studies")]);
    const had = this.studies.length;
    this.studies = studies;
    document.body.classList.toggle("alone", !runs.length);
    if (studies.length !== had) this.#showViews();
    const count = (name) => runs.filter((run) => run.name === name).length;
    for (const run of runs) if (count(run.name) > 1) run.label = run.path.split("/").slice(-2).join("/");
    this.runs = runs.map(({ label, ...run }) => ({ ...run, name: label ?? run.name }));
    this.#showRuns();
  }

  /** Runs that are shown: those of the address, else the first. */
  chosen() {
    const ids = (this.param("runs") ?? "").split(",").filter(Boolean);
    const found = ids.map((id) => this.runs.find((run) => run.id === id)).filter(Boolean);
    return found.length ? found : this.runs.slice(0, 1);
  }

  /** The run of views that show one. */
  focus() {
    return this.chosen()[0] ?? null;
  }

  /** Metrics of a run, opened once; after a failure, anew. */
  metrics(id) {
    if (!this.#metrics.has(id)) {
      const opening = new Metrics(id).open();
      opening.catch(() => this.#metrics.delete(id));
      this.#metrics.set(id, opening);
    }
    return this.#metrics.get(id);
  }

  param(name) {
    return this.#params.get(name);
  }

  /** The address of this view with some parameters changed; null removes one. */
  link(changes, view = this.#name) {
    const params = new URLSearchParams(view === this.#name ? this.#params : KEPT.flatMap((name) => (this.#params.has(name) ? [[name, this.#params.get(name)]] : [])));
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") params.delete(name);
      else params.set(name, value);
    }
    return `#/${view}${params.size ? `?${params}` : ""}`;
  }

  /** Changes parameters of the address without a new entry in the history. */
  set(changes) {
    const link = this.link(changes);
    if (link === location.hash) return;
    history.replaceState(null, "", link);
    this.#route();
  }

  /** Forgets all parameters of this view. */
  clear() {
    location.hash = this.link({}, this.#name).split("?")[0] + (this.param("runs") ? `?${new URLSearchParams({ runs: this.param("runs") })}` : "");
  }

  say(text) {
    fill(this.live, text);
  }

  #route() {
    this.#opening = this.#opening.then(() => this.#show()).catch((error) => this.say(error.message));
    return this.#opening;
  }

  async #show() {
    const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
    const name = path in VIEWS ? path : this.runs.length ? "curves" : "results";
    const before = [this.#name, this.param("runs") ?? ""].join("?");
    this.#params = new URLSearchParams(query);
    this.#name = name;
    this.#showRuns();
    if (this.view && before === [name, this.param("runs") ?? ""].join("?")) return this.view.params();
    this.view?.close();
    this.#showViews();
    const [title, View] = VIEWS[name];
    document.title = `${title} - hacpo_mega watch`;
    this.view = new View(this, this.main);
    try {
      await this.view.open();
      this.say("");
    } catch (error) {
      this.main.append(el("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  #showViews() {
    const known = Object.entries(VIEWS).filter(([name]) => (name === "results" ? this.studies.length : this.runs.length || !this.studies.length));
    const links = known.map(([name, [title]]) => el("a", { href: this.link({}, name), "aria-current": name === this.#name ? "page" : null }, title));
    fill(document.getElementById("views"), links);
  }

  #showRuns() {
    const chosen = new Set(this.chosen().map(({ id }) => id));
    const focused = document.activeElement?.value;
    const items = this.runs.map((run) => {
      const box = el("input", { type: "checkbox", value: run.id, checked: chosen.has(run.id), onchange: () => this.#choose(run.id) });
      const progress = run.num_steps ? `${run.last_step ?? 0} of ${run.num_steps} steps` : `${run.last_step ?? 0} steps`;
      const state = el("span", { class: `state ${run.state}` }, `${STATES[run.state] ?? "?"} ${run.state}`);
      const facts = el("small", {}, state, ` · ${progress}`, run.seed !== undefined && run.seed !== null && ` · seed ${run.seed}`, run.note && el("em", {}, ` · ${run.note}`));
      return el("li", {}, el("label", { title: run.path }, box, el("span", {}, run.name, facts)));
    });
    const list = document.getElementById("runs");
    fill(list, el("ul", {}, items), this.runs.length > 1 && this.runs.length > chosen.size && button("all runs", () => this.#chooseAll()));
    [...list.querySelectorAll("input")].find(({ value }) => value === focused)?.focus();
  }

  #choose(id) {
    const ids = this.chosen().map((run) => run.id);
    const next = ids.includes(id) ? ids.filter((one) => one !== id) : [...ids, id];
    this.set({ runs: next.join(",") || null });
    this.#showRuns();
  }

  #chooseAll() {
    this.set({ runs: this.runs.map(({ id }) => id).join(",") });
  }

  async #changed(some) {
    await this.#askRuns();
    const ids = some ?? [...this.runs, ...this.studies].map(({ id }) => id);
    this.#opening = this.#opening.then(() => this.view?.update(ids)).catch((error) => this.say(error.message));
    await this.#opening;
  }

  #theme(name) {
    localStorage.setItem("theme", name);
    document.documentElement.dataset.theme = name;
    const next = THEMES[(THEMES.indexOf(name) + 1) % THEMES.length];
    const old = document.getElementById("theme");
    const fresh = button(`theme: ${name}`, () => this.#theme(next), { id: "theme", title: `change to ${next}` });
    const focused = document.activeElement === old;
    old.replaceWith(fresh);
    if (focused) fresh.focus();
    this.view?.params();
  }
}

const app = new App();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.view?.params());
app.start().catch((error) => fill(document.getElementById("main"), el("p", { class: "problem", role: "alert" }, error.message)));
