// Gets snapshots: by a stream of events or, where there is none to have, by asking again and again.
// fetch() reads the stream, because EventSource cannot send a key.

// Without a byte for so long the connection counts as lost; the server sends every two seconds.
const SILENCE_MS = 9000;
const POLL_MS = 5000;
// A page without a stream tries again to get one after so many snapshots.
const POLLS = 12;
const LONGEST_PAUSE_MS = 10000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The reason in an error's body: FastAPI's form, or OpenAI's.
export async function refusal(response) {
  let text = "";
  try {
    const body = await response.json();
    const detail = body.detail ?? body.error?.message;
    text = typeof detail === "string" ? detail : fields(detail);
  } catch {
    // No JSON: the status is all that is known.
  }
  return new Refused(response.status, text || `the server answers ${response.status}`);
}

function fields(detail) {
  if (!Array.isArray(detail)) return detail ? JSON.stringify(detail) : "";
  return detail.map((each) => `${each.loc.filter((part) => part !== "body").join(".")}: ${each.msg}`).join("; ");
}

export class Connection {
  // `query` gives the parameters of the view, `headers` the key. `on` has the functions snapshot,
  // same, problem and state (live, polling, lost, refused; with a reason).
  constructor({ query, headers, on }) {
    Object.assign(this, { query, headers, on, pause: 500, etag: null, run: 0 });
    const wake = () => this.state !== "live" && this.restart();
    addEventListener("online", wake);
    document.addEventListener("visibilitychange", () => document.hidden || wake());
  }

  // Begin anew: the view or the key has changed, or the network is back.
  restart() {
    this.abort?.abort();
    this.pause = 500;
    this.etag = null;
    this.keep(++this.run);
  }

  async keep(run) {
    while (run === this.run) {
      this.abort = new AbortController();
      try {
        await this.stream(run);
        // The server ended the stream, as it does before its own end.
        if (run === this.run) this.tell("lost", "the server closed the connection");
      } catch (error) {
        if (run !== this.run) return;
        if (error instanceof Refused && [401, 403].includes(error.status)) {
          this.tell("refused", error.message, error.status);
          return;
        }
        if (error instanceof Refused) await this.poll(run, error);
        else this.tell("lost", error.reason ?? "the server does not answer");
      }
      if (run !== this.run) return;
      await sleep(this.pause * (0.75 + Math.random() / 2));
      this.pause = Math.min(this.pause * 2, LONGEST_PAUSE_MS);
    }
  }

  tell(state, reason, status) {
    this.state = state;
    this.on.state(state, reason, status);
  }

  fetch(name, more = {}) {
    const url = new URL(`dashboard/${name}?${this.query()}`, document.baseURI);
    return fetch(url, { headers: { ...this.headers(), ...more }, signal: this.abort.signal, cache: "no-store" });
  }

  async stream(run) {
    const { abort } = this;
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    alive();
    try {
      const response = await this.fetch("events");
      if (!response.ok) throw await refusal(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done || run !== this.run) return;
        alive();
        text += value;
        const parts = text.split("\n\n");
        text = parts.pop();
        parts.forEach((part) => this.event(part));
      }
    } catch (error) {
      if (abort.signal.aborted) error.reason = "no news for some seconds";
      throw error;
    } finally {
      clearTimeout(timer);
    }
  }

  event(part) {
    const found = part.match(/^event: (\w+)\ndata: (.*)$/s);
    if (!found) return;
    const [, name, data] = found;
    this.pause = 500;
    if (this.state !== "live") this.tell("live");
    this.on[name]?.(JSON.parse(data));
  }

  // All streams are taken, or another process of the server has what is shown.
  async poll(run, why) {
    for (let count = 0; count < POLLS && run === this.run; count++) {
      try {
        const response = await this.fetch("snapshot", this.etag ? { "If-None-Match": this.etag } : {});
        if (response.status === 304) this.on.same({});
        else if (response.ok) {
          this.etag = response.headers.get("ETag");
          this.on.snapshot(await response.json());
        } else {
          throw await refusal(response);
        }
        if (this.state !== "polling") this.tell("polling", why.message);
      } catch (error) {
        if (run !== this.run) return;
        this.tell("lost", error instanceof Refused ? error.message : "the server does not answer");
        return;
      }
      await sleep(POLL_MS);
    }
  }
}

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
