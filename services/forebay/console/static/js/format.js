/** Texts for numbers, durations and times. Times are microseconds of Unix time and are shown in UTC. */

const SECOND = 1_000_000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
export const NONE = "–";

const INTEGERS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });
const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

const isAbsent = (value) => value === null || value === undefined || Number.isNaN(value);

/** Return a whole number with thousands separators: "12,031". */
export function whole(value) {
  if (isAbsent(value)) return NONE;
  const known = value;
  // A number format takes ten times as long, and most numbers are small.
  return Number.isInteger(known) && known >= 0 && known < 1_000 ? String(known) : INTEGERS.format(known);
}

/** Return a number with three significant digits: "0.437", "12.5", "1,160". */
export function number(value) {
  if (isAbsent(value)) return NONE;
  return Math.abs(value) >= 1_000 ? whole(value) : SHORT.format(value);
}

/** Return a short form of a large number: "16.4K". */
export function compact(value) {
  return isAbsent(value) ? NONE : COMPACT.format(value);
}

/** Return a number with its noun: "1 worker", "3 workers". */
export function counted(value, noun, plural = `${noun}s`) {
  return `${whole(value)} ${value === 1 ? noun : plural}`;
}

/** Return a message as a sentence, with a capital and a full stop. */
export function sentence(message) {
  const isWord = /^[a-z]+[ ,]/.test(message); // unlike the name of a parameter
  const begin = isWord ? message.charAt(0).toUpperCase() : message.charAt(0);
  return `${begin}${message.slice(1)}${/[.!?]$/.test(message) ? "" : "."}`;
}

/** Return a share as a percentage: "20.3%". */
export function percent(share) {
  if (isAbsent(share)) return NONE;
  const value = 100 * share;
  return `${value === 0 || value === 100 || value >= 99.95 ? value.toFixed(0) : value.toFixed(1)}%`;
}

/** Return a duration with three significant digits: "850 µs", "276 ms", "1.69 s", "12 min 3 s", "2 h 5 min". */
export function duration(us) {
  if (isAbsent(us)) return NONE;
  const value = us;
  const length = Math.abs(value);
  if (length === 0) return "0 s";
  if (length < 999.5) return `${SHORT.format(value)} µs`;
  if (length < 999_500) return `${SHORT.format(value / 1_000)} ms`;
  if (length < MINUTE) return `${SHORT.format(value / SECOND)} s`;
  if (length < HOUR) return twoParts(value, MINUTE, "min", SECOND, "s");
  if (length < DAY) return twoParts(value, HOUR, "h", MINUTE, "min");
  return twoParts(value, DAY, "d", HOUR, "h");
}

/** Return a time of day: "14:03:07.250". */
export function clock(us) {
  return isAbsent(us) ? NONE : iso(us).slice(11, 23);
}

/** Return a date and a time: "2026-11-23 14:03:07.250". */
export function dateTime(us) {
  return isAbsent(us) ? NONE : `${iso(us).slice(0, 10)} ${clock(us)}`;
}

export function date(us) {
  return isAbsent(us) ? NONE : iso(us).slice(0, 10);
}

/**
 * Read a time that a user typed: "14:03:07.25" on the day of `nearUs`, "2026-11-23 14:03", an ISO time, microseconds of
 * Unix time, or "-90s", "-5m", "-1h" before `nearUs`.
 * Returns microseconds of Unix time; null if the text is no time
 */
export function parseTime(typed, nearUs) {
  const value = typed.trim().replace(/\s*UTC$|Z$/i, "");
  if (/^\d{12,16}$/.test(value)) return Number(value);
  const back = value.match(/^-\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)$/);
  if (back) {
    const units = { ms: 1_000, s: SECOND, m: MINUTE, min: MINUTE, h: HOUR, d: DAY };
    return nearUs - Math.round(Number(back[1]) * units[(back[2])]);
  }
  const parts = value.match(/^(?:(\d{4}-\d{2}-\d{2})[T ]+)?(\d{1,2}):(\d{2})(?::(\d{2})(\.\d{1,6})?)?$/);
  if (!parts) return null;
  const [, day = date(nearUs), hour, minute, second = "00", fraction = "0"] = parts;
  if (Number(hour) > 23 || Number(minute) > 59 || Number(second) > 59) return null;
  const ms = Date.parse(`${day}T${hour.padStart(2, "0")}:${minute}:${second}Z`);
  return Number.isNaN(ms) ? null : ms * 1_000 + Math.round(Number(fraction) * SECOND);
}

/** Return ISO 8601 with milliseconds, rounded down like the clock of a log. */
function iso(us) {
  const ms = Math.floor(us / 1_000);
  // A damaged record may hold any clock.
  return Math.abs(ms) > 8.64e15 ? `time ${us} µs` : new Date(ms).toISOString();
}

/** large: microseconds of the larger unit */
function twoParts(us, large, largeName, small, smallName) {
  const units = Math.round(Math.abs(us) / small);
  const [whole_, rest] = [Math.floor((units * small) / large), units % (large / small)];
  return `${us < 0 ? "-" : ""}${whole_} ${largeName}${rest ? ` ${rest} ${smallName}` : ""}`;
}
