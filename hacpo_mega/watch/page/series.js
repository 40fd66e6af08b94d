// Arithmetic on series: smoothing, seeds, common axes, bins. No element and no request here.

/** Exponential mean of weight 0..1 over the values that exist, corrected for its start; null stays null. */
export function smooth(values, weight) {
  if (!(weight > 0)) return values;
  let mean = 0;
  let mass = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

/** The points that exist, in the order of x: {x, y, low, high}; bounds are null where a series has none. */
export function points(series, axis) {
  const x = series[axis] ?? series.steps;
  const order = series.values.map((_, n) => n).filter((n) => series.values[n] !== null && Number.isFinite(x[n]));
  order.sort((a, b) => x[a] - x[b]);
  const pick = (column) => (column ? order.map((n) => column[n]) : null);
  return { x: pick(x), y: pick(series.values), low: pick(series.low), high: pick(series.high) };
}

/** The sorted union of all x, and for each of `columns` ({x, y}) its values there, null where it has none. */
export function align(columns) {
  const x = [...new Set(columns.flatMap((column) => column.x))].sort((a, b) => a - b);
  const place = new Map(x.map((value, n) => [value, n]));
  const rows = columns.map((column) => {
    const row = new Array(x.length).fill(null);
    column.x.forEach((value, n) => {
      row[place.get(value)] = column.y[n];
    });
    return row;
  });
  return [x, ...rows];
}

/** Mean of several curves ({x, y}) where at least two have a value, with their lowest and highest as bounds. */
export function meanOfSeeds(curves) {
  const [x, ...rows] = align(curves);
  const mean = { x: [], y: [], low: [], high: [] };
  x.forEach((value, n) => {
    const found = rows.map((row) => row[n]).filter((y) => Number.isFinite(y));
    if (found.length < Math.min(2, curves.length)) return;
    mean.x.push(value);
    mean.y.push(found.reduce((sum, y) => sum + y, 0) / found.length);
    mean.low.push(Math.min(...found));
    mean.high.push(Math.max(...found));
  });
  return mean;
}

/**
 * A line with about `most` points between two x, which looks the same: of each bin its lowest and its highest point, and
 * one point beyond either end. A line with fewer points there keeps them all.
 */
export function thin(line, from, to, most) {
  const { x, y } = line;
  const first = from === null ? 0 : Math.max(0, x.findIndex((value) => value >= from) - 1);
  const last = to === null ? x.length - 1 : Math.min(x.length - 1, x.findLastIndex((value) => value <= to) + 1);
  if (last - first < most) return line;
  const width = (2 * (last - first + 1)) / most;
  const kept = new Set([first, last]);
  for (let start = first; start <= last; start += width) {
    let [low, high] = [-1, -1];
    for (let n = Math.ceil(start); n < Math.min(start + width, last + 1); n += 1) {
      if (y[n] === null) continue;
      if (low < 0 || y[n] < y[low]) low = n;
      if (high < 0 || y[n] > y[high]) high = n;
    }
    if (low >= 0) kept.add(low).add(high);
  }
  const order = [...kept].sort((a, b) => a - b);
  const pick = (column) => (column ? order.map((n) => column[n]) : column);
  return { ...line, x: pick(x), y: pick(y), low: pick(line.low), high: pick(line.high), raw: pick(line.raw) };
}

/** The place of the last of ascending `x` that is no larger than a value; -1 before the first. */
export function before(x, value) {
  let [low, high] = [0, x.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** At most `most` bins of neighbouring x, each with the mean of its layers; absent is 0. */
export function bin(x, layers, most) {
  const width = Math.max(1, Math.ceil(x.length / most));
  if (width === 1) return { x, layers: layers.map((layer) => layer.map((value) => value ?? 0)), width };
  const starts = Array.from({ length: Math.ceil(x.length / width) }, (_, n) => n * width);
  const mean = (values) => values.reduce((sum, value) => sum + (value ?? 0), 0) / values.length;
  return {
    x: starts.map((start) => x[start]),
    layers: layers.map((layer) => starts.map((start) => mean(layer.slice(start, start + width)))),
    width,
  };
}

/** Running sums over layers: the top edge of each. */
export function stacked(layers) {
  const tops = [];
  for (const layer of layers) {
    const below = tops.at(-1);
    tops.push(layer.map((value, n) => value + (below ? below[n] : 0)));
  }
  return tops;
}

/** A sentence about a curve for people who do not see it. */
export function spoken(label, { x, y }, show, unit) {
  if (!y.length) return `${label}: no value yet`;
  const [low, high] = y.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  return `${label}: ${show(y[0])} at ${unit} ${show(x[0])}, ${show(y.at(-1))} at ${show(x.at(-1))}, between ${show(low)} and ${show(high)}`;
}
