// One answer in full: its prompt as it was rendered, its tokens in colour, how it was judged, and its rivals beside it.
import { el, field, fill, show } from "./dom.js";

const STEPS = 5; // shades on either side
// Where a shade is full: log of a ratio, advantage, nats of a log-prob.
const FULL = { ratio: 0.5, advantage: 2, logprob: 4 };

/** A number, or the agents' numbers in a line: "qwen 1.000, llama 0.785". */
export function perLearner(value) {
  if (value === null || typeof value !== "object") return show(value);
  return Object.entries(value).map(([learner, number]) => `${learner} ${show(number)}`).join(", ") || "–";
}

/** "right", "wrong" or "partly" by the reward; "" where there is none. */
export function verdictClass({ reward, verdict }) {
  if (verdict === "correct" || reward === 1) return "right";
  if (typeof reward !== "number") return "";
  return reward <= 0 ? "wrong" : "partly";
}

/** -5..5: the shade of a token by a measure, null where it has no number. */
export function shade(measure, value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return null;
  const size = measure === "ratio" ? (value > 0 ? Math.log(value) : -Infinity) : value;
  const part = Math.max(-1, Math.min(1, size / FULL[measure]));
  return Math.sign(part) * Math.ceil(Math.abs(part) * STEPS - 1e-9) + 0;
}

/** The whole view of an answer of the server, with its choice of colours. */
export function detail(answer, app) {
  const everyone = [answer, ...(answer.others ?? [])];
  const agents = [...new Set(everyone.map(({ agent }) => agent))].sort();
  const hasTokens = everyone.some(({ tokens }) => tokens?.length);
  const columns = el("div", { class: "columns" });
  const draw = (measure, learner) => {
    fill(columns, agents.map((agent) => column(agent, everyone.filter((one) => one.agent === agent), answer.key, { measure, learner, app })));
  };
  const measure = field("colour tokens by", { value: "ratio" }, [["ratio", "ratio"], ["advantage", "advantage"], ["logprob", "log-prob"], ["none", "nothing"]]);
  const learner = field("advantage for", { value: answer.agent }, agents.map((name) => [name, name]));
  const [how, whom] = [measure, learner].map((label) => label.querySelector("select"));
  for (const select of [how, whom]) select.addEventListener("change", () => draw(how.value, whom.value));
  draw(how.value, whom.value);
  return el(
    "article",
    {},
    heading(answer),
    prompt(answer),
    hasTokens
      ? el("div", { class: "toolbar" }, measure, learner, key())
      : el("p", { class: "note" }, "Tokens are not in this run's log: logging.rollout_tokens = true writes them."),
    columns,
  );
}

function heading({ step, lane, prompt_id: id, skill, gold }) {
  const place = [`step ${step}`, lane !== undefined && lane !== null && `lane ${lane}`, skill, id].filter((part) => part || part === 0);
  return [el("h2", {}, place.join(" · ")), gold !== undefined && gold !== null && el("p", {}, el("small", {}, "gold "), el("code", {}, show(gold)))];
}

function prompt({ prompt: asked, prompt_seen: seen }) {
  const messages = Array.isArray(asked) ? asked : [{ role: "prompt", content: asked }];
  const words = (content) => (typeof content === "string" ? content : JSON.stringify(content, null, 1));
  const shown = messages.map(({ role, content }) => el("div", { class: "message" }, el("small", {}, role), el("pre", {}, words(content))));
  const rendered = seen && el("details", {}, el("summary", {}, "as it was rendered for the agent"), el("pre", {}, seen));
  return el("section", { class: "prompt", "aria-label": "Prompt" }, shown, rendered);
}

function key() {
  const shades = [-5, -3, -1, 1, 3, 5].map((n) => el("span", { class: shadeClass(n) }, " "));
  return el("span", { class: "key" }, "less ", el("span", { class: "strip", "aria-hidden": "true" }, shades), " more");
}

const shadeClass = (n) => (n === null ? "none" : n === 0 ? "same" : n > 0 ? `up${n}` : `down${-n}`);

function column(agent, answers, chosen, how) {
  const order = [...answers].sort((a, b) => Number(b.key === chosen) - Number(a.key === chosen));
  return el("section", { class: "column", "aria-label": `Answers of ${agent}` }, el("h3", {}, `${agent}, ${answers.length} answers`), order.map((one) => card(one, one.key === chosen, how)));
}

