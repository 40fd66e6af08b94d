// Every answer of a run: found, filtered, sorted; and one prompt with all agents' answers side by side.
import { get, runPath } from "./api.js";
import { button, el, field, fill, show } from "./dom.js";
import { detail, perLearner, verdictClass } from "./answer.js";

const EQUAL = ["agent", "skill", "verdict", "stop"];
const BETWEEN = ["step", "reward", "ratio", "advantage", "length"];
const COLUMNS = ["step", "agent", "skill", "reward", "verdict", "ratio", "advantage", "length", "stop", "turn"];
const WAIT_MS = 100; // after a key, before a search

/** The filter of the address as the server takes it. */
export function filterOf(param) {
  const filter = {};
  for (const name of [...EQUAL, "turn", "text", "regex", "prompt_id"]) if (param(name)) filter[name] = param(name);
  if (filter.turn) filter.turn = Number(filter.turn);
  for (const name of BETWEEN) {
    const ends = ["min", "max"].map((side) => param(`${name}_${side}`));
    if (ends.some((end) => end !== null && end !== "")) filter[name] = ends.map((end) => (end === null || end === "" ? null : Number(end)));
  }
  return filter;
}

export class Answers {
  #timer = 0;
  #asked = null;

  constructor(app, host) {
    this.app = app;
    this.form = el("form", { class: "toolbar", "aria-label": "Filter", onsubmit: (event) => event.preventDefault() });
    this.count = el("p", { class: "note", role: "status" });
    this.list = el("div", { class: "wide" });
    this.pager = el("nav", { class: "pager", "aria-label": "Pages" });
    this.one = el("section", { class: "detail", "aria-label": "One prompt", tabindex: -1 });
    this.table = el("section", { "aria-label": "Answers" }, this.form, this.count, this.list, this.pager);
    this.title = el("h1", {}, "Answers");
    fill(host, this.title, this.table, this.one);
  }

  async open() {
    this.run = this.app.focus();
    if (!this.run) return void fill(this.list, el("p", {}, "Choose a run."));
    const number = this.app.chosen().length;
    fill(this.title, `Answers of ${this.run.name} `, number > 1 && el("small", {}, `the first of ${number} chosen runs`));
    await this.params();
  }

