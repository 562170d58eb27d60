/* Numbers as people read them, in the very words of slimgrad's terminal output. */

const KIBI = 1024;
const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB"];

/* Rounded as Python does it, a tie to the even digit: the page and the terminal must not differ. A tie can only be
   stored exactly if a power of two makes it odd. */
function fixed(x, digits) {
  const shifted = x * 2 ** (digits + 1);
  const scale = 10 ** digits;
  if (!Number.isInteger(shifted) || shifted % 2 === 0) return x.toFixed(digits);
  const below = Math.floor(x * scale);
  return ((below % 2 === 0 ? below : below + 1) / scale).toFixed(digits);
}

function bytesText(n) {
  if (n < KIBI) return `${fixed(n, 0)} B`;
  let size = n;
  for (const unit of UNITS) {
    size /= KIBI;
    if (Number(fixed(size, 1)) < KIBI || unit === UNITS.at(-1)) return `${fixed(size, 1)} ${unit}`;
  }
}

function ratioText(before, after) {
  if (before === after) return "the same";
  const less = after < before;
  const [small, large] = less ? [after, before] : [before, after];
  if (small === 0) return less ? "all of it less" : "from nothing";
  const ratio = large / small;
  return `${fixed(ratio, ratio < 1.1 ? 2 : 1)}x ${less ? "less" : "more"}`;
}

function secondsText(seconds) {
  return seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : `${seconds.toFixed(2)} s`;
}

/* Beside the untouched step or, where nobody knows what that takes, what is added to it. */
function timeText({ slowdown, added }) {
  return slowdown === null ? `+${secondsText(added)}` : `${fixed(slowdown, 2)}x`;
}

function errorText(error) {
  if (error === 0) return "none";
  const percent = 100 * error;
  if (percent < 0.01) return "<0.01%";
  return `${percent < 1 ? Number(percent.toPrecision(2)) : fixed(percent, percent < 10 ? 1 : 0)}%`;
}

function plural(n, noun) {
  return n === 1 ? `1 ${noun}` : `${n} ${noun}s`;
}

function total(numbers) {
  return numbers.reduce((sum, n) => sum + n, 0);
}

/* The highest of many numbers; Math.max has no room for very long lists. */
function highest(numbers) {
  return numbers.reduce((most, n) => Math.max(most, n), -Infinity);
}

/* Round values, at most about `count` of them, from below `low` to above `high`. */
function ticks(low, high, count) {
  const rough = Math.max(high - low, Number.EPSILON * Math.abs(high), 1e-9) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const first = Math.floor(low / step + 1e-6);
  const last = Math.max(Math.ceil(high / step - 1e-6), first + 1);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

/* Ticks that are round in the unit in which people read the largest of them, and their texts in that unit. */
function byteTicks(low, high, count) {
  const rank = Math.max(0, Math.floor(Math.log(Math.max(high, 1)) / Math.log(KIBI) + 1e-9));
  const [size, unit] = [KIBI ** rank, rank ? UNITS[rank - 1] : "B"];
  const values = ticks(low / size, high / size, count).map((tick) => tick * size);
  return { values, textOf: (tick) => (tick === 0 ? "0" : `${Number((tick / size).toPrecision(4))} ${unit}`) };
}