function card(answer, isChosen, how) {
  const facts = [`reward ${show(answer.reward)}`, answer.verdict, answer.stop, `${show(answer.num_tokens ?? answer.length)} tokens`];
  if (typeof answer.mean_logprob === "number") facts.push(`log-prob ${show(answer.mean_logprob)}`);
  return el(
    "div",
    { class: `answer ${verdictClass(answer)}${isChosen ? " chosen" : ""}` },
    body(answer, how),
    el("p", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    judged(answer),
    el("p", { class: "facts" }, `advantage ${perLearner(answer.advantage ?? null)}; ratio ${perLearner(answer.ratio ?? null)}`),
    Object.entries(answer.not_trained ?? {}).map(([learner, why]) => el("p", { class: "facts" }, `not trained by ${learner}: ${String(why).replaceAll("_", " ")}`)),
    !isChosen && answer.key && el("a", { href: how.app.link({ key: answer.key }) }, "link to this answer"),
  );
}

function judged({ extracted, rule }) {
  const parts = [];
  if (extracted !== null && extracted !== undefined && extracted !== "") parts.push("read ", el("code", {}, show(extracted)));
  if (rule) parts.push(parts.length ? ", by " : "judged by ", String(rule));
  return parts.length ? el("p", { class: "facts" }, parts) : null;
}

/** Turns behind what a program wrote as the prompt, or what an environment said behind the task; own ones by token. */
function turns(answer, how) {
  const { turns: all, task, opening, tokens } = answer;
  const before = [["the program's prompt", task], ["behind the task", opening]].filter(([, text]) => text);
  const context = before.map(([who, text]) => el("div", { class: "message" }, el("small", {}, who), el("pre", {}, text)));
  const hasTokens = how.measure !== "none" && tokens?.length && all.reduce((sum, turn) => sum + (turn.num_tokens ?? NaN), 0) === tokens.length;
  let start = 0;
  const said = all.map(({ role, name, text, opened, num_tokens: length }) => {
    const from = start;
    start += length ?? 0;
    const body = hasTokens && role === "assistant" ? strip(answer, how, from, start) : el("pre", {}, text);
    return el("div", { class: "message" }, el("small", {}, [role, name].filter(Boolean).join(" ")), opened ? el("pre", {}, opened) : null, body);
  });
  return [context, said, hasTokens ? numbers(answer) : null];
}

/** The turns of a conversation, the tokens of an answer, or its text. */
function body(answer, how) {
  if (answer.turns?.length) return turns(answer, how);
  if (!answer.tokens?.length || how.measure === "none") return el("pre", {}, answer.text);
  return [strip(answer, how, 0, answer.tokens.length), el("details", {}, el("summary", {}, "as text"), el("pre", {}, answer.text)), numbers(answer)];
}

/** Log-prob and ratio of the n-th token; trained_places says which have some in a conversation, else the leading ones. */
function numberOf({ token_logprob: logprobs, token_ratio: ratios, trained_places: places }) {
  const order = places && new Map(places.map((place, n) => [place, n]));
  return (n) => {
    const at = order ? order.get(n) : n;
    return { logprob: logprobs?.[at], ratio: ratios?.[at] };
  };
}

function strip(answer, { measure, learner }, from, to) {
  const { tokens, advantage = {} } = answer;
  const [of, whole] = [numberOf(answer), typeof advantage === "number" ? advantage : advantage?.[learner]];
  const said = el("p", { class: "facts", role: "status" });
  const spans = tokens.slice(from, to).map((token, n) => {
    const { logprob, ratio } = of(from + n);
    const isTrained = !answer.trained_places || logprob !== undefined || ratio !== undefined;
    const value = { ratio, logprob, advantage: isTrained ? whole : undefined }[measure];
    const text = `ratio ${show(ratio)}, log-prob ${show(logprob)}`;
    const tell = () => fill(said, el("code", {}, JSON.stringify(token)), ` ${text}`);
    return el("span", { class: shadeClass(shade(measure, value)), title: text, onclick: tell, onmouseover: tell }, token);
  });
  return [el("div", { class: "strip" }, spans), said];
}

/** The tokens as a table, for keyboards and screen readers; filled when it is opened. */
function numbers(answer) {
  const [{ tokens }, of] = [answer, numberOf(answer)];
  const holder = el("div", { class: "wide" });
  const open = () => {
    if (holder.childElementCount) return;
    const head = el("tr", {}, ["token", "log-prob", "ratio"].map((name) => el("th", { scope: "col" }, name)));
    const rows = tokens.map((token, n) => el("tr", {}, el("td", {}, el("code", {}, JSON.stringify(token))), el("td", {}, show(of(n).logprob)), el("td", {}, show(of(n).ratio))));
    fill(holder, el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
  };
  return el("details", { ontoggle: open }, el("summary", {}, "numbers of each token"), holder);
}
