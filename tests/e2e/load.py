"""A load on a server, from a process of its own: ``python load.py URL SEED REQUESTS CLIENTS MODEL``.

Clients ask one request after another, and leave some streams where they are. Every answer goes to stdout as a line of
JSON: what was asked, what came, and whether it was left. The requests end by themselves, and so does this.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from openai import AsyncOpenAI

PROMPTS = ["What say you?", "O", "I will not hear it, my lord", "Ay", "it it it it", "Why", "You 你", "No more. No"]


def request(rng: random.Random) -> dict[str, Any]:
    """What is asked, and where it is left: after so many chunks, or None."""
    body: dict[str, Any] = {"max_tokens": rng.choice([1, 8, 20, 40, 80])}
    if rng.random() < 0.5:
        body |= {"temperature": rng.choice([0.7, 1.0, 1.3]), "seed": rng.randrange(1000)}
        body |= rng.choice([{}, {"n": 2}, {"top_p": 0.9}])
    if rng.random() < 0.2:
        body["stop"] = rng.choice(["e", ["ou", "a"]])
    extra = {"baseline": True} if rng.random() < 0.2 else {}
    return {
        "prompt": rng.choice(PROMPTS),
        "chat": rng.random() < 0.5,
        "stream": rng.random() < 0.6,
        "leave": rng.randrange(6) if rng.random() < 0.4 else None,
        "body": body,
        "extra": extra,
    }


async def ask(client: AsyncOpenAI, model: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Ask it; return the texts of its choices, and whether they are whole."""
    body = {**asked["body"], "model": model, "stream": asked["stream"], "extra_body": asked["extra"]}
    create: Any = client.completions.create
    if asked["chat"]:
        create, body["messages"] = client.chat.completions.create, [{"role": "user", "content": asked["prompt"]}]
    else:
        body["prompt"] = asked["prompt"]
    reply = await create(**body)
    texts = [""] * asked["body"].get("n", 1)
    if not asked["stream"]:
        for choice in reply.choices:
            texts[choice.index] = choice.message.content if asked["chat"] else choice.text
        return {"texts": texts, "whole": True}
    chunks, ended = 0, 0
    async with reply:
        async for chunk in reply:
            if chunks == asked["leave"]:
                return {"texts": texts, "whole": False}
            chunks += 1
            for choice in chunk.choices:
                texts[choice.index] += (choice.delta.content if asked["chat"] else choice.text) or ""
                ended += choice.finish_reason is not None
    assert ended == len(texts), "a stream ended before its answers"
    return {"texts": texts, "whole": True}


async def main(url: str, seed: int, requests: int, clients: int, model: str) -> None:
    """Share out the requests among clients."""
    rng = random.Random(seed)
    waiting = [request(rng) for _ in range(requests)]
    openai = AsyncOpenAI(base_url=f"{url}v1", api_key="none", max_retries=0, timeout=300)

    async def work() -> None:
        while waiting:
            asked = waiting.pop()
            found = await ask(openai, model, asked)
            print(json.dumps({**asked, **found}), flush=True)

    async with openai:
        await asyncio.gather(*(work() for _ in range(clients)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]))
