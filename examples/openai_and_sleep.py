"""The server way in: stream an answer with OpenAI's client, put the engine to sleep, wake it, and stream the same answer again.

    torpor serve builtin:smollm2-135m --enable-sleep-mode --port 8000
    python examples/openai_and_sleep.py http://127.0.0.1:8000

With a prefill/decode pair the answers come from the router and an engine sleeps:

    python examples/openai_and_sleep.py http://127.0.0.1:8000 --engine http://127.0.0.1:8001
"""

from __future__ import annotations

import argparse

import httpx
import openai


def answer(client: openai.OpenAI, question: str) -> str:
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    return "".join(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the server, or a router")
    parser.add_argument("--engine", help="who sleeps; default: the server itself")
    arguments = parser.parse_args()
    engine = arguments.engine or arguments.url

    with openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="unused") as client:
        before = answer(client, "What is the capital of France?")
        print("before:", before)
        report = (
            httpx.post(f"{engine}/sleep", params={"level": 1, "mode": "wait", "deadline_s": 30}, timeout=60)
            .raise_for_status()
            .json()
        )
        print(f"asleep: {report['returned_bytes'] >> 20} MiB back with the device in {report['seconds']:.2f} s")
        httpx.post(f"{engine}/wake_up", timeout=60).raise_for_status()
        after = answer(client, "What is the capital of France?")
        print("after: ", after)
    if before != after:
        raise SystemExit("the answers differ")


if __name__ == "__main__":
    main()
