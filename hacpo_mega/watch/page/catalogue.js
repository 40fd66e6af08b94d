// The charts of a run, from the server's catalogue (report/catalogue.py), which the static report uses, too.
// A chart names its metrics by pattern, in which {a} is an agent and {b} a source or another agent.
import { get } from "./api.js";

const table = await get("/api/catalogue");
const bare = (names) => Object.assign(Object.create(null), names); // a run may call a phase "constructor"
export const AGENT_COLOURS = table.agents;
export const FATES = bare(table.fates);
export const BAND = bare(table.band);
export const PHASES = bare(table.phases);
export const UNKNOWN_COLOUR = table.unknown;
export const SECTIONS = table.sections;

const escape = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** The `names` that match a pattern: [{name, a, b}]. */
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
  const titled = (pattern) => pattern.replace("agent/{a}/", "").replace("{b}", "…").replace("{a}", "…");
  return rest.map((pattern) => ({ id: `m:${pattern}`, title: titled(pattern), patterns: [pattern] }));
}

/** The lines a chart has in a run: [{name, label, a}]. */
export function linesOf(spec, names, agents) {
  return spec.patterns.flatMap((pattern) =>
    matching(pattern, names, agents).map(({ name, a, b }) => {
      const who = [a, b && `from ${b}`].filter(Boolean).join(" ");
      const own = pattern.includes("/self/") ? "own " : "";
      const which = spec.patterns.length > 1 ? own + name.split("/").at(-1).replace(/_bytes$|_s$/, "").replaceAll("_", " ") : "";
      return { name, a, b, label: [who, which].filter(Boolean).join(" · ") || name, part: spec.patterns.indexOf(pattern) };
    }),
  );
}
