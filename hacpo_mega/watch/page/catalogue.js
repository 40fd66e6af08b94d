// The charts of a run: which metrics belong together, how a chart is called, in which section it stands.
// A metric is known by its pattern, in which {a} is an agent and {b} a source or another one.

export const AGENT_COLOURS = ["#3d7fd9", "#e2762b", "#23a37c", "#b865c9", "#c79a1e", "#d64c61", "#36a9c4", "#8a9099"];
export const FATES = {
  reached: ["teaches", "#2aa37d"],
  outside_band: ["outside the band", "#e0a030"],
  too_long: ["too long", "#d64c61"],
  undecodable: ["undecodable", "#b865c9"],
  unencodable: ["unencodable", "#5f6fc4"],
  changed: ["changed by re-encoding", "#36a9c4"],
  control_tokens: ["with control tokens", "#8d6e63"],
  not_finite: ["without a finite log-prob", "#d17ba3"],
  unjudged: ["unjudged", "#70757f"],
  zero_advantage: ["advantage 0", "#b9bfc8"],
};
export const BAND = { below: ["below", "#8b95a5"], inside: ["inside", "#2aa37d"], above: ["above", "#e0a030"] };
export const PHASES = {
  roll_out: "#4f86c6",
  judge: "#c9a33a",
  score: "#8fb8de",
  exchange: "#9a9fa8",
  diagnose: "#7a68b8",
  learn: "#d9713c",
  publish: "#5fae8b",
  evaluate: "#b07cc6",
  write: "#a98467",
  checkpoint: "#c26a77",
  load: "#3e8e9c",
  export: "#8d6e63",
  wait: "#c9cdd4",
  other: "#5b616b",
};
export const UNKNOWN_COLOUR = "#b0705f";

// title, patterns, and: share = axis from 0 to 1, level = a line to compare with, verdict = the server's name of its chart
const chart = (id, title, patterns, more = {}) => ({ id, title, patterns: [patterns].flat(), ...more });
export const SECTIONS = [
  {
    title: "Learning",
    charts: [
      chart("accuracy", "Held-out accuracy", "agent/{a}/accuracy", { note: "Greedy answers to held-out prompts; shade: 95 % interval." }),
      chart("held_out_reward", "Held-out mean reward", "agent/{a}/eval/reward_mean", { verdict: "accuracy" }),
      chart("reward", "Reward while training", "agent/{a}/reward_mean", { note: "Mean over the answers an agent sampled in a step." }),
      chart("kl", "KL to the initial policy", "agent/{a}/kl", { unit: "nats" }),
    ],
  },
  {
    title: "Learning from each other",
    charts: [
      chart("capability", "Capability", "capability/{a}", { verdict: "mean capability", note: "Mean reward over the last steps." }),
      chart("omega", "Capability ratio", "omega/{a}/{b}", { level: 1, verdict: "capability", note: "Learner over source; above 1 the learner did better." }),
      { id: "fates", title: "Fates of others' answers", of: ["view/num_answers", "view/num_trained"], note: "Each answer once: it teaches the learner, or why not." },
      { id: "band", title: "Others' answers and the band", of: Object.keys(BAND), share: true, note: "Only answers inside give a gradient." },
      chart("ratio", "Cross ratio", "agent/{a}/from/{b}/ratio_mean", { level: 1, note: "Learner over source, mean over answers." }),
      chart("share", "Share of the gradient", "agent/{a}/from/{b}/grad_share", { share: true }),
      chart("cosine", "Cosine of own and cross gradient", "agent/{a}/from/{b}/grad_cosine", { level: 0, note: "Below 0 a source pulls against the learner's own answers." }),
      chart("signs", "Pull towards right answers", "agent/{a}/from/{b}/positive_share", { share: true, level: 0.5 }),
      chart("ess", "Effective sample size of the weights", "agent/{a}/from/{b}/weight_ess", { share: true }),
    ],
  },
  {
    title: "Health",
    charts: [
      chart("engine_gap", "Engine gap", "agent/{a}/engine_gap_mean", { unit: "nats a token", log: true, note: "Engine against trainer; a jump warns." }),
      chart("first_ratio", "Error of the first ratio", "agent/{a}/self/first_ratio_error"),
      chart("grad_norm", "Gradient norm", ["agent/{a}/grad_norm", "agent/{a}/from/{b}/grad_norm", "agent/{a}/self/grad_norm"]),
      chart("clipped", "Own answers clipped", "agent/{a}/self/clipped", { share: true }),
      chart("length", "Tokens an answer", "agent/{a}/answer_tokens_mean"),
      chart("truncated", "Answers cut at the limit", "agent/{a}/truncated", { share: true }),
      chart("lr", "Learning rate", "agent/{a}/lr"),
    ],
  },
  {
    title: "Time and memory",
    charts: [
      { id: "phases", title: "Seconds of a step by phase", phases: "phase_mean", unit: "s", note: "Mean over an agent's ranks." },
      { id: "wait", title: "Waiting for others, by phase", phases: "wait", unit: "s", note: "The agent that all wait for waits least." },
      chart("rate", "Answer tokens a second and GPU", ["rate/answer_tokens_per_gpu_s", "rate/answer_tokens_per_s"]),
      chart("mfu", "MFU of learning", ["rate/learn_mfu", "agent/{a}/learn_mfu"]),
      chart("step_s", "Seconds a step", "agent/{a}/step_s", { unit: "s" }),
      chart("memory", "Memory", ["agent/{a}/device_bytes", "agent/{a}/rss_bytes"], { unit: "bytes", note: "Of the fullest device, and of the largest process." }),
      chart("asleep", "Memory while the engine sleeps", "agent/{a}/asleep_bytes", { unit: "bytes" }),
    ],
  },
];

