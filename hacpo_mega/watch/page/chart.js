// One chart: uPlot drawn in the page's colours, with its own legend that tells the values, keys, and events on the axis.
import { align, before, bin, spoken, stacked, thin } from "./series.js";
import { add, button, el, fill, show, visible } from "./dom.js";

const HEIGHT = 220;
const MOST_BARS = 240;
const POINTS_A_PIXEL = 2;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

// Charts share the cursor's place; a drag belongs to the one it began in.
const SYNC = { key: "charts", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } };

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const pale = (colour, alpha) => `color-mix(in srgb, ${colour} ${alpha * 100}%, transparent)`;

/** Canvas takes no color-mix in older browsers: hex colours get their alpha as digits. */
const faded = (colour, alpha) =>
  /^#[0-9a-f]{6}$/i.test(colour) ? colour + Math.round(alpha * 255).toString(16).padStart(2, "0") : pale(colour, alpha);

/** Texts of ticks, short enough for the axis, with the digits that tell neighbours apart. */
export function ticks(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const apart = Math.min(...known.slice(1).map((value, n) => Math.abs(value - known[n])));
  const digits = Math.ceil(Math.log10(Math.max(...known.map(Math.abs)) / apart)) + 2; // 2: steps may be 2.5
  return values.map((value) => tick(value, Number.isFinite(digits) ? Math.min(Math.max(digits, 4), 12) : 4));
}

function tick(value, digits) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  const short = (scale) => +(value / scale).toPrecision(digits);
  if (size >= 1e9) return `${short(1e9)}G`;
  if (size >= 1e6) return `${short(1e6)}M`;
  if (size >= 1e4) return `${short(1e3)}k`;
  return size !== 0 && size < 1e-3 ? short(1).toExponential() : String(short(1));
}

/** Draws what happened (starts, alarms) as lines across the plot. */
function drawEvents(plot, events) {
  const { ctx, bbox } = plot;
  ctx.save();
  for (const { x, kind } of events) {
    const at = Math.round(plot.valToPos(x, "x", true));
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    ctx.strokeStyle = css(kind === "alarm" ? "--wrong" : "--faint");
    ctx.fillStyle = ctx.strokeStyle;
    ctx.setLineDash(kind === "alarm" ? [4, 3] : [1, 3]);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    const size = 5 * devicePixelRatio; // a mark at the top: a triangle for an alarm, a square for a start
    ctx.beginPath();
    if (kind === "alarm") {
      ctx.moveTo(at - size, bbox.top);
      ctx.lineTo(at + size, bbox.top);
      ctx.lineTo(at, bbox.top + 1.6 * size);
    } else ctx.rect(at - size / 2, bbox.top, size, size);
    ctx.fill();
  }
  ctx.restore();
}

function drawLevel(plot, level) {
  const { ctx, bbox } = plot;
  const at = plot.valToPos(level, "y", true);
  if (!(at >= bbox.top && at <= bbox.top + bbox.height)) return;
  ctx.save();
  ctx.strokeStyle = css("--faint");
  ctx.setLineDash([5, 4]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, at);
  ctx.lineTo(bbox.left + bbox.width, at);
  ctx.stroke();
  ctx.restore();
}

/** Columns and series of uPlot for curves: bounds first (they lie below), then the raw curve, then the smoothed one. */
function curveColumns(lines, hidden) {
  const columns = [];
  const series = [{}];
  const bands = [];
  const put = (x, y, options) => {
    columns.push({ x, y });
    return series.push({ spanGaps: true, points: { show: false }, ...options }) - 1;
  };
  lines.forEach((line, n) => {
    const off = hidden.has(line.label);
    const dots = { show: line.x.length < 40, size: 5, fill: line.colour };
    if (line.low) {
      const high = put(line.x, line.high, { show: !off, stroke: "transparent" });
      const low = put(line.x, line.low, { show: !off, stroke: "transparent" });
      bands.push({ series: [high, low], fill: faded(line.colour, 0.16) });
    }
    if (line.raw) put(line.x, line.raw, { show: !off, stroke: faded(line.colour, 0.3), width: 1 });
    put(line.x, line.y, { show: !off, stroke: line.colour, width: 2, dash: DASHES[line.dash % DASHES.length], points: dots, of: n });
  });
  return { data: align(columns), series, bands };
}

/** Columns and series of stacked bars: the highest sum is drawn first, the layers below over it. */
function barColumns(x, layers, hidden) {
  const kept = layers.filter((layer) => !hidden.has(layer.label));
  const table = bin(x, kept.map((layer) => layer.values), MOST_BARS);
  const tops = stacked(table.layers);
  const bars = uPlot.paths.bars({ size: [0.92, 60], gap: 0 });
  const series = [{}];
  const data = [table.x];
  for (let n = kept.length - 1; n >= 0; n -= 1) {
    data.push(tops[n]);
    series.push({ stroke: kept[n].colour, fill: kept[n].colour, width: 0, paths: bars, points: { show: false }, of: layers.indexOf(kept[n]) });
  }
  return { data, series, bands: [], table, kept };
}