  #filter() {
    return filterOf((name) => this.app.param(name));
  }

  /** Reads the address: a filter with its page, or one answer. */
  async params() {
    const key = this.app.param("key");
    this.table.hidden = key !== null;
    this.one.hidden = key === null;
    if (key !== null) return this.#open(key);
    const page = Number(this.app.param("page") ?? 0);
    const query = { filter: JSON.stringify(this.#filter()), sort: this.app.param("sort") ?? "-step", page };
    this.#asked?.abort();
    this.#asked = new AbortController();
    this.step = this.app.focus()?.last_step;
    this.list.setAttribute("aria-busy", "true");
    try {
      const answer = await get(runPath(this.run.id, "answers"), query, this.#asked.signal);
      this.unread = Boolean(answer.note);
      this.#fillForm(answer.choices ?? {});
      this.#fillList(answer, page);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#fillForm({});
      fill(this.count, error.message);
      for (const node of [this.list, this.pager]) fill(node);
    }
    this.list.removeAttribute("aria-busy");
  }

  #fillForm(choices) {
    const [focused, clear] = [document.activeElement, this.clear];
    if (this.form.contains(focused) && focused !== clear) return; // somebody writes there
    const set = (name) => (event) => this.#later({ [name]: event.target.value || null, page: null });
    const choice = (name) => {
      const options = [["", "any"], ...(choices[name] ?? []).map((value) => [value, value])];
      const value = this.app.param(name) ?? "";
      if (!options.some(([one]) => one === value)) options.push([value, value]);
      return field(name, { value, onchange: set(name) }, options);
    };
    const bound = (name, side) => {
      const id = `${name}_${side}`;
      return field(`${name} ${side === "min" ? "from" : "to"}`, { type: "number", step: "any", value: this.app.param(id) ?? "", oninput: set(id) });
    };
    const typed = (name, label, type) => field(label, { type, value: this.app.param(name) ?? "", oninput: set(name), spellcheck: "false" });
    fill(
      this.form,
      typed("text", "text", "search"),
      typed("regex", "regular expression", "search"),
      EQUAL.map(choice),
      el("details", { open: BETWEEN.some((name) => this.app.param(`${name}_min`) || this.app.param(`${name}_max`)) },
        el("summary", {}, "ranges"),
        el("div", { class: "ranges" }, BETWEEN.map((name) => [bound(name, "min"), bound(name, "max")]), typed("turn", "turn", "number")),
      ),
      (this.clear = button("clear", () => this.app.clear())),
    );
    if (clear && focused === clear) this.clear.focus();
  }

  #later(changes) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.app.set(changes), WAIT_MS);
  }

  #fillList({ total, rows, per_page: size = 50, note }, page) {
    const some = total ? `, ${page * size + 1} to ${page * size + rows.length} shown` : "";
    fill(this.count, `${total.toLocaleString("en")} answers${some}. ${note ?? ""} `, this.#export());
    const sort = this.app.param("sort") ?? "-step";
    const heads = COLUMNS.map((name) => {
      const own = sort.replace(/^-/, "") === name;
      const order = own ? (sort.startsWith("-") ? "descending" : "ascending") : "none";
      const next = own && !sort.startsWith("-") ? `-${name}` : name;
      const mark = { none: "", ascending: " ↑", descending: " ↓" }[order];
      return el("th", { scope: "col", "aria-sort": order }, button(name + mark, () => this.app.set({ sort: next, page: null })));
    });
    const body = rows.map((row) => this.#row(row));
    const head = el("thead", {}, el("tr", {}, heads, el("th", { scope: "col" }, "answer")));
    fill(this.list, el("table", { class: "answers" }, head, el("tbody", {}, body)));
    const last = Math.max(0, Math.ceil(total / size) - 1);
    const turn = (text, to) => button(text, () => this.app.set({ page: to || null }), { disabled: to < 0 || to > last || to === page });
    fill(this.pager, last > 0 && [turn("first", 0), turn("previous", page - 1), el("span", {}, `page ${page + 1} of ${last + 1}`), turn("next", page + 1), turn("last", last)]);
  }

  #row(row) {
    const cells = COLUMNS.map((name) => el("td", { class: name, "data-name": BETWEEN.includes(name) ? name : null }, name === "ratio" || name === "advantage" ? perLearner(row[name]) : show(row[name])));
    const link = el("a", { href: this.app.link({ key: row.key }) }, row.excerpt.trim() || (row.excerpt ? "(blank)" : "(empty)"));
    return el("tr", { class: verdictClass(row) }, cells, el("td", { class: "excerpt" }, link));
  }

  /** A link of our own, so the browser names and saves the file. */
  #export() {
    const query = new URLSearchParams({ filter: JSON.stringify(this.#filter()), sort: this.app.param("sort") ?? "-step" });
    return el("a", { href: `${runPath(this.run.id, "export")}?${query}`, download: "answers.jsonl" }, "export as JSON Lines");
  }

  async #open(key) {
    try {
      const answer = await get(runPath(this.run.id, "answers", key));
      fill(this.one, el("p", {}, el("a", { href: this.app.link({ key: null }) }, "← all answers")), detail(answer, this.app));
    } catch (error) {
      fill(this.one, el("p", {}, el("a", { href: this.app.link({ key: null }) }, "← all answers")), el("p", { class: "problem" }, error.message));
    }
    this.one.focus();
  }

  /** New answers came: they are offered, not pushed under the reader's eyes. */
  update(changed) {
    if (!this.run || !changed.includes(this.run.id) || this.table.hidden || this.count.querySelector(".fresh")) return;
    if (this.app.focus().last_step === this.step && !this.unread) return;
    this.count.append(" ", button("new answers: show", () => this.params(), { class: "fresh" }));
  }

  close() {
    clearTimeout(this.#timer);
    this.#asked?.abort();
  }
}