const escape = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** What of `names` fits a pattern: [{name, a, b}]. */
export function matching(pattern, names, agents) {
  const any = `(${[...agents].sort((x, y) => y.length - x.length).map(escape).join("|") || "(?!)"})`;
  const source = pattern.split(/(\{[ab]\})/).map((part) => (/^\{[ab]\}$/.test(part) ? any : escape(part))).join("");
  const form = new RegExp(`^${source}$`);
  const order = [...pattern.matchAll(/\{([ab])\}/g)].map((match) => match[1]);
  return names.flatMap((name) => {
    const found = form.exec(name);
    return found ? [{ name, ...Object.fromEntries(order.map((letter, n) => [letter, found[n + 1]])) }] : [];
  });
}

/** The pattern of a name: agents after agent/, from/, capability/ and omega/ become {a} and {b}. */
export function patternOf(name, agents) {
  const known = new Set(agents);
  const letters = ["{a}", "{b}"];
  let used = 0;
  return name
    .split("/")
    .map((part, n, parts) => {
      const holds = ["agent", "from", "capability", "omega"].includes(parts[n - 1]) || (n === 2 && parts[0] === "omega");
      return holds && known.has(part) && used < 2 ? letters[used++] : part;
    })
    .join("/");
}

/** Charts of all names that no section shows, by pattern. */
export function others(names, agents) {
  const shown = new Set(SECTIONS.flatMap(({ charts }) => charts.flatMap(({ patterns = [] }) => patterns)));
  const rest = [...new Set(names.map((name) => patternOf(name, agents)))].filter((pattern) => !shown.has(pattern)).sort();
  return rest.map((pattern) => chart(`m:${pattern}`, pattern.replace("agent/{a}/", "").replace("{b}", "…").replace("{a}", "…"), pattern));
}

/** The lines a chart has in a run: [{name, label, a}]. */
export function linesOf(spec, names, agents) {
  return spec.patterns.flatMap((pattern) =>
    matching(pattern, names, agents).map(({ name, a, b }) => {
      const who = [a, b && `from ${b}`].filter(Boolean).join(" ");
      const which = spec.patterns.length > 1 ? name.split("/").at(-1).replace(/_bytes$|_s$/, "").replaceAll("_", " ") : "";
      return { name, a, b, label: [who, which].filter(Boolean).join(" · ") || name, part: spec.patterns.indexOf(pattern) };
    }),
  );
}