function axes(spec) {
  const common = { stroke: () => css("--faint"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const values = (_, places) => ticks(places);
  return [
    { ...common, values, size: 28, space: 60 },
    { ...common, values, size: 52, space: 34 },
  ];
}

/** The range of y: shares from 0 to 1, bars from 0, else what is there with a little room, the level included. */
function yRange(spec) {
  return (plot, low, high) => {
    if (low === null || !Number.isFinite(low)) return [0, 1];
    if (spec.log) return uPlot.rangeLog(low, high, 10, true);
    if (spec.share) return [0, 1];
    if (spec.layers) return [0, high * 1.05 || 1];
    const from = spec.level === undefined ? low : Math.min(low, spec.level);
    const to = spec.level === undefined ? high : Math.max(high, spec.level);
    const room = (to - from || Math.abs(to) || 1) * 0.06;
    return [from - room, to + room];
  };
}

/**
 * A chart in the page. `spec`: title, unit, xUnit, note, verdicts, share, level, log, events [{x, kind, text}], and either
 * lines [{label, colour, dash, x, y, raw, low, high}] or x with layers [{label, colour, values}].
 */
export class Chart {
  #hidden = new Set();
  #plot = null;

  /** `zoom`: {from, to, set(from, to)} that all charts of a view share. */
  constructor(title, zoom) {
    this.zoom = zoom;
    this.title = el("h3", {}, title);
    this.verdicts = el("div", { class: "verdicts" });
    this.canvas = el("div", { class: "plot", tabindex: 0, role: "img", onkeydown: (event) => this.#key(event) });
    this.legend = el("div", { class: "legend" });
    this.at = el("div", { class: "at" });
    this.note = el("p", { class: "note" });
    this.node = el("section", { class: "chart" }, this.title, this.verdicts, this.canvas, this.at, this.legend, this.note);
    this.sized = new ResizeObserver(() => this.#plot && this.#plot.setSize({ width: this.#width(), height: HEIGHT }));
  }

  #width() {
    return Math.max(160, Math.floor(this.canvas.clientWidth));
  }

  draw(spec) {
    this.spec = spec;
    fill(this.note, spec.note ?? "");
    fill(this.verdicts, (spec.verdicts ?? []).map(({ text, level }) => el("p", { class: `verdict ${level ?? "none"}` }, text)));
    const made = spec.layers ? barColumns(spec.x, spec.layers, this.#hidden) : curveColumns(this.#thinned(spec.lines), this.#hidden);
    this.made = made;
    this.canvas.setAttribute("aria-label", visible(this.#spoken()));
    const cursor = this.#plot?.cursor.idx === null ? null : this.#plot?.cursor.left;
    this.#destroy();
    const log = spec.log && !spec.layers;
    const options = {
      width: this.#width(),
      height: HEIGHT,
      series: made.series,
      bands: made.bands,
      axes: axes(spec),
      legend: { show: false },
      scales: {
        x: { time: false, range: (plot, low, high) => this.#xRange(low, high) },
        y: { distr: log ? 3 : 1, range: yRange({ ...spec, log }) },
      },
      cursor: { drag: { x: true, y: false, setScale: false }, sync: SYNC, points: { size: 6 } },
      hooks: {
        draw: [(plot) => this.#decorate(plot)],
        setCursor: [(plot) => this.#tell(plot.cursor.idx)],
        setSelect: [(plot) => this.#select(plot)],
      },
    };
    if (log) made.data = made.data.map((column, n) => (n ? column.map((value) => (value > 0 ? value : null)) : column));
    this.#plot = new uPlot(options, made.data, this.canvas);
    this.#plot.over.addEventListener("dblclick", () => this.zoom.set(null, null));
    this.sized.observe(this.canvas);
    if (cursor >= 0 && cursor !== null && cursor !== undefined) this.#plot.setCursor({ left: cursor, top: HEIGHT / 3 });
    else this.#tell(null);
  }

  /** Lines with no more points than the plot can show. */
  #thinned(lines) {
    const most = POINTS_A_PIXEL * this.#width();
    return lines.map((line) => thin(line, this.zoom.from, this.zoom.to, most));
  }

  #xRange(low, high) {
    const { from, to } = this.zoom;
    const [first, last] = this.spec.span ?? [low, high];
    const [a, b] = [from ?? first ?? 0, to ?? last ?? 1];
    const room = this.spec.layers && from === null ? this.#barRoom() : 0;
    return a === b ? [a - 1, b + 1] : [a - room, b + room];
  }

  /** Half a bar at both ends, which would be cut else. */
  #barRoom() {
    const x = this.made.table.x;
    return x.length > 1 ? (x.at(-1) - x[0]) / (x.length - 1) / 2 : 0.5;
  }

  #decorate(plot) {
    if (this.spec.level !== undefined) drawLevel(plot, this.spec.level);
    drawEvents(plot, this.spec.events ?? []);
  }

  #select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.zoom.set(from, to);
  }

  /** Arrows move along the points, + and - zoom around the cursor, 0 shows all. */
  #key(event) {
    const x = this.made.data[0];
    const at = this.#plot.cursor.idx ?? x.length - 1;
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: x.length - 1 }[event.key];
    if (next !== undefined && x.length) {
      const n = Math.min(Math.max(next, 0), x.length - 1);
      this.#plot.setCursor({ left: this.#plot.valToPos(x[n], "x"), top: HEIGHT / 3 });
      this.at.setAttribute("aria-live", "polite");
    } else if (event.key === "+" || event.key === "-") {
      const { min, max } = this.#plot.scales.x;
      const half = ((max - min) / 2) * (event.key === "+" ? 0.5 : 2);
      this.zoom.set(x[at] - half, x[at] + half);
    } else if (event.key === "0" || event.key === "Escape") this.zoom.set(null, null);
    else return;
    event.preventDefault();
  }

  /** The values at the cursor, at the last point where there is none. */
  #tell(index) {
    const x = this.made.data[0];
    const n = index ?? x.length - 1;
    const entries = this.spec.layers ?? this.spec.lines;
    const near = (this.spec.events ?? []).filter((event) => index !== null && x[n] !== undefined && event.x === x[n]);
    const where = n >= 0 ? `${this.spec.xUnit} ${show(x[n])}${this.spec.smoothed ? ", smoothed" : ""}` : "no value yet";
    fill(this.at, index === null ? `last: ${where}` : where, near.map(({ kind, text }) => el("b", { class: kind }, ` ${kind}: ${text}`)));
    if (this.legend.childElementCount !== entries.length || this.entries !== entries) this.#legend(entries);
    entries.forEach((entry, m) => fill(this.values[m], show(this.#value(m, n)), this.#bounds(entry, x[n])));
  }

  #legend(entries) {
    this.entries = entries;
    this.values = entries.map(() => el("output", {}));
    const items = entries.map((entry, m) => {
      const swatch = el("i", { class: `swatch dash${(entry.dash ?? 0) % DASHES.length}`, "aria-hidden": "true" });
      swatch.style.setProperty("--colour", entry.colour);
      const toggle = () => {
        if (!this.#hidden.delete(entry.label)) this.#hidden.add(entry.label);
        this.entries = null;
        this.draw(this.spec);
        this.legend.children[m]?.focus();
      };
      const pressed = String(!this.#hidden.has(entry.label));
      return add(button("", toggle, { "aria-pressed": pressed, title: "show or hide" }), swatch, `${entry.label} `, this.values[m]);
    });
    fill(this.legend, items);
  }

  #value(entry, n) {
    const { data, kept, table } = this.made;
    if (this.spec.layers) {
      const layer = kept.indexOf(this.spec.layers[entry]);
      return layer < 0 ? null : table.layers[layer][n];
    }
    const { x, y } = this.spec.lines[entry]; // with the points that thin() leaves out
    for (let m = before(x, data[0][n]); m >= 0; m -= 1) if (y[m] !== null) return y[m];
    return null;
  }

  #bounds(line, x) {
    if (!line.low) return null;
    const n = before(line.x, x);
    return n < 0 || line.low[n] === null ? null : el("small", {}, ` ${show(line.low[n])} to ${show(line.high[n])}`);
  }

  #spoken() {
    const { lines, layers, x, xUnit, events = [] } = this.spec;
    const curves = lines ?? layers.map((layer) => ({ label: layer.label, x, y: layer.values.map((value) => value ?? 0) }));
    const alarms = events.filter(({ kind }) => kind === "alarm").length;
    const parts = curves.map((curve) => spoken(curve.label, curve, show, xUnit));
    return `${this.title.textContent}. ${parts.join("; ")}.${alarms ? ` Alarms: ${alarms}.` : ""} Arrow keys read values, plus and minus zoom.`;
  }

  /** Draws again with other colours or another zoom. */
  again() {
    if (this.spec) this.draw(this.spec);
  }

  #destroy() {
    this.sized.disconnect();
    this.#plot?.destroy();
    this.#plot = null;
  }

  close() {
    this.#destroy();
  }
}
