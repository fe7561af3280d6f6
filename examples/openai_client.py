"""The openai package and a router: a chat as it is written, with what it cost, and a completion.

pip install openai
python examples/openai_client.py                        # of `make demo KEEP=1`, or of `headrace up`
python examples/openai_client.py https://HOST:8000/v1   # with the key in OPENAI_API_KEY, where keys are configured
"""

import os
import sys

from openai import OpenAI


def main(base_url: str = "http://localhost:8000/v1") -> None:
    with OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        chat(client, model, "What is the capital of France?")
        complete(client, model, "The capital of France is")


def chat(client: OpenAI, model: str, question: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:  # the last chunk has none
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = (details.cached_tokens if details is not None else None) or 0
            print(f"\n[prompt {chunk.usage.prompt_tokens} tokens, {cached} of them cached", end="")
            print(f"; answer {chunk.usage.completion_tokens}]")


def complete(client: OpenAI, model: str, prompt: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=16,
        stop="\n",
        extra_body={"top_k": 1},  # what the API has and the package does not
    )
    print(f"{prompt}{answer.choices[0].text} [{answer.choices[0].finish_reason}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
