// The server's answers, and the series of metrics that grow with a run.

const LONG_RUN = 2000; // steps
const FIRST_POINTS = 250; // of a curve of a long run, before the others
const FIRST_MS = 1000; // for these to be drawn
const NAMES_A_REQUEST = 60; // a longer address may be cut

/** A route's JSON. Throws an Error with the server's own line. */
export async function get(path, query = {}, signal = undefined) {
  const known = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(known).toString();
  const response = await fetch(search ? `${path}?${search}` : path, { signal, credentials: "same-origin" });
  const body = await response.json().catch(() => null);
  if (response.status === 401 || response.status === 403) {
    throw new Error(body?.error ?? "This address lacks its token: open the one that `hacpo-mega watch` printed.");
  }
  if (!response.ok || body === null) throw new Error(body?.error ?? `${path} answered ${response.status}`);
  return body;
}

export const runPath = (run, ...parts) => ["/api/runs", run, ...parts].map((part, n) => (n ? encodeURIComponent(part) : part)).join("/");

/** Metrics of one run, asked for by name once and then extended. */
export class Metrics {
  #batches = []; // {names, steps, seconds, trained_answers, series, intervals}
  #wanted = new Map(); // by name, the promise that resolves when it is loaded
  #growing = Promise.resolve();
  #queue = []; // names that the next request asks for
  #flush = null;
  #every = 1; // of a long run every so many steps are loaded first, and all of them soon after
  events = [];
  names = [];
  whole = Promise.resolve(); // all steps of what was asked for are here
  onWhole = () => {};

  constructor(run) {
    this.run = run;
  }

  /** Asks for the names of all metrics. */
  async open() {
    const { names, events, last_step: last } = await get(runPath(this.run, "metrics"));
    this.names = names;
    this.#every = (last ?? 0) < LONG_RUN ? 1 : Math.floor(last / FIRST_POINTS);
    if (events) this.events = events;
    return this;
  }

  /** Resolves when all of `names` that the run has are loaded. Names asked for in one turn go into one request. */
  async need(names) {
    const known = new Set(this.names);
    for (const name of names) {
      if (!known.has(name) || this.#wanted.has(name)) continue;
      this.#flush ??= new Promise((resolve) => setTimeout(resolve)).then(() => this.#send());
      this.#queue.push(name);
      this.#wanted.set(name, this.#flush);
    }
    await Promise.all(names.map((name) => this.#wanted.get(name)));
  }

  async #send() {
    const asked = this.#queue;
    [this.#queue, this.#flush] = [[], null];
    const parts = Array.from({ length: Math.ceil(asked.length / NAMES_A_REQUEST) }, (_, n) => asked.slice(n * NAMES_A_REQUEST, (n + 1) * NAMES_A_REQUEST));
    try {
      await Promise.all(parts.map((part) => this.#load(part)));
    } catch (error) {
      for (const name of asked) this.#wanted.delete(name);
      throw error;
    }
  }

  async #load(names) {
    const ask = (every) => get(runPath(this.run, "metrics"), { names: names.join(","), every });
    const every = this.#every;
    const answer = await ask(every);
    this.events = answer.events ?? this.events;
    const batch = { ...answer, names };
    this.#batches.push(batch);
    if (every === 1) return;
    const drawn = new Promise((resolve) => setTimeout(resolve, FIRST_MS));
    const rest = drawn.then(() => ask(1)).then((all) => {
      Object.assign(batch, { ...all, names });
      this.onWhole();
    });
    this.whole = Promise.all([this.whole, rest.catch(() => null)]);
  }

  /** Asks for the steps since the last answer; true if there are any. One call at a time. */
  refresh() {
    this.#growing = this.#growing.catch(() => false).then(async () => {
      await this.open();
      const grown = await Promise.all(this.#batches.map((batch) => this.#extend(batch)));
      return grown.some(Boolean);
    });
    return this.#growing;
  }

  async #extend(batch) {
    const after = batch.steps.at(-1);
    const { names, generation } = batch; // the server sends all rows again if some were replaced since this generation
    const answer = await get(runPath(this.run, "metrics"), { names: names.join(","), after, generation });
    if (answer.events) this.events = answer.events;
    if (answer.full) {
      Object.assign(batch, { ...answer, names });
      return true;
    }
    append(batch, answer);
    return answer.steps.length > 0;
  }

  /** The value of an axis at a step, or at the last step before it that has one. */
  place(step, axis) {
    const batch = this.#batches[0];
    if (!batch || axis === "steps") return step;
    const n = batch.steps.findLastIndex((one) => one <= step);
    return batch[axis][Math.max(n, 0)];
  }

  /** {steps, seconds, trained_answers, values, low, high} of a metric, null if the run has none. */
  series(name) {
    const batch = this.#batches.find((one) => one.names.includes(name) && one.series[name]);
    if (!batch) return null;
    const { low = null, high = null } = batch.intervals?.[name] ?? {};
    const { steps, seconds, trained_answers } = batch;
    return { steps, seconds, trained_answers, values: batch.series[name], low, high };
  }
}

function append(batch, more) {
  const before = batch.steps.length;
  batch.steps.push(...more.steps);
  batch.seconds.push(...more.seconds);
  batch.trained_answers.push(...more.trained_answers);
  for (const name of batch.names) extend((batch.series[name] ??= []), more.series[name], before, more.steps.length);
  batch.intervals ??= {};
  for (const [name, bounds] of Object.entries(more.intervals ?? {})) {
    const own = (batch.intervals[name] ??= { low: [], high: [] });
    for (const side of ["low", "high"]) extend(own[side], bounds[side], before, more.steps.length);
  }
  for (const own of Object.values(batch.intervals)) {
    for (const side of ["low", "high"]) extend(own[side], [], batch.steps.length, 0);
  }
}

/** Appends `rows` values after the first `before`, null where there are none. */
function extend(column, values, before, rows) {
  while (column.length < before) column.push(null);
  for (let n = 0; n < rows; n += 1) column.push(values?.[n] ?? null);
}

/** Calls `onChange(ids)` whenever runs changed, with null after a lost connection, `onState(text)` when the connection is lost or back; never returns. */
export async function follow(onChange, onState) {
  let seq = 0;
  let lost = false;
  for (;;) {
    try {
      const { seq: now, changed } = await get("/api/events", { after: seq });
      if (lost) onState("");
      if (changed.length || lost) await onChange(lost ? null : changed); // null: any may have changed
      seq = now;
      lost = false;
    } catch (error) {
      lost = true;
      onState(`not connected, tries again: ${error.message}`);
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}
