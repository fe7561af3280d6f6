// The server's events, read with fetch so that a key can be sent. It connects again for as long as the page is open.

export class NeedsKey extends Error {}

const KEY = "headrace-key";
const PATIENCE = 10_000;

export const keep = (key) => sessionStorage.setItem(KEY, key);

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function explained(response) {
  const body = await response.json().catch(() => ({}));
  const why = typeof body.error === "string" ? body.error : `status ${response.status}`;
  return response.status === 401 ? new NeedsKey(why) : new Error(why);
}

export async function ask(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await explained(response);
  return response.json();
}

/** Calls hear(kind, value) for each event until the stream ends; rejects with the reason why there is none. */
async function follow(path, hear) {
  const abort = new AbortController();
  let timer = 0;
  const patient = () => {
    clearTimeout(timer);
    timer = setTimeout(() => abort.abort(), PATIENCE);
  };
  patient();
  try {
    const response = await fetch(path, { headers: headers(), cache: "no-store", signal: abort.signal });
    if (!response.ok) throw await explained(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
      const { done, value } = await reader.read();
      if (done) return;
      patient();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const [, kind, data] = /^event: (\w+)\ndata: (.*)$/s.exec(event) ?? [];
        if (kind) hear(kind, JSON.parse(data));
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

/** Never ends but for want of a key: then it rejects with NeedsKey. `lost(reason)`: there are no news just now. */
export async function followAlways(path, hear, lost) {
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    try {
      await follow(path, (kind, value) => {
        wait = 500;
        hear(kind, value);
      });
      lost("the console ended the stream");
    } catch (error) {
      if (error instanceof NeedsKey) throw error;
      lost(error.name === "AbortError" ? "the console says nothing" : error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
