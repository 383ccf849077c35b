// Numbers, durations and times as the page writes them.

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const digits = (count) => new Intl.NumberFormat(undefined, { maximumSignificantDigits: count });
const three = digits(3);
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const minute = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hour12: false });

export const NONE = "–";

export const zone = () => {
  const name = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return name ? `your time zone (${name})` : "your time zone";
};

export function number(value) {
  if (value == null) return NONE;
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return whole.format(value);
  return three.format(value);
}

export const exact = (value) => (value == null ? NONE : three.format(value));

// Seconds as a person says them: 0.8 ms, 0.25 s, 48 s, 3 min 20 s, 14 min, 5 h 02 min, 3 d 4 h.
export function duration(seconds) {
  if (seconds == null) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${three.format(seconds * 1e3)} ms`;
  if (seconds < 1) return `${whole.format(seconds * 1e3)} ms`;
  if (seconds < 10) return `${three.format(seconds)} s`;
  const all = Math.round(seconds);
  if (all < 60) return `${all} s`;
  const [minutes, hours, days] = [Math.floor(all / 60), Math.floor(all / 3600), Math.floor(all / 86400)];
  if (all >= 600 && hours < 1) return `${minutes} min`;
  if (hours < 1) return `${minutes} min ${two(all % 60)} s`;
  if (days < 1) return `${hours} h ${two(minutes % 60)} min`;
  return `${days} d ${hours % 24} h`;
}

const two = (value) => String(value).padStart(2, "0");

// A value and its unit as two texts; durations choose their own unit.
export function quantity(value, unit) {
  if (value == null) return [NONE, ""];
  if (unit === "s") {
    const words = duration(value).split(" ");
    return words.length === 2 ? words : [words.join(" "), ""];
  }
  return [number(value), unit ?? ""];
}

export const measured = (value, unit) =>
  typeof value === "string" ? value : quantity(value, unit).filter(Boolean).join(unit === "/s" ? "" : " ");

export const timeOfDay = (seconds) => clock.format(new Date(seconds * 1000));
export const hourMinute = (seconds) => minute.format(new Date(seconds * 1000));
export const dateAndTime = (seconds) => day.format(new Date(seconds * 1000));

// How a value lies to the usual one, in percent; empty where that says nothing.
export function against(value, usual) {
  if (value == null || !usual) return "";
  const percent = Math.round((value / usual - 1) * 100);
  return Math.abs(percent) < 5 ? "as usual" : `${percent > 0 ? "+" : "−"}${Math.abs(percent)} %`;
}
