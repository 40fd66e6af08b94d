// The job: its progress and time, its ranks with their places and phases, and its last trouble.
import { get, runPath } from "./api.js";
import { PHASES, UNKNOWN_COLOUR } from "./catalogue.js";
import { duration, el, fill, show } from "./dom.js";

const EVERY_MS = 2000; // phases change without a new step
const MOST_NAMED = 6; // ranks that the sentence about waiting names

export class Job {
  #timer = 0;
  #closed = false;

  constructor(app, host) {
    this.app = app;
    this.body = el("div", {});
    fill(host, el("h1", {}, "Job"), this.body);
  }

  async open() {
    this.run = this.app.focus();
    if (!this.run) return void fill(this.body, el("p", {}, "Choose a run."));
    await this.#ask();
  }

  async #ask() {
    try {
      const job = await get(runPath(this.run.id, "job"));
      if (this.#closed) return;
      fill(this.body, el("h2", {}, this.run.name), facts(job), waiting(job), map(job), phaseKey(job.ranks ?? []), troubles(job.trouble ?? []));
    } catch (error) {
      fill(this.body, el("p", { class: "problem" }, error.message));
    }
    clearTimeout(this.#timer);
    if (!this.#closed) this.#timer = setTimeout(() => this.#ask(), EVERY_MS);
  }

  params() {}

  update() {}

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
  }
}

function facts({ state, step, num_steps: planned, seconds, seconds_left: left, safe_step: safe, attempt }) {
  const rows = [
    ["state", state],
    ["step", planned ? `${show(step)} of ${show(planned)}` : show(step)],
    ["running for", duration(seconds)],
    ["time left", duration(left)],
    ["resumes from step", show(safe)],
    ["Slurm attempt", attempt !== null && typeof attempt === "object" ? Object.entries(attempt).map(([name, value]) => `${name} ${show(value)}`).join(", ") : show(attempt)],
  ];
  const bar = planned && typeof step === "number" ? el("progress", { max: planned, value: step, "aria-label": "steps done" }) : null;
  return el("div", { class: "facts-block" }, bar, el("dl", {}, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value ?? "–")))));
}

/** One sentence on the ranks that wait, and those they wait for; nothing if no rank reports. */
function waiting({ ranks, waited_for: late }) {
  const reporting = (ranks ?? []).filter(({ phase }) => phase);
  const waiters = reporting.filter(({ waits_for: whom }) => whom).length;
  if (!reporting.length) return null;
  if (!late?.length) return el("p", { class: "waiting" }, waiters ? `All ${waiters} ranks that tell are in a collective.` : "Nobody waits.");
  const named = late.slice(0, MOST_NAMED).map((number) => {
    const { agent, lane, phase, phase_s: seconds } = reporting.find(({ rank }) => rank === number);
    return `rank ${number} (${agent}, lane ${show(lane)}) in ${phase.replaceAll("_", " ")} for ${duration(seconds)}`;
  });
  const more = late.length > MOST_NAMED ? ` and ${late.length - MOST_NAMED} more` : "";
  return el("p", { class: "waiting" }, waiters ? `${waiters} of ${reporting.length} ranks wait for others. At work: ` : "Nobody waits. At work: ", named.join("; "), more, ".");
}

/** Agents as rows, lanes as columns, cells as boxes of ranks. */
function map({ ranks, state }) {
  if (!ranks?.length) return el("p", { class: "note" }, "The run's files do not tell its ranks.");
  const agents = [...new Set(ranks.map(({ agent }) => agent))];
  const lanes = [...new Set(ranks.map(({ lane }) => lane))].sort((a, b) => a - b);
  const head = el("tr", {}, el("td", {}), lanes.map((lane) => el("th", { scope: "col" }, `lane ${show(lane)}`)));
  const rows = agents.map((agent) => {
    const cells = lanes.map((lane) => el("td", {}, boxes(ranks.filter((rank) => rank.agent === agent && rank.lane === lane), state)));
    return el("tr", {}, el("th", { scope: "row" }, agent), cells);
  });
  return el("div", { class: "wide" }, el("table", { class: "map" }, el("caption", {}, "Answers travel down a lane, gradients along an agent."), el("thead", {}, head), el("tbody", {}, rows)));
}

function boxes(ranks, state) {
  const cells = [...new Set(ranks.map(({ cell }) => cell))];
  return cells.map((cell) => {
    const own = ranks.filter((rank) => rank.cell === cell);
    const nodes = [...new Set(own.map(({ node }) => node))].filter(Boolean).join(", ");
    return el("div", { class: "cell" }, el("small", {}, [`cell ${show(cell)}`, nodes].filter(Boolean).join(" · ")), el("ul", {}, own.map((rank) => box(rank, state))));
  });
}

/** A rank: its phase and seconds in it, its small steps beside those of the last such phase, and whom it waits for. */
function box(it, state) {
  const { rank, phase, when, phase_s: seconds, num_done: done, num_before: before, progress, waits_for: whom, waited_s: waited } = it;
  const silent = phase && it.silent;
  const name = phase ? phase.replaceAll("_", " ") : state === "running" ? "tells nothing yet" : "–";
  const parts = typeof done === "number" && done > 0 ? ` ${show(done)}${before ? ` of about ${show(before)}` : ""}` : "";
  const bar = typeof progress === "number" && done > 0 && el("progress", { max: 1, value: progress, "aria-label": `small steps of ${name}, as many as last time` });
  const node = el(
    "li",
    { class: silent ? "silent" : whom ? "waits" : "", title: when ?? null },
    el("b", {}, show(rank)),
    ` ${name}`,
    phase && ` ${duration(seconds)}`,
    bar || null,
    parts && el("small", {}, parts),
    whom && el("small", {}, ` waits ${duration(waited)} for ${whom}`),
    silent && el("em", {}, state === "running" ? ` stale since ${duration(it.seen_s_ago)}` : ` told ${duration(it.seen_s_ago)} ago, ${when ?? ""}`),
  );
  node.style.setProperty("--colour", phase ? (PHASES[phase] ?? UNKNOWN_COLOUR) : "transparent");
  return node;
}

function phaseKey(ranks) {
  const phases = [...new Set(ranks.map(({ phase }) => phase))].filter(Boolean);
  return el("p", { class: "legend", "aria-hidden": "true" }, phases.map((phase) => {
    const swatch = el("i", { class: "swatch" });
    swatch.style.setProperty("--colour", PHASES[phase] ?? UNKNOWN_COLOUR);
    return el("span", {}, swatch, phase.replaceAll("_", " "));
  }));
}

function troubles(found) {
  if (!found.length) return el("p", { class: "note" }, "No trouble.");
  const when = (time) => (typeof time === "number" ? new Date(time * 1000).toLocaleString() : null);
  const lines = found.map(({ time_unix_s: time, rank, text }) =>
    el("li", {}, el("small", {}, [when(time), rank !== undefined && rank !== null && `rank ${rank}`].filter(Boolean).join(", ")), " ", text),
  );
  return el("section", {}, el("h2", {}, "Last trouble"), el("ul", { class: "trouble" }, lines));
}
