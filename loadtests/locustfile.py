"""For people who use Locust: users that ask OpenAI's completions and read the stream. Needs the extra `locust`.

    locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 [--headless -u 20 -r 2 -t 1m]

Locust is a closed loop: a user asks again once it was answered, so a slow server is asked less, and waits that others would
have had go uncounted. For latencies under a given rate use `headrace bench`; for users that wait for answers, this.

$HEADRACE_MODEL (else the first that is served) · $HEADRACE_API_KEY · $INPUT_TOKENS (256) · $OUTPUT_TOKENS (64)
· $NUM_REQUESTS (no end): ends by itself after so many
Rows beside Locust's own: TTFT and TPOT, in ms.
"""

import json
import os
import time
from typing import Any

from headrace.traces import Prompts, TraceRow

try:
    import gevent
    from locust import HttpUser, between, task
except ImportError:
    raise SystemExit("locust is not installed: pip install 'headrace[locust]'") from None

INPUT_TOKENS, OUTPUT_TOKENS = int(os.environ.get("INPUT_TOKENS", "256")), int(os.environ.get("OUTPUT_TOKENS", "64"))
NUM_REQUESTS = int(os.environ.get("NUM_REQUESTS", "0"))
PROMPTS = Prompts(vocab_size=400)
PATH = "/v1/completions"


class Asker(HttpUser):
    """Asks, reads to the end, thinks, asks again; no two prompts share a block."""

    wait_time = between(0.5, 2.0)
    num_asked = 0
    num_answered = 0

    def on_start(self) -> None:
        key = os.environ.get("HEADRACE_API_KEY")
        self.client.headers.update({"authorization": f"Bearer {key}"} if key else {})
        self.model = os.environ.get("HEADRACE_MODEL") or self.client.get("/v1/models").json()["data"][0]["id"]

    @task
    def ask(self) -> None:
        Asker.num_asked += 1
        row = TraceRow(time.time_ns() + Asker.num_asked, 0.0, INPUT_TOKENS, OUTPUT_TOKENS)
        body = {
            "model": self.model,
            "prompt": PROMPTS.of(row),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked = time.perf_counter()
        with self.client.post(PATH, json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"HTTP {response.status_code}: {response.text[:200]}")
                return
            times: list[float] = []
            num_tokens, done = 0, False
            for line in response.iter_lines():
                if not line.startswith(b"data:"):
                    continue
                if (payload := line[5:].strip()) == b"[DONE]":
                    done = True
                    break
                said = json.loads(payload)
                if said.get("error"):
                    response.failure(str(said["error"])[:200])
                    return
                if said.get("choices"):
                    times.append(time.perf_counter())
                num_tokens = (said.get("usage") or {}).get("completion_tokens", num_tokens)
            if not done:
                response.failure("the answer ended without [DONE]")
                return
        Asker.num_answered += 1
        self._tell("TTFT", times[0] - asked)
        if num_tokens > 1:
            self._tell("TPOT", (times[-1] - times[0]) / (num_tokens - 1))
        if Asker.num_answered == NUM_REQUESTS:
            gevent.spawn(self.environment.runner.quit)  # which ends this user, and would end itself with it

    def _tell(self, name: str, seconds: float) -> None:
        event: dict[str, Any] = {"response_length": 0, "exception": None, "context": {}}
        self.environment.events.request.fire(request_type=name, name=PATH, response_time=seconds * 1e3, **event)
