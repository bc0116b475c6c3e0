"""Tiny engines that answer chats, for the tests of the server: fp64, and some answers end by themselves."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import train_bpe
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.heads import HeadsConfig
from medusa.infer import Engine
from medusa.infer.serve.app import create_app, urls, web_server
from medusa.infer.serve.serving import Settings
from medusa.testing import memorising_heads, plain_greedy, random_heads, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

from .drafting import UNTRAINED, untrained

BOS, START, END = "<|begin|>", "<|start|>", "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
TREE = Topology.full([3, 2, 1])
CONTEXT = 256
PROMPTS = ["What say you?", "O", "I will not hear it, my lord", "Ay", "it it it it", "Why", "You 你", "No more. No"]
DRAFTERS = ("medusa", "hydra", *UNTRAINED)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes with merges: tokens of several characters, and characters of several tokens."""
    made = train_bpe(["What say you, my lord? I will not hear it 你\n"] * 3, 290)
    made.add_special_tokens({"bos_token": BOS, "eos_token": END, "additional_special_tokens": [START]})
    made.chat_template = TEMPLATE
    return made


@cache
def trunk() -> Trunk:
    """A trunk that ends some of its answers."""
    made = tiny_trunk("llama", vocab_size=len(tokenizer()), max_position_embeddings=CONTEXT)
    made.tokenizer = tokenizer()
    made.model.generation_config.eos_token_id = tokenizer().eos_token_id
    with torch.no_grad():
        made.model.get_output_embeddings().weight[tokenizer().eos_token_id] *= 1.2
    return made


def known_texts() -> list[list[int]]:
    """What heads are made to know by heart."""
    prompts = [tokenizer().encode(prompt) for prompt in PROMPTS[:3]]
    return [ids + plain_greedy(trunk(), ids, 30) for ids in prompts]


@cache
def drafter(name: str) -> Drafter:
    """Heads that are right now and then, or a drafter without."""
    if name in UNTRAINED:
        return untrained(trunk(), name)
    if name == "hydra":
        return MedusaDrafter(random_heads(trunk(), HeadsConfig("hydra", num=3), scale=0.1), TREE)
    return MedusaDrafter(memorising_heads(trunk(), HeadsConfig("medusa", num=3), known_texts()), TREE)


@cache
def engine(name: str = "medusa") -> Engine:
    """A tiny engine."""
    return Engine(trunk(), drafter(name))


def save_run(folder: Path) -> Path:
    """The same as a folder, as `medusa train` makes them."""
    trunk().model.save_pretrained(folder / "trunk")
    tokenizer().save_pretrained(folder / "trunk")
    heads = memorising_heads(Trunk.load(folder / "trunk"), HeadsConfig("medusa", num=3), known_texts())
    save_heads(folder, heads, str(folder / "trunk"))
    save_tree(folder, TREE)
    return folder


def option_sets() -> list[dict[str, Any]]:
    """Options of all kinds, in the engine's names."""
    common = {"include_stop": False}
    return [
        common | {"max_new_tokens": 30},
        common | {"max_new_tokens": 7, "logprobs": True, "top_logprobs": 2},
        common | {"max_new_tokens": 25, "temperature": 0.8, "seed": 3},
        common | {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.9, "seed": 11, "num_return_sequences": 3},
        common | {"max_new_tokens": 30, "stop_strings": ["e", "ou "], "logprobs": True},
        common | {"max_new_tokens": 16, "frequency_penalty": 1.0, "sequence_bias": {(5,): 2.0}},
        common | {"max_new_tokens": 1},
    ]


@contextmanager
def serving(own: Engine | None = None, **options: Any) -> Iterator[str]:
    """A server on a free port, and where it is."""
    app = create_app(own or engine(), Settings("tiny", **options))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = web_server(app, grace=5)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield urls(listener)["page"]
        finally:
            server.should_exit = True
            thread.join()
